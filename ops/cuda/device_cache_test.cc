// A device cache through steps whose outcome is known, and what it refuses. (Random schedules, and
// the host's cache beside it: schedule_test.cc.)

#include "ops/cuda/device_cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/cuda/device_cache_testing.h"

namespace het_tf {
namespace {

using testing::DeviceCluster;
using testing::Floats;
using testing::Ids;
using testing::kStream;
using testing::PlainConfig;
using testing::Restore;
using testing::SetStaleness;
using testing::TableRow;
using testing::TableRows;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(DeviceCacheTest, AStepOfHitsAsksForNothing) {
  const DeviceCluster cluster(PlainConfig(2));
  EXPECT_EQ(cluster.Step(0, {7, 8, 7}, {1, 2, 4}), (Floats{0, 0, 0}));
  const DeviceCluster::Call hits = cluster.Lookup(0, {8, 7});
  for (const auto& request : hits.requests) EXPECT_TRUE(request->empty());
  EXPECT_EQ(cluster.count(CacheCounter::kLookups), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kIds), 5);
  EXPECT_EQ(cluster.count(CacheCounter::kKeys), 4);
  EXPECT_EQ(cluster.count(CacheCounter::kHits), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kHitIds), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kMisses), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kInitialized), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kUpdates), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kRows), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 2);
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{7, {{-5}, {}, 1}}, {8, {{-2}, {}, 1}}}));
  EXPECT_EQ(cluster.count(CacheCounter::kRowsPushed), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
}

// With one line, so that the row leaves and comes again.
TEST(DeviceCacheTest, ARowThatTheHostHasKeptIsCheckedAndNotFetched) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    SCOPED_TRACE(static_cast<int>(clock));
    CacheConfig config = PlainConfig();
    config.rows.clock = clock;
    config.rows.dim = 8;
    config.capacity = 1;
    config.host_capacity = 100;
    config.policy = Policy::kLru;
    config.read_bound = 2;
    if (clock == ClockRule::kDrift) config.read_bound <<= 14;
    const DeviceCluster cluster(config, 2);
    const auto step = [&](int w, int64_t key) {
      return cluster.Step(w, {key}, Floats(8, 1 / std::sqrt(8.0f)))[0] * -std::sqrt(8.0f);
    };
    step(1, 7);
    cluster.Flush(1);
    EXPECT_FLOAT_EQ(step(0, 7), 1);
    cluster.Flush(0);
    step(0, 8);  // 7 leaves
    EXPECT_EQ(cluster.count(CacheCounter::kRowsToHost), 1);
    const int64_t sent = cluster.rows_sent();
    EXPECT_FLOAT_EQ(step(0, 7), 2) << "own update included";
    EXPECT_EQ(cluster.count(CacheCounter::kRowsFromHost), 1);
    EXPECT_EQ(cluster.rows_sent(), sent);
    cluster.Flush(0);
    step(0, 8);
    // Beyond the bound it comes from its shard.
    for (int i = 0; i < 5; ++i) {
      step(1, 7);
      cluster.Flush(1);
    }
    EXPECT_FLOAT_EQ(step(0, 7), 8);
    EXPECT_EQ(cluster.count(CacheCounter::kRowsFromHost), clock == ClockRule::kLamport ? 1 : 2)
        << "8, of which nothing is sent, is there twice";
  }
}

// A row whose update waits when it leaves is kept with that, and so is its clock.
TEST(DeviceCacheTest, ARowThatLeavesWithUpdatesIsKeptWithThem) {
  for (const bool comes_back : {false, true}) {
    for (const int64_t write_bound : {kUnbounded, int64_t{1}}) {
      CacheConfig config = PlainConfig();
      config.rows.clock = comes_back ? ClockRule::kLamport : ClockRule::kCount;
      config.capacity = 1;
      config.host_capacity = 100;
      config.policy = Policy::kLru;
      config.write_bound = write_bound;
      const DeviceCluster cluster(config);
      EXPECT_EQ(cluster.Step(0, {7}, {1})[0], 0);
      EXPECT_EQ(cluster.Step(0, {7}, {1})[0], -1);
      cluster.Step(0, {8}, {1});
      EXPECT_EQ(cluster.Step(0, {7}, {1})[0], -2);
      EXPECT_EQ(cluster.count(CacheCounter::kRowsFromHost), comes_back ? 0 : 1);
      cluster.Flush(0);
      EXPECT_EQ(cluster.Rows(), (TableRows{{7, {{-3}, {}, 3}}, {8, {{-1}, {}, 1}}}));
    }
  }
}

