// Table::Sync: the shard's side of the protocol (docs/protocol.md, 2 and 3).

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/row/clock.h"
#include "ops/core/table/lifetimes.h"
#include "ops/core/table/table.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::ApplyRows;
using testing::Buffer;
using testing::LookupRows;
using testing::MakeTable;
using testing::RequestBuilder;
using testing::Restore;
using testing::RunThreads;
using testing::Snapshot;
using testing::Sync;
using testing::TableRow;
using testing::TableRows;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One column of SGD from zero: a contribution is what the row gains.
RowConfig Plain(ClockRule clock = ClockRule::kCount) { return {1, "sgd", "zeros", 0, clock, 1}; }

struct Reply {
  Buffer bytes;
  ReplyView view;
};

// Sends what must be accepted.
Reply Exchange(Table* table, const RequestBuilder& request) {
  Reply reply;
  EXPECT_OK(Sync(table, request.Encode(), &reply.bytes));
  EXPECT_OK(ReplyView::Parse(reply.bytes.data(), reply.bytes.size(), &reply.view));
  return reply;
}

// Of a cache that has heard of the table.
RequestBuilder Request(Table* table) {
  RequestBuilder request;
  request.header.dim = static_cast<uint32_t>(table->dim());
  request.header.slot_dim = static_cast<uint32_t>(table->slot_dim());
  request.header.contribution_dim = static_cast<uint32_t>(table->contribution_dim());
  return request;
}
RequestBuilder Hello(Table* table, uint64_t cache_id = 7) {
  RequestBuilder request = Request(table);
  request.header.cache_id = cache_id;
  const Reply reply = Exchange(table, request);
  request.header.incarnation = reply.view.header.incarnation;
  request.header.session = reply.view.header.session;
  return request;
}

RequestBuilder Push(RequestBuilder request, uint64_t sequence, int64_t key, float contribution,
                    uint32_t updates = 1, uint32_t clock = 0) {
  request.pushes = {{sequence, {{key, updates, {contribution}, clock}}}};
  return request;
}

TEST(TableSyncTest, ContributionsMergeAndCount) {
  const auto table = MakeTable(Plain());
  const RequestBuilder hello = Hello(table.get());
  EXPECT_EQ(Exchange(table.get(), Push(hello, 1, 5, 2.5f, 3)).view.header.acknowledged, 1u);
  EXPECT_EQ(Exchange(table.get(), Push(hello, 2, 5, -1, 2)).view.header.acknowledged, 2u);
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{1.5}, {}, 5}}}));
  EXPECT_EQ(table->counter(TableCounter::kPushesMerged), 2);
  EXPECT_EQ(table->counter(TableCounter::kRowsMerged), 2);
}

TEST(TableSyncTest, LamportClocksTakeTheGreater) {
  const auto table = MakeTable(Plain(ClockRule::kLamport));
  const RequestBuilder hello = Hello(table.get());
  Exchange(table.get(), Push(hello, 1, 5, 1, 1, 3));
  Exchange(table.get(), Push(hello, 2, 5, 1, 1, 2));
  EXPECT_EQ(Snapshot(*table)[5].clock, 3);
  Exchange(table.get(), Push(hello, 3, 5, 1, 1, 7));
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{3}, {}, 7}}}));
}

TEST(TableSyncTest, LamportClocksBeyond32Bits) {
  const auto table = MakeTable(Plain(ClockRule::kLamport));
  const int64_t far = (int64_t{5} << 32) + 10;
  ASSERT_OK(Restore(table.get(), {{5, {{0}, {}, far}}}));
  const RequestBuilder hello = Hello(table.get());
  Exchange(table.get(), Push(hello, 1, 5, 1, 1, static_cast<uint32_t>(far - 11)));
  EXPECT_EQ(Snapshot(*table)[5].clock, far);
  Exchange(table.get(), Push(hello, 2, 5, 1, 1, static_cast<uint32_t>(far + 20)));
  EXPECT_EQ(Snapshot(*table)[5].clock, far + 20);
}

