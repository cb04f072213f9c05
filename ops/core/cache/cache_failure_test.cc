// The cache when messages are lost, come late or are wrong, and when shards start again.

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "ops/core/cache/cache.h"
#include "ops/core/cache/cache_testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Buffer;
using testing::Chance;
using testing::Cluster;
using testing::Floats;
using testing::Ids;
using testing::PlainConfig;
using testing::Random;
using testing::Restore;
using testing::SetStaleness;
using testing::Sync;
using testing::TableRows;

// The sequences of the pushes in a request.
std::vector<uint64_t> Sequences(const Buffer& request) {
  RequestView view;
  EXPECT_OK(RequestView::Parse(request.data(), request.size(), &view));
  std::vector<uint64_t> sequences;
  for (const PushView& push : view.pushes) sequences.push_back(push.sequence);
  return sequences;
}

TEST(CacheFailureTest, ALostRequestIsSentAgain) {
  Cluster cluster(PlainConfig());
  cluster.Step(0, {1}, {3});
  const Cluster::Call lost = cluster.CutFlush(0, true);
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 1);
  EXPECT_EQ(cluster.Read(0, {1}), Floats{-3});
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-3}, {}, 1}}}));
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
}

TEST(CacheFailureTest, AfterALostReplyTheSameSequenceIsSentAndNotMergedAgain) {
  Cluster cluster(PlainConfig());
  cluster.Step(0, {1}, {3});
  Cluster::Call lost = cluster.CutFlush(0, true);
  cluster.Deliver(&lost);
  EXPECT_EQ(Sequences(*lost.requests[0]), std::vector<uint64_t>{1});
  lost.ticket.reset();
  cluster.Step(0, {1, 2}, {4, 5});
  Cluster::Call again = cluster.CutFlush(0, true);
  // The step's own lookup repeated push 1 and heard of it, so this carries the new one alone.
  EXPECT_EQ(Sequences(*again.requests[0]), std::vector<uint64_t>{2});
  cluster.Deliver(&again);
  cluster.Fill(&again);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-7}, {}, 2}}, {2, {{-5}, {}, 1}}}));
  EXPECT_EQ(cluster.table()->counter(TableCounter::kPushesRepeated), 1);
}

TEST(CacheFailureTest, AFailedStepCanBeRepeated) {
  Cluster cluster(PlainConfig());
  for (const bool request_arrives : {false, true}) {
    Cluster::Call lost = cluster.Lookup(0, {1, 2});
    if (request_arrives) cluster.Deliver(&lost);
    lost.ticket.reset();
    EXPECT_EQ(cluster.count(CacheCounter::kRows), 0) << "nothing is known of these rows";
  }
  EXPECT_EQ(cluster.Step(0, {1, 2}, {1, 2}), (Floats{0, 0}));
  EXPECT_EQ(cluster.Read(0, {1, 2}), (Floats{-1, -2}));
}

// The row that the shard sent is from before the second push.
TEST(CacheFailureTest, ALateReplyDoesNotUndoWhatWasPushedSince) {
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  Cluster cluster(config, 2);
  cluster.Step(0, {1}, {1});
  cluster.Step(1, {1}, {10});
  cluster.Flush(1);
  Cluster::Call late = cluster.Lookup(0, {1});
  cluster.Deliver(&late);
  cluster.Flush(0);
  EXPECT_EQ(cluster.Fill(&late), Floats{-11}) << "with the own push that it lacks";
  EXPECT_EQ(cluster.Read(0, {1}), Floats{-11});
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-11}, {}, 2}}}));
}

TEST(CacheFailureTest, RepliesInTheWrongOrder) {
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  Cluster cluster(config);
  cluster.Step(0, {1, 2}, {1, 1});
  Cluster::Call first = cluster.CutFlush(0, true);
  cluster.Deliver(&first);
  cluster.Step(0, {1}, {2});
  Cluster::Call second = cluster.CutFlush(0, true);
  cluster.Deliver(&second);
  cluster.Fill(&second);
  cluster.Fill(&first);
  EXPECT_EQ(cluster.Step(0, {1, 2}, {4, 4}), (Floats{-3, -1}));
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-7}, {}, 3}}, {2, {{-5}, {}, 2}}}));
  EXPECT_EQ(cluster.rows_sent(), 0) << "the base did not follow the pushes";
}

