// Random schedules: many workers and shards, messages that overtake each other, come twice or
// never. Every gradient is 1, so a value is minus the number of updates that are in it.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ops/core/cache/cache.h"
#include "ops/core/cache/cache_testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Chance;
using testing::Cluster;
using testing::Floats;
using testing::Ids;
using testing::PlainConfig;
using testing::Random;
using testing::SetStaleness;

using Counts = std::map<int64_t, int64_t>;

Ids RandomIds(Random* random, int64_t num_keys) {
  Ids ids(1 + Below(random, 6));
  for (int64_t& id : ids) id = Below(random, 1 + Below(random, num_keys));
  return ids;
}

// Gradients of which each key's sum is 1.
Floats OneForEachKey(const UniqueIds& unique) {
  Floats gradients(unique.num_ids());
  for (int64_t u = 0; u < unique.num_keys(); ++u) gradients[unique.positions[unique.begin[u]]] = 1;
  return gradients;
}

CacheConfig RandomConfig(Random* random) {
  constexpr int64_t kBounds[] = {kUnbounded, 0, 1, 2, 5};
  CacheConfig config = PlainConfig(static_cast<int>(1 + Below(random, 5)));
  config.capacity = 1 + Below(random, 40);
  config.policy = Chance(random, 0.5) ? Policy::kLru : Policy::kLfu;
  config.read_bound = kBounds[Below(random, 5)];
  config.write_bound = kBounds[Below(random, 5)];
  if (Chance(random, 0.2)) config.capacity = 0;
  return config;
}

class Schedule {
 public:
  Schedule(uint64_t seed, ClockRule clock, bool half_rows, bool half_wire) : random_(seed) {
    CacheConfig config = RandomConfig(&random_);
    config.rows.clock = clock;
    config.rows.half = half_rows;
    config.half = half_wire;
    clock_ = clock;
    read_bound_ = config.capacity == 0 ? 0 : config.read_bound;
    const int num_workers = static_cast<int>(1 + Below(&random_, 4));
    cluster_ = std::make_unique<Cluster>(config, num_workers);
    own_.resize(num_workers);
  }

  void Run(int events) {
    for (int event = 0; event < events; ++event) {
      const int w = static_cast<int>(Below(&random_, cluster_->num_caches()));
      switch (Below(&random_, 5)) {
        case 0:
        case 1:
          if (under_way_.size() < 6) Lookup(w);
          break;
        case 2:
          DeliverOne();
          break;
        case 3:
          FinishOne();
          break;
        case 4:
          if (Chance(&random_, 0.3))
            flushes_.push_back(cluster_->CutFlush(w, Chance(&random_, 0.5)));
          FinishFlushes();
          break;
      }
    }
    while (!under_way_.empty()) FinishOne();
    flushes_.clear();
    for (int w = 0; w < cluster_->num_caches(); ++w) {
      cluster_->CutFlush(w, true);  // lost
      cluster_->Flush(w);
      EXPECT_EQ(cluster_->count(CacheCounter::kPending, w), 0);
      EXPECT_EQ(cluster_->count(CacheCounter::kUpdatesLost, w), 0);
    }
  }

  void ExpectExactSums() {
    const testing::TableRows rows = cluster_->Rows();
    EXPECT_EQ(rows.size(), total_.size());
    for (const auto& [key, count] : total_) {
      ASSERT_EQ(rows.count(key), 1u);
      ASSERT_LE(count, 256) << "beyond it bfloat16 has no longer all integers";
      EXPECT_EQ(rows.at(key).value[0], -count) << "key " << key;
      if (clock_ == ClockRule::kCount) {
        EXPECT_EQ(rows.at(key).clock, count) << "key " << key;
      } else if (clock_ == ClockRule::kLamport) {
        EXPECT_LE(rows.at(key).clock, count) << "key " << key;
      } else {
        const auto way = static_cast<int64_t>(static_cast<double>(count) / kDriftUnit);
        EXPECT_GE(rows.at(key).clock, way) << "key " << key;
      }
    }
  }

  int64_t num_updates() const {
    int64_t sum = 0;
    for (const auto& entry : total_) sum += entry.second;
    return sum;
  }

 private:
  struct Step {
    Cluster::Call call;
    // When the lookup was made:
    Counts own;     // the worker's updates
    Counts others;  // those of others that a shard had merged, at least
  };

