// The cache on a network that works: cache_failure_test.cc has the others.

#include "ops/core/cache/cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "ops/core/cache/cache_testing.h"

namespace het_tf {
namespace {

using testing::ApplyRows;
using testing::Below;
using testing::Cluster;
using testing::Floats;
using testing::Ids;
using testing::LookupRows;
using testing::MakeTable;
using testing::PlainConfig;
using testing::Random;
using testing::SetStaleness;
using testing::TableRows;
using testing::ThreadedFor;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(CacheTest, FirstLookupMissesAndTheNextHits) {
  Cluster cluster(PlainConfig());
  ASSERT_OK(ApplyRows(cluster.table(), {1}, {-5}));
  EXPECT_EQ(cluster.Read(0, {1, 2, 1}), (Floats{5, 0, 5}));
  EXPECT_EQ(cluster.Read(0, {2, 3}), (Floats{0, 0}));
  EXPECT_EQ(cluster.count(CacheCounter::kLookups), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kIds), 5);
  EXPECT_EQ(cluster.count(CacheCounter::kKeys), 4);
  EXPECT_EQ(cluster.count(CacheCounter::kHits), 1);
  EXPECT_EQ(cluster.count(CacheCounter::kHitIds), 1);
  EXPECT_EQ(cluster.count(CacheCounter::kMisses), 3);
  EXPECT_EQ(cluster.count(CacheCounter::kInitialized), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kRows), 3);
  EXPECT_EQ(cluster.count(CacheCounter::kMessages), 2);
}

TEST(CacheTest, HitsAreCountedByKeyAndByOccurrence) {
  Cluster cluster(PlainConfig());
  cluster.Read(0, {1, 2});
  cluster.Read(0, {1, 1, 1, 3, 2, 3});
  EXPECT_EQ(cluster.count(CacheCounter::kHits), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kHitIds), 4);
}

TEST(CacheTest, RowsThatNobodyUpdatedAreComputedHereAndCostNoPayload) {
  CacheConfig config = PlainConfig(3);
  config.rows = {4, "adam", "uniform", 7, ClockRule::kCount, 3};
  Cluster cluster(config);
  const Ids ids = {1, -2, int64_t{1} << 40};
  const auto table = MakeTable({4, "adam", "uniform", 7});
  EXPECT_EQ(cluster.Read(0, ids), LookupRows(*table, ids));
  EXPECT_TRUE(cluster.Rows().empty());
  EXPECT_EQ(cluster.rows_sent(), 0);
  const int64_t messages = cluster.count(CacheCounter::kMessages);
  EXPECT_EQ(cluster.count(CacheCounter::kBytesDown),
            messages * static_cast<int64_t>(sizeof(ReplyHeader)));
  std::map<int, std::vector<int64_t>> asked;  // by shard
  for (const int64_t key : ids) asked[ShardOfHash(HashKey(key), 3)].push_back(key);
  size_t bytes_up = 0;
  for (const auto& [shard, keys] : asked) {
    bytes_up += sizeof(RequestHeader) + (keys.size() * KeyPacking::Of(keys).key_bytes + 7) / 8 * 8;
  }
  EXPECT_EQ(cluster.count(CacheCounter::kBytesUp), static_cast<int64_t>(bytes_up));
}

TEST(CacheTest, NoMessageWhereThereIsNothingToSay) {
  CacheConfig config = PlainConfig(4);
  Cluster cluster(config);
  EXPECT_EQ(cluster.Lookup(0, {}).num_requests(), 0);
  EXPECT_EQ(cluster.Lookup(0, {5}).num_requests(), 1);
  cluster.Step(0, {5}, {1});
  // Unbounded: a hit need not be checked, an update not be pushed.
  EXPECT_EQ(cluster.Lookup(0, {5}).num_requests(), 0);
  EXPECT_EQ(cluster.CutFlush(0, false).num_requests(), 0);
  EXPECT_EQ(cluster.CutFlush(0, true).num_requests(), 1);
}