// A later request was answered earlier, and nothing was pushed in between.
TEST(CacheFailureTest, ALateReplyDoesNotBringOldRowsBack) {
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  Cluster cluster(config, 2);
  cluster.Read(0, {1});
  Cluster::Call early = cluster.Lookup(0, {1}), late = cluster.Lookup(0, {1});
  for (Cluster::Call* call : {&early, &late}) {
    cluster.Step(1, {1}, {1});
    cluster.Flush(1);
    cluster.Deliver(call);
  }
  EXPECT_EQ(cluster.Fill(&late), Floats{-2});
  EXPECT_EQ(cluster.Fill(&early), Floats{-2});
}

// An evicted line lives on until its push is acknowledged; looked up before that, it stays.
TEST(CacheFailureTest, ALineThatComesBackWhileItsPushIsUnderWay) {
  CacheConfig config = PlainConfig();
  config.capacity = 1;
  config.read_bound = 0;
  Cluster cluster(config);
  cluster.Step(0, {1}, {1});
  cluster.CutFlush(0, true);
  cluster.Lookup(0, {2});  // evicts key 1
  EXPECT_EQ(cluster.Read(0, {3, 1}), (Floats{0, -1}));
  for (int step = 0; step < 3; ++step) {
    cluster.Step(0, {1}, {1});
    cluster.Flush(0);
  }
  EXPECT_EQ(cluster.rows_sent(), 0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-4}, {}, 4}}}));
}

TEST(CacheFailureTest, AFrozenCacheSendsAndTakesNoMore) {
  Cluster cluster(PlainConfig());
  cluster.Step(0, {1}, {1});
  Cluster::Call under_way = cluster.Lookup(0, {1});
  cluster.Deliver(&under_way);
  cluster.Fill(&under_way);
  cluster.cache()->Freeze();
  EXPECT_EQ(cluster.Update(under_way, {1}).code(), Code::kCancelled);
  const int64_t id = 1;
  std::shared_ptr<RowTicket> ticket;
  const Status status = cluster.cache()->Lookup(
      std::make_shared<UniqueIds>(&id, 1), false, SerialFor,
      [](int, size_t) { return std::shared_ptr<char>(); }, &ticket);
  EXPECT_EQ(status.code(), Code::kCancelled);
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-1}, {}, 1}}}));
}

TEST(CacheFailureTest, ARestartDropsLinesAndCountsWhatIsLost) {
  Cluster cluster(PlainConfig(2));
  const int64_t lost_key = 1;
  int64_t kept_key = 2;
  while (cluster.table_of(kept_key) == cluster.table_of(lost_key)) ++kept_key;
  cluster.Step(0, {lost_key, kept_key}, {1, 1});
  cluster.Flush(0);
  cluster.Step(0, {lost_key, kept_key}, {2, 2});
  {
    Cluster::Call step = cluster.Lookup(0, {lost_key});
    cluster.Fill(&step);
    cluster.CutFlush(0, true);             // 1 update, sent in vain
    ASSERT_OK(cluster.Update(step, {4}));  // 1 more, unsent
  }
  cluster.table_of(lost_key)->Clear();
  cluster.Flush(0);
  EXPECT_EQ(cluster.count(CacheCounter::kUpdatesLost), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
  EXPECT_EQ(cluster.count(CacheCounter::kRows), 1);
  EXPECT_EQ(cluster.Rows(), (TableRows{{kept_key, {{-3}, {}, 2}}}));
  EXPECT_EQ(cluster.Step(0, {lost_key, kept_key}, {8, 0}), (Floats{0, -3}));
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows().at(lost_key), (testing::TableRow{{-8}, {}, 1}));
}

TEST(CacheFailureTest, ARestoredShardReplacesWhatTheStepLooksUp) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport}) {
    CacheConfig config = PlainConfig();
    config.rows.clock = clock;
    SetStaleness(&config, 5);
    Cluster cluster(config);
    cluster.Step(0, {1, 2, 3}, {1, 1, 1});
    ASSERT_OK(Restore(cluster.table(), {{1, {{70}, {}, 9}}, {2, {{80}, {}, 1}}}));
    EXPECT_EQ(cluster.Step(0, {1, 3}, {1, 1}), (Floats{70, 0}));
    EXPECT_EQ(cluster.Read(0, {2}), Floats{80});
    EXPECT_EQ(cluster.count(CacheCounter::kUpdatesLost), 3);
    cluster.Flush(0);
    EXPECT_EQ(cluster.Rows().at(1).value[0], 69);
    EXPECT_EQ(cluster.Rows().at(3).value[0], -1);
  }
}

