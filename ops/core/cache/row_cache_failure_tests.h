// What both caches do (row_cache.h) when messages are lost, come late or are wrong, and when shards
// start again. Tests of a kind of cache instantiate these with its side (cache_testing.h).

#ifndef HET_TF_OPS_CORE_CACHE_ROW_CACHE_FAILURE_TESTS_H_
#define HET_TF_OPS_CORE_CACHE_ROW_CACHE_FAILURE_TESTS_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "ops/core/cache/cache_testing.h"

namespace het_tf {
namespace testing {

template <typename Side>
class RowCacheFailureTest : public ::testing::Test {};
TYPED_TEST_SUITE_P(RowCacheFailureTest);

// The sequences of the pushes in a request.
inline std::vector<uint64_t> Sequences(const Buffer& request) {
  RequestView view;
  EXPECT_OK(RequestView::Parse(request.data(), request.size(), &view));
  std::vector<uint64_t> sequences;
  for (const PushView& push : view.pushes) sequences.push_back(push.sequence);
  return sequences;
}

TYPED_TEST_P(RowCacheFailureTest, ALostRequestIsSentAgain) {
  using Cluster = ClusterOf<TypeParam>;
  const Cluster cluster(PlainConfig());
  cluster.Step(0, {1}, {3});
  const auto lost = cluster.CutFlush(0, true);
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 1);
  EXPECT_EQ(cluster.Read(0, {1}), Floats{-3});
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-3}, {}, 1}}}));
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
}

TYPED_TEST_P(RowCacheFailureTest, AfterALostReplyTheSameSequenceIsSentAndNotMergedAgain) {
  using Cluster = ClusterOf<TypeParam>;
  const Cluster cluster(PlainConfig());
  cluster.Step(0, {1}, {3});
  auto lost = cluster.CutFlush(0, true);
  cluster.Deliver(&lost);
  EXPECT_EQ(Sequences(*lost.requests[0]), std::vector<uint64_t>{1});
  lost.ticket.reset();
  cluster.Step(0, {1, 2}, {4, 5});
  auto again = cluster.CutFlush(0, true);
  // The step's own lookup repeated push 1 and heard of it, so this carries the new one alone.
  EXPECT_EQ(Sequences(*again.requests[0]), std::vector<uint64_t>{2});
  cluster.Deliver(&again);
  cluster.Fill(&again);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-7}, {}, 2}}, {2, {{-5}, {}, 1}}}));
  EXPECT_EQ(cluster.table()->counter(TableCounter::kPushesRepeated), 1);
}

TYPED_TEST_P(RowCacheFailureTest, AFailedStepCanBeRepeated) {
  using Cluster = ClusterOf<TypeParam>;
  const Cluster cluster(PlainConfig());
  for (const bool request_arrives : {false, true}) {
    auto lost = cluster.Lookup(0, {1, 2});
    if (request_arrives) cluster.Deliver(&lost);
    lost.ticket.reset();
    EXPECT_EQ(cluster.count(CacheCounter::kRows), 0) << "nothing is known of these rows";
  }
  EXPECT_EQ(cluster.Step(0, {1, 2}, {1, 2}), (Floats{0, 0}));
  EXPECT_EQ(cluster.Read(0, {1, 2}), (Floats{-1, -2}));
}

// The row that the shard sent is from before the second push.
TYPED_TEST_P(RowCacheFailureTest, ALateReplyDoesNotUndoWhatWasPushedSince) {
  using Cluster = ClusterOf<TypeParam>;
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  const Cluster cluster(config, 2);
  cluster.Step(0, {1}, {1});
  cluster.Step(1, {1}, {10});
  cluster.Flush(1);
  auto late = cluster.Lookup(0, {1});
  cluster.Deliver(&late);
  cluster.Flush(0);
  EXPECT_EQ(cluster.Fill(&late), Floats{-11}) << "with the own push that it lacks";
  EXPECT_EQ(cluster.Read(0, {1}), Floats{-11});
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-11}, {}, 2}}}));
}