// The greater of what the worker says and what the merge did.
TEST(TableSyncTest, DriftClocksCountDistance) {
  const auto table = MakeTable({1, "momentum momentum=0.5", "zeros", 0, ClockRule::kDrift});
  RequestBuilder request = Hello(table.get());
  const auto units = [](double distance) { return static_cast<int64_t>(distance / kDriftUnit); };
  request.pushes = {{1, {{5, 1, {3, 3}, static_cast<uint32_t>(units(1))}}}};
  Exchange(table.get(), request);
  EXPECT_EQ(Snapshot(*table)[5].clock, units(3));
  request.pushes = {{2, {{5, 1, {0, 0}, static_cast<uint32_t>(units(8))}}}};
  Exchange(table.get(), request);
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{4.5}, {1.5}, units(11)}}})) << "the velocity rolls";
  request.pushes = {{3, {{5, 0, {2}, 0, 0.5f}}}};
  Exchange(table.get(), request);
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{4.25}, {-0.25}, units(11.25)}}}));
}

TEST(TableSyncTest, GradientsAreSteppedHere) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport}) {
    const auto table = MakeTable({1, "momentum momentum=0.5", "zeros", 0, clock});
    RequestBuilder request = Hello(table.get());
    request.pushes = {{1, {{5, 0, {4}, 1, 0.25f}, {5, 0, {4}, 2, 0.25f}}}};
    request.values = {5};
    const Reply reply = Exchange(table.get(), request);
    ASSERT_EQ(reply.view.header.num_values, 1u);
    EXPECT_EQ(reply.view.values[0], -1 - 1.5f);
    EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{-2.5}, {-1.5}, 2}}}));
  }
}

TEST(TableSyncTest, KeysGetTheirRowOnceSomebodyUpdatedIt) {
  const auto table = MakeTable({2, "adagrad", "zeros"});
  ASSERT_OK(ApplyRows(table.get(), {1}, {1, 1}));
  RequestBuilder request = Request(table.get());
  request.full = {2, 1, 3};
  request.values = {4, 1};
  const Reply reply = Exchange(table.get(), request);
  ASSERT_EQ(reply.view.header.num_full, 1u);
  ASSERT_EQ(reply.view.header.num_values, 1u);
  EXPECT_EQ(reply.view.header.num_queries, 5u);
  EXPECT_EQ(reply.view.full_rows[0].query, 1);
  EXPECT_EQ(reply.view.full_rows[0].clock, 1);
  EXPECT_EQ(reply.view.value_rows[0].query, 4);
  const TableRow row = Snapshot(*table)[1];
  EXPECT_EQ(std::vector<float>(reply.view.full, reply.view.full + 2), row.value);
  EXPECT_EQ(std::vector<float>(reply.view.full + 2, reply.view.full + 4), row.slots);
  EXPECT_EQ(std::vector<float>(reply.view.values, reply.view.values + 2), row.value);
  EXPECT_EQ(table->size(), 1);
}

TEST(TableSyncTest, ChecksAreAnsweredBeyondTheReadBound) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    const auto table = MakeTable(Plain(clock));
    ASSERT_OK(Restore(table.get(), {{1, {{5}, {}, 10}}}));
    for (const int64_t bound : {int64_t{0}, int64_t{3}, kUnbounded}) {
      RequestBuilder request = Request(table.get());
      request.header.read_bound = bound;
      const std::vector<RequestBuilder::Check> checks = {{1, 10}, {1, 9},  {1, 7}, {1, 6},
                                                         {1, 0},  {1, 12}, {2, 0}};
      request.checks = request.value_checks = checks;
      const Reply reply = Exchange(table.get(), request);
      std::vector<int64_t> answered, values;
      for (uint32_t r = 0; r < reply.view.header.num_full; ++r) {
        answered.push_back(reply.view.full_rows[r].query);
      }
      for (uint32_t r = 0; r < reply.view.header.num_values; ++r) {
        values.push_back(reply.view.value_rows[r].query - 7);
      }
      const std::vector<int64_t> expected = bound == 0   ? std::vector<int64_t>{1, 2, 3, 4}
                                            : bound == 3 ? std::vector<int64_t>{3, 4}
                                                         : std::vector<int64_t>{};
      EXPECT_EQ(answered, expected) << "read_bound " << bound;
      EXPECT_EQ(values, expected) << "read_bound " << bound;
    }
  }
}