// The step read rows that are gone. Its update was made after the restart, and counts.
TEST(CacheFailureTest, ARestartBetweenLookupAndUpdate) {
  Cluster cluster(PlainConfig());
  cluster.Step(0, {1}, {1});
  Cluster::Call call = cluster.Lookup(0, {1});
  cluster.Deliver(&call);
  cluster.Fill(&call);
  cluster.Flush(0);
  cluster.table()->Clear();
  cluster.Read(0, {2});  // here the cache hears of it
  ASSERT_OK(cluster.Update(call, {4}));
  EXPECT_EQ(cluster.count(CacheCounter::kUpdatesLost), 0);
  EXPECT_EQ(cluster.Read(0, {1}), Floats{-4});
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-4}, {}, 1}}}));
}

// Both requests were cut before the restart, and each reply tells of it.
TEST(CacheFailureTest, ARestartWithTwoStepsUnderWay) {
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  Cluster cluster(config);
  cluster.Step(0, {1, 2}, {1, 1});
  cluster.Flush(0);
  Cluster::Call first = cluster.Lookup(0, {1, 3}), second = cluster.Lookup(0, {1, 2});
  ASSERT_OK(Restore(cluster.table(), {{1, {{70}, {}, 9}}}));
  cluster.Deliver(&first);
  cluster.Deliver(&second);
  EXPECT_EQ(cluster.Fill(&second), (Floats{70, -1}));
  ASSERT_OK(cluster.Update(second, {1, 1}));
  EXPECT_EQ(cluster.Fill(&first), (Floats{69, 0}));
  ASSERT_OK(cluster.Update(first, {1, 1}));
  EXPECT_EQ(cluster.count(CacheCounter::kUpdatesLost), 0);
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(),
            (TableRows{{1, {{68}, {}, 11}}, {2, {{-2}, {}, 2}}, {3, {{-1}, {}, 1}}}));
}

// A reply that the shard gave before it started again arrives after one that it gave since.
TEST(CacheFailureTest, AReplyFromBeforeARestartServesItsStepAndNoOther) {
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  Cluster cluster(config);
  cluster.Step(0, {1, 2}, {1, 1});
  cluster.Flush(0);
  EXPECT_OK(cluster.cache()->Clear());
  Cluster::Call before = cluster.Lookup(0, {1, 2, 3}), after = cluster.Lookup(0, {1});
  cluster.Deliver(&before);
  ASSERT_OK(Restore(cluster.table(), {{1, {{70}, {}, 9}}, {3, {{80}, {}, 1}}}));
  cluster.Deliver(&after);
  EXPECT_EQ(cluster.Fill(&after), Floats{70});
  ASSERT_OK(cluster.Update(after, {1}));
  EXPECT_EQ(cluster.Fill(&before), (Floats{69, -1, 0})) << "an own update is always seen";
  ASSERT_OK(cluster.Update(before, {0, 5, 5}));
  EXPECT_EQ(cluster.count(CacheCounter::kUpdatesLost), 0);
  EXPECT_EQ(cluster.Read(0, {1, 2, 3}), (Floats{69, -6, 75}));
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows().at(1).value[0], 69);
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
}

// First contact, or two restarts, with steps under way: a reply of an incarnation that the cache
// never heard of comes after one of a newer. It must not cut the cache off.
TEST(CacheFailureTest, ALateReplyOfAnUnknownIncarnationDoesNotCutTheCacheOff) {
  for (const bool first_contact : {true, false}) {
    CacheConfig config = PlainConfig();
    config.read_bound = 0;
    Cluster cluster(config);
    if (!first_contact) {
      cluster.Step(0, {1}, {1});
      cluster.Flush(0);
    }
    Cluster::Call late = cluster.Lookup(0, {1});
    cluster.table()->Clear();
    cluster.Deliver(&late);
    cluster.table()->Clear();
    Cluster::Call newer = cluster.Lookup(0, {1});
    cluster.Deliver(&newer);
    cluster.Fill(&newer);
    cluster.Fill(&late);
    for (int step = 0; step < 50; ++step) {
      cluster.Step(0, {1}, {1});
      Cluster::Call flush = cluster.CutFlush(0, true);
      EXPECT_EQ(Sequences(*flush.requests[0]).size(), 1u) << "messages must not grow";
      cluster.Deliver(&flush);
      cluster.Fill(&flush);
    }
    EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-50}, {}, 50}}}));
  }
}