TEST(CacheTest, UpdatesAreSeenAtOnceAndSentByFlush) {
  Cluster cluster(PlainConfig(2));
  cluster.Step(0, {1, 2, 1}, {1, 10, 2});
  EXPECT_EQ(cluster.Step(0, {1, 2}, {4, 0}), (Floats{-3, -10}));
  EXPECT_EQ(cluster.Read(0, {1, 2}), (Floats{-7, -10}));
  EXPECT_TRUE(cluster.Rows().empty());
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 4);
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-7}, {}, 2}}, {2, {{-10}, {}, 2}}}));
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
  EXPECT_EQ(cluster.count(CacheCounter::kUpdates), 4);
  EXPECT_EQ(cluster.count(CacheCounter::kRowsPushed), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kUpdatesPushed), 4);
  EXPECT_EQ(cluster.Read(0, {1, 2}), (Floats{-7, -10}));
  EXPECT_EQ(cluster.CutFlush(0, true).num_requests(), 0);
}

TEST(CacheTest, ATicketKeepsItsLinesWhateverTheCapacity) {
  CacheConfig config = PlainConfig();
  config.capacity = 1;
  Cluster cluster(config);
  Ids ids(50);
  for (int64_t i = 0; i < 50; ++i) ids[i] = i;
  {
    Cluster::Call call = cluster.Lookup(0, ids);
    cluster.Deliver(&call);
    cluster.Fill(&call);
    for (int64_t other = 100; other < 120; ++other) cluster.Step(0, {other}, {1});
    EXPECT_GE(cluster.count(CacheCounter::kRows), 50);
    ASSERT_OK(cluster.Update(call, Floats(50, 2)));
    EXPECT_EQ(cluster.Read(0, ids), Floats(50, -2));
  }
  cluster.Flush(0);
  EXPECT_EQ(cluster.count(CacheCounter::kRows), 1);
  const TableRows rows = cluster.Rows();
  EXPECT_EQ(rows.size(), 70u);
  for (const auto& [key, row] : rows) EXPECT_EQ(row.value[0], key < 50 ? -2 : -1);
}

TEST(CacheTest, EvictedDirtyRowsTravelWithTheNextMessage) {
  CacheConfig config = PlainConfig();
  config.policy = Policy::kLru;
  config.capacity = 1;
  Cluster cluster(config);
  cluster.Step(0, {1}, {3});
  EXPECT_TRUE(cluster.Rows().empty());
  cluster.Read(0, {2});
  EXPECT_EQ(cluster.count(CacheCounter::kDirtyEvictions), 1);
  cluster.Read(0, {3});
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-3}, {}, 1}}}));
  EXPECT_EQ(cluster.count(CacheCounter::kEvictions), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kDirtyEvictions), 1);
  // Looked up in the very message that pushes it, the row comes back as pushed.
  cluster.Step(0, {4}, {1});
  EXPECT_EQ(cluster.Read(0, {5, 1}), (Floats{0, -3}));
  EXPECT_EQ(cluster.Read(0, {4}), Floats{-1});
}

TEST(CacheTest, WriteBoundLimitsWhatIsUnsent) {
  for (const int64_t bound : {1, 2, 5}) {
    CacheConfig config = PlainConfig();
    config.write_bound = bound;
    Cluster cluster(config);
    for (int64_t step = 1; step <= 20; ++step) {
      cluster.Step(0, {1}, {1});
      // The bound is reached by an update, and the next step's message pushes it.
      EXPECT_EQ(cluster.count(CacheCounter::kPending), (step - 1) % bound + 1);
      const TableRows rows = cluster.Rows();
      EXPECT_EQ(rows.empty() ? 0 : rows.at(1).clock, (step - 1) / bound * bound);
    }
  }
}

