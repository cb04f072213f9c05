// Hits without a check (link/watch.h): what messages hold, and that reads keep the bound whatever
// becomes of them. Every gradient is 1, so a value is minus the number of updates that are in it.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/wire/reply.h"
#include "ops/core/wire/request.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Buffer;
using testing::Cluster;
using testing::Floats;
using testing::Ids;
using testing::PlainConfig;
using testing::Random;

constexpr int64_t kKey = 5;

CacheConfig WatchingConfig(int64_t read_bound = 3) {
  CacheConfig config = PlainConfig();
  config.read_bound = read_bound;
  config.write_bound = 0;
  return config;
}

RequestHeader AskedBy(const Cluster::Call& call, int s = 0) {
  RequestView view;
  EXPECT_OK(RequestView::Parse(call.requests[s]->data(), call.requests[s]->size(), &view));
  return view.header;
}

std::vector<int64_t> UnaskedKeys(const Cluster::Call& call, int s = 0) {
  ReplyView view;
  EXPECT_OK(ReplyView::Parse(call.replies[s].data(), call.replies[s].size(), &view));
  std::vector<int64_t> keys;
  for (uint32_t r = 0; r < view.header.num_unasked; ++r) keys.push_back(view.unasked_rows[r].query);
  return keys;
}

// A worker that reads a row, and another that updates it.
class CacheWatchTest : public ::testing::Test {
 protected:
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
  Cluster::Call LookUp(const Ids& ids = {kKey}) { return cluster_->Lookup(0, ids); }
  float Finish(Cluster::Call* call) { return cluster_->Fill(call)[0]; }

  std::unique_ptr<Cluster> cluster_;
};

TEST_F(CacheWatchTest, AHitIsCheckedOnceAndThenSentWhenItIsBeyondTheBound) {
  Make(WatchingConfig(3));
  EXPECT_EQ(Read(), 0);
  Cluster::Call call = LookUp();
  EXPECT_EQ(AskedBy(call).num_checks, 1u);
  cluster_->Deliver(&call);
  Finish(&call);
  OthersUpdate(3);
  call = LookUp();
  EXPECT_EQ(AskedBy(call).num_queries(), 0) << "but the shard is heard";
  EXPECT_EQ(call.requests[0]->size(), sizeof(RequestHeader));
  cluster_->Deliver(&call);
  EXPECT_EQ(call.replies[0].size(), sizeof(ReplyHeader));
  EXPECT_EQ(Finish(&call), 0);
  OthersUpdate(1);
  call = LookUp();
  EXPECT_EQ(AskedBy(call).num_queries(), 0);
  cluster_->Deliver(&call);
  EXPECT_EQ(UnaskedKeys(call), Ids{kKey});
  EXPECT_EQ(Finish(&call), -4);
  call = LookUp();
  EXPECT_EQ(AskedBy(call).num_checks, 1u) << "it has to be watched again";
  EXPECT_EQ(cluster_->count(CacheCounter::kChecksSpared), 2);
  EXPECT_EQ(cluster_->count(CacheCounter::kRowsUnasked), 1);
}

TEST_F(CacheWatchTest, ARowThatIsBeyondTheBoundComesThoughTheStepIsAboutOthers) {
  Make(WatchingConfig(1));
  Watch();
  OthersUpdate(2);
  Cluster::Call call = LookUp({7, 8});
  cluster_->Deliver(&call);
  EXPECT_EQ(UnaskedKeys(call), Ids{kKey});
  cluster_->Fill(&call);
  EXPECT_EQ(Read(), -2);
}

TEST_F(CacheWatchTest, OwnUpdatesDoNotEndAWatch) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kDrift}) {
    CacheConfig config = WatchingConfig(clock == ClockRule::kDrift ? 1 << 20 : 1);
    config.rows.clock = clock;
    Make(config);
    Watch();
    for (int step = 0; step < 20; ++step) {
      EXPECT_EQ(cluster_->Step(0, {kKey}, {1})[0], static_cast<float>(-step));
      cluster_->Flush(0);
    }
    const Cluster::Call call = LookUp();
    EXPECT_EQ(AskedBy(call).num_queries(), 0);
    EXPECT_EQ(cluster_->rows_sent(), 0);
  }
}

TEST_F(CacheWatchTest, NothingIsWatchedWhereEveryReadMustBeChecked) {
  CacheConfig fresh = WatchingConfig(0), lamport = WatchingConfig(), unbounded = WatchingConfig();
  lamport.rows.clock = ClockRule::kLamport;
  unbounded.read_bound = kUnbounded;
  for (const CacheConfig& config : {fresh, lamport, unbounded}) {
    Make(config);
    for (int i = 0; i < 5; ++i) Read();
    EXPECT_EQ(cluster_->count(CacheCounter::kChecksSpared), 0);
    EXPECT_EQ(cluster_->table()->num_watched(), 0);
  }
  Make(WatchingConfig());
  Watch();
  EXPECT_EQ(AskedBy(cluster_->Lookup(0, {kKey}, /*fresh=*/true)).num_checks, 1u);
}