  void Lookup(int w) {
    under_way_.push_back({cluster_->Lookup(w, RandomIds(&random_, 60)), own_[w], {}});
    for (const auto& [key, row] : cluster_->Rows()) {
      under_way_.back().others[key] = static_cast<int64_t>(-row.value[0]) - own_[w][key];
    }
  }

  // Any request of any call, also one that was there before.
  void DeliverOne() {
    const int s = static_cast<int>(Below(&random_, cluster_->num_shards()));
    if (!under_way_.empty())
      cluster_->Deliver(&under_way_[Below(&random_, under_way_.size())].call, s);
    if (!flushes_.empty()) cluster_->Deliver(&flushes_[Below(&random_, flushes_.size())], s);
  }

  void DeliverTheRest(Cluster::Call* call) {
    for (int s = 0; s < cluster_->num_shards(); ++s) {
      if (call->replies[s].empty()) cluster_->Deliver(call, s);
    }
  }

  // What a read that misses no more than the bound sees of others. (A row that was updated once has
  // gone further than the bounds of drift clocks here, and Lamport's bound nothing of this kind.)
  int64_t LeastOfOthers(const Step& step, int64_t key) {
    if (read_bound_ == kUnbounded || clock_ == ClockRule::kLamport) return 0;
    const auto merged = step.others.find(key);
    if (merged == step.others.end()) return 0;
    const int64_t bound = clock_ == ClockRule::kDrift ? 0 : read_bound_;
    return std::max<int64_t>(merged->second - bound, 0);
  }

  void FinishOne() {
    if (under_way_.empty()) return;
    std::swap(under_way_[Below(&random_, under_way_.size())], under_way_.back());
    Step step = std::move(under_way_.back());
    under_way_.pop_back();
    if (Chance(&random_, 0.2)) return;  // lost
    DeliverTheRest(&step.call);
    const Floats values = cluster_->Fill(&step.call);
    const UniqueIds& unique = testing::UniqueIdsOf(*step.call.ticket);
    for (size_t i = 0; i < values.size(); ++i) {
      const int64_t key = unique.keys[unique.key_of[i]];
      EXPECT_GE(-values[i], step.own[key]) << "own updates of key " << key << " are missing";
      EXPECT_GE(-values[i], step.own[key] + LeastOfOthers(step, key))
          << "the read of key " << key << " misses more than the bound of " << read_bound_;
      EXPECT_LE(-values[i], total_[key]) << "key " << key << " has updates that nobody made";
    }
    EXPECT_OK(cluster_->Update(step.call, OneForEachKey(unique)));
    for (const int64_t key : unique.keys) {
      ++total_[key];
      ++own_[step.call.cache][key];
    }
  }

  void FinishFlushes() {
    if (flushes_.empty() || Chance(&random_, 0.5)) return;
    std::swap(flushes_[Below(&random_, flushes_.size())], flushes_.back());
    Cluster::Call call = std::move(flushes_.back());
    flushes_.pop_back();
    if (Chance(&random_, 0.2)) return;  // lost
    DeliverTheRest(&call);
    cluster_->Fill(&call);
  }

  Random random_;
  ClockRule clock_;
  int64_t read_bound_;
  std::unique_ptr<Cluster> cluster_;
  std::vector<Step> under_way_;
  std::vector<Cluster::Call> flushes_;
  Counts total_;
  std::vector<Counts> own_;
};

void RunSchedules(ClockRule clock, bool half_rows = false, bool half_wire = false) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Schedule schedule(seed, clock, half_rows, half_wire);
    schedule.Run(500);
    schedule.ExpectExactSums();
    EXPECT_GT(schedule.num_updates(), 50);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(CacheScheduleTest, EveryUpdateIsMergedOnce) { RunSchedules(ClockRule::kCount); }

TEST(CacheScheduleTest, EveryUpdateIsMergedOnceWithLamportClocks) {
  RunSchedules(ClockRule::kLamport);
}

TEST(CacheScheduleTest, EveryUpdateIsMergedOnceWithDriftClocks) { RunSchedules(ClockRule::kDrift); }

