// A worker whose rows lie in a device store: the store's verbs joined to the link and the messages
// of ops/core, with the network in the test's hands. What ops/kernels will do is this,
// asynchronously.

#ifndef HET_TF_OPS_CUDA_WORKER_TESTING_H_
#define HET_TF_OPS_CUDA_WORKER_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/cache/cache.h"
#include "ops/core/link/link.h"
#include "ops/core/memory/hash.h"
#include "ops/core/row/row_config.h"
#include "ops/core/testing.h"
#include "ops/core/wire/reply.h"
#include "ops/cuda/store_testing.h"

namespace het_tf {
namespace testing {

class DeviceWorker {
 public:
  // config.capacity: the store's lines.
  DeviceWorker(const CacheConfig& config, uint64_t id)
      : config_(config),
        id_(id),
        store_(config.rows.optimizer, config.rows.dim, config.capacity,
               config.policy == Policy::kLru ? HET_LRU : HET_LFU,
               static_cast<int32_t>(config.rows.clock)),
        shards_(config.rows.num_shards) {
    EXPECT_OK(RowKit::Create(config.rows, &kit_));
  }

  // A lookup or flush under way.
  struct Call {
    std::unique_ptr<Step> step;  // nullptr: a flush
    // By shard. Of a query, what it is about: a miss, or (misses + c) check c.
    std::vector<std::vector<int64_t>> queries;
    std::vector<int64_t> num_checks;  // the first queries
    std::vector<Link::Request> links;
    std::vector<Buffer> requests, replies;
  };

  // admit: whether a miss is worth a line.
  template <typename Admit>
  Call Lookup(const std::vector<int64_t>& ids, const Admit& admit) {
    Call call = NewCall();
    call.step = std::make_unique<Step>(store_, dim(), ids);
    const std::vector<int64_t> misses = call.step->miss_keys(), checks = call.step->check_keys();
    const std::vector<int64_t> bases = call.step->check_bases();
    std::vector<int32_t> uses;
    for (const int64_t key : misses) uses.push_back(admit(key) ? 1 : 0);
    Send(call.step->MakeLines(uses), 0);
    std::vector<std::vector<int64_t>> full(shards_.size());
    std::vector<RequestBuilder> builders(shards_.size());
    for (size_t m = 0; m < misses.size(); ++m) {
      full[ShardOf(misses[m])].push_back(static_cast<int64_t>(m));
      builders[ShardOf(misses[m])].full.push_back(misses[m]);
    }
    for (size_t c = 0; c < checks.size(); ++c) {
      const int shard = ShardOf(checks[c]);
      const auto query = static_cast<int64_t>(misses.size() + c);
      if (bases[c] < 0) {
        full[shard].push_back(query);
        builders[shard].full.push_back(checks[c]);
      } else if (config_.read_bound != kUnbounded) {
        call.queries[shard].push_back(query);
        builders[shard].checks.push_back({checks[c], bases[c]});
      }
    }
    for (size_t s = 0; s < shards_.size(); ++s) {
      call.num_checks[s] = static_cast<int64_t>(call.queries[s].size());
      call.queries[s].insert(call.queries[s].end(), full[s].begin(), full[s].end());
      Cut(static_cast<int>(s), false, &builders[s], &call);
    }
    return call;
  }

  // Pushes what is due, or (all) everything, and what is under way once more.
  Call CutFlush(bool all) {
    if (all) Send(CollectDirty(store_), 0);
    Call call = NewCall();
    for (size_t s = 0; s < shards_.size(); ++s) {
      RequestBuilder builder;
      Cut(static_cast<int>(s), true, &builder, &call);
    }
    return call;
  }

  // Takes the replies; those that did not come are lost, and so is their step (false).
  bool Install(Call* call) {
    const Step* step = call->step.get();
    const std::vector<int64_t> misses = step ? step->miss_keys() : std::vector<int64_t>();
    const std::vector<int64_t> checks = step ? step->check_keys() : std::vector<int64_t>();
    std::vector<std::vector<float>> rows(misses.size() + checks.size());
    std::vector<int64_t> clocks(rows.size());
    bool complete = true;
    for (size_t s = 0; s < shards_.size(); ++s) {
      if (call->links[s].number == 0) continue;
      if (call->replies[s].empty()) {
        complete = false;
      } else {
        Take(static_cast<int>(s), *call, misses, checks, &rows, &clocks);
      }
      shards_[s].link.Close(call->links[s].number);
    }
    if (!complete || step == nullptr) return complete;
    const auto middle = static_cast<int64_t>(misses.size());
    call->step->InstallMisses({rows.begin(), rows.begin() + middle},
                              {clocks.begin(), clocks.begin() + middle});
    std::vector<int32_t> index;
    std::vector<std::vector<float>> fresh;
    std::vector<int64_t> fresh_clocks;
    const std::vector<int32_t> check_index = step->check_index();
    for (size_t c = 0; c < checks.size(); ++c) {
      if (rows[middle + c].empty()) continue;
      index.push_back(check_index[c]);
      fresh.push_back(rows[middle + c]);
      fresh_clocks.push_back(clocks[middle + c]);
    }
    step->InstallChecked(index, fresh, fresh_clocks);
    return true;
  }

