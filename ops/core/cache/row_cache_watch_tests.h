// Hits without a check (link/watch.h), of both caches (row_cache.h): what messages hold, and that
// reads keep the bound whatever becomes of them. Every gradient is 1, so a value is minus the
// number of updates that are in it. Tests of a kind of cache instantiate these with its side
// (cache_testing.h).

#ifndef HET_TF_OPS_CORE_CACHE_ROW_CACHE_WATCH_TESTS_H_
#define HET_TF_OPS_CORE_CACHE_ROW_CACHE_WATCH_TESTS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/link/sessions.h"
#include "ops/core/wire/reply.h"
#include "ops/core/wire/request.h"

namespace het_tf {
namespace testing {

constexpr int64_t kKey = 5;

inline CacheConfig WatchingConfig(int64_t read_bound = 3) {
  CacheConfig config = PlainConfig();
  config.read_bound = read_bound;
  config.write_bound = 0;
  return config;
}

template <typename Call>
RequestHeader AskedBy(const Call& call, int s = 0) {
  RequestView view;
  EXPECT_OK(RequestView::Parse(call.requests[s]->data(), call.requests[s]->size(), &view));
  return view.header;
}

template <typename Call>
Ids UnaskedKeys(const Call& call, int s = 0) {
  ReplyView view;
  EXPECT_OK(ReplyView::Parse(call.replies[s].data(), call.replies[s].size(), &view));
  Ids keys;
  for (uint32_t r = 0; r < view.header.num_unasked; ++r) keys.push_back(view.unasked_rows[r].query);
  return keys;
}

// A worker that reads a row, and another that updates it.
template <typename Side>
class RowCacheWatchTest : public ::testing::Test {
 protected:
  using Cluster = ClusterOf<Side>;
  using Call = typename Cluster::Call;

  void Make(const CacheConfig& config) { cluster_ = std::make_unique<Cluster>(config, 2); }
  // Until worker 0 need not check the key.
  void Watch(int64_t key = kKey) {
    Read(key);  // gets a line
    Read(key);  // is checked
    ASSERT_EQ(AskedBy(cluster_->Lookup(0, {key})).num_checks, 0u);
    Read(key);  // what the lookup that was given up left behind: checked again
    Read(key);
  }
  float Read(int64_t key = kKey) { return cluster_->Read(0, {key})[0]; }
  void OthersUpdate(int times, int64_t key = kKey) {
    for (int i = 0; i < times; ++i) {
      cluster_->Step(1, {key}, {1});
      cluster_->Flush(1);
    }
  }
  Call LookUp(const Ids& ids = {kKey}) { return cluster_->Lookup(0, ids); }
  float Finish(Call* call) { return cluster_->Fill(call)[0]; }

