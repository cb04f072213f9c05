// One test for each fault of the code released with the HET paper that a cache can show,
// of both caches (row_cache.h). Each of these fails where the fault is made again.
// Tests of a kind of cache instantiate these with its side (cache_testing.h).

#ifndef HET_TF_OPS_CORE_CACHE_ROW_CACHE_PAPER_TESTS_H_
#define HET_TF_OPS_CORE_CACHE_ROW_CACHE_PAPER_TESTS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ops/core/cache/cache_testing.h"

namespace het_tf {
namespace testing {

template <typename Side>
class PaperCodeFaults : public ::testing::Test {};
TYPED_TEST_SUITE_P(PaperCodeFaults);

inline CacheConfig WithStaleness(int num_shards, int64_t staleness) {
  CacheConfig config = PlainConfig(num_shards);
  SetStaleness(&config, staleness);
  return config;
}

// Its fused push-pull added the gradients to the row that came back with them in it.
TYPED_TEST_P(PaperCodeFaults, OwnGradientsAreAppliedOnce) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport}) {
    for (const int64_t staleness : {0, 1, 2}) {
      CacheConfig config = WithStaleness(2, staleness);
      config.rows.clock = clock;
      const ClusterOf<TypeParam> cluster(config, 2);
      for (int step = 0; step < 6; ++step) {
        EXPECT_EQ(cluster.Step(0, {1}, {1}), Floats{static_cast<float>(-step)});
        if (staleness == 0) cluster.Flush(0, false);
      }
      cluster.Flush(0);
      EXPECT_EQ(cluster.Rows().at(1).value[0], -6);
      EXPECT_EQ(cluster.Read(0, {1}), Floats{-6});
      // What another worker does comes on top, and own updates stay in.
      cluster.Step(1, {1}, {10});
      cluster.Step(0, {1}, {1});
      cluster.Flush(1);
      cluster.Flush(0);
      EXPECT_EQ(cluster.Rows().at(1).value[0], -17);
    }
  }
}

// It wrote all of a message's rows only where every shard had a key in the message.
TYPED_TEST_P(PaperCodeFaults, RowsOfShardsWithoutKeysAreNotDropped) {
  constexpr int kShards = 4;
  const ClusterOf<TypeParam> cluster(WithStaleness(kShards, 1));
  Ids ids(40);
  for (int64_t i = 0; i < 40; ++i) ids[i] = i;
  cluster.Step(0, ids, Floats(40, 1));  // reaches the write bound in every shard
  cluster.Step(0, {7}, {1});            // a message to one shard, pushes to all
  EXPECT_EQ(cluster.Rows().size(), 40u);
  for (const int64_t key : ids) cluster.Step(0, {key}, {1});
  cluster.Flush(0);
  const TableRows rows = cluster.Rows();
  for (const int64_t key : ids) {
    EXPECT_EQ(rows.at(key), (TableRow{{key == 7 ? -3.0f : -2.0f}, {}, key == 7 ? 3 : 2}));
  }
}

// Evictions came behind the sorted keys of a push, which was then cut by shard as if sorted.
// Table::Sync refuses a key that is not its own, so a wrong way fails at once.
TYPED_TEST_P(PaperCodeFaults, PushesAfterEvictionsReachTheirShard) {
  CacheConfig config = WithStaleness(5, 3);
  config.policy = Policy::kLru;
  config.capacity = 7;
  const ClusterOf<TypeParam> cluster(config);
  std::map<int64_t, int64_t> updates;
  Random random(1);
  for (int step = 0; step < 300; ++step) {
    std::set<int64_t> keys;
    while (keys.size() < 10) keys.insert(Below(&random, 200) - 100);
    cluster.Step(0, Ids(keys.begin(), keys.end()), Floats(10, 1));
    for (const int64_t key : keys) ++updates[key];
  }
  EXPECT_GT(cluster.count(CacheCounter::kDirtyEvictions), 1000);
  cluster.Flush(0);
  const TableRows rows = cluster.Rows();
  EXPECT_EQ(rows.size(), updates.size());
  for (const auto& [key, n] : updates) {
    EXPECT_EQ(rows.at(key), (TableRow{{-static_cast<float>(n)}, {}, n})) << "key " << key;
  }
}

// Ids went through float32, where the 33.76 million ids of Criteo are 25.2 million.
TYPED_TEST_P(PaperCodeFaults, IdsBeyondFloat32StayDistinct) {
  Ids ids;
  for (const int64_t base : {int64_t{1} << 24, int64_t{33762577}, int64_t{1} << 31,
                             (int64_t{1} << 53) - 2, INT64_MAX - 4, INT64_MIN}) {
    for (int64_t i = 0; i < 5; ++i) ids.push_back(base + i);
  }
  const ClusterOf<TypeParam> cluster(WithStaleness(3, 0), 2);
  Floats gradients(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) gradients[i] = -static_cast<float>(i + 1);
  cluster.Step(0, ids, gradients);
  cluster.Flush(0, false);
  const TableRows rows = cluster.Rows();
  EXPECT_EQ(rows.size(), ids.size());
  const Floats read = cluster.Read(1, ids);
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(read[i], static_cast<float>(i + 1)) << ids[i];
    EXPECT_EQ(rows.at(ids[i]), (TableRow{{static_cast<float>(i + 1)}, {}, 1})) << ids[i];
  }
}