// By Lamport clocks a pushed row comes back, since clocks do not tell that others pushed, too.
TEST(DeviceCacheTest, WhatOthersPushedMeanwhileIsReadAfterARowHasLeft) {
  CacheConfig config = PlainConfig();
  config.rows.clock = ClockRule::kLamport;
  config.capacity = 1;
  config.host_capacity = 100;
  config.policy = Policy::kLru;
  config.read_bound = 0;
  config.write_bound = 1;
  const DeviceCluster cluster(config, 2);
  for (int round = 0; round < 5; ++round) {
    for (const int w : {0, 1}) cluster.Step(w, {7}, {1});
    for (const int w : {0, 1}) cluster.Step(w, {8}, {1});  // 7 is pushed, and leaves
  }
  for (const int w : {0, 1}) EXPECT_EQ(cluster.Read(w, {7})[0], -10) << w;
}

TEST(DeviceCacheTest, WhatAStepHasTakenFromTheHostIsOldOnceTheCacheIsCleared) {
  CacheConfig config = PlainConfig();
  config.capacity = 1;
  config.host_capacity = 100;
  config.policy = Policy::kLru;
  const DeviceCluster cluster(config, 2);
  cluster.Step(0, {7}, {1});
  cluster.Step(0, {8}, {1});
  cluster.Flush(0);
  {
    DeviceCluster::Call call = cluster.Lookup(0, {7});
    cluster.Deliver(&call);
    ASSERT_OK(cluster.cache()->Clear());
    EXPECT_EQ(cluster.Fill(&call)[0], -1);
    EXPECT_EQ(cluster.count(CacheCounter::kRowsFromHost), 1);
  }
  cluster.Step(1, {7}, {5});
  cluster.Flush(1);
  EXPECT_EQ(cluster.Read(0, {7})[0], -6);
}

// Slots are paid for out of what the cache has saved, if they come. Keys that take turns on the
// lines get one each time as long as that is paid for.
TEST(DeviceCacheTest, SlotsAreGivenBackForRowsThatTheHostHadKeptAndForNoOthers) {
  constexpr int kKeys = 9, kLookups = 90;
  const auto count_of = [&](bool keeps, bool others_update, CacheCounter counter) {
    CacheConfig config = PlainConfig();
    config.rows.optimizer = "adam";
    config.rows.dim = 64;
    config.capacity = kKeys - 1;
    config.host_capacity = keeps ? 100 : 0;
    config.policy = Policy::kLru;
    config.read_bound = 0;
    const DeviceCluster cluster(config, 2);
    const auto update = [&](const Ids& ids) {
      cluster.Step(1, ids, Floats(64 * ids.size(), 1));
      cluster.Flush(1);
    };
    Ids keys(kKeys);
    std::iota(keys.begin(), keys.end(), 0);
    update(keys);
    for (int i = 0; i < 200; ++i) cluster.Read(0, Ids(keys.begin(), keys.end() - 1));  // saves
    const int64_t before = cluster.count(counter);
    for (int i = 0; i < kLookups; ++i) {
      const int64_t key = keys[(kKeys - 1 + i) % kKeys];
      if (others_update) update({key});
      cluster.Read(0, {key});
    }
    return cluster.count(counter) - before;
  };
  EXPECT_EQ(count_of(true, false, CacheCounter::kRowsFromHost), kLookups - 1);
  EXPECT_EQ(count_of(true, true, CacheCounter::kEvictions),
            count_of(false, true, CacheCounter::kEvictions));
}