// The reply that has the row never comes.
TEST_F(CacheWatchTest, ALostReplyDoesNotLoseTheRow) {
  Make(WatchingConfig(1));
  Watch();
  OthersUpdate(2);
  {
    Cluster::Call lost = LookUp({7});
    cluster_->Deliver(&lost);
    EXPECT_EQ(UnaskedKeys(lost), Ids{kKey});
  }
  EXPECT_EQ(Read(), -2);
  // What is lost ends the epoch; then rows are watched again.
  Read();
  EXPECT_EQ(AskedBy(LookUp()).num_checks, 0u);
}

// Two steps at once, of which only one gets the row at first: both read it, in whatever order their
// requests are answered and their replies installed.
TEST_F(CacheWatchTest, AStepThatWasCutBeforeTheRowCameHasItToo) {
  for (const bool first_is_answered_first : {true, false}) {
    for (const bool first_is_installed_first : {true, false}) {
      Make(WatchingConfig(1));
      Watch();
      Cluster::Call first = LookUp(), second = LookUp();
      EXPECT_EQ(AskedBy(first).num_queries() + AskedBy(second).num_queries(), 0);
      OthersUpdate(2);
      cluster_->Deliver(first_is_answered_first ? &first : &second);
      cluster_->Deliver(first_is_answered_first ? &second : &first);
      EXPECT_EQ(Finish(first_is_installed_first ? &first : &second), -2);
      EXPECT_EQ(Finish(first_is_installed_first ? &second : &first), -2);
      EXPECT_EQ(Read(), -2);
      OthersUpdate(2);
      EXPECT_EQ(Read(), -4);
    }
  }
}

// A check whose answer is older than a row that came meanwhile does not begin a watch.
TEST_F(CacheWatchTest, AnAnswerThatWasOvertakenSaysNothing) {
  Make(WatchingConfig(1));
  Read();
  Cluster::Call slow = LookUp();
  EXPECT_EQ(AskedBy(slow).num_checks, 1u);
  cluster_->Deliver(&slow);  // watched
  OthersUpdate(2);
  Cluster::Call quick = LookUp();
  cluster_->Deliver(&quick);  // the watch is over
  EXPECT_EQ(Finish(&quick), -2);
  Finish(&slow);
  const Cluster::Call next = LookUp();
  EXPECT_EQ(AskedBy(next).num_checks, 1u);
}

TEST_F(CacheWatchTest, ARequestThatComesTwiceTakesNothingAway) {
  Make(WatchingConfig(1));
  Watch();
  OthersUpdate(2);
  Cluster::Call call = LookUp();
  for (int i = 0; i < 3; ++i) {
    cluster_->Deliver(&call);
    EXPECT_EQ(UnaskedKeys(call), Ids{kKey});
  }
  EXPECT_EQ(Finish(&call), -2);
  for (int i = 0; i < 200; ++i) {
    OthersUpdate(2);
    EXPECT_EQ(Read(), -4 - 2 * i) << "after numbers that were never taken";
  }
  Read();
  EXPECT_EQ(AskedBy(LookUp()).num_checks, 0u) << "a new epoch has begun";
}