TEST(CacheTest, WriteThroughPushesInTheSameStep) {
  CacheConfig config = PlainConfig();
  SetStaleness(&config, 0);
  Cluster cluster(config, 2);
  for (int step = 1; step <= 5; ++step) {
    for (int w = 0; w < 2; ++w) {
      EXPECT_EQ(cluster.Step(w, {1}, {1}), Floats{static_cast<float>(-2 * (step - 1) - w)});
      cluster.Flush(w, false);
      EXPECT_EQ(cluster.count(CacheCounter::kPending, w), 0);
    }
    EXPECT_EQ(cluster.Rows().at(1).clock, 2 * step);
  }
}

TEST(CacheTest, ReadBoundLimitsWhatAReadMisses) {
  for (const int64_t bound : {int64_t{0}, int64_t{1}, int64_t{4}, kUnbounded}) {
    CacheConfig config = PlainConfig();
    config.read_bound = bound;
    config.write_bound = 0;
    Cluster cluster(config, 2);
    cluster.Read(0, {1});
    for (int64_t missed = 1; missed <= 5; ++missed) {
      cluster.Step(1, {1}, {1});
      cluster.Flush(1, false);
      const float seen = cluster.Read(0, {1})[0];
      if (bound == kUnbounded || missed <= bound) {
        EXPECT_EQ(seen, 0);
      } else {
        EXPECT_EQ(seen, -static_cast<float>(missed));
        EXPECT_EQ(
            cluster.count(CacheCounter::kStaleHits) + cluster.count(CacheCounter::kRowsUnasked), 1);
        break;
      }
    }
  }
}

// Own pushes move the base along, so that they do not count as what a read misses.
TEST(CacheTest, WhoKeepsUpdatesTrainsAloneUntilThisEnds) {
  for (const int64_t bound : {0, 3}) {
    CacheConfig config = PlainConfig(2);
    SetStaleness(&config, bound);
    Cluster cluster(config, 2);
    for (int w = 0; w < 2; ++w) {
      cluster.Step(w, {1, 2, 3}, {1, 1, 1});
      cluster.Flush(w);
    }
    Cluster::Call first = cluster.Lookup(0, {1, 2, 3}, /*fresh=*/true);
    cluster.Deliver(&first);
    EXPECT_EQ(cluster.Fill(&first), Floats(3, -2));
    ASSERT_OK(cluster.cache(0)->KeepUpdates(true));
    for (int step = 1; step <= 10; ++step) {
      cluster.Step(1, {1, 3}, {1, 1});
      cluster.Flush(1);
      Cluster::Call call = cluster.Lookup(0, {1, 2});
      EXPECT_EQ(call.num_requests(), 0);
      EXPECT_EQ(cluster.Fill(&call)[0], -1 - step);  // of the other's updates, none since
      ASSERT_OK(cluster.Update(call, {1, 1}));
      EXPECT_EQ(cluster.CutFlush(0, /*all=*/false).num_requests(), 0);
      std::shared_ptr<RowTicket> made;
      Cluster::Call room = cluster.NewCall(0);
      ASSERT_OK(cluster.cache(0)->MakeRoom(*call.ticket, Cluster::Into(&room), &made));
      EXPECT_EQ(room.num_requests(), 0);
    }
    EXPECT_EQ(cluster.Read(0, {4}), Floats{0});  // a row that is not here is fetched
    EXPECT_EQ(cluster.Lookup(0, {4}).num_requests(), 0) << "and stays";
    EXPECT_EQ(cluster.count(CacheCounter::kPending), 20);
    EXPECT_EQ(cluster.Rows().at(1).value, Floats{-12});
    ASSERT_OK(cluster.cache(0)->KeepUpdates(false));
    // Everything travels with one message to each shard, and then the bounds hold.
    EXPECT_EQ(cluster.Read(0, {1, 2, 3}), (Floats{-22, -12, -12}));
    EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
    EXPECT_EQ(cluster.Rows().at(1).value, Floats{-22});
    for (int step = 0; step < 5; ++step) {
      cluster.Step(0, {1}, {1});
      EXPECT_LE(cluster.count(CacheCounter::kPending), std::max<int64_t>(bound, 1));
      ASSERT_OK(cluster.cache(0)->KeepUpdates(false));  // changes nothing
      EXPECT_GE(cluster.count(CacheCounter::kPending), 1);
    }
  }
}