TYPED_TEST_P(RowCacheFailureTest, RepliesInTheWrongOrder) {
  using Cluster = ClusterOf<TypeParam>;
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  const Cluster cluster(config);
  cluster.Step(0, {1, 2}, {1, 1});
  auto first = cluster.CutFlush(0, true);
  cluster.Deliver(&first);
  cluster.Step(0, {1}, {2});
  auto second = cluster.CutFlush(0, true);
  cluster.Deliver(&second);
  cluster.Fill(&second);
  cluster.Fill(&first);
  EXPECT_EQ(cluster.Step(0, {1, 2}, {4, 4}), (Floats{-3, -1}));
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-7}, {}, 3}}, {2, {{-5}, {}, 2}}}));
  EXPECT_EQ(cluster.rows_sent(), 0) << "the base did not follow the pushes";
}

// A later request was answered earlier, and nothing was pushed in between.
TYPED_TEST_P(RowCacheFailureTest, ALateReplyDoesNotBringOldRowsBack) {
  using Cluster = ClusterOf<TypeParam>;
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  const Cluster cluster(config, 2);
  cluster.Read(0, {1});
  auto early = cluster.Lookup(0, {1}), late = cluster.Lookup(0, {1});
  for (auto* call : {&early, &late}) {
    cluster.Step(1, {1}, {1});
    cluster.Flush(1);
    cluster.Deliver(call);
  }
  EXPECT_EQ(cluster.Fill(&late), Floats{-2});
  EXPECT_EQ(cluster.Fill(&early), Floats{-2});
}

TYPED_TEST_P(RowCacheFailureTest, AFrozenCacheSendsAndTakesNoMore) {
  using Cluster = ClusterOf<TypeParam>;
  const Cluster cluster(PlainConfig());
  cluster.Step(0, {1}, {1});
  auto under_way = cluster.Lookup(0, {1});
  cluster.Deliver(&under_way);
  cluster.Fill(&under_way);
  cluster.cache()->Freeze();
  EXPECT_EQ(cluster.Update(under_way, {1}).code(), Code::kCancelled);
  auto refused = cluster.NewCall(0);
  EXPECT_EQ(cluster.TryLookup({1}, &refused).code(), Code::kCancelled);
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-1}, {}, 1}}}));
}

TYPED_TEST_P(RowCacheFailureTest, ARestartDropsLinesAndCountsWhatIsLost) {
  using Cluster = ClusterOf<TypeParam>;
  const Cluster cluster(PlainConfig(2));
  const int64_t lost_key = 1;
  int64_t kept_key = 2;
  while (cluster.table_of(kept_key) == cluster.table_of(lost_key)) ++kept_key;
  cluster.Step(0, {lost_key, kept_key}, {1, 1});
  cluster.Flush(0);
  cluster.Step(0, {lost_key, kept_key}, {2, 2});
  {
    auto step = cluster.Lookup(0, {lost_key});
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
  EXPECT_EQ(cluster.Rows().at(lost_key), (TableRow{{-8}, {}, 1}));
}

TYPED_TEST_P(RowCacheFailureTest, ARestoredShardReplacesWhatTheStepLooksUp) {
  using Cluster = ClusterOf<TypeParam>;
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport}) {
    CacheConfig config = PlainConfig();
    config.rows.clock = clock;
    SetStaleness(&config, 5);
    const Cluster cluster(config);
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
TYPED_TEST_P(RowCacheFailureTest, ARestartBetweenLookupAndUpdate) {
  using Cluster = ClusterOf<TypeParam>;
  const Cluster cluster(PlainConfig());
  cluster.Step(0, {1}, {1});
  auto call = cluster.Lookup(0, {1});
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
TYPED_TEST_P(RowCacheFailureTest, ARestartWithTwoStepsUnderWay) {
  using Cluster = ClusterOf<TypeParam>;
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  const Cluster cluster(config);
  cluster.Step(0, {1, 2}, {1, 1});
  cluster.Flush(0);
  auto first = cluster.Lookup(0, {1, 3}), second = cluster.Lookup(0, {1, 2});
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
TYPED_TEST_P(RowCacheFailureTest, AReplyFromBeforeARestartServesItsStepAndNoOther) {
  using Cluster = ClusterOf<TypeParam>;
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  const Cluster cluster(config);
  cluster.Step(0, {1, 2}, {1, 1});
  cluster.Flush(0);
  EXPECT_OK(cluster.cache()->Clear());
  auto before = cluster.Lookup(0, {1, 2, 3}), after = cluster.Lookup(0, {1});
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
TYPED_TEST_P(RowCacheFailureTest, ALateReplyOfAnUnknownIncarnationDoesNotCutTheCacheOff) {
  using Cluster = ClusterOf<TypeParam>;
  for (const bool first_contact : {true, false}) {
    CacheConfig config = PlainConfig();
    config.read_bound = 0;
    const Cluster cluster(config);
    if (!first_contact) {
      cluster.Step(0, {1}, {1});
      cluster.Flush(0);
    }
    auto late = cluster.Lookup(0, {1});
    cluster.table()->Clear();
    cluster.Deliver(&late);
    cluster.table()->Clear();
    auto newer = cluster.Lookup(0, {1});
    cluster.Deliver(&newer);
    cluster.Fill(&newer);
    cluster.Fill(&late);
    for (int step = 0; step < 50; ++step) {
      cluster.Step(0, {1}, {1});
      auto flush = cluster.CutFlush(0, true);
      EXPECT_EQ(Sequences(*flush.requests[0]).size(), 1u) << "messages must not grow";
      cluster.Deliver(&flush);
      cluster.Fill(&flush);
    }
    EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-50}, {}, 50}}}));
  }
}