TEST(DeviceCacheTest, WhatTheHostHasKeptGoesWithItsShard) {
  for (const bool late : {false, true}) {
    CacheConfig config = PlainConfig();
    config.capacity = 1;
    config.host_capacity = 100;
    config.policy = Policy::kLru;
    const DeviceCluster cluster(config);
    cluster.Step(0, {7}, {1});
    cluster.Step(0, {8}, {1});
    cluster.Flush(0);
    EXPECT_EQ(cluster.count(CacheCounter::kRowsToHost), 1);
    DeviceCluster::Call call = cluster.NewCall(0);
    if (late) {
      call = cluster.Lookup(0, {7});
      cluster.Deliver(&call);
    }
    ASSERT_OK(Restore(cluster.table(), {{7, {{-9}, {}, 1}}}));
    cluster.Read(0, {9});  // hears of it
    if (late) {
      EXPECT_EQ(cluster.Fill(&call)[0], -1) << "its answer is of what the shard was";
    }
    call.ticket.reset();
    cluster.Read(0, {8});
    EXPECT_EQ(cluster.Read(0, {7})[0], -9);
  }
}

// What crosses the bus on the way to the device is the ids, and the rows of keys that are new
// there; on the way back of a step of hits a few numbers. (ScaleFreeCTR, SIGIR 2021: with 8 bytes
// an id, only new unique rows cross it.)
TEST(DeviceCacheTest, OnlyIdsAndNewUniqueRowsGoToTheDevice) {
  constexpr int64_t kKeys = 2000, kIds = 500, kSteps = 25, kDim = 16;
  for (const int64_t capacity : {kKeys, kKeys / 10}) {
    SCOPED_TRACE(capacity);
    CacheConfig config = PlainConfig(2);
    config.rows.optimizer = "row_wise_adagrad";
    config.rows.dim = kDim;
    config.capacity = capacity;
    SetStaleness(&config, kUnbounded);
    const DeviceCluster cluster(config, 2);
    Ids all(kKeys);
    std::iota(all.begin(), all.end(), 0);
    cluster.Step(1, all, Floats(kKeys * kDim, 1));
    cluster.Flush(1);

    std::mt19937_64 random(7);
    const auto count = [&](CacheCounter counter) { return cluster.count(counter); };
    int64_t of_hits = -1, back_of_hits = -1;
    for (int step = 0; step < kSteps; ++step) {
      Ids ids(kIds);
      // As Zipf's with exponent 1: few keys are most ids.
      for (int64_t& id : ids) {
        const double u = std::uniform_real_distribution<>(0, 1)(random);
        id = std::min<int64_t>(kKeys - 1, static_cast<int64_t>(std::pow(kKeys, u)) - 1);
      }
      // From some step on, hits alone.
      if (step >= kSteps - 5) std::fill(ids.begin() + step - kSteps + 6, ids.end(), 0);
      const int64_t to = count(CacheCounter::kBytesToDevice);
      const int64_t from = count(CacheCounter::kBytesFromDevice);
      const int64_t misses = count(CacheCounter::kMisses);
      const int64_t visitors = count(CacheCounter::kVisitors);
      cluster.Step(0, ids, Floats(kIds * kDim, 0.01f));
      const int64_t newcomers = count(CacheCounter::kMisses) - misses;
      const int64_t values = count(CacheCounter::kVisitors) - visitors;
      const int64_t rows = newcomers - values;
      const auto array = [](int64_t n, int64_t bytes) { return (n * bytes + 255) / 256 * 256; };
      const int64_t row_floats = (kDim + 1 + 3) / 4 * 4;
      int64_t expected = 8 * kIds;
      if (newcomers > 0) {
        expected += newcomers * static_cast<int64_t>(sizeof(HetNewcomer));
        expected += array(rows, 4 * row_floats) + array(rows, 8) + array(rows, 4) +
                    array(values, 4 * kDim) + array(values, 8) + array(values, 4);
      }
      ASSERT_EQ(count(CacheCounter::kBytesToDevice) - to, expected) << "step " << step;
      if (newcomers == 0) {
        of_hits = count(CacheCounter::kBytesToDevice) - to;
        back_of_hits = count(CacheCounter::kBytesFromDevice) - from;
      }
    }
    EXPECT_EQ(of_hits, 8 * kIds);
    EXPECT_LT(back_of_hits, 1000) << "whatever the number of ids";
    if (capacity < kKeys) {
      EXPECT_GT(count(CacheCounter::kEvictions), 0);
    }
  }
}