TEST(CacheTest, ALoneWriterIsNeverSentItsRowsBack) {
  for (const int64_t staleness : {0, 1, 3}) {
    CacheConfig config = PlainConfig(2);
    SetStaleness(&config, staleness);
    Cluster cluster(config);
    for (int step = 0; step < 20; ++step) {
      EXPECT_EQ(cluster.Step(0, {1, 2, 3}, {1, 1, 1})[0], static_cast<float>(-step));
      if (step % 3 == 0) cluster.Flush(0, step % 2 == 0);
    }
    EXPECT_EQ(cluster.rows_sent(), 0);
    EXPECT_EQ(cluster.count(CacheCounter::kStaleHits), 0);
  }
}

TEST(CacheTest, ARefreshKeepsOwnUnsentUpdates) {
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  Cluster cluster(config, 2);
  cluster.Step(0, {1}, {1});
  cluster.Step(1, {1}, {10});
  cluster.Flush(1);
  EXPECT_EQ(cluster.Read(0, {1}), Floats{-11});
  EXPECT_EQ(cluster.Rows().at(1).value[0], -10);
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows().at(1).value[0], -11);
  EXPECT_EQ(cluster.Rows().at(1).clock, 2);
  EXPECT_EQ(cluster.Read(1, {1}), Floats{-11});
}

TEST(CacheTest, LamportSendsPushedRowsBack) {
  CacheConfig config = PlainConfig();
  config.rows.clock = ClockRule::kLamport;
  SetStaleness(&config, 100);
  Cluster cluster(config, 2);
  cluster.Step(0, {1, 2}, {1, 1});
  cluster.Step(1, {1, 2}, {10, 10});
  cluster.Flush(1);
  // Within the bound, so nothing is seen of it until the row is pushed.
  EXPECT_EQ(cluster.Read(0, {1}), Floats{-1});
  cluster.Flush(0);
  Cluster::Call call = cluster.Lookup(0, {1, 2});
  EXPECT_EQ(cluster.count(CacheCounter::kMisses), 2);
  cluster.Deliver(&call);
  EXPECT_EQ(cluster.Fill(&call), (Floats{-11, -11}));
  EXPECT_EQ(cluster.Rows().at(1).clock, 1) << "the greater of two clocks, both 1";
}

TEST(CacheTest, WithoutACacheTheShardsApplyTheOptimizer) {
  CacheConfig config = PlainConfig(2);
  config.rows.optimizer = "momentum momentum=0.5";
  config.capacity = 0;
  Cluster cluster(config, 2);
  const auto table = MakeTable({1, "momentum momentum=0.5", "zeros"});
  for (int step = 0; step < 6; ++step) {
    const Ids ids = {1, 2, step, 1};
    EXPECT_EQ(cluster.Step(step % 2, ids, {1, 2, 4, 8}, 0.25f), LookupRows(*table, ids));
    cluster.Flush(step % 2, false);
    ASSERT_OK(ApplyRows(table.get(), ids, {1, 2, 4, 8}, 0.25f));
    EXPECT_EQ(cluster.Rows(), testing::Snapshot(*table));
  }
  EXPECT_EQ(cluster.count(CacheCounter::kHits), 0);
  EXPECT_EQ(cluster.count(CacheCounter::kRows), 0);
}

