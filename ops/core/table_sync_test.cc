// Table::Sync: the shard's side of the protocol (DESIGN 3.2 and 3.3).

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <string>
#include <vector>

#include "ops/core/hash.h"
#include "ops/core/message.h"
#include "ops/core/table.h"
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

// One column of SGD from zero: a pushed delta is what the row gains.
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

RequestBuilder Push(uint64_t sequence, int64_t key, float delta, int64_t clock = 1) {
  RequestBuilder request;
  request.pushes = {{sequence, {{key, clock}}, {delta}}};
  return request;
}

TEST(TableSyncTest, PushesMergeAndCount) {
  const auto table = MakeTable(Plain());
  EXPECT_EQ(Exchange(table.get(), Push(1, 5, 2.5f, 3)).view.header.acknowledged, 1u);
  EXPECT_EQ(Exchange(table.get(), Push(4, 5, -1, 2)).view.header.acknowledged, 4u);
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{1.5}, {}, 5}}}));
  EXPECT_EQ(table->counter(TableCounter::kPushesMerged), 2);
  EXPECT_EQ(table->counter(TableCounter::kRowsMerged), 2);
}

TEST(TableSyncTest, LamportClocksTakeTheGreater) {
  const auto table = MakeTable(Plain(ClockRule::kLamport));
  Exchange(table.get(), Push(1, 5, 1, 3));
  Exchange(table.get(), Push(2, 5, 1, 2));
  EXPECT_EQ(Snapshot(*table)[5].clock, 3);
  Exchange(table.get(), Push(3, 5, 1, 7));
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{3}, {}, 7}}}));
}

TEST(TableSyncTest, ServerAppliesTheOptimizerToGradients) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport}) {
    const auto table = MakeTable({1, "momentum momentum=0.5", "zeros", 0, clock});
    RequestBuilder request = Push(1, 5, 4);
    request.header.slot_dim = 1;
    request.header.flags = kServerApplies;
    request.pushes[0].learning_rate = 0.25f;
    request.absent = {5};
    const Reply reply = Exchange(table.get(), request);
    EXPECT_EQ(reply.view.header.width, 1);
    EXPECT_EQ(reply.view.data[0], -1);
    EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{-1}, {-1}, 1}}}));
  }
}

TEST(TableSyncTest, AbsentKeysGetTheirRowOnceSomebodyUpdatedIt) {
  const auto table = MakeTable({2, "adagrad", "zeros"});
  ASSERT_OK(ApplyRows(table.get(), {1}, {1, 1}));
  RequestBuilder request;
  request.header.dim = request.header.slot_dim = 2;
  request.absent = {2, 1, 3};
  const Reply reply = Exchange(table.get(), request);
  ASSERT_EQ(reply.view.header.num_rows, 1);
  EXPECT_EQ(reply.view.header.num_queries, 3);
  EXPECT_EQ(reply.view.header.width, 4);
  EXPECT_EQ(reply.view.rows[0].query, 1);
  EXPECT_EQ(reply.view.rows[0].clock, 1);
  const TableRow row = Snapshot(*table)[1];
  EXPECT_EQ(std::vector<float>(reply.view.data, reply.view.data + 2), row.value);
  EXPECT_EQ(std::vector<float>(reply.view.data + 2, reply.view.data + 4), row.slots);
  EXPECT_EQ(table->size(), 1);
}

TEST(TableSyncTest, ChecksAreAnsweredBeyondTheReadBound) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport}) {
    const auto table = MakeTable(Plain(clock));
    Exchange(table.get(), Push(1, 1, 1, 10));
    for (const int64_t bound : {int64_t{0}, int64_t{3}, kUnbounded}) {
      RequestBuilder request;
      request.header.read_bound = bound;
      request.checks = {{1, 10}, {1, 9}, {1, 7}, {1, 6}, {1, 0}, {1, 12}, {2, 0}};
      std::vector<int64_t> answered;
      const Reply reply = Exchange(table.get(), request);
      for (int64_t r = 0; r < reply.view.header.num_rows; ++r) {
        answered.push_back(reply.view.rows[r].query);
      }
      const std::vector<int64_t> expected = bound == 0   ? std::vector<int64_t>{1, 2, 3, 4}
                                            : bound == 3 ? std::vector<int64_t>{3, 4}
                                                         : std::vector<int64_t>{};
      EXPECT_EQ(answered, expected) << "read_bound " << bound;
    }
  }
}

TEST(TableSyncTest, PushComesBeforeCheck) {
  const auto table = MakeTable(Plain());
  RequestBuilder request = Push(1, 5, 2.5f);
  request.absent = {5};
  request.checks = {{5, 1}, {5, 0}};
  const Reply reply = Exchange(table.get(), request);
  ASSERT_EQ(reply.view.header.num_rows, 2);
  EXPECT_EQ(reply.view.rows[0].query, 1);  // base 0 lacks the pushed update, base 1 has it
  EXPECT_EQ(reply.view.rows[1].query, 2);
  EXPECT_EQ(reply.view.data[1], 2.5f);
}

TEST(TableSyncTest, RepeatedSequencesMergeOnce) {
  const auto table = MakeTable(Plain());
  RequestBuilder request = Push(3, 5, 1);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Exchange(table.get(), request).view.header.acknowledged, 3u);
  }
  EXPECT_EQ(Exchange(table.get(), Push(2, 5, 1)).view.header.acknowledged, 3u);
  // A repeat together with what came after.
  request.pushes.push_back({4, {{5, 1}}, {1}});
  EXPECT_EQ(Exchange(table.get(), request).view.header.acknowledged, 4u);
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{2}, {}, 2}}}));
  EXPECT_EQ(table->counter(TableCounter::kPushesRepeated), 4);
  // Another cache has its own sequence.
  request.header.cache_id = 8;
  Exchange(table.get(), request);
  EXPECT_EQ(Snapshot(*table)[5].clock, 4);
}

