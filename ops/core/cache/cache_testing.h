// Caches and table shards in one process, with the network between them in the test's hands.

#ifndef HET_TF_OPS_CORE_CACHE_CACHE_TESTING_H_
#define HET_TF_OPS_CORE_CACHE_CACHE_TESTING_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ops/core/cache/cache.h"
#include "ops/core/memory/hash.h"
#include "ops/core/parallel.h"
#include "ops/core/table/table.h"
#include "ops/core/testing.h"
#include "ops/core/unique_ids.h"

namespace het_tf {
namespace testing {

using Ids = std::vector<int64_t>;
using Floats = std::vector<float>;

// One column of SGD from zero: with rate 1 a row is minus the sum of its gradients, exactly as long
// as these are integers.
inline CacheConfig PlainConfig(int num_shards = 1) {
  CacheConfig config;
  config.rows = {1, "sgd", "zeros", 0, ClockRule::kCount, num_shards};
  config.capacity = 1000;
  return config;
}

inline void SetStaleness(CacheConfig* config, int64_t staleness) {
  config->read_bound = config->write_bound = staleness;
}

// Caches and shards. Side: how tests reach the caches of a kind, as HostSide below. Safe for
// concurrent use as far as tables and caches are.
template <typename Side>
class ClusterOf {
 public:
  using CacheType = typename Side::CacheType;

  explicit ClusterOf(const CacheConfig& config, int num_caches = 1,
                     const Lifetimes& lifetimes = Lifetimes())
      : config_(config) {
    for (int s = 0; s < config.rows.num_shards; ++s) {
      tables_.emplace_back();
      EXPECT_OK(Table::Create(config.rows, s, &tables_.back(), lifetimes));
    }
    for (int w = 0; w < num_caches; ++w) {
      caches_.emplace_back();
      EXPECT_OK(Side::Create(config, &caches_.back()));
    }
  }

  int num_shards() const { return static_cast<int>(tables_.size()); }
  int num_caches() const { return static_cast<int>(caches_.size()); }
  CacheType* cache(int w = 0) const { return caches_[w].get(); }
  Table* table(int s = 0) const { return tables_[s].get(); }
  Table* table_of(int64_t key) const {
    return table(static_cast<int>(ShardOfHash(HashKey(key), num_shards())));
  }

  int64_t count(CacheCounter counter, int w = 0) const {
    RowCache::Stats stats;
    EXPECT_OK(cache(w)->GetStats(&stats));
    return stats[static_cast<size_t>(counter)];
  }
  int64_t rows_sent() const {
    int64_t sum = 0;
    for (const auto& table : tables_) sum += table->counter(TableCounter::kRowsSent);
    return sum;
  }

  // A lookup or flush under way: the requests that were cut, then the shards' replies to them.
  struct Call {
    int cache;
    std::shared_ptr<RowTicket> ticket;
    std::vector<std::shared_ptr<Buffer>> requests;
    std::vector<Buffer> replies;

    int num_requests() const {
      return static_cast<int>(std::count_if(requests.begin(), requests.end(),
                                            [](const auto& bytes) { return !bytes->empty(); }));
    }
  };

  Call NewCall(int w) const {
    return {w, nullptr, std::vector<std::shared_ptr<Buffer>>(num_shards()),
            std::vector<Buffer>(num_shards())};
  }
  // The memory of a call's requests.
  static AllocateRequest Into(Call* call) {
    return [call](int shard, size_t bytes) {
      auto& request = call->requests[shard];
      request = std::make_shared<Buffer>(bytes);
      return std::shared_ptr<char>(request, request->data());
    };
  }

  Status TryLookup(const Ids& ids, Call* call, bool fresh = false) const {
    return cache(call->cache)
        ->Lookup({ids.data(), static_cast<int64_t>(ids.size())}, fresh, parallel_for, Into(call),
                 &call->ticket);
  }
  Call Lookup(int w, const Ids& ids, bool fresh = false) const {
    Call call = NewCall(w);
    EXPECT_OK(TryLookup(ids, &call, fresh));
    return call;
  }