// Own updates pending, a step begins, a flush pushes them, the step's reply lacks them.
TYPED_TEST_P(RowCacheFailureTest, OwnWritesAreReadWhenStepsOverlap) {
  using Cluster = ClusterOf<TypeParam>;
  for (const char* optimizer : {"sgd", "momentum", "adagrad", "adam", "ftrl"}) {
    CacheConfig config = PlainConfig();
    config.rows.optimizer = optimizer;
    config.read_bound = 0;
    const Cluster cluster(config, 2), serial(config);
    for (int w = 0; w < 2; ++w) cluster.Step(w, {1}, {1}, 0.5f);
    cluster.Flush(1);
    auto step = cluster.Lookup(0, {1});  // the other's update is beyond the bound
    cluster.Deliver(&step);
    cluster.Flush(0);
    const float read = cluster.Fill(&step)[0];
    for (int w = 0; w < 2; ++w) serial.Step(0, {1}, {1}, 0.5f);
    EXPECT_NEAR(read, serial.Read(0, {1})[0], 1e-6) << optimizer;
  }
}

// A request that carries no push overtakes one that does: its answer lacks the push, though the
// push was acknowledged by the time it is installed.
TYPED_TEST_P(RowCacheFailureTest, AnAnswerOlderThanAnAcknowledgement) {
  using Cluster = ClusterOf<TypeParam>;
  CacheConfig config = PlainConfig();
  config.read_bound = 0;
  config.write_bound = 1;
  const Cluster cluster(config, 2);
  cluster.Step(0, {1}, {1});
  cluster.Step(1, {1}, {10});
  cluster.Flush(1);
  auto carries = cluster.Lookup(0, {2});
  auto overtakes = cluster.Lookup(0, {1});
  cluster.Deliver(&overtakes);
  cluster.Deliver(&carries);
  cluster.Fill(&carries);
  EXPECT_EQ(cluster.Fill(&overtakes), Floats{-11});
  EXPECT_EQ(cluster.Rows().at(1).value[0], -11);
}

// The first of two pushes is still under way, for as long as its step lives.
TYPED_TEST_P(RowCacheFailureTest, AGapDoesNotBlockWhatComesAfter) {
  using Cluster = ClusterOf<TypeParam>;
  CacheConfig config = PlainConfig();
  config.write_bound = 1;
  const Cluster cluster(config);
  cluster.Step(0, {1}, {1});
  const auto hangs = cluster.Lookup(0, {2});
  for (int step = 0; step < 5; ++step) cluster.Step(0, {3}, {1});
  cluster.Read(0, {4});
  cluster.Read(0, {4});
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-1}, {}, 1}}, {3, {{-5}, {}, 5}}}));
}