TEST_F(CacheWatchTest, MoreChangesThanAreRememberedAreNoneForgotten) {
  Make(WatchingConfig(1));
  Watch();
  OthersUpdate(2);
  for (int64_t first = 100; first < 200'000; first += 10'000) {
    Ids ids(10'000);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = first + static_cast<int64_t>(i);
    cluster_->Step(1, ids, Floats(ids.size(), 1));
    cluster_->Flush(1);
  }
  EXPECT_EQ(Read(), -2);
}

// What the table's own process does to a row.
TEST_F(CacheWatchTest, UpdatesThatNoCacheMadeEndAWatch) {
  Make(WatchingConfig(1));
  Watch();
  const UniqueIds ids(&kKey, 1);
  const float gradient = 1;
  for (int i = 0; i < 2; ++i) {
    FoundRows found;
    float value;
    ASSERT_OK(cluster_->table()->Lookup(ids, SerialFor, &value, &found));
    ASSERT_OK(cluster_->table()->Apply(ids, found, &gradient, 1, Nonfinite::kError, SerialFor));
  }
  EXPECT_EQ(Read(), -2);
}

TEST_F(CacheWatchTest, AShardThatStartsAnewWatchesAnew) {
  Make(WatchingConfig(1));
  OthersUpdate(4);
  Watch();
  cluster_->table()->Clear();
  EXPECT_EQ(Read(), 0);
  OthersUpdate(2);
  EXPECT_EQ(Read(), -2);
}

TEST_F(CacheWatchTest, OnlyWhatAShardThatStartedAnewWatchedIsAskedForAgain) {
  CacheConfig config = WatchingConfig(1);
  config.rows.num_shards = 2;
  Make(config);
  int64_t there = 0;
  while (cluster_->table_of(there) == cluster_->table_of(kKey)) ++there;
  OthersUpdate(4, there);
  OthersUpdate(4);
  for (int i = 0; i < 2; ++i) cluster_->Read(0, {kKey, there});
  cluster_->Read(0, {kKey, there});
  ASSERT_EQ(cluster_->count(CacheCounter::kChecksSpared), 2);
  cluster_->table_of(kKey)->Clear();
  Cluster::Call call = LookUp({kKey, there, kKey});
  cluster_->Deliver(&call);
  ASSERT_OK(cluster_->TryInstall(&call));
  EXPECT_TRUE(call.ticket->lacks_rows());
  cluster_->AskAgain(&call);
  EXPECT_EQ(call.num_requests(), 1);
  EXPECT_REFUSED(cluster_->cache()->AskAgain(call.ticket.get(), Cluster::Into(&call)),
                 "ticket was not installed before");
  cluster_->Deliver(&call);
  EXPECT_EQ(cluster_->Fill(&call), (Floats{0, -4, 0}));
}

// A step has asked again, but not for a row that another had brought. Then the shard starts anew.
TEST_F(CacheWatchTest, AStepAsksUntilItsShardStays) {
  constexpr int64_t kOther = 6;
  Make(WatchingConfig(1));
  OthersUpdate(4);
  Watch();
  Watch(kOther);
  cluster_->table()->Clear();
  Cluster::Call one = LookUp(), both = LookUp({kKey, kOther});
  cluster_->Deliver(&one);
  cluster_->Deliver(&both);
  EXPECT_EQ(Finish(&one), 0);
  ASSERT_OK(cluster_->TryInstall(&both));
  ASSERT_TRUE(both.ticket->lacks_rows());
  cluster_->AskAgain(&both);
  EXPECT_EQ(AskedBy(both).num_queries(), 1) << "the other row is there";
  cluster_->table()->Clear();
  OthersUpdate(6);
  cluster_->Deliver(&both);
  ASSERT_OK(cluster_->TryInstall(&both));
  ASSERT_TRUE(both.ticket->lacks_rows()) << "and is not any more";
  cluster_->AskAgain(&both);
  cluster_->Deliver(&both);
  const float merged = cluster_->Rows().at(kKey).value[0];
  ASSERT_LT(merged, 0);
  EXPECT_EQ(cluster_->Fill(&both), (Floats{merged, 0}));
}

TEST_F(CacheWatchTest, AShardDoesNotWatchMoreAndMoreForRowsThatHaveLeft) {
  CacheConfig config = WatchingConfig(100);
  config.capacity = 50;
  config.policy = Policy::kLru;
  Make(config);
  Random random(1);
  int64_t most = 0, spared = 0;
  for (int64_t step = 0; step < 3000; ++step) {
    Ids ids;
    for (int i = 0; i < 20; ++i) ids.push_back(step / 2 * 10 + Below(&random, 20));
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    cluster_->Step(0, ids, Floats(ids.size(), 1));
    most = std::max(most, cluster_->table()->num_watched());
  }
  spared = cluster_->count(CacheCounter::kChecksSpared);
  EXPECT_GT(spared, 0);
  EXPECT_LT(most, 2 * (50 + 1024) + 50);
}

TEST_F(CacheWatchTest, RepliesThatCannotBeAreRefusedAndChangeNothing) {
  CacheConfig config = WatchingConfig(1);
  config.rows.num_shards = 2;
  Make(config);
  int64_t key = 0;
  while (ShardOfHash(HashKey(key), 2) != 0) ++key;
  int64_t foreign = 0;
  while (ShardOfHash(HashKey(foreign), 2) != 1) ++foreign;
  for (int i = 0; i < 3; ++i) Read(key);
  OthersUpdate(2, key);
  Cluster::Call call = LookUp({key});
  cluster_->Deliver(&call);
  Buffer good = call.replies[0];
  const auto refused = [&](const char* word) {
    const Status status = cluster_->TryInstall(&call);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
    call.replies[0] = good;
  };
  const auto header = [&] { return reinterpret_cast<ReplyHeader*>(call.replies[0].data()); };
  ASSERT_EQ(header()->num_unasked, 1u);
  auto* row = reinterpret_cast<ReplyRow*>(call.replies[0].data() + sizeof(ReplyHeader));
  row->query = foreign;
  refused("another shard");
  row = reinterpret_cast<ReplyRow*>(call.replies[0].data() + sizeof(ReplyHeader));
  row->clock = -1;
  refused("clock");
  header()->num_unasked = 2;
  refused("bytes");
  EXPECT_EQ(Finish(&call), -2);

  call = cluster_->Lookup(0, {key}, /*fresh=*/true);
  cluster_->Deliver(&call);
  good = call.replies[0];
  header()->number = 1;
  refused("nothing is watched");
}

}  // namespace
}  // namespace het_tf