  Call CutFlush(int w, bool all) const {
    Call call = NewCall(w);
    EXPECT_OK(cache(w)->Flush(all, Into(&call), &call.ticket));
    return call;
  }

  void Deliver(Call* call) const {
    for (int s = 0; s < num_shards(); ++s) Deliver(call, s);
  }
  void Deliver(Call* call, int s) const {
    if (call->requests[s]->empty()) return;
    EXPECT_OK(Sync(table(s), *call->requests[s], &call->replies[s], parallel_for));
  }

  Status TryInstall(Call* call) const {
    std::vector<ReplyBytes> replies;
    for (const Buffer& reply : call->replies) replies.push_back({reply.data(), reply.size()});
    int64_t rows = 0;
    return cache(call->cache)->Install(call->ticket.get(), replies, parallel_for, &rows);
  }
  Floats Gather(const Call& call) const {
    const typename Side::Array out(Floats(call.ticket->num_ids() * cache(call.cache)->dim()));
    EXPECT_OK(cache(call.cache)->Gather(*call.ticket, parallel_for, out.get()));
    return out.Read();
  }
  // Asks for what an installed call lacks.
  void AskAgain(Call* call) const {
    for (Buffer& reply : call->replies) reply.clear();
    EXPECT_OK(cache(call->cache)->AskAgain(call->ticket.get(), Into(call)));
  }
  void Install(Call* call) const {
    EXPECT_OK(TryInstall(call));
    while (call->ticket->incomplete()) {
      AskAgain(call);
      Deliver(call);
      EXPECT_OK(TryInstall(call));
    }
  }
  Floats Fill(Call* call) const {
    Install(call);
    return Gather(*call);
  }

  Status Update(const Call& call, const Floats& gradients, float learning_rate = 1) const {
    const typename Side::Array there(gradients);
    return cache(call.cache)->Update(call.ticket.get(), there.get(), learning_rate, parallel_for);
  }

  Floats Read(int w, const Ids& ids) const {
    Call call = Lookup(w, ids);
    Deliver(&call);
    return Fill(&call);
  }

  // What the step read before its update.
  Floats Step(int w, const Ids& ids, const Floats& gradients, float learning_rate = 1) const {
    Call call = Lookup(w, ids);
    Deliver(&call);
    const Floats values = Fill(&call);
    EXPECT_OK(Update(call, gradients, learning_rate));
    return values;
  }

  void Flush(int w, bool all = true) const {
    Call call = CutFlush(w, all);
    Deliver(&call);
    Install(&call);
  }

  // Every row of every shard.
  TableRows Rows() const {
    TableRows rows;
    for (int s = 0; s < num_shards(); ++s) {
      for (const auto& [key, row] : Snapshot(*table(s))) {
        EXPECT_EQ(table_of(key), table(s)) << "key " << key << " is in a shard that is not its own";
        rows[key] = row;
      }
    }
    return rows;
  }

  ParallelFor parallel_for = SerialFor;

 private:
  const CacheConfig config_;
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<std::shared_ptr<CacheType>> caches_;
};

// Caches whose rows are in the host's memory.
struct HostSide {
  using CacheType = Cache;
  static constexpr int kFewer = 1;          // part of its rounds that a random test does
  static constexpr bool kHasCache = false;  // its capacity may be 0

  // Floats where the cache takes them.
  class Array {
   public:
    explicit Array(Floats from) : floats_(std::move(from)) {}
    float* get() const { return floats_.data(); }
    Floats Read() const { return floats_; }

   private:
    mutable Floats floats_;
  };

  static Status Create(const CacheConfig& config, std::shared_ptr<Cache>* cache) {
    return Cache::Create(config, cache);
  }
};
using Cluster = ClusterOf<HostSide>;

// ticket: of a Cluster.
inline const UniqueIds& UniqueIdsOf(const RowTicket& ticket) {
  return static_cast<const Ticket&>(ticket).ids();
}

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_CACHE_TESTING_H_