  std::unique_ptr<Cluster> cluster_;
};

TYPED_TEST_SUITE_P(RowCacheWatchTest);

TYPED_TEST_P(RowCacheWatchTest, AHitIsCheckedOnceAndThenSentWhenItIsBeyondTheBound) {
  this->Make(WatchingConfig(3));
  EXPECT_EQ(this->Read(), 0);
  auto call = this->LookUp();
  EXPECT_EQ(AskedBy(call).num_checks, 1u);
  this->cluster_->Deliver(&call);
  this->Finish(&call);
  this->OthersUpdate(3);
  call = this->LookUp();
  EXPECT_EQ(AskedBy(call).num_queries(), 0) << "but the shard is heard";
  EXPECT_EQ(call.requests[0]->size(), sizeof(RequestHeader));
  this->cluster_->Deliver(&call);
  EXPECT_EQ(call.replies[0].size(), sizeof(ReplyHeader));
  EXPECT_EQ(this->Finish(&call), 0);
  this->OthersUpdate(1);
  call = this->LookUp();
  EXPECT_EQ(AskedBy(call).num_queries(), 0);
  this->cluster_->Deliver(&call);
  EXPECT_EQ(UnaskedKeys(call), Ids{kKey});
  EXPECT_EQ(this->Finish(&call), -4);
  call = this->LookUp();
  EXPECT_EQ(AskedBy(call).num_checks, 1u) << "it has to be watched again";
  EXPECT_EQ(this->cluster_->count(CacheCounter::kChecksSpared), 2);
  EXPECT_EQ(this->cluster_->count(CacheCounter::kRowsUnasked), 1);
}

TYPED_TEST_P(RowCacheWatchTest, ARowThatIsBeyondTheBoundComesThoughTheStepIsAboutOthers) {
  this->Make(WatchingConfig(1));
  this->Watch();
  this->OthersUpdate(2);
  auto call = this->LookUp({7, 8});
  this->cluster_->Deliver(&call);
  EXPECT_EQ(UnaskedKeys(call), Ids{kKey});
  this->cluster_->Fill(&call);
  EXPECT_EQ(this->Read(), -2);
}

TYPED_TEST_P(RowCacheWatchTest, OwnUpdatesDoNotEndAWatch) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kDrift}) {
    CacheConfig config = WatchingConfig(clock == ClockRule::kDrift ? 1 << 20 : 1);
    config.rows.clock = clock;
    this->Make(config);
    this->Watch();
    for (int step = 0; step < 20; ++step) {
      EXPECT_EQ(this->cluster_->Step(0, {kKey}, {1})[0], static_cast<float>(-step));
      this->cluster_->Flush(0);
    }
    const auto call = this->LookUp();
    EXPECT_EQ(AskedBy(call).num_queries(), 0);
    EXPECT_EQ(this->cluster_->rows_sent(), 0);
  }
}

TYPED_TEST_P(RowCacheWatchTest, NothingIsWatchedWhereEveryReadMustBeChecked) {
  CacheConfig fresh = WatchingConfig(0), lamport = WatchingConfig(), unbounded = WatchingConfig();
  lamport.rows.clock = ClockRule::kLamport;
  unbounded.read_bound = kUnbounded;
  for (const CacheConfig& config : {fresh, lamport, unbounded}) {
    this->Make(config);
    for (int i = 0; i < 5; ++i) this->Read();
    EXPECT_EQ(this->cluster_->count(CacheCounter::kChecksSpared), 0);
    EXPECT_EQ(this->cluster_->table()->num_watched(), 0);
  }
  this->Make(WatchingConfig());
  this->Watch();
  EXPECT_EQ(AskedBy(this->cluster_->Lookup(0, {kKey}, /*fresh=*/true)).num_checks, 1u);
}

// The reply that has the row never comes.
TYPED_TEST_P(RowCacheWatchTest, ALostReplyDoesNotLoseTheRow) {
  this->Make(WatchingConfig(1));
  this->Watch();
  this->OthersUpdate(2);
  {
    auto lost = this->LookUp({7});
    this->cluster_->Deliver(&lost);
    EXPECT_EQ(UnaskedKeys(lost), Ids{kKey});
  }
  EXPECT_EQ(this->Read(), -2);
  // What is lost ends the epoch; then rows are watched again.
  this->Read();
  EXPECT_EQ(AskedBy(this->LookUp()).num_checks, 0u);
}

// Two steps at once, of which only one gets the row at first: both read it, in whatever order their
// requests are answered and their replies installed.
TYPED_TEST_P(RowCacheWatchTest, AStepThatWasCutBeforeTheRowCameHasItToo) {
  for (const bool first_is_answered_first : {true, false}) {
    for (const bool first_is_installed_first : {true, false}) {
      this->Make(WatchingConfig(1));
      this->Watch();
      auto first = this->LookUp(), second = this->LookUp();
      EXPECT_EQ(AskedBy(first).num_queries() + AskedBy(second).num_queries(), 0);
      this->OthersUpdate(2);
      this->cluster_->Deliver(first_is_answered_first ? &first : &second);
      this->cluster_->Deliver(first_is_answered_first ? &second : &first);
      EXPECT_EQ(this->Finish(first_is_installed_first ? &first : &second), -2);
      EXPECT_EQ(this->Finish(first_is_installed_first ? &second : &first), -2);
      EXPECT_EQ(this->Read(), -2);
      this->OthersUpdate(2);
      EXPECT_EQ(this->Read(), -4);
    }
  }
}