TEST(TableSyncTest, ReadsAreCountedByWhatTheyMiss) {
  const auto table = MakeTable(Plain());
  ASSERT_OK(Restore(table.get(), {{1, {{5}, {}, 10}}, {3, {{5}, {}, int64_t{1} << 40}}}));
  RequestBuilder request = Request(table.get());
  request.header.read_bound = 3;
  // The third misses 3; the fourth and fifth would miss more, so the row comes; nobody has row 2.
  request.checks = {{1, 10}, {1, 9}, {1, 7}, {1, 6}, {1, 0}, {2, 0}};
  Exchange(table.get(), request);
  EXPECT_EQ(table->reads_that_missed(0), 3);
  EXPECT_EQ(table->reads_that_missed(1), 1);
  EXPECT_EQ(table->reads_that_missed(2), 1);
  request.header.read_bound = kUnbounded;
  request.checks = {{3, 0}};
  Exchange(table.get(), request);
  EXPECT_EQ(table->reads_that_missed(Table::kMissedBuckets - 1), 1);
}

TEST(TableSyncTest, PushComesBeforeCheck) {
  const auto table = MakeTable(Plain());
  RequestBuilder request = Push(Hello(table.get()), 1, 5, 2.5f);
  request.full = {5};
  request.checks = {{5, 1}, {5, 0}};
  const Reply reply = Exchange(table.get(), request);
  ASSERT_EQ(reply.view.header.num_full, 2u);
  EXPECT_EQ(reply.view.full_rows[0].query, 1);  // base 0 lacks the pushed update, base 1 has it
  EXPECT_EQ(reply.view.full_rows[1].query, 2);
  EXPECT_EQ(reply.view.full[1], 2.5f);
}

TEST(TableSyncTest, ARepeatWaitsForWhatItRepeats) {
  const auto table = MakeTable(Plain());
  const Buffer push = Push(Hello(table.get()), 1, 5, 2.5f).Encode();
  std::atomic<bool> repeat_is_answered{false};
  std::thread repeat;
  int loops = 0;  // of the first: one checks the push, the next one merges it
  const auto with_repeat = [&](int64_t total, int64_t cost, const auto& body) {
    if (++loops == 2) {
      repeat = std::thread([&] {
        Buffer reply;
        EXPECT_OK(Sync(table.get(), push, &reply));
        repeat_is_answered = true;
      });
      // So long as it takes one that does not wait.
      for (int ms = 0; ms < 200 && !repeat_is_answered; ++ms) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    SerialFor(total, cost, body);
  };
  Buffer reply;
  EXPECT_OK(Sync(table.get(), push, &reply, with_repeat));
  repeat.join();
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{2.5}, {}, 1}}}));
  EXPECT_EQ(table->counter(TableCounter::kPushesRepeated), 1);
}

TEST(TableSyncTest, RepeatedSequencesMergeOnce) {
  const auto table = MakeTable(Plain());
  const RequestBuilder hello = Hello(table.get());
  RequestBuilder request = Push(hello, 1, 5, 1);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Exchange(table.get(), request).view.header.acknowledged, 1u);
  }
  // A repeat together with what came after.
  request.pushes.push_back({2, {{5, 1, {1}}}});
  EXPECT_EQ(Exchange(table.get(), request).view.header.acknowledged, 2u);
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{2}, {}, 2}}}));
  EXPECT_EQ(table->counter(TableCounter::kPushesRepeated), 3);
  // Another cache has its own sequence.
  Exchange(table.get(), Push(Hello(table.get(), 8), 1, 5, 1));
  EXPECT_EQ(Snapshot(*table)[5].clock, 3);
  EXPECT_EQ(table->num_sessions(), 2);
}

