// Random schedules of both caches (row_cache.h): many workers and shards, messages that overtake
// each other, come twice or never. Every gradient is 1, so a value is minus the number of updates
// that are in it. Tests of a kind of cache instantiate these with its side (cache_testing.h).

#ifndef HET_TF_OPS_CORE_CACHE_ROW_CACHE_SCHEDULE_TESTS_H_
#define HET_TF_OPS_CORE_CACHE_ROW_CACHE_SCHEDULE_TESTS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/unique_ids.h"
#include "ops/core/wire/request.h"

namespace het_tf {
namespace testing {

template <typename Side>
class RowCacheScheduleTest : public ::testing::Test {};
TYPED_TEST_SUITE_P(RowCacheScheduleTest);

using Counts = std::map<int64_t, int64_t>;

constexpr uint64_t kSchedules = kSanitized ? 20 : 60;

inline Ids RandomIds(Random* random, int64_t num_keys) {
  Ids ids(1 + Below(random, 6));
  for (int64_t& id : ids) id = Below(random, 1 + Below(random, num_keys));
  return ids;
}

// Gradients of which each key's sum is 1.
inline Floats OneForEachKey(const UniqueIds& unique) {
  Floats gradients(unique.num_ids());
  for (int64_t u = 0; u < unique.num_keys(); ++u) gradients[unique.positions[unique.begin[u]]] = 1;
  return gradients;
}

inline CacheConfig RandomConfig(Random* random, bool has_cache) {
  constexpr int64_t kBounds[] = {kUnbounded, 0, 1, 2, 5};
  CacheConfig config = PlainConfig(static_cast<int>(1 + Below(random, 5)));
  // With so few lines, or with slots, which have to be paid for, most keys are visitors.
  config.capacity = 1 + Below(random, Chance(random, 0.5) ? 3 : 40);
  if (Chance(random, 0.5)) config.rows.optimizer = "momentum momentum=0";
  config.policy = Chance(random, 0.5) ? Policy::kLru : Policy::kLfu;
  config.read_bound = kBounds[Below(random, 5)];
  config.write_bound = kBounds[Below(random, 5)];
  if (Chance(random, 0.2) && !has_cache) config.capacity = 0;
  return config;
}

template <typename Side>
class Schedule {
 public:
  Schedule(uint64_t seed, ClockRule clock, bool half_rows, bool half_wire) : random_(seed) {
    CacheConfig config = RandomConfig(&random_, Side::kHasCache);
    config.rows.clock = clock;
    config.rows.half = half_rows;
    config.half = half_wire;
    clock_ = clock;
    read_bound_ = config.capacity == 0 ? 0 : config.read_bound;
    const int num_workers = static_cast<int>(1 + Below(&random_, 4));
    cluster_ = std::make_unique<ClusterOf<Side>>(config, num_workers);
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
    const TableRows rows = cluster_->Rows();
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
  using Call = typename ClusterOf<Side>::Call;
  struct Step {
    Ids ids;
    Call call;
    Counts others;  // updates of others that a shard had merged when the lookup was made, at least
  };

  void Lookup(int w) {
    const Ids ids = RandomIds(&random_, 60);
    under_way_.push_back({ids, cluster_->Lookup(w, ids), {}});
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

  void DeliverTheRest(Call* call) {
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
    const UniqueIds unique(step.ids.data(), static_cast<int64_t>(step.ids.size()));
    for (size_t i = 0; i < values.size(); ++i) {
      const int64_t key = step.ids[i], own = own_[step.call.cache][key];
      EXPECT_GE(-values[i], own) << "own updates of key " << key << " are missing";
      EXPECT_GE(-values[i], own + LeastOfOthers(step, key))
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
    Call call = std::move(flushes_.back());
    flushes_.pop_back();
    if (Chance(&random_, 0.2)) return;  // lost
    DeliverTheRest(&call);
    cluster_->Fill(&call);
  }

  Random random_;
  ClockRule clock_;
  int64_t read_bound_;
  std::unique_ptr<ClusterOf<Side>> cluster_;
  std::vector<Step> under_way_;
  std::vector<Call> flushes_;
  Counts total_;
  std::vector<Counts> own_;
};

template <typename Side>
void RunSchedule(uint64_t seed, ClockRule clock, bool half_rows = false, bool half_wire = false) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Schedule<Side> schedule(seed, clock, half_rows, half_wire);
  schedule.Run(500);
  schedule.ExpectExactSums();
  EXPECT_GT(schedule.num_updates(), 50);
}

template <typename Side>
void RunSchedules(ClockRule clock) {
  for (uint64_t seed = 0; seed < kSchedules / Side::kFewer; ++seed) {
    RunSchedule<Side>(seed, clock);
    if (::testing::Test::HasFailure()) return;
  }
}

TYPED_TEST_P(RowCacheScheduleTest, EveryUpdateIsMergedOnce) {
  RunSchedules<TypeParam>(ClockRule::kCount);
}

TYPED_TEST_P(RowCacheScheduleTest, EveryUpdateIsMergedOnceWithLamportClocks) {
  RunSchedules<TypeParam>(ClockRule::kLamport);
}

TYPED_TEST_P(RowCacheScheduleTest, EveryUpdateIsMergedOnceWithDriftClocks) {
  RunSchedules<TypeParam>(ClockRule::kDrift);
}

// Of integers that bfloat16 has, nothing is rounded: each counts once here, too.
TYPED_TEST_P(RowCacheScheduleTest, EveryUpdateIsMergedOnceInBfloat16) {
  constexpr ClockRule kClocks[] = {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift};
  for (uint64_t seed = 0; seed < kSchedules / TypeParam::kFewer; ++seed) {
    const bool half_rows = seed % 3 != 0, half_wire = seed % 3 != 1;
    RunSchedule<TypeParam>(seed, kClocks[seed / 3 % 3], half_rows, half_wire);
    if (::testing::Test::HasFailure()) return;
  }
}

// docs/protocol.md, 2: without losses and with one step at a time, a read misses at most
// read_bound + (N - 1) * write_bound updates of the others.
TYPED_TEST_P(RowCacheScheduleTest, AReadMissesNoMoreThanTheBounds) {
  for (const int64_t read_bound : {0, 1, 4}) {
    for (const int64_t write_bound : {0, 1, 3}) {
      CacheConfig config = PlainConfig(2);
      config.read_bound = read_bound;
      config.write_bound = write_bound;
      config.capacity = 8;
      constexpr int kWorkers = 3;
      const ClusterOf<TypeParam> cluster(config, kWorkers);
      Random random(1);
      Counts total;
      int64_t most_missed = 0;
      for (int step = 0; step < 600 / TypeParam::kFewer; ++step) {
        const int w = static_cast<int>(Below(&random, kWorkers));
        const Ids ids = RandomIds(&random, 12);
        const UniqueIds unique(ids.data(), static_cast<int64_t>(ids.size()));
        const Floats values = cluster.Step(w, ids, OneForEachKey(unique));
        for (size_t i = 0; i < values.size(); ++i) {
          most_missed = std::max(most_missed, total[ids[i]] + static_cast<int64_t>(values[i]));
        }
        for (const int64_t key : unique.keys) ++total[key];
        if (write_bound == 0) cluster.Flush(w, false);
      }
      const int64_t unsent = write_bound == 0 ? 0 : (kWorkers - 1) * write_bound;
      EXPECT_LE(most_missed, read_bound + unsent);
      EXPECT_EQ(most_missed > 0, read_bound + unsent > 0) << "whether the bound was tried";
    }
  }
}

// The clocks of cached rows as a call's requests send them.
template <typename Call>
Counts ClocksSent(const Call& call) {
  Counts clocks;
  for (const auto& request : call.requests) {
    if (request->empty()) continue;
    RequestView view;
    EXPECT_OK(RequestView::Parse(request->data(), request->size(), &view));
    for (int64_t c = 0; c < view.header.num_bases(); ++c) clocks[view.keys[c]] = view.bases[c];
  }
  return clocks;
}

// By every clock rule: once a lookup is installed, no shard's clock of its lines is more than the
// read bound beyond what the worker knows. (Lamport's is the paper's Lemma 1, seen from one
// worker.)
TYPED_TEST_P(RowCacheScheduleTest, ALineIsNoOlderThanTheReadBound) {
  for (const ClockRule rule : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    for (const int64_t bound : {0, 2, 6}) {
      SCOPED_TRACE("rule " + std::to_string(static_cast<int>(rule)) + " bound " +
                   std::to_string(bound));
      CacheConfig config = PlainConfig(2);
      config.rows.clock = rule;
      config.read_bound = rule == ClockRule::kDrift ? bound << 14 : bound;
      config.write_bound = rule == ClockRule::kDrift ? 2 << 14 : 2;
      config.capacity = 10;
      constexpr int kWorkers = 3;
      const ClusterOf<TypeParam> cluster(config, kWorkers);
      Random random(2);
      int64_t furthest = 0;
      for (int step = 0; step < 200 / TypeParam::kFewer; ++step) {
        const int w = static_cast<int>(Below(&random, kWorkers));
        const Ids ids = RandomIds(&random, 12);
        auto call = cluster.Lookup(w, ids);
        cluster.Deliver(&call);
        ASSERT_OK(cluster.TryInstall(&call));
        const TableRows rows = cluster.Rows();
        // What a step that came now would say of the same lines, if none of them were watched.
        const auto look = cluster.Lookup(w, ids, /*fresh=*/true);
        for (const auto& [key, base] : ClocksSent(look)) {
          const auto row = rows.find(key);
          if (row != rows.end()) furthest = std::max(furthest, row->second.clock - base);
        }
        ASSERT_OK(cluster.Update(call, OneForEachKey(UniqueIds(ids.data(), ids.size()))));
      }
      EXPECT_LE(furthest, config.read_bound);
      EXPECT_EQ(furthest > 0, bound > 0) << "whether the bound was tried";
    }
  }
}

REGISTER_TYPED_TEST_SUITE_P(RowCacheScheduleTest, EveryUpdateIsMergedOnce,
                            EveryUpdateIsMergedOnceWithLamportClocks,
                            EveryUpdateIsMergedOnceWithDriftClocks,
                            EveryUpdateIsMergedOnceInBfloat16, AReadMissesNoMoreThanTheBounds,
                            ALineIsNoOlderThanTheReadBound);

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_ROW_CACHE_SCHEDULE_TESTS_H_