// Neither of hits nor of misses.
TEST(DeviceCacheTest, AStepsWorkDoesNotGrowWithTheCapacity) {
  if (!cuda::IsHostBuild()) GTEST_SKIP() << "kernels' items are counted on the host build";
  Ids ids(100);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<int64_t> items;
  for (const int64_t capacity : {1000, 100000}) {
    CacheConfig config = PlainConfig(2);
    config.capacity = capacity;
    const DeviceCluster cluster(config);
    for (int step = 0; step < 2; ++step) {
      const int64_t before = cuda::items_run;
      cluster.Step(0, ids, Floats(ids.size(), 1));
      items.push_back(cuda::items_run - before);
    }
  }
  EXPECT_GT(items[0], items[1]);
  EXPECT_GT(items[1], 0);
  EXPECT_EQ(items[2], items[0]);
  EXPECT_EQ(items[3], items[1]);
}

TEST(DeviceCacheTest, NoIdsIsAStep) {
  const DeviceCluster cluster(PlainConfig(2));
  EXPECT_EQ(cluster.Step(0, {}, {}), Floats());
  EXPECT_EQ(cluster.count(CacheCounter::kMessages), 0);
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(), TableRows());
}

TEST(DeviceCacheTest, MoreKeysThanLines) {
  for (const char* optimizer : {"sgd", "momentum"}) {
    SCOPED_TRACE(optimizer);
    CacheConfig config = PlainConfig(2);
    config.rows.optimizer = optimizer;
    config.capacity = 5;
    const DeviceCluster cluster(config);
    Ids ids(100);
    std::iota(ids.begin(), ids.end(), 0);
    for (int step = 0; step < 4; ++step) cluster.Step(0, ids, Floats(ids.size(), 1));
    EXPECT_GT(cluster.count(CacheCounter::kVisitors), 0);
    EXPECT_LE(cluster.count(CacheCounter::kRows), cluster.cache()->lines());
    cluster.Flush(0);
    const TableRows rows = cluster.Rows();
    ASSERT_EQ(rows.size(), ids.size());
    // A visitor's gradient is applied by the shard, in the order in which a serial run applies it.
    const Floats read = cluster.Read(0, ids);
    for (size_t i = 0; i < ids.size(); ++i) {
      EXPECT_EQ(rows.at(ids[i]).clock, 4);
      EXPECT_EQ(read[i], rows.at(ids[i]).value[0]);
      EXPECT_EQ(rows.at(ids[i]).value, rows.at(0).value);
    }
  }
}

// A value without slots is all that a visitor costs on the way down.
TEST(DeviceCacheTest, AVisitorComesWithoutSlots) {
  CacheConfig config = PlainConfig();
  config.rows.optimizer = "adam";
  config.rows.dim = 8;
  config.capacity = 1;
  const DeviceCluster cluster(config, 2);
  const Ids ids = {1, 2, 3, 4};
  cluster.Step(1, ids, Floats(32, 1));
  cluster.Flush(1);
  DeviceCluster::Call call = cluster.Lookup(0, ids);
  cluster.Deliver(&call);
  ReplyView reply;
  ASSERT_OK(ReplyView::Parse(call.replies[0].data(), call.replies[0].size(), &reply));
  EXPECT_GE(reply.header.num_values, 3u);
  const Floats values = cluster.Fill(&call);
  const TableRows rows = cluster.Rows();
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(Floats(values.begin() + 8 * i, values.begin() + 8 * (i + 1)), rows.at(ids[i]).value);
  }
}

// Slots are paid for when they are asked for, but a miss may find every line pinned.
TEST(DeviceCacheTest, SlotsForAMissWithoutALineAreGivenBack) {
  CacheConfig config = PlainConfig();
  config.rows.optimizer = "momentum";
  config.capacity = 2;
  config.policy = Policy::kLru;
  const DeviceCluster cluster(config, 2);
  Ids ids(200);
  std::iota(ids.begin(), ids.end(), 1);
  cluster.Step(1, ids, Floats(ids.size(), 1));
  cluster.Flush(1);
  cluster.Read(0, ids);  // what came as values is credit
  for (int step = 0; step < 3; ++step) cluster.Read(0, {1, 2});
  ASSERT_EQ(cluster.count(CacheCounter::kRows), 2);
  RequestView asked;
  {
    const DeviceCluster::Call pins = cluster.Lookup(0, {1, 2});
    DeviceCluster::Call step = cluster.Lookup(0, {11, 12});
    ASSERT_OK(RequestView::Parse(step.requests[0]->data(), step.requests[0]->size(), &asked));
    EXPECT_EQ(asked.header.num_values, 2u);
    cluster.Deliver(&step);
    cluster.Fill(&step);
  }
  const DeviceCluster::Call step = cluster.Lookup(0, {11, 12});
  ASSERT_OK(RequestView::Parse(step.requests[0]->data(), step.requests[0]->size(), &asked));
  EXPECT_EQ(asked.header.num_full, 2u);
}