  // gradients: (num_ids, dim)
  void Update(const Call& call, const std::vector<float>& gradients, float learning_rate = 1) {
    call.step->Update(gradients, learning_rate);
    Send(call.step->CollectDue(config_.write_bound), learning_rate);
  }

  int dim() const { return config_.rows.dim; }
  const DeviceStore& store() const { return store_; }
  int64_t visitors() const { return visitors_; }
  int64_t restarts() const { return restarts_; }

 private:
  using Row = RequestBuilder::Row;

  struct Shard {
    Link link;
    std::vector<Row> outbox;
    std::map<uint64_t, std::vector<Row>> pushes;  // by sequence
  };

  int ShardOf(int64_t key) const {
    return static_cast<int>(ShardOfHash(HashKey(key), config_.rows.num_shards));
  }

  Call NewCall() const {
    const size_t n = shards_.size();
    Call call;
    call.queries.resize(n);
    call.num_checks.resize(n);
    call.links.resize(n);
    call.requests.resize(n);
    call.replies.resize(n);
    return call;
  }

  void Send(const std::vector<PushedRow>& rows, float learning_rate) {
    for (const PushedRow& row : rows) {
      visitors_ += row.gradient;
      const auto updates = static_cast<uint32_t>(row.gradient ? 0 : row.updates);
      shards_[ShardOf(row.key)].outbox.push_back(
          {row.key, updates, row.floats, row.clock, learning_rate});
    }
  }

  void Cut(int s, bool everything, RequestBuilder* builder, Call* call) {
    Shard& shard = shards_[s];
    for (const Link::Push* push : shard.link.ToCarry(everything)) {
      builder->pushes.push_back({push->sequence, shard.pushes[push->sequence]});
    }
    if (!shard.outbox.empty()) {
      Link::Push push;
      push.sequence = shard.link.NextSequence();
      std::stable_partition(shard.outbox.begin(), shard.outbox.end(),
                            [](const Row& row) { return row.updates == 0; });
      builder->pushes.push_back({push.sequence, shard.outbox});
      shard.pushes[push.sequence].swap(shard.outbox);
      shard.link.AddPush(std::move(push));
    }
    if (builder->pushes.empty() && builder->checks.empty() && builder->full.empty()) return;
    builder->header.cache_id = id_;
    builder->header.incarnation = shard.link.epoch().incarnation;
    builder->header.session = shard.link.epoch().session;
    builder->header.cut = shard.link.cut();
    builder->header.read_bound = config_.read_bound;
    builder->header.dim = static_cast<uint32_t>(dim());
    builder->header.slot_dim = static_cast<uint32_t>(kit_.optimizer->slot_dim());
    builder->header.contribution_dim = static_cast<uint32_t>(kit_.optimizer->contribution_dim());
    builder->header.shard = static_cast<uint32_t>(s);
    call->requests[s] = builder->Encode();
    call->links[s] = shard.link.Open(everything);
  }

  // Has a row take in the own pushes that a reply does not hold, and what is about to be pushed.
  void MergeOwn(const Shard& shard, uint64_t acknowledged, int64_t key, std::vector<float>* row,
                int64_t* clock) const {
    const auto merge = [&](const std::vector<Row>& rows) {
      for (const Row& own : rows) {
        if (own.key != key) continue;
        if (own.updates == 0) {
          kit_.optimizer->Update(row->data(), own.floats.data(), own.learning_rate);
        } else {
          kit_.optimizer->Merge(row->data(), own.floats.data(), own.updates);
        }
        switch (config_.rows.clock) {
          case ClockRule::kCount:
            *clock = Advance(*clock, std::max(own.updates, 1u));
            break;
          case ClockRule::kLamport:
            *clock = std::max(*clock, ClockNear(*clock, own.clock));
            break;
          case ClockRule::kDrift:
            *clock = Advance(*clock, own.clock);
            break;
        }
      }
    };
    shard.link.ForEachPushAfter(
        acknowledged, [&](const Link::Push& push) { merge(shard.pushes.at(push.sequence)); });
    merge(shard.outbox);
  }