// Of integers that bfloat16 has, nothing is rounded: each counts once here, too.
TEST(CacheScheduleTest, EveryUpdateIsMergedOnceInBfloat16) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    RunSchedules(clock, true, false);
    RunSchedules(clock, false, true);
    RunSchedules(clock, true, true);
  }
}

// DESIGN 3.2: without losses and with one step at a time, a read misses at most
// read_bound + (N - 1) * write_bound updates of the others.
TEST(CacheScheduleTest, AReadMissesNoMoreThanTheBounds) {
  for (const int64_t read_bound : {0, 1, 4}) {
    for (const int64_t write_bound : {0, 1, 3}) {
      CacheConfig config = PlainConfig(2);
      config.read_bound = read_bound;
      config.write_bound = write_bound;
      config.capacity = 8;
      constexpr int kWorkers = 3;
      Cluster cluster(config, kWorkers);
      Random random(1);
      Counts total;
      int64_t most_missed = 0;
      for (int step = 0; step < 600; ++step) {
        const int w = static_cast<int>(Below(&random, kWorkers));
        Cluster::Call call = cluster.Lookup(w, RandomIds(&random, 12));
        cluster.Deliver(&call);
        const Floats values = cluster.Fill(&call);
        const UniqueIds& unique = testing::UniqueIdsOf(*call.ticket);
        for (size_t i = 0; i < values.size(); ++i) {
          const int64_t missed =
              total[unique.keys[unique.key_of[i]]] + static_cast<int64_t>(values[i]);
          most_missed = std::max(most_missed, missed);
        }
        ASSERT_OK(cluster.Update(call, OneForEachKey(unique)));
        for (const int64_t key : unique.keys) ++total[key];
        if (write_bound == 0) cluster.Flush(w, false);
      }
      const int64_t unsent = write_bound == 0 ? 0 : (kWorkers - 1) * write_bound;
      EXPECT_LE(most_missed, read_bound + unsent);
      EXPECT_EQ(most_missed > 0, read_bound + unsent > 0) << "whether the bound was tried";
    }
  }
}

// The clock of a cached row as the cache sends it: base, sent and pending.
Counts ClocksSent(const Cluster::Call& call) {
  Counts clocks;
  for (const auto& request : call.requests) {
    if (request->empty()) continue;
    RequestView view;
    EXPECT_OK(RequestView::Parse(request->data(), request->size(), &view));
    for (int64_t c = 0; c < view.header.num_bases(); ++c) clocks[view.keys[c]] = view.bases[c];
  }
  return clocks;
}

// The paper's Lemma 1: the clocks that two workers read a row at differ by at most 2s.
TEST(CacheScheduleTest, LamportClocksOfTwoWorkersStayWithinTwiceTheStaleness) {
  for (const int64_t staleness : {1, 2, 5}) {
    CacheConfig config = PlainConfig(2);
    config.rows.clock = ClockRule::kLamport;
    SetStaleness(&config, staleness);
    constexpr int kWorkers = 3;
    Cluster cluster(config, kWorkers);
    const Ids all = {0, 1, 2, 3, 4};
    Random random(1);
    int64_t furthest = 0;
    for (int step = 0; step < 600; ++step) {
      const int w = static_cast<int>(Below(&random, kWorkers));
      const Ids ids = RandomIds(&random, 5);
      const std::set<int64_t> keys(ids.begin(), ids.end());
      const Ids unique(keys.begin(), keys.end());
      cluster.Step(w, unique, Floats(unique.size(), 1));
      if (step % 10 != 0) continue;
      std::vector<Counts> clocks;
      // The first round sends what is due, so that in the second nothing changes between the reads.
      for (int reader = 0; reader < 2 * kWorkers; ++reader) cluster.Read(reader % kWorkers, all);
      for (int reader = 0; reader < kWorkers; ++reader) {
        clocks.push_back(ClocksSent(cluster.Lookup(reader, all)));
        EXPECT_EQ(clocks.back().size(), all.size());
      }
      for (const int64_t key : all) {
        for (int a = 0; a < kWorkers; ++a) {
          for (int b = 0; b < kWorkers; ++b) {
            furthest = std::max(furthest, clocks[a][key] - clocks[b][key]);
          }
        }
      }
    }
    EXPECT_LE(furthest, 2 * staleness);
    EXPECT_GT(furthest, 0) << "the bound was never tried";
  }
}

}  // namespace
}  // namespace het_tf