// A push that overtook another is not merged, and nothing of the cache is taken for read.
TEST(TableSyncTest, ASequenceThatSkipsAheadWaitsForThoseBefore) {
  const auto table = MakeTable({1, "momentum", "zeros"});
  RequestBuilder request = Hello(table.get());
  request.pushes = {{1, {{5, 1, {1, 0}}}}};
  Exchange(table.get(), request);
  request.pushes = {{3, {{5, 1, {100, 0}}}}};
  request.header.read_bound = 5;
  request.checks = {{5, 3}};
  request.value_checks = {{5, 3}};
  request.values = {5, 6};
  const Reply ahead = Exchange(table.get(), request);
  EXPECT_EQ(ahead.view.header.acknowledged, 1u);
  EXPECT_EQ(ahead.view.header.num_full, 3u) << "the bases count what is not here yet";
  EXPECT_EQ(ahead.view.full[0], 1);
  EXPECT_EQ(table->counter(TableCounter::kPushesSkipped), 1);
  request.pushes = {{2, {{5, 1, {10, 0}}}}, {3, {{5, 1, {100, 0}}}}};
  const Reply both = Exchange(table.get(), request);
  EXPECT_EQ(both.view.header.acknowledged, 3u);
  EXPECT_EQ(both.view.header.num_full, 0u);
  EXPECT_EQ(both.view.header.num_values, 1u);
  EXPECT_EQ(Snapshot(*table)[5].value[0], 111);
  // Without a push of its own, a request may overtake one too.
  request.pushes.clear();
  request.header.cut = 4;
  EXPECT_EQ(Exchange(table.get(), request).view.header.num_full, 3u);
}

TEST(TableSyncTest, AfterARestartNothingMergesAndEveryQueryIsAnswered) {
  const auto table = MakeTable(Plain());
  RequestBuilder request = Hello(table.get());
  Exchange(table.get(), Push(request, 1, 5, 1));
  Exchange(table.get(), Push(request, 2, 5, 1));
  ASSERT_OK(Restore(table.get(), {{6, {{60}, {}, 3}}}));
  request = Push(request, 3, 5, 100);
  request.header.read_bound = kUnbounded;
  request.checks = {{7, 50}, {6, 50}};
  request.full = {5};
  const Reply reply = Exchange(table.get(), request);
  EXPECT_NE(reply.view.header.incarnation, request.header.incarnation);
  EXPECT_EQ(reply.view.header.flags, kRestarted);
  EXPECT_EQ(reply.view.header.acknowledged, 0u);
  ASSERT_EQ(reply.view.header.num_full, 2u);
  EXPECT_EQ(reply.view.full_rows[0].query, 1);
  EXPECT_EQ(reply.view.full[0], 60);
  EXPECT_EQ(reply.view.full_rows[1].query, 2);
  EXPECT_EQ(reply.view.full[1], 2);
  EXPECT_EQ(Snapshot(*table)[5].value[0], 2);

  request.header.incarnation = reply.view.header.incarnation;
  request.header.session = reply.view.header.session;
  request.pushes[0].sequence = 1;
  EXPECT_EQ(Exchange(table.get(), request).view.header.flags, 0);
  EXPECT_EQ(Snapshot(*table)[5].value[0], 102);
}

// What a forgotten cache pushes late is not merged again.
TEST(TableSyncTest, AnotherSessionIsAsARestart) {
  const auto table = MakeTable(Plain());
  RequestBuilder request = Push(Hello(table.get()), 1, 5, 1);
  Exchange(table.get(), request);
  ++request.header.session;
  const Reply reply = Exchange(table.get(), request);
  EXPECT_EQ(reply.view.header.flags, kRestarted);
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{1}, {}, 1}}}));
}