TEST(TableSyncTest, AfterARestartNothingMergesAndEveryQueryIsAnswered) {
  const auto table = MakeTable(Plain());
  const uint64_t before = Exchange(table.get(), Push(1, 5, 1)).view.header.incarnation;
  EXPECT_EQ(Exchange(table.get(), Push(2, 5, 1)).view.header.incarnation, before);
  ASSERT_OK(Restore(table.get(), {{6, {{60}, {}, 3}}}));
  RequestBuilder request = Push(3, 5, 100);
  request.header.incarnation = before;
  request.header.read_bound = kUnbounded;
  request.checks = {{7, 50}, {6, 50}};
  request.absent = {5};
  const Reply reply = Exchange(table.get(), request);
  EXPECT_NE(reply.view.header.incarnation, before);
  EXPECT_EQ(reply.view.header.flags, kRestarted);
  ASSERT_EQ(reply.view.header.num_rows, 2);
  EXPECT_EQ(reply.view.rows[0].query, 1);
  EXPECT_EQ(reply.view.data[0], 60);
  EXPECT_EQ(reply.view.rows[1].query, 2);
  EXPECT_EQ(reply.view.data[1], 2);
  EXPECT_EQ(Snapshot(*table)[5].value[0], 2);

  request.header.incarnation = reply.view.header.incarnation;
  EXPECT_EQ(Exchange(table.get(), request).view.header.flags, 0);
  EXPECT_EQ(Snapshot(*table)[5].value[0], 102);
}

TEST(TableSyncTest, WhatIsNotForThisShardIsRefusedAndNothingMerged) {
  const int64_t foreign = 1;
  RowConfig config = {2, "adagrad", "zeros", 0, ClockRule::kCount, 3};
  const int owner = ShardOfHash(HashKey(foreign), 3), other = (owner + 1) % 3;
  int64_t own = 2;
  while (ShardOfHash(HashKey(own), 3) != static_cast<uint32_t>(other)) ++own;
  const auto table = MakeTable(config, other);
  const auto refused = [&](const char* text, const auto& change) {
    RequestBuilder request;
    request.header.dim = request.header.slot_dim = 2;
    request.header.shard = other;
    request.pushes = {{1, {{own, 1}}, {1, 1, 1, 1}}};
    change(&request);
    Buffer reply;
    EXPECT_REFUSED(Sync(table.get(), request.Encode(), &reply), text);
    EXPECT_TRUE(reply.empty());
    EXPECT_EQ(table->size(), 0);
  };
  const std::string names_both =
      "holds key 1 of shard " + std::to_string(owner) + ", this is shard " + std::to_string(other);
  refused(names_both.c_str(), [&](RequestBuilder* r) { r->checks = {{foreign, 0}}; });
  refused(names_both.c_str(), [&](RequestBuilder* r) { r->absent = {foreign}; });
  refused(names_both.c_str(),
          [&](RequestBuilder* r) { r->pushes.push_back({2, {{foreign, 1}}, {1, 1, 1, 1}}); });
  refused("request is for shard", [&](RequestBuilder* r) { r->header.shard = owner; });
  refused("dim = 4, slot_dim = 0; this table has dim = 2, slot_dim = 2 (optimizer 'adagrad')",
          [](RequestBuilder* r) { r->header.dim = 4, r->header.slot_dim = 0; });
  refused("dim = 1, slot_dim = 3",
          [](RequestBuilder* r) { r->header.dim = 1, r->header.slot_dim = 3; });
  refused("sequence 0", [](RequestBuilder* r) { r->pushes[0].sequence = 0; });
  refused("with clock 0", [](RequestBuilder* r) { r->pushes[0].rows[0].clock = 0; });
  refused("with clock -1", [](RequestBuilder* r) { r->pushes[0].rows[0].clock = -1; });
  refused("learning_rate", [](RequestBuilder* r) { r->pushes[0].learning_rate = kNan; });
  refused("HETQ", [](RequestBuilder* r) { r->header.magic = 1; });
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
      for (int round = 0; round < kRounds; ++round) {
        RequestBuilder request;
        request.header.cache_id = t;
        RequestBuilder::Push push = {static_cast<uint64_t>(round + 1), {}, {}};
        for (int64_t key = 0; key < kKeys; ++key) {
          push.rows.push_back({key, 1 + t % 2});
          push.data.push_back(static_cast<float>(t + 1));
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
  for (int64_t round = 1; round <= 100; ++round) {
    RequestBuilder request = Push(round, 5, 1);
    request.absent = {5};
    RunThreads(4, [&](int) {
      const Reply reply = Exchange(table.get(), request);
      ASSERT_EQ(reply.view.header.num_rows, 1);
      EXPECT_EQ(reply.view.data[0], round) << "answered before it was merged";
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
    for (int round = 0; round < 200; ++round) {
      RequestBuilder request;
      request.header.dim = 2;
      request.header.slot_dim = 5;
      request.header.cache_id = t;
      request.pushes = {{static_cast<uint64_t>(round + 1), {{round, 1}}, std::vector<float>(7, 1)}};
      for (int64_t key = 0; key < 200; ++key) request.absent.push_back(key);
      Exchange(table.get(), request);
      EXPECT_OK(ApplyRows(table.get(), {round % 7}, {1, 1}));
    }
    --running;
  });
  EXPECT_LE(table->size(), 200);
}

}  // namespace
}  // namespace het_tf