// By Lamport's rule a row that is pushed comes back, also where no step asks for its key.
TEST(DeviceCacheTest, LamportAPushedRowComesBack) {
  CacheConfig config = PlainConfig(2);
  config.rows.clock = ClockRule::kLamport;
  config.read_bound = kUnbounded;  // else rows come when they are read
  config.write_bound = 1;
  const DeviceCluster cluster(config, 2);
  const Ids ids = {1, 2, 3, 4};
  for (int w = 0; w < 2; ++w) cluster.Step(w, ids, Floats(4, 1));
  cluster.Flush(1);
  cluster.Read(0, {9});  // carries the push
  EXPECT_EQ(cluster.Read(0, ids), Floats(4, -2));
  EXPECT_EQ(cluster.Read(1, ids), Floats(4, -1)) << "nobody told it";
  cluster.Step(1, {1, 2}, Floats(2, 1));
  cluster.Flush(1);
  EXPECT_EQ(cluster.Read(1, ids), (Floats{-3, -3, -1, -1}));
}

// First contact, or two restarts, with steps under way: a reply of an incarnation that the cache
// never heard of comes after one of a newer. It must neither cut the cache off nor leave its rows.
TEST(DeviceCacheTest, ALateReplyOfAnUnknownIncarnation) {
  for (const bool first_contact : {true, false}) {
    SCOPED_TRACE(first_contact);
    CacheConfig config = PlainConfig();
    config.read_bound = 0;
    const DeviceCluster cluster(config);
    if (!first_contact) {
      cluster.Step(0, {1}, {1});
      cluster.Flush(0);
    }
    DeviceCluster::Call late = cluster.Lookup(0, {1, 2});
    ASSERT_OK(Restore(cluster.table(), {{2, {{70}, {}, 9}}}));
    cluster.Deliver(&late);
    cluster.table()->Clear();
    DeviceCluster::Call newer = cluster.Lookup(0, {1});
    cluster.Deliver(&newer);
    cluster.Fill(&newer);
    EXPECT_EQ(cluster.Fill(&late)[1], 70) << "it serves its step";
    late.ticket.reset();
    EXPECT_EQ(cluster.Read(0, {2}), Floats{0}) << "and no other";
    for (int step = 0; step < 50; ++step) {
      cluster.Step(0, {1}, {1});
      cluster.Flush(0);
    }
    EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-50}, {}, 50}}}));
  }
}

TEST(DeviceCacheTest, ConfigsThatCannotBeAreRefused) {
  std::shared_ptr<cuda::DeviceCache> cache;
  const auto refused = [&](const CacheConfig& config, const char* text) {
    EXPECT_REFUSED(testing::DeviceSide::Create(config, &cache), text);
  };
  CacheConfig config = PlainConfig();
  config.capacity = 0;
  refused(config, "capacity = 0 rows must be in [1, 1073741824] on a device");
  config = PlainConfig();
  config.read_bound = -2;
  refused(config, "read_bound = -2");
  config = PlainConfig();
  config.write_bound = kMaxBound + 1;
  refused(config, "write_bound = 2147483648");
  config = PlainConfig(0x10000);
  refused(config, "num_shards = 65536");
  config = PlainConfig();
  config.rows.optimizer = "none";
  refused(config, "none");
}

TEST(DeviceCacheTest, AsManyLinesAsMemoryHolds) {
  constexpr int64_t kBytes = 10'000'000;
  CacheConfig config = PlainConfig();
  config.rows.dim = 64;
  int64_t lines = 0;
  ASSERT_OK(cuda::DeviceCache::LinesWithin(config, kBytes, &lines));
  for (const int64_t more : {0, 1}) {
    config.capacity = lines + more;
    const DeviceCluster cluster(config);
    EXPECT_EQ(cluster.count(CacheCounter::kMemoryBytes) > kBytes, more == 1);
  }
  EXPECT_REFUSED(cuda::DeviceCache::LinesWithin(config, 100, &lines),
                 "100 bytes of device memory do not hold one row");
}