// Own updates pending, a step begins, a flush pushes them, the step's reply lacks them.
TEST(CacheFailureTest, OwnWritesAreReadWhenStepsOverlap) {
  for (const char* optimizer : {"sgd", "momentum", "adagrad", "adam", "ftrl"}) {
    CacheConfig config = PlainConfig();
    config.rows.optimizer = optimizer;
    config.read_bound = 0;
    Cluster cluster(config, 2), serial(config);
    for (int w = 0; w < 2; ++w) cluster.Step(w, {1}, {1}, 0.5f);
    cluster.Flush(1);
    Cluster::Call step = cluster.Lookup(0, {1});  // the other's update is beyond the bound
    cluster.Deliver(&step);
    cluster.Flush(0);
    const float read = cluster.Fill(&step)[0];
    for (int w = 0; w < 2; ++w) serial.Step(0, {1}, {1}, 0.5f);
    EXPECT_NEAR(read, serial.Read(0, {1})[0], 1e-6) << optimizer;
  }
}

// A request that carries no push overtakes one that does: its answer lacks the push, though the
// push was acknowledged by the time it is installed.
TEST(CacheFailureTest, AnAnswerOlderThanAnAcknowledgement) {
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  config.write_bound = 1;
  Cluster cluster(config, 2);
  cluster.Step(0, {1}, {1});
  cluster.Step(1, {1}, {10});
  cluster.Flush(1);
  Cluster::Call carries = cluster.Lookup(0, {2});
  Cluster::Call overtakes = cluster.Lookup(0, {1});
  cluster.Deliver(&overtakes);
  cluster.Deliver(&carries);
  cluster.Fill(&carries);
  EXPECT_EQ(cluster.Fill(&overtakes), Floats{-11});
  EXPECT_EQ(cluster.Rows().at(1).value[0], -11);
}

// The first of two pushes is still under way, for as long as its step lives.
TEST(CacheFailureTest, AGapDoesNotBlockWhatComesAfter) {
  CacheConfig config = PlainConfig();
  config.write_bound = 1;
  Cluster cluster(config);
  cluster.Step(0, {1}, {1});
  const Cluster::Call hangs = cluster.Lookup(0, {2});
  for (int step = 0; step < 5; ++step) cluster.Step(0, {3}, {1});
  cluster.Read(0, {4});
  cluster.Read(0, {4});
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-1}, {}, 1}}, {3, {{-5}, {}, 5}}}));
}

TEST(CacheFailureTest, ClearForgetsRowsAndWhatWasNotSent) {
  Cluster cluster(PlainConfig(2));
  cluster.Step(0, {1, 2, 3}, {1, 1, 1});
  Cluster::Call under_way = cluster.Lookup(0, {1, 4});
  cluster.Deliver(&under_way);
  EXPECT_OK(cluster.cache()->Clear());
  EXPECT_EQ(cluster.count(CacheCounter::kUpdatesLost), 3);
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
  cluster.Fill(&under_way);
  under_way.ticket.reset();
  EXPECT_EQ(cluster.Read(0, {1, 2, 3, 4}), (Floats{0, 0, 0, 0}));
  cluster.Step(0, {1}, {5});
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-5}, {}, 1}}}));
}

// ---- Wrong replies ----

class WrongReplyTest : public ::testing::Test {
 protected:
  WrongReplyTest() : cluster_(Config(), 2) {
    cluster_.Step(0, {1, 2}, {1, 1});
    cluster_.Flush(0);
    cluster_.Step(0, {1}, {1});
    for (int step = 0; step < 3; ++step) cluster_.Step(1, {2}, {1});
    cluster_.Flush(1);
    call_ = cluster_.Lookup(0, {1, 2, 3});
    cluster_.Deliver(&call_);
    right_ = call_.replies;
  }

  static CacheConfig Config() {
    CacheConfig config = PlainConfig(2);
    SetStaleness(&config, 1);
    return config;
  }

  // After refusals the right replies must do what they always do.
  ~WrongReplyTest() override {
    EXPECT_EQ(cluster_.count(CacheCounter::kPending), 1);
    EXPECT_EQ(cluster_.count(CacheCounter::kUpdatesLost), 0);
    call_.replies = right_;
    EXPECT_EQ(cluster_.Fill(&call_), (Floats{-2, -4, 0}));
    cluster_.Flush(0);
    EXPECT_EQ(cluster_.Rows(), (TableRows{{1, {{-2}, {}, 2}}, {2, {{-4}, {}, 4}}}));
    EXPECT_EQ(cluster_.count(CacheCounter::kPending), 0);
  }