// A check whose answer is older than a row that came meanwhile does not begin a watch.
TYPED_TEST_P(RowCacheWatchTest, AnAnswerThatWasOvertakenSaysNothing) {
  this->Make(WatchingConfig(1));
  this->Read();
  auto slow = this->LookUp();
  EXPECT_EQ(AskedBy(slow).num_checks, 1u);
  this->cluster_->Deliver(&slow);  // watched
  this->OthersUpdate(2);
  auto quick = this->LookUp();
  this->cluster_->Deliver(&quick);  // the watch is over
  EXPECT_EQ(this->Finish(&quick), -2);
  this->Finish(&slow);
  const auto next = this->LookUp();
  EXPECT_EQ(AskedBy(next).num_checks, 1u);
}

TYPED_TEST_P(RowCacheWatchTest, ARequestThatComesTwiceTakesNothingAway) {
  this->Make(WatchingConfig(1));
  this->Watch();
  this->OthersUpdate(2);
  auto call = this->LookUp();
  for (int i = 0; i < 3; ++i) {
    this->cluster_->Deliver(&call);
    EXPECT_EQ(UnaskedKeys(call), Ids{kKey});
  }
  EXPECT_EQ(this->Finish(&call), -2);
  for (int i = 0; i < 200; ++i) {
    this->OthersUpdate(2);
    EXPECT_EQ(this->Read(), -4 - 2 * i) << "after numbers that were never taken";
  }
  this->Read();
  EXPECT_EQ(AskedBy(this->LookUp()).num_checks, 0u) << "a new epoch has begun";
}