TEST(TableSyncTest, WhatIsNotForThisShardIsRefusedAndNothingMerged) {
  const int64_t foreign = 1;
  RowConfig config = {2, "adagrad", "zeros", 0, ClockRule::kCount, 3};
  const int owner = ShardOfHash(HashKey(foreign), 3), other = (owner + 1) % 3;
  int64_t own = 2;
  while (ShardOfHash(HashKey(own), 3) != static_cast<uint32_t>(other)) ++own;
  const auto table = MakeTable(config, other);
  RequestBuilder good = Request(table.get());
  good.header.shard = static_cast<uint32_t>(other);
  const Reply hello = Exchange(table.get(), good);
  good.header.incarnation = hello.view.header.incarnation;
  good.header.session = hello.view.header.session;
  good.pushes = {{1, {{own, 0, {1, 1}}, {own, 1, {1, 1, 1, 1}}}}};
  const auto refused = [&](const std::string& text, const auto& change) {
    RequestBuilder request = good;
    change(&request);
    Buffer reply;
    EXPECT_REFUSED(Sync(table.get(), request.Encode(), &reply), text);
    EXPECT_TRUE(reply.empty());
    EXPECT_EQ(table->size(), 0);
  };
  const std::string names_both =
      "holds key 1 of shard " + std::to_string(owner) + ", this is shard " + std::to_string(other);
  const std::string pushes = "request pushes key " + std::to_string(own) + ": ";
  refused(names_both, [&](RequestBuilder* r) { r->checks = {{foreign, 0}}; });
  refused(names_both, [&](RequestBuilder* r) { r->full = {foreign}; });
  refused(names_both, [&](RequestBuilder* r) { r->values = {foreign}; });
  refused(names_both, [&](RequestBuilder* r) { r->pushes.push_back({2, {{foreign, 0, {1, 1}}}}); });
  refused("request is for shard", [&](RequestBuilder* r) { r->header.shard = owner; });
  refused("dim = 4, slot_dim = 0, contribution_dim = 4; this table has dim = 2, slot_dim = 2",
          [](RequestBuilder* r) {
            r->pushes.clear();
            r->header.dim = r->header.contribution_dim = 4;
            r->header.slot_dim = 0;
          });
  refused("sequence 0 after 0", [](RequestBuilder* r) { r->pushes[0].sequence = 0; });
  refused("sequence 1 after 1", [](RequestBuilder* r) { r->pushes.push_back(r->pushes[0]); });
  refused("incarnation = 0", [](RequestBuilder* r) { r->header.incarnation = 0; });
  refused("session = 0", [](RequestBuilder* r) { r->header.session = 0; });
  refused(pushes + "learning_rate = nan",
          [](RequestBuilder* r) { r->pushes[0].rows[0].learning_rate = kNan; });
  refused(pushes + "learning_rate = -1",
          [](RequestBuilder* r) { r->pushes[0].rows[0].learning_rate = -1; });
  refused(pushes + "a gradient or its square",
          [](RequestBuilder* r) { r->pushes[0].rows[0].floats[1] = 1e20f; });
  refused(pushes + "a contribution holds NaN",
          [](RequestBuilder* r) { r->pushes[0].rows[1].floats[3] = kNan; });
  refused("HETQ", [](RequestBuilder* r) { r->header.magic = 1; });
  Exchange(table.get(), good);
  EXPECT_EQ(table->size(), 1);
}

// ---- Rows that come and go. ----

// A check that was cut before a push, and comes after it, says that the cache holds the initial
// value: of a row that is there this misses the push, of one that was refused the refusal.
TEST(TableSyncTest, ARefusedUpdateIsToldThoughAnOlderCheckComesLater) {
  for (const bool refuses : {false, true}) {
    Lifetimes lifetimes;
    ASSERT_OK(Lifetimes::Parse(refuses ? "admit count=2" : "expire age=9", &lifetimes));
    std::unique_ptr<Table> table;
    ASSERT_OK(Table::Create(Plain(), 0, &table, lifetimes));
    RequestBuilder request = Hello(table.get());
    request.header.read_bound = 100;
    request.header.watch = 1;
    RequestBuilder check = request;
    check.checks = {RequestBuilder::Check{5, 0}};
    request.header.cut = 1;
    Exchange(table.get(), Push(request, 1, 5, 1));
    EXPECT_EQ(Exchange(table.get(), check).view.header.flags & kWatches, 0);
    check.header.cut = 1;
    check.checks = {RequestBuilder::Check{5, 1}};
    const Reply told = Exchange(table.get(), check);
    ASSERT_EQ(told.view.header.num_full, 1u) << "another life than that of the base";
    EXPECT_EQ(told.view.full_rows[0].clock == 1, refuses);
    check.checks = {RequestBuilder::Check{5, told.view.full_rows[0].clock}};
    EXPECT_EQ(Exchange(table.get(), check).view.header.flags & kWatches, kWatches);
  }
}