  void Refused(const char* text) {
    EXPECT_REFUSED(cluster_.TryInstall(&call_), text);
    EXPECT_REFUSED(cluster_.Update(call_, {1, 1, 1}), "not installed");
    call_.replies = right_;
  }

  Cluster cluster_;
  Cluster::Call call_;
  std::vector<Buffer> right_;
};

TEST_F(WrongReplyTest, Size) {
  for (int s = 0; s < 2; ++s) {
    if (right_[s].empty()) continue;
    call_.replies[s].pop_back();
    Refused("reply has");
    call_.replies[s].clear();
    Refused("reply has 0 bytes");
  }
}

TEST_F(WrongReplyTest, NumberOfShards) {
  int64_t rows;
  EXPECT_REFUSED(cluster_.cache()->Install(call_.ticket.get(), {}, SerialFor, &rows),
                 "0 messages for 2 shards");
}

TEST_F(WrongReplyTest, NumberOfQueries) {
  for (int s = 0; s < 2; ++s) {
    ++reinterpret_cast<ReplyHeader*>(call_.replies[s].data())->num_queries;
    Refused("queries with rows of dim 1 and slot_dim 0, not");
  }
}

TEST_F(WrongReplyTest, WidthOfRows) {
  for (int s = 0; s < 2; ++s) {
    // Without rows any width has the right size.
    call_.replies[s].resize(sizeof(ReplyHeader));
    auto* header = reinterpret_cast<ReplyHeader*>(call_.replies[s].data());
    header->num_full = header->num_values = 0;
    header->dim = 2;
    Refused("queries with rows of dim 2");
  }
}

TEST_F(WrongReplyTest, AnAcknowledgementOfWhatWasNeverCut) {
  for (int s = 0; s < 2; ++s) {
    reinterpret_cast<ReplyHeader*>(call_.replies[s].data())->acknowledged = 1000;
    Refused("acknowledges push 1000, the last cut is");
  }
}

TEST_F(WrongReplyTest, AClockThatWouldOverflow) {
  int tried = 0;
  for (int s = 0; s < 2; ++s) {
    if (reinterpret_cast<ReplyHeader*>(call_.replies[s].data())->num_full == 0) continue;
    reinterpret_cast<ReplyRow*>(call_.replies[s].data() + sizeof(ReplyHeader))->clock = INT64_MAX;
    Refused("has clock 9223372036854775807");
    ++tried;
  }
  EXPECT_GT(tried, 0);
}

TEST_F(WrongReplyTest, RepliesOfEachOther) {
  ASSERT_NE(right_[0].size(), 0u);
  ASSERT_NE(right_[1].size(), 0u);
  std::swap(call_.replies[0], call_.replies[1]);
  Refused("queries");
}

// Whatever the shards say, the cache goes on.
TEST(CacheFuzzTest, AnyReply) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    CacheConfig config = PlainConfig(2);
    config.rows = {2, "adam", "uniform", 0, clock, 2};
    config.capacity = 10;
    SetStaleness(&config, 1);
    std::unique_ptr<Cluster> cluster;
    Random random(1);
    int accepted = 0;
    for (int step = 0; step < 4000; ++step) {
      if (step % 50 == 0) cluster = std::make_unique<Cluster>(config);
      Cluster::Call call = cluster->Lookup(0, {Below(&random, 20), Below(&random, 20)});
      for (int s = 0; s < 2; ++s) {
        // A shard may refuse what the cache makes of such replies.
        if (!call.requests[s]->empty()) {
          (void)Sync(cluster->table(s), *call.requests[s], &call.replies[s]).ok();
        }
      }
      for (Buffer& reply : call.replies) {
        for (int64_t n = Below(&random, 4); n > 0 && !reply.empty(); --n) {
          const uint64_t bits = random() >> Below(&random, 64);
          std::memcpy(reply.data() + Below(&random, reply.size() / 8) * 8, &bits, 8);
        }
      }
      if (!cluster->TryInstall(&call).ok()) continue;
      ++accepted;
      cluster->Gather(call);
      EXPECT_OK(cluster->Update(call, {1, 1, 1, 1}));
    }
    EXPECT_GT(accepted, 400) << "too few to test anything";
  }
}

}  // namespace
}  // namespace het_tf