TYPED_TEST_P(RowCacheFailureTest, ClearForgetsRowsAndWhatWasNotSent) {
  using Cluster = ClusterOf<TypeParam>;
  const Cluster cluster(PlainConfig(2));
  cluster.Step(0, {1, 2, 3}, {1, 1, 1});
  auto under_way = cluster.Lookup(0, {1, 4});
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

// Whether a gradient is bad by itself, by its square or only together with another of its key.
TYPED_TEST_P(RowCacheFailureTest, WhatIsNotFiniteIsRefusedAndChangesNothing) {
  using Cluster = ClusterOf<TypeParam>;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const Cluster cluster(PlainConfig());
  cluster.Step(0, {1, 2}, {1, 1});
  auto call = cluster.Lookup(0, {1, 2, 3, 2});
  cluster.Deliver(&call);
  cluster.Fill(&call);
  for (const Floats& gradients : {Floats{1, kNan, 1, 1}, Floats{1, 1, -HUGE_VALF, 1},
                                  Floats{1e20f, 1, 1, 1}, Floats{1, 3e38f, 1, 3e38f}}) {
    EXPECT_REFUSED(cluster.Update(call, gradients),
                   "gradients, or their squares, hold NaN or infinity for 1 of 3 keys; no row was"
                   " updated");
  }
  EXPECT_REFUSED(cluster.Update(call, {kNan, 1, HUGE_VALF, kNan}), "for 3 of 3 keys");
  EXPECT_REFUSED(cluster.Update(call, {1, 1, 1, 1}, kNan), "learning_rate = nan");
  EXPECT_REFUSED(cluster.Update(call, {1, 1, 1, 1}, HUGE_VALF), "learning_rate = inf");
  EXPECT_EQ(cluster.count(CacheCounter::kUpdates), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 2);
  EXPECT_EQ(cluster.Gather(call), (Floats{-1, -1, 0, -1}));
  ASSERT_OK(cluster.Update(call, {1, 1, 1, 1}));
  cluster.Flush(0);
  EXPECT_EQ(cluster.Rows(),
            (TableRows{{1, {{-2}, {}, 2}}, {2, {{-3}, {}, 2}}, {3, {{-1}, {}, 1}}}));
}

TYPED_TEST_P(RowCacheFailureTest, WhatIsNotFiniteIsSkippedIfToldTo) {
  using Cluster = ClusterOf<TypeParam>;
  CacheConfig config = PlainConfig();
  config.nonfinite = Nonfinite::kSkip;
  config.capacity = 2;  // the third is a visitor
  const Cluster cluster(config);
  cluster.Step(0, {1, 2, 3}, {1, std::numeric_limits<float>::quiet_NaN(), 1});
  cluster.Step(0, {1, 2, 3}, {1, 1, 1e20f});
  EXPECT_EQ(cluster.count(CacheCounter::kNonfiniteSkipped), 2);
  EXPECT_EQ(cluster.count(CacheCounter::kUpdates), 4);
  cluster.Flush(0);
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
  EXPECT_EQ(cluster.Rows(),
            (TableRows{{1, {{-2}, {}, 2}}, {2, {{-1}, {}, 1}}, {3, {{-1}, {}, 1}}}));
}

// With a line for the key, or none, since another step has the only one.
TYPED_TEST_P(RowCacheFailureTest, StepsThatOverlapHearOfARefusedUpdate) {
  using Cluster = ClusterOf<TypeParam>;
  Lifetimes lifetimes;
  ASSERT_OK(Lifetimes::Parse("admit count=3", &lifetimes));
  for (const bool has_line : {true, false}) {
    SCOPED_TRACE(has_line);
    CacheConfig config = PlainConfig();
    SetStaleness(&config, 0);
    config.capacity = 1;
    const Cluster cluster(config, 1, lifetimes);
    auto other = cluster.Lookup(0, {has_line ? 2 : 1});
    auto first = cluster.Lookup(0, {2});
    cluster.Deliver(&first);
    EXPECT_EQ(cluster.Fill(&first), Floats{0});
    auto second = cluster.Lookup(0, {2});
    cluster.Deliver(&second);
    EXPECT_EQ(cluster.Fill(&second), Floats{0});
    ASSERT_OK(cluster.Update(first, {1}));
    EXPECT_EQ(cluster.Gather(second), Floats{-1});
    auto third = cluster.Lookup(0, {2});
    cluster.Deliver(&third);
    ASSERT_EQ(cluster.Rows(), TableRows()) << "the update was refused";
    EXPECT_EQ(cluster.Fill(&third), Floats{0});
    EXPECT_EQ(cluster.Gather(second), Floats{0});
    ASSERT_OK(cluster.Update(second, {1}));
    EXPECT_EQ(cluster.Gather(third), Floats{-1});
    cluster.Flush(0);
    ASSERT_OK(cluster.Update(third, {1}));
    cluster.Flush(0);
    // The third that is counted makes the row.
    EXPECT_EQ(cluster.Rows().at(2).value, Floats{-1});
    EXPECT_EQ(cluster.Read(0, {2}), Floats{-1});
    EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
  }
}

// Steps overlap: the lookup of a later step has taken the push along.
TYPED_TEST_P(RowCacheFailureTest, AFlushWaitsForWhatALookupHasUnderWay) {
  using Cluster = ClusterOf<TypeParam>;
  for (const bool lookup_comes_first : {true, false}) {
    SCOPED_TRACE(lookup_comes_first);
    CacheConfig config = PlainConfig();
    SetStaleness(&config, 0);
    const Cluster cluster(config);
    cluster.Step(0, {1}, {3});
    auto lookup = cluster.Lookup(0, {2});
    EXPECT_EQ(Sequences(*lookup.requests[0]), std::vector<uint64_t>{1});
    auto flush = cluster.CutFlush(0, false);
    EXPECT_EQ(Sequences(*flush.requests[0]), std::vector<uint64_t>{});
    if (lookup_comes_first) cluster.Deliver(&lookup);
    cluster.Deliver(&flush);
    EXPECT_OK(cluster.TryInstall(&flush));
    EXPECT_EQ(flush.ticket->incomplete(), !lookup_comes_first);
    // The lookup may be lost, so the flush asks some times and then sends the push itself.
    if (!lookup_comes_first) cluster.cache()->Freeze();  // an update that was made is still sent
    for (int times = 1; !lookup_comes_first && times <= 3; ++times) {
      EXPECT_TRUE(flush.ticket->incomplete());
      cluster.AskAgain(&flush);
      EXPECT_EQ(Sequences(*flush.requests[0]), std::vector<uint64_t>(times == 3 ? 1 : 0, 1));
      cluster.Deliver(&flush);
      EXPECT_OK(cluster.TryInstall(&flush));
    }
    EXPECT_FALSE(flush.ticket->incomplete());
    if (!lookup_comes_first) cluster.Deliver(&lookup);
    EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
    EXPECT_EQ(cluster.Fill(&lookup), Floats{0});
    EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-3}, {}, 1}}}));
    EXPECT_EQ(cluster.CutFlush(0, false).num_requests(), 0) << "there is nothing to wait for";
  }
}