// Clocks advanced with every occurrence in a step, so frequent ids used up their bound at once.
TYPED_TEST_P(PaperCodeFaults, ClockAdvancesOncePerKeyAndStep) {
  for (const bool cached : {true, false}) {
    CacheConfig config = WithStaleness(2, 0);
    if (!cached && !TypeParam::kHasCache) config.capacity = 0;
    const ClusterOf<TypeParam> cluster(config);
    const auto table = MakeTable({1, "sgd", "zeros"});
    for (int64_t step = 1; step <= 3; ++step) {
      cluster.Step(0, Ids(200, 7), Floats(200, 1));
      cluster.Flush(0, false);
      ASSERT_OK(ApplyRows(table.get(), Ids(200, 7), Floats(200, 1)));
      EXPECT_EQ(cluster.Rows(), (TableRows{{7, {{-200.0f * static_cast<float>(step)}, {}, step}}}));
      EXPECT_EQ(cluster.Rows(), Snapshot(*table));
    }
    EXPECT_EQ(cluster.count(CacheCounter::kUpdates), 3);
  }
}

// There was no flush, so that save() left out what the caches had not yet sent.
TYPED_TEST_P(PaperCodeFaults, FlushLeavesNothingBehind) {
  CacheConfig config = WithStaleness(3, kUnbounded);
  config.capacity = 20;
  const ClusterOf<TypeParam> cluster(config);
  Ids ids(100);
  for (int64_t i = 0; i < 100; ++i) ids[i] = i;
  for (int step = 0; step < 5; ++step) cluster.Step(0, ids, Floats(100, 1));
  cluster.Flush(0);
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
  const TableRows rows = cluster.Rows();
  EXPECT_EQ(rows.size(), 100u);
  for (const auto& [key, row] : rows) EXPECT_EQ(row, (TableRow{{-5}, {}, 5})) << key;
  EXPECT_EQ(cluster.CutFlush(0, true).num_requests(), 0);
}

// After load() caches went on with the rows of before.
TYPED_TEST_P(PaperCodeFaults, LoadReachesCachesAtTheNextLookup) {
  const ClusterOf<TypeParam> cluster(WithStaleness(1, 100));
  cluster.Step(0, {1, 2}, {1, 1});
  cluster.Flush(0);
  const TableRows saved = cluster.Rows();
  cluster.Step(0, {1, 2}, {1, 1});
  cluster.Flush(0);
  ASSERT_OK(Restore(cluster.table(), saved));
  EXPECT_EQ(cluster.Read(0, {1, 2}), (Floats{-1, -1}));
  EXPECT_EQ(cluster.Rows(), saved);
}

// Its "light LFU" never took a line's rank away, so new hot keys never entered.
TYPED_TEST_P(PaperCodeFaults, LfuDemotes) {
  constexpr int64_t kCapacity = 64;
  CacheConfig config = WithStaleness(1, kUnbounded);
  config.policy = Policy::kLfu;
  config.capacity = kCapacity;
  const ClusterOf<TypeParam> cluster(config);
  Ids old_hot(kCapacity), new_hot(kCapacity);
  for (int64_t i = 0; i < kCapacity; ++i) old_hot[i] = i, new_hot[i] = 1000 + i;
  for (int round = 0; round < 100; ++round) cluster.Read(0, old_hot);
  for (int round = 0; round < 40; ++round) cluster.Read(0, new_hot);
  const int64_t hits = cluster.count(CacheCounter::kHits);
  cluster.Read(0, new_hot);
  EXPECT_GE(cluster.count(CacheCounter::kHits) - hits, kCapacity * 9 / 10);
}

// It knew plain SGD with a fixed rate alone.
TYPED_TEST_P(PaperCodeFaults, EveryOptimizerAndRate) {
  const std::vector<std::string> optimizers = {"sgd",
                                               "momentum",
                                               "adagrad",
                                               "row_wise_adagrad",
                                               "adam",
                                               "row_wise_adam",
                                               "ftrl l1=0.01 beta=0.1"};
  for (const std::string& optimizer : optimizers) {
    SCOPED_TRACE(optimizer);
    CacheConfig config = WithStaleness(2, 4);
    config.rows.dim = 2;
    config.rows.optimizer = optimizer;
    config.capacity = 6;
    const ClusterOf<TypeParam> cluster(config);
    const auto table = MakeTable({2, optimizer, "zeros"});
    const Ids all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    Random random(1);
    for (int step = 0; step < 50; ++step) {
      const Ids ids = {Below(&random, 12), Below(&random, 12), Below(&random, 12)};
      const Floats gradients = {1, -1, 0.5f, 0.25f, -2, static_cast<float>(step % 3)};
      const float rate = 0.5f / static_cast<float>(1 + step);
      cluster.Step(0, ids, gradients, rate);
      ASSERT_OK(ApplyRows(table.get(), ids, gradients, rate));
    }
    cluster.Flush(0);
    const Floats expected = LookupRows(*table, all), read = cluster.Read(0, all);
    const TableRows rows = cluster.Rows();
    for (size_t i = 0; i < read.size(); ++i) {
      EXPECT_NEAR(read[i], expected[i], 1e-5) << "in the cache, key " << all[i / 2];
      EXPECT_NEAR(rows.at(all[i / 2]).value[i % 2], expected[i], 1e-5) << "key " << all[i / 2];
    }
  }
}

REGISTER_TYPED_TEST_SUITE_P(PaperCodeFaults, OwnGradientsAreAppliedOnce,
                            RowsOfShardsWithoutKeysAreNotDropped,
                            PushesAfterEvictionsReachTheirShard, IdsBeyondFloat32StayDistinct,
                            ClockAdvancesOncePerKeyAndStep, FlushLeavesNothingBehind,
                            LoadReachesCachesAtTheNextLookup, LfuDemotes, EveryOptimizerAndRate);

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_ROW_CACHE_PAPER_TESTS_H_