// A row that others have updated comes as a value until it has proved to come again.
TEST(CacheTest, ARowGetsALineWhenItComesAgain) {
  CacheConfig config = PlainConfig();
  config.rows = {4, "adagrad", "zeros"};
  config.capacity = 10;
  SetStaleness(&config, 100);
  Cluster cluster(config);
  Ids ids(200);
  for (int64_t i = 0; i < 200; ++i) ids[i] = i;
  ASSERT_OK(ApplyRows(cluster.table(), ids, Floats(800, 1)));
  for (const int64_t id : ids) cluster.Read(0, {id});
  // But for one in a hundred, that slots may cost in advance.
  EXPECT_GE(cluster.count(CacheCounter::kVisitors), 196);
  EXPECT_LE(cluster.count(CacheCounter::kRows), 4);
  for (int round = 0; round < 200; ++round) cluster.Read(0, {7});
  EXPECT_GT(cluster.count(CacheCounter::kHits), 50);
}

// From a visitor to a line and back, with updates on the way: as without a cache.
TEST(CacheTest, VisitorsReadTheirOwnWrites) {
  CacheConfig config = PlainConfig();
  config.rows = {2, "momentum", "zeros"};
  config.capacity = 2;
  SetStaleness(&config, 3);
  Cluster cluster(config);
  const auto table = MakeTable(config.rows);
  const auto start = [&](Table* each) {
    for (int64_t key = 0; key < 30; ++key) ASSERT_OK(ApplyRows(each, {key}, {1, 2}, 0.5f));
  };
  start(cluster.table());
  start(table.get());
  Random random(1);
  for (int step = 0; step < 2000; ++step) {
    const Ids ids = {Below(&random, 1 + Below(&random, 30)), Below(&random, 30)};
    const Floats gradients = {1, -1, 0.5f, static_cast<float>(step % 3)};
    const Floats expected = LookupRows(*table, ids);
    const Floats read = cluster.Step(0, ids, gradients, 0.01f);
    for (size_t i = 0; i < 4; ++i) ASSERT_NEAR(read[i], expected[i], 2e-4) << "step " << step;
    ASSERT_OK(ApplyRows(table.get(), ids, gradients, 0.01f));
  }
  EXPECT_GT(cluster.count(CacheCounter::kVisitors), 100);
  EXPECT_GT(cluster.count(CacheCounter::kHits), 100);
}

TEST(CacheTest, NonfiniteGradientsChangeNothingOrAreSkipped) {
  for (const Nonfinite nonfinite : {Nonfinite::kError, Nonfinite::kSkip}) {
    CacheConfig config = PlainConfig();
    config.nonfinite = nonfinite;
    Cluster cluster(config);
    cluster.Step(0, {1, 2}, {1, 1});
    Cluster::Call call = cluster.Lookup(0, {1, 2, 2});
    cluster.Deliver(&call);
    cluster.Fill(&call);
    const Status status = cluster.Update(call, {1, kNan, 1});
    if (nonfinite == Nonfinite::kError) {
      EXPECT_REFUSED(status, "for 1 of 2 keys; no row was updated");
    } else {
      EXPECT_OK(status);
    }
    const bool skipped = nonfinite == Nonfinite::kSkip;
    EXPECT_EQ(cluster.count(CacheCounter::kNonfiniteSkipped), skipped);
    EXPECT_EQ(cluster.count(CacheCounter::kUpdates), 2 + skipped);
    cluster.Flush(0);
    EXPECT_EQ(cluster.Rows(),
              (TableRows{{1, {{skipped ? -2.0f : -1.0f}, {}, 1 + skipped}}, {2, {{-1}, {}, 1}}}));
  }
}

TEST(CacheTest, UpdatesThatCannotBeMadeAreRefused) {
  Cluster cluster(PlainConfig());
  Cluster::Call call = cluster.Lookup(0, {1});
  EXPECT_REFUSED(cluster.Update(call, {1}), "not installed");
  cluster.Deliver(&call);
  cluster.Fill(&call);
  EXPECT_REFUSED(cluster.Update(call, {1}, -1), "learning_rate = -1");
  cluster.Flush(0);
  EXPECT_TRUE(cluster.Rows().empty());
}