REGISTER_TYPED_TEST_SUITE_P(RowCacheFailureTest, ALostRequestIsSentAgain,
                            AfterALostReplyTheSameSequenceIsSentAndNotMergedAgain,
                            AFailedStepCanBeRepeated, ALateReplyDoesNotUndoWhatWasPushedSince,
                            RepliesInTheWrongOrder, ALateReplyDoesNotBringOldRowsBack,
                            AFrozenCacheSendsAndTakesNoMore, ARestartDropsLinesAndCountsWhatIsLost,
                            ARestoredShardReplacesWhatTheStepLooksUp,
                            ARestartBetweenLookupAndUpdate, ARestartWithTwoStepsUnderWay,
                            AReplyFromBeforeARestartServesItsStepAndNoOther,
                            ALateReplyOfAnUnknownIncarnationDoesNotCutTheCacheOff,
                            OwnWritesAreReadWhenStepsOverlap, AnAnswerOlderThanAnAcknowledgement,
                            AGapDoesNotBlockWhatComesAfter, ClearForgetsRowsAndWhatWasNotSent,
                            WhatIsNotFiniteIsRefusedAndChangesNothing,
                            WhatIsNotFiniteIsSkippedIfToldTo, StepsThatOverlapHearOfARefusedUpdate,
                            AFlushWaitsForWhatALookupHasUnderWay);

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_ROW_CACHE_FAILURE_TESTS_H_