// ---- Threads: what ThreadSanitizer watches. ----

TEST(TableThreadsTest, ClocksAndValuesAreTheSumOfAllPushes) {
  constexpr int kThreads = 8, kRounds = 60, kKeys = 40;
  const auto table = MakeTable(Plain());
  std::atomic<int> pushing{kThreads};
  RunThreads(kThreads + 3, [&](int t) {
    if (t == kThreads) {
      while (pushing > 0) LookupRows(*table, {1, 2, 3, 1000});
    } else if (t == kThreads + 1) {
      while (pushing > 0) EXPECT_LE(Snapshot(*table).size(), static_cast<size_t>(kKeys));
    } else if (t == kThreads + 2) {
      while (pushing > 0) {
        const int64_t rows = table->size();  // first: both grow meanwhile
        EXPECT_LE(rows * 20, table->memory_bytes());
      }
    } else {
      RequestBuilder request = Hello(table.get(), t + 1);
      for (int round = 0; round < kRounds; ++round) {
        RequestBuilder::Push push = {static_cast<uint64_t>(round + 1), {}};
        request.checks.clear();
        for (int64_t key = 0; key < kKeys; ++key) {
          push.rows.push_back({key, 1u + t % 2, {static_cast<float>(t + 1)}});
          request.checks.push_back({key, round});
        }
        request.pushes = {push};
        Exchange(table.get(), request);
      }
      --pushing;
    }
  });
  const TableRows rows = Snapshot(*table);
  ASSERT_EQ(rows.size(), static_cast<size_t>(kKeys));
  for (const auto& [key, row] : rows) {
    EXPECT_EQ(row.clock, kRounds * kThreads * 3 / 2) << key;
    EXPECT_EQ(row.value[0], kRounds * kThreads * (kThreads + 1) / 2) << key;
  }
}

TEST(TableThreadsTest, OneMessageFromManyThreadsMergesOnce) {
  const auto table = MakeTable(Plain());
  const RequestBuilder hello = Hello(table.get());
  for (int64_t round = 1; round <= 100; ++round) {
    RequestBuilder request = Push(hello, round, 5, 1);
    request.full = {5};
    RunThreads(4, [&](int) {
      const Reply reply = Exchange(table.get(), request);
      ASSERT_EQ(reply.view.header.num_full, 1u);
      EXPECT_EQ(reply.view.full[0], round) << "answered before it was merged";
    });
  }
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{100}, {}, 100}}}));
}

TEST(TableThreadsTest, RowsComeAndGoUnderTraffic) {
  const auto table = MakeTable({2, "adam", "uniform"});
  std::atomic<int> running{3};
  RunThreads(4, [&](int t) {
    if (t == 3) {
      while (running > 0) {
        const TableRows rows = Snapshot(*table);
        table->Clear();
        EXPECT_OK(Restore(table.get(), rows));
      }
      return;
    }
    RequestBuilder request = Hello(table.get(), t + 1);
    for (int64_t key = 0; key < 200; ++key) request.full.push_back(key);
    for (int round = 0; round < 200; ++round) {
      request.pushes = {{static_cast<uint64_t>(round + 1),
                         {{round, 0, {1, 1}}, {round, 1, std::vector<float>(7, 1)}}}};
      const Reply reply = Exchange(table.get(), request);
      request.header.incarnation = reply.view.header.incarnation;
      request.header.session = reply.view.header.session;
      EXPECT_OK(ApplyRows(table.get(), {round % 7}, {1, 1}));
    }
    --running;
  });
  EXPECT_LE(table->size(), 200);
}

}  // namespace
}  // namespace het_tf