TEST(CacheTest, ConfigsThatCannotBeAreRefused) {
  std::shared_ptr<Cache> cache;
  const auto refused = [&](const char* text, const auto& change) {
    CacheConfig config = PlainConfig();
    change(&config);
    EXPECT_REFUSED(Cache::Create(config, &cache), text);
  };
  refused("dim = 0", [](CacheConfig* c) { c->rows.dim = 0; });
  refused("optimizer", [](CacheConfig* c) { c->rows.optimizer = "adan"; });
  refused("num_shards = 0", [](CacheConfig* c) { c->rows.num_shards = 0; });
  refused("num_shards = 65536", [](CacheConfig* c) { c->rows.num_shards = 65536; });
  refused("capacity = -1", [](CacheConfig* c) { c->capacity = -1; });
  refused("capacity = 2147483648", [](CacheConfig* c) { c->capacity = int64_t{1} << 31; });
  refused("read_bound = -2", [](CacheConfig* c) { c->read_bound = -2; });
  refused("write_bound = -2", [](CacheConfig* c) { c->write_bound = -2; });
}

TEST(CacheTest, LruKeepsTheMostRecentlyUsed) {
  constexpr size_t kCapacity = 20;
  CacheConfig config = PlainConfig();
  config.policy = Policy::kLru;
  config.capacity = kCapacity;
  Cluster cluster(config);
  std::list<int64_t> recent;
  int64_t hits = 0;
  Random random(1);
  for (int step = 0; step < 3000; ++step) {
    const int64_t key = Below(&random, 1 + Below(&random, 60));
    const size_t before = recent.size();
    recent.remove(key);
    hits += recent.size() < before;
    recent.push_front(key);
    if (recent.size() > kCapacity) recent.pop_back();
    cluster.Read(0, {key});
    ASSERT_EQ(cluster.count(CacheCounter::kHits), hits) << "step " << step;
  }
}

// A key that comes once drives nothing out, one that comes again does.
TEST(CacheTest, AFullCacheAdmitsAKeyAtItsSecondLookup) {
  CacheConfig config = PlainConfig();
  config.capacity = 20;
  Cluster cluster(config);
  for (int64_t key = 0; key < 20; ++key) cluster.Read(0, {key});
  for (int64_t key = 100; key < 150; ++key) cluster.Read(0, {key});
  EXPECT_EQ(cluster.count(CacheCounter::kEvictions), 0);
  cluster.Read(0, {149});
  EXPECT_EQ(cluster.count(CacheCounter::kHits), 0);
  EXPECT_EQ(cluster.count(CacheCounter::kEvictions), 1);
  cluster.Read(0, {149});
  EXPECT_EQ(cluster.count(CacheCounter::kHits), 1);
}

// Each may have what the others leave, and always an equal part.
TEST(CacheTest, CachesWithoutACapacityShareMemory) {
  constexpr int64_t kRowBytes = 3 * 64, kRows = 100;
  MemoryShare memory(kRows * kRowBytes);
  CacheConfig config = PlainConfig();
  config.capacity = kSharedMemory;
  config.memory = &memory;
  Cluster cluster(config, 2);
  const auto rows = [&](int cache) { return cluster.count(CacheCounter::kRows, cache); };
  for (int64_t key = 0; key < 30; ++key) cluster.Read(1, {key});
  cluster.Read(1, {0});  // A lookup says what the ones before have made.
  for (int64_t key = 0; key < 300; ++key) cluster.Read(0, {key});
  EXPECT_EQ(rows(0), 70);
  EXPECT_EQ(rows(1), 30);
  for (int64_t key = 30; key < 300; ++key) cluster.Read(1, {key});
  cluster.Read(0, {0});
  EXPECT_EQ(rows(0), 50);
  EXPECT_EQ(rows(1), 50);
  EXPECT_GE(cluster.count(CacheCounter::kEvictions, 0), 20);
}