  void Take(int s, const Call& call, const std::vector<int64_t>& misses,
            const std::vector<int64_t>& checks, std::vector<std::vector<float>>* rows,
            std::vector<int64_t>* clocks) {
    Shard& shard = shards_[s];
    ReplyView reply;
    ASSERT_OK(ReplyView::Parse(call.replies[s].data(), call.replies[s].size(), &reply));
    const Link::Epoch epoch = {reply.header.incarnation, reply.header.session};
    const uint64_t acknowledged = reply.header.acknowledged;
    ASSERT_OK(shard.link.Check(call.links[s], {epoch, acknowledged}));
    const Link::Standing standing = shard.link.StandingOf(call.links[s], epoch);
    if (standing == Link::Standing::kNew) {
      const bool first = shard.link.epoch() == Link::Epoch();
      shard.link.Restart(epoch, [](const Link::Push&) {});
      if (!first) {
        ++restarts_;
        shard.outbox.clear();
        shard.pushes.clear();
        store_.Forget(s, config_.rows.num_shards);
      }
    }
    if (standing != Link::Standing::kOld) {
      shard.link.Acknowledge(call.links[s].number, acknowledged, [](const Link::Push&) {});
    }
    const auto keep = [&](int64_t query, std::vector<float> row, int64_t clock) {
      const int64_t of = call.queries[s][query];
      const auto num_misses = static_cast<int64_t>(misses.size());
      const int64_t key = of < num_misses ? misses[of] : checks[of - num_misses];
      MergeOwn(shard, acknowledged, key, &row, &clock);
      (*rows)[of] = std::move(row);
      (*clocks)[of] = clock;
    };
    const int row_dim = kit_.optimizer->row_dim();
    std::vector<bool> answered(call.queries[s].size());
    for (int64_t r = 0; r < reply.header.num_full; ++r) {
      const ReplyRow& row = reply.full_rows[r];
      const float* floats = reply.full + r * row_dim;
      keep(row.query, {floats, floats + row_dim}, row.clock);
      answered[row.query] = true;
    }
    // A row that nobody has updated yet.
    for (size_t q = call.num_checks[s]; q < answered.size(); ++q) {
      if (answered[q]) continue;
      const int64_t of = call.queries[s][q];
      const auto num_misses = static_cast<int64_t>(misses.size());
      std::vector<float> row(row_dim);
      kit_.InitRow(of < num_misses ? misses[of] : checks[of - num_misses], row.data());
      keep(static_cast<int64_t>(q), std::move(row), 0);
    }
  }

  const CacheConfig config_;
  const uint64_t id_;
  RowKit kit_;
  DeviceStore store_;
  std::vector<Shard> shards_;
  int64_t visitors_ = 0, restarts_ = 0;
};

// Device workers and the shards of their table.
class DeviceCluster {
 public:
  explicit DeviceCluster(const CacheConfig& config, int num_workers = 1) : config_(config) {
    for (int s = 0; s < config.rows.num_shards; ++s) tables_.push_back(MakeTable(config.rows, s));
    for (int w = 0; w < num_workers; ++w) {
      workers_.push_back(std::make_unique<DeviceWorker>(config, 100 + w));
    }
  }

  DeviceWorker* worker(int w = 0) const { return workers_[w].get(); }
  int num_workers() const { return static_cast<int>(workers_.size()); }
  Table* table(int s) const { return tables_[s].get(); }
  int num_shards() const { return static_cast<int>(tables_.size()); }

  void Deliver(DeviceWorker::Call* call, int s) const {
    if (call->requests[s].empty()) return;
    EXPECT_OK(Sync(table(s), call->requests[s], &call->replies[s]));
  }
  void Deliver(DeviceWorker::Call* call) const {
    for (int s = 0; s < num_shards(); ++s) Deliver(call, s);
  }

  void Flush(int w, bool all) const {
    DeviceWorker::Call call = worker(w)->CutFlush(all);
    Deliver(&call);
    EXPECT_TRUE(worker(w)->Install(&call));
  }

  // What the step read before its update.
  std::vector<float> Step(int w, const std::vector<int64_t>& ids,
                          const std::vector<float>& gradients) const {
    DeviceWorker::Call call = worker(w)->Lookup(ids, [](int64_t) { return true; });
    Deliver(&call);
    EXPECT_TRUE(worker(w)->Install(&call));
    std::vector<float> values = call.step->Gather();
    worker(w)->Update(call, gradients);
    call.step->Unpin();
    return values;
  }

  TableRows Rows() const {
    TableRows rows;
    for (const auto& table : tables_) {
      for (const auto& [key, row] : Snapshot(*table)) rows[key] = row;
    }
    return rows;
  }

 private:
  const CacheConfig config_;
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<std::unique_ptr<DeviceWorker>> workers_;
};

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_WORKER_TESTING_H_