TEST(DeviceCacheTest, LookupsThatCannotBeAreRefused) {
  const DeviceCluster cluster(PlainConfig());
  std::shared_ptr<RowTicket> ticket;
  for (const int64_t n : {int64_t{-1}, int64_t{1} << 30}) {
    EXPECT_REFUSED(cluster.cache()->Lookup(
                       {nullptr, n}, false, SerialFor,
                       [](int, size_t) { return std::shared_ptr<char>(); }, &ticket),
                   "ids holds " + std::to_string(n));
  }
  DeviceCluster::Call call = cluster.Lookup(0, {1});
  EXPECT_REFUSED(cluster.Update(call, {1}), "not installed");
  EXPECT_REFUSED(cluster.cache()->Gather(*call.ticket, SerialFor, nullptr), "not installed");
  cluster.Deliver(&call);
  cluster.Fill(&call);
  EXPECT_REFUSED(cluster.TryInstall(&call), "installed before");
  EXPECT_REFUSED(cluster.Update(call, {1}, kNan), "learning_rate");
}

// With lines for one key, or for all.
TEST(DeviceCacheTest, AClosureReadsWhatItHoldsBack) {
  for (const int64_t capacity : {1, 100}) {
    SCOPED_TRACE(capacity);
    CacheConfig config = PlainConfig(2);
    config.rows.optimizer = "momentum momentum=0";
    config.capacity = capacity;
    SetStaleness(&config, 1);
    const DeviceCluster cluster(config, 2);
    const Ids ids = {1, 2, 3, 4, 5, 6};
    const Floats ones(ids.size(), 1);
    cluster.Step(1, ids, ones);
    cluster.Flush(1);
    std::shared_ptr<Closure> closure;
    ASSERT_OK(cluster.cache()->BeginClosure(7, &closure));
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(cluster.Step(0, ids, ones), Floats(ids.size(), -1 - step));
      EXPECT_EQ(cluster.CutFlush(0, true).num_requests(), 0);
    }
    for (const auto& [key, row] : cluster.Rows()) EXPECT_EQ(row.clock, 1) << key;
    DeviceCluster::Call call = cluster.NewCall(0);
    ASSERT_OK(cluster.cache()->CommitClosure(*closure, 6, cluster.Into(&call), &call.ticket));
    EXPECT_REFUSED(cluster.cache()->EndClosure(*closure), "must be run again");
    cluster.Deliver(&call);
    ASSERT_OK(cluster.TryInstall(&call));
    ASSERT_OK(cluster.cache()->EndClosure(*closure));
    const testing::TableRows rows = cluster.Rows();
    for (const int64_t id : ids) {
      EXPECT_EQ(rows.at(id).value, Floats{-4});
      EXPECT_EQ(rows.at(id).clock, 4);
    }
    ASSERT_OK(cluster.cache()->BeginClosure(8, &closure));
    cluster.Step(0, ids, ones);
    closure.reset();  // its run did not end
    cluster.Flush(0);
    EXPECT_EQ(cluster.count(CacheCounter::kUpdatesUndone), 6);
    EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
    EXPECT_EQ(cluster.Rows(), rows);
    EXPECT_EQ(cluster.Read(0, ids), Floats(ids.size(), -4));
  }
}

// Steps of several threads on one cache: every update is merged once.
TEST(DeviceCacheTest, StepsOfThreads) {
  CacheConfig config = PlainConfig(2);
  SetStaleness(&config, 2);
  config.capacity = 6;
  const DeviceCluster cluster(config);
  constexpr int kThreads = 3, kSteps = 40;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int step = 0; step < kSteps; ++step) {
        cluster.Step(0, {step % 7, 10 + t, step % 5}, {1, 1, 0});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  cluster.Flush(0);
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
  const TableRows rows = cluster.Rows();
  for (int64_t key = 0; key < 7; ++key) {
    const int steps = kSteps / 7 + (key < kSteps % 7);
    EXPECT_EQ(rows.at(key).value[0], -kThreads * steps) << key;
  }
  for (int t = 0; t < kThreads; ++t) EXPECT_EQ(rows.at(10 + t).value[0], -kSteps);
}

}  // namespace
}  // namespace het_tf