// Uses age by the rows that there is memory for.
TEST(CacheTest, FrequentRowsSurviveAScanWithoutACapacity) {
  constexpr int64_t kRowBytes = 3 * 64, kRows = 100, kHot = 50;
  MemoryShare memory(kRows * kRowBytes);
  CacheConfig config = PlainConfig();
  config.capacity = kSharedMemory;
  config.memory = &memory;
  Cluster cluster(config);
  for (int round = 0; round < 10; ++round) {
    for (int64_t key = 0; key < kHot; ++key) cluster.Read(0, {key});
  }
  for (int64_t key = 1000; key < 1000 + kRows; ++key) {
    cluster.Read(0, {key});
    cluster.Read(0, {key});
  }
  EXPECT_GT(cluster.count(CacheCounter::kEvictions), kHot / 2);
  const int64_t hits = cluster.count(CacheCounter::kHits);
  for (int64_t key = 0; key < kHot; ++key) cluster.Read(0, {key});
  EXPECT_EQ(cluster.count(CacheCounter::kHits) - hits, kHot);
}

TEST(MemoryShareTest, ACacheThatEndsLeavesItsPart) {
  MemoryShare memory(100);
  MemoryShare::Part first(&memory), other(&memory);
  {
    MemoryShare::Part second(&memory);
    EXPECT_EQ(first.Allowed(40), 100);
    EXPECT_EQ(second.Allowed(50), 60);
    EXPECT_EQ(first.Allowed(60), 50);
  }
  EXPECT_EQ(first.Allowed(60), 100);
  EXPECT_EQ(other.Allowed(0), 50) << "an equal part of two";
}

// One worker with any staleness gives what it gives without a cache; also when the work is split.
TEST(CacheTest, OneWorkerIsLikeNoCache) {
  const std::string kAdam = "adam";
  for (const char* optimizer : {"sgd", "momentum nesterov=1", "adagrad", "row_wise_adagrad", "adam",
                                "row_wise_adam", "ftrl l1=0.01 l2=0.01", "ftrl max_norm=0.1",
                                "sgd weight_decay=0.1 clipnorm=1 max_norm=0.2"}) {
    for (const int64_t staleness : {int64_t{0}, int64_t{3}, kUnbounded}) {
      SCOPED_TRACE(std::string(optimizer) + " staleness " + std::to_string(staleness));
      CacheConfig config;
      config.rows = {4, optimizer, "uniform", 3, ClockRule::kCount, 3};
      config.capacity = 15;
      SetStaleness(&config, staleness);
      Cluster cluster(config);
      if (optimizer == kAdam && staleness == 3) cluster.parallel_for = ThreadedFor;
      const auto table = MakeTable({4, optimizer, "uniform", 3});
      Random random(1);
      for (int step = 0; step < 40; ++step) {
        Ids ids(12);
        for (int64_t& id : ids) id = Below(&random, 40);
        Floats gradients(ids.size() * 4);
        for (float& g : gradients) g = static_cast<float>(Below(&random, 200) - 100) / 100;
        const float rate = 0.1f / static_cast<float>(1 + step / 13);
        const Floats expected = LookupRows(*table, ids),
                     read = cluster.Step(0, ids, gradients, rate);
        for (size_t i = 0; i < read.size(); ++i) ASSERT_NEAR(read[i], expected[i], 1e-4);
        ASSERT_OK(ApplyRows(table.get(), ids, gradients, rate));
      }
      cluster.Flush(0);
      const TableRows rows = cluster.Rows(), expected = testing::Snapshot(*table);
      ASSERT_EQ(rows.size(), expected.size());
      for (const auto& [key, row] : expected) {
        EXPECT_EQ(rows.at(key).clock, row.clock);
        for (int i = 0; i < 4; ++i) EXPECT_NEAR(rows.at(key).value[i], row.value[i], 1e-4);
        for (size_t i = 0; i < row.slots.size(); ++i) {
          EXPECT_NEAR(rows.at(key).slots[i], row.slots[i], 1e-4 * (1 + std::abs(row.slots[i])));
        }
      }
    }
  }
}

}  // namespace
}  // namespace het_tf