TYPED_TEST_P(RowCacheWatchTest, MoreChangesThanAreRememberedAreNoneForgotten) {
  this->Make(WatchingConfig(1));
  this->Watch();
  this->OthersUpdate(2);
  for (int64_t first = 100; first < 200'000; first += 10'000) {
    Ids ids(10'000);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = first + static_cast<int64_t>(i);
    this->cluster_->Step(1, ids, Floats(ids.size(), 1));
    this->cluster_->Flush(1);
  }
  EXPECT_EQ(this->Read(), -2);
}

// What the table's own process does to a row.
TYPED_TEST_P(RowCacheWatchTest, UpdatesThatNoCacheMadeEndAWatch) {
  this->Make(WatchingConfig(1));
  this->Watch();
  const UniqueIds ids(&kKey, 1);
  const float gradient = 1;
  for (int i = 0; i < 2; ++i) {
    FoundRows found;
    float value;
    ASSERT_OK(this->cluster_->table()->Lookup(ids, SerialFor, &value, &found));
    ASSERT_OK(
        this->cluster_->table()->Apply(ids, found, &gradient, 1, Nonfinite::kError, SerialFor));
  }
  EXPECT_EQ(this->Read(), -2);
}

TYPED_TEST_P(RowCacheWatchTest, AShardThatStartsAnewWatchesAnew) {
  this->Make(WatchingConfig(1));
  this->OthersUpdate(4);
  this->Watch();
  this->cluster_->table()->Clear();
  EXPECT_EQ(this->Read(), 0);
  this->OthersUpdate(2);
  EXPECT_EQ(this->Read(), -2);
}

TYPED_TEST_P(RowCacheWatchTest, AClearedCacheIsWatchedAnew) {
  this->Make(WatchingConfig(1));
  this->Watch();
  for (int i = 0; i < 3; ++i) {
    const float before = this->Read();
    ASSERT_OK(this->cluster_->cache()->Clear());
    this->OthersUpdate(2);
    EXPECT_EQ(this->Read(), before - 2);
    this->Read();
    EXPECT_EQ(AskedBy(this->LookUp()).num_checks, 0u);
    this->OthersUpdate(2);
    EXPECT_EQ(this->Read(), before - 4);
    this->Read();
    this->Read();
  }
}

// Own updates that a closure holds back are not in the shard's clock. So they neither end a watch
// nor hide what others do; nor does a closure whose run was given up.
TYPED_TEST_P(RowCacheWatchTest, AClosureIsWatched) {
  CacheConfig config = WatchingConfig(1);
  config.write_bound = 1;
  this->Make(config);
  this->Watch();
  std::shared_ptr<Closure> closure;
  ASSERT_OK(this->cluster_->cache()->BeginClosure(1, &closure));
  for (int step = 0; step < 5; ++step) {
    auto call = this->LookUp();
    EXPECT_EQ(AskedBy(call).num_queries(), 0);
    this->cluster_->Deliver(&call);
    EXPECT_EQ(this->Finish(&call), static_cast<float>(-step));
    ASSERT_OK(this->cluster_->Update(call, {1}));
  }
  this->OthersUpdate(2);
  EXPECT_EQ(this->Read(), -7);
  this->Read();
  auto call = this->cluster_->NewCall(0);
  ASSERT_OK(this->cluster_->cache()->CommitClosure(*closure, 0, ClusterOf<TypeParam>::Into(&call),
                                                   &call.ticket));
  this->cluster_->Deliver(&call);
  ASSERT_OK(this->cluster_->TryInstall(&call));
  ASSERT_OK(this->cluster_->cache()->EndClosure(*closure));
  EXPECT_EQ(AskedBy(this->LookUp()).num_queries(), 0) << "what it pushed is no one else's";
  EXPECT_EQ(this->Read(), -7);
  this->OthersUpdate(2);
  EXPECT_EQ(this->Read(), -9);
  this->Read();
  this->Read();
  ASSERT_OK(this->cluster_->cache()->BeginClosure(2, &closure));
  this->cluster_->Step(0, {kKey}, {1});
  closure.reset();  // its run did not end
  EXPECT_EQ(this->Read(), -9);
  this->Read();
  EXPECT_EQ(AskedBy(this->LookUp()).num_queries(), 0);
  this->OthersUpdate(2);
  EXPECT_EQ(this->Read(), -11);
}

// Whose updates the shard has in the place of those that were pushed.
TYPED_TEST_P(RowCacheWatchTest, AClosureThatCountedBeforeIsWatched) {
  CacheConfig config = WatchingConfig(1);
  config.write_bound = 1;
  this->Make(config);
  this->Watch();
  for (const int w : {1, 0}) {  // two runs, of which the first counts
    std::shared_ptr<Closure> closure;
    ASSERT_OK(this->cluster_->cache(w)->BeginClosure(1, &closure));
    this->cluster_->Step(w, {kKey}, {static_cast<float>(w + 1)});
    auto call = this->cluster_->NewCall(w);
    ASSERT_OK(this->cluster_->cache(w)->CommitClosure(
        *closure, 0, ClusterOf<TypeParam>::Into(&call), &call.ticket));
    this->cluster_->Deliver(&call);
    ASSERT_OK(this->cluster_->TryInstall(&call));
    ASSERT_OK(this->cluster_->cache(w)->EndClosure(*closure));
  }
  EXPECT_EQ(this->Read(), -2);
  this->Read();
  EXPECT_EQ(AskedBy(this->LookUp()).num_queries(), 0);
  this->OthersUpdate(2);
  EXPECT_EQ(this->Read(), -4);
}

TYPED_TEST_P(RowCacheWatchTest, OnlyWhatAShardThatStartedAnewWatchedIsAskedForAgain) {
  CacheConfig config = WatchingConfig(1);
  config.rows.num_shards = 2;
  this->Make(config);
  int64_t there = 0;
  while (this->cluster_->table_of(there) == this->cluster_->table_of(kKey)) ++there;
  this->OthersUpdate(4, there);
  this->OthersUpdate(4);
  for (int i = 0; i < 2; ++i) this->cluster_->Read(0, {kKey, there});
  this->cluster_->Read(0, {kKey, there});
  ASSERT_EQ(this->cluster_->count(CacheCounter::kChecksSpared), 2);
  this->cluster_->table_of(kKey)->Clear();
  auto call = this->LookUp({kKey, there, kKey});
  this->cluster_->Deliver(&call);
  ASSERT_OK(this->cluster_->TryInstall(&call));
  EXPECT_TRUE(call.ticket->incomplete());
  this->cluster_->AskAgain(&call);
  EXPECT_EQ(call.num_requests(), 1);
  EXPECT_REFUSED(
      this->cluster_->cache()->AskAgain(call.ticket.get(), ClusterOf<TypeParam>::Into(&call)),
      "ticket was not installed before");
  this->cluster_->Deliver(&call);
  EXPECT_EQ(this->cluster_->Fill(&call), (Floats{0, -4, 0}));
}

// A step has asked again, but not for a row that another had brought. Then the shard starts anew.
TYPED_TEST_P(RowCacheWatchTest, AStepAsksUntilItsShardStays) {
  constexpr int64_t kOther = 6;
  this->Make(WatchingConfig(1));
  this->OthersUpdate(4);
  this->Watch();
  this->Watch(kOther);
  this->cluster_->table()->Clear();
  auto one = this->LookUp(), both = this->LookUp({kKey, kOther});
  this->cluster_->Deliver(&one);
  this->cluster_->Deliver(&both);
  EXPECT_EQ(this->Finish(&one), 0);
  ASSERT_OK(this->cluster_->TryInstall(&both));
  ASSERT_TRUE(both.ticket->incomplete());
  this->cluster_->AskAgain(&both);
  EXPECT_EQ(AskedBy(both).num_queries(), 1) << "the other row is there";
  this->cluster_->table()->Clear();
  this->OthersUpdate(6);
  this->cluster_->Deliver(&both);
  ASSERT_OK(this->cluster_->TryInstall(&both));
  ASSERT_TRUE(both.ticket->incomplete()) << "and is not any more";
  this->cluster_->AskAgain(&both);
  this->cluster_->Deliver(&both);
  const float merged = this->cluster_->Rows().at(kKey).value[0];
  ASSERT_LT(merged, 0);
  EXPECT_EQ(this->cluster_->Fill(&both), (Floats{merged, 0}));
}

// The rows of the step are there, but nobody would tell of what became of them meanwhile.
TYPED_TEST_P(RowCacheWatchTest, AShardThatNoLongerWatchesForASilentCacheIsAskedAgain) {
  CacheConfig config = WatchingConfig(3);
  config.write_bound = 100;
  this->Make(config);
  this->Watch();
  EXPECT_EQ(this->cluster_->Step(0, {kKey}, {1})[0], 0);
  Table* const table = this->cluster_->table();
  ASSERT_EQ(table->num_watched(), 1);
  const int64_t before = table->memory_bytes();
  RequestBuilder other;
  other.header.cache_id = 99;
  const Buffer bytes = other.Encode();
  for (int64_t i = 0; i < Sessions::kWatchLifetime * 9 / 8; ++i) {
    Buffer reply;
    ASSERT_OK(Sync(table, bytes, &reply));
  }
  EXPECT_EQ(table->num_watched(), 0);
  EXPECT_LT(table->memory_bytes(), before);
  this->OthersUpdate(4);
  auto call = this->LookUp();
  EXPECT_EQ(AskedBy(call).num_queries(), 0) << "it counts on the watch";
  this->cluster_->Deliver(&call);
  ASSERT_OK(this->cluster_->TryInstall(&call));
  ASSERT_TRUE(call.ticket->incomplete());
  this->cluster_->AskAgain(&call);
  this->cluster_->Deliver(&call);
  EXPECT_EQ(this->Finish(&call), -5) << "with its own update, which was not pushed";
  this->Read();
  this->Read();
  EXPECT_EQ(AskedBy(this->LookUp()).num_queries(), 0);
  this->cluster_->Flush(0);
  EXPECT_EQ(this->cluster_->Rows().at(kKey).value, Floats{-5});
}

TYPED_TEST_P(RowCacheWatchTest, AShardDoesNotWatchMoreAndMoreForRowsThatHaveLeft) {
  CacheConfig config = WatchingConfig(100);
  config.capacity = 50;
  config.policy = Policy::kLru;
  this->Make(config);
  Random random(1);
  int64_t most = 0, spared = 0;
  for (int64_t step = 0; step < 3000; ++step) {
    Ids ids;
    for (int i = 0; i < 20; ++i) ids.push_back(step / 2 * 10 + Below(&random, 20));
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    this->cluster_->Step(0, ids, Floats(ids.size(), 1));
    most = std::max(most, this->cluster_->table()->num_watched());
  }
  spared = this->cluster_->count(CacheCounter::kChecksSpared);
  EXPECT_GT(spared, 0);
  EXPECT_LT(most, 2 * (50 + 1024) + 50);
}

TYPED_TEST_P(RowCacheWatchTest, RepliesThatCannotBeAreRefusedAndChangeNothing) {
  CacheConfig config = WatchingConfig(1);
  config.rows.num_shards = 2;
  this->Make(config);
  int64_t key = 0;
  while (ShardOfHash(HashKey(key), 2) != 0) ++key;
  int64_t foreign = 0;
  while (ShardOfHash(HashKey(foreign), 2) != 1) ++foreign;
  for (int i = 0; i < 3; ++i) this->Read(key);
  this->OthersUpdate(2, key);
  auto call = this->LookUp({key});
  this->cluster_->Deliver(&call);
  Buffer good = call.replies[0];
  const auto refused = [&](const char* word) {
    const Status status = this->cluster_->TryInstall(&call);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
    call.replies[0] = good;
  };
  const auto header = [&] { return reinterpret_cast<ReplyHeader*>(call.replies[0].data()); };
  ASSERT_EQ(header()->num_unasked, 1u);
  auto* row = reinterpret_cast<ReplyRow*>(call.replies[0].data() + sizeof(ReplyHeader));
  row->query = foreign;
  refused("another shard");
  // The row twice, as if it were another.
  const size_t values = sizeof(ReplyHeader) + sizeof(ReplyRow);
  const Buffer twice = call.replies[0];
  call.replies[0].resize(twice.size() + sizeof(ReplyRow) + sizeof(float));
  char* bytes = call.replies[0].data();
  std::memcpy(bytes + values, bytes + sizeof(ReplyHeader), sizeof(ReplyRow));
  std::memset(bytes + values + sizeof(ReplyRow), 0, 2 * sizeof(float));
  header()->num_unasked = 2;
  refused("came twice");
  row = reinterpret_cast<ReplyRow*>(call.replies[0].data() + sizeof(ReplyHeader));
  row->clock = -1;
  refused("clock");
  header()->num_unasked = 2;
  refused("bytes");
  EXPECT_EQ(this->Finish(&call), -2);

  call = this->cluster_->Lookup(0, {key}, /*fresh=*/true);
  this->cluster_->Deliver(&call);
  good = call.replies[0];
  header()->number = 1;
  refused("nothing is watched");
}

REGISTER_TYPED_TEST_SUITE_P(
    RowCacheWatchTest, AClearedCacheIsWatchedAnew, AClosureIsWatched,
    AClosureThatCountedBeforeIsWatched, AHitIsCheckedOnceAndThenSentWhenItIsBeyondTheBound,
    ARowThatIsBeyondTheBoundComesThoughTheStepIsAboutOthers, OwnUpdatesDoNotEndAWatch,
    NothingIsWatchedWhereEveryReadMustBeChecked, ALostReplyDoesNotLoseTheRow,
    AStepThatWasCutBeforeTheRowCameHasItToo, AnAnswerThatWasOvertakenSaysNothing,
    ARequestThatComesTwiceTakesNothingAway, MoreChangesThanAreRememberedAreNoneForgotten,
    UpdatesThatNoCacheMadeEndAWatch, AShardThatStartsAnewWatchesAnew,
    OnlyWhatAShardThatStartedAnewWatchedIsAskedForAgain, AStepAsksUntilItsShardStays,
    AShardThatNoLongerWatchesForASilentCacheIsAskedAgain,
    AShardDoesNotWatchMoreAndMoreForRowsThatHaveLeft,
    RepliesThatCannotBeAreRefusedAndChangeNothing);

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_ROW_CACHE_WATCH_TESTS_H_
