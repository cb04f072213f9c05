#include "ops/core/link/watch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace het_tf {
namespace {

std::vector<int64_t> Sent(WatchedRows* rows) {
  std::vector<int64_t> keys;
  rows->ForEachSent([&](const WatchedRows::Row& row) { keys.push_back(row.key); });
  std::sort(keys.begin(), keys.end());
  return keys;
}

void Watch1(WatchedRows* rows, int64_t key, int64_t base) { rows->Watch(HashKey(key), key, base); }
WatchedRows::Row* Find(WatchedRows* rows, int64_t key) { return rows->Find(HashKey(key), key); }

TEST(ChangeLogTest, SaysWhatWasAddedSinceOrThatSomeOfItIsGone) {
  ChangeLog log;
  log.Add(1);
  EXPECT_EQ(log.end(), 0u) << "nobody wants to know";
  log.Start();
  std::vector<int64_t> seen;
  const auto visit = [&](int64_t key) { seen.push_back(key); };
  EXPECT_TRUE(log.ForEachFrom(0, visit));
  log.Add(7);
  const uint64_t place = log.end();
  log.Add(8);
  log.Add(9);
  EXPECT_TRUE(log.ForEachFrom(place, visit));
  EXPECT_EQ(seen, (std::vector<int64_t>{8, 9}));
  log.Start();  // again has no effect
  int64_t added = 2;
  while (log.ForEachFrom(place, [](int64_t) {})) {
    log.Add(++added);
    ASSERT_LT(added, 1 << 20) << "it must not grow without end";
  }
  EXPECT_TRUE(log.ForEachFrom(log.end(), visit));
}

TEST(WatchedRowsTest, ARowThatWasSentGoesUntilItsReplyWasSeen) {
  WatchedRows rows;
  Watch1(&rows, 1, 10);
  Watch1(&rows, 2, 20);
  EXPECT_EQ(Sent(&rows), std::vector<int64_t>{});
  rows.Send(Find(&rows, 1), 5);
  rows.Send(Find(&rows, 1), 6);  // the first counts
  rows.Send(Find(&rows, 2), 6);
  rows.Seen(4);
  EXPECT_EQ(Sent(&rows), (std::vector<int64_t>{1, 2}));
  rows.Seen(5);
  EXPECT_EQ(Sent(&rows), (std::vector<int64_t>{2}));
  EXPECT_EQ(Find(&rows, 1), nullptr);
  EXPECT_EQ(rows.size(), 1);
}

TEST(WatchedRowsTest, AWatchThatBeginsAnewIsNotSent) {
  WatchedRows rows;
  Watch1(&rows, 1, 10);
  rows.Send(Find(&rows, 1), 5);
  Watch1(&rows, 1, 30);
  EXPECT_EQ(Sent(&rows), std::vector<int64_t>{});
  rows.Seen(9);
  ASSERT_NE(Find(&rows, 1), nullptr);
  EXPECT_EQ(Find(&rows, 1)->base, 30);
}

TEST(WatchedRowsTest, SeveralAreFoundInOrder) {
  WatchedRows rows;
  std::vector<int64_t> keys, expected, found;
  for (int64_t key = 0; key < 100; ++key) {
    if (key % 3 == 0) Watch1(&rows, key, 10 * key);
    keys.push_back(99 - key);
  }
  for (const int64_t key : keys) {
    if (key % 3 == 0) expected.push_back(10 * key);
  }
  rows.ForEachFound(
      100, [&](int64_t i) { return HashKey(keys[i]); }, [&](int64_t i) { return keys[i]; },
      [&](int64_t i, WatchedRows::Row* row) {
        EXPECT_EQ(row->key, keys[i]);
        found.push_back(row->base);
      });
  EXPECT_EQ(found, expected);
}

// Beside a map, through growth and reuse of places.
TEST(WatchedRowsTest, MatchesAMap) {
  std::mt19937 random(1);
  WatchedRows rows;
  std::map<int64_t, std::pair<int64_t, uint64_t>> expected;  // key -> base, sent
  for (uint64_t reply = 1; reply < 20000; ++reply) {
    const int64_t key = random() % 300;
    switch (random() % 4) {
      case 0:
      case 1:
        Watch1(&rows, key, static_cast<int64_t>(reply));
        expected[key] = {static_cast<int64_t>(reply), 0};
        break;
      case 2:
        if (WatchedRows::Row* row = Find(&rows, key)) {
          rows.Send(row, reply);
          if (expected[key].second == 0) expected[key].second = reply;
        }
        break;
      case 3: {
        const uint64_t seen = reply - random() % 40;
        rows.Seen(seen);
        for (auto it = expected.begin(); it != expected.end();) {
          const uint64_t sent = it->second.second;
          it = sent != 0 && sent <= seen ? expected.erase(it) : std::next(it);
        }
        break;
      }
    }
    ASSERT_EQ(rows.size(), static_cast<int64_t>(expected.size()));
    std::vector<int64_t> sent, watched;
    for (const auto& [each, row] : expected) (row.second != 0 ? sent : watched).push_back(each);
    ASSERT_EQ(Sent(&rows), sent);
    std::vector<int64_t> found;
    rows.ForEachWatched([&](WatchedRows::Row* row) { found.push_back(row->key); });
    std::sort(found.begin(), found.end());
    ASSERT_EQ(found, watched);
    for (const auto& [each, row] : expected) ASSERT_EQ(Find(&rows, each)->base, row.first);
  }
}

TEST(WatchTest, AnEpochForgetsTheOneBefore) {
  Watch watch;
  bool begins;
  EXPECT_EQ(watch.BeginReply(1, 4, &begins), 1u);
  EXPECT_TRUE(begins);
  Watch1(watch.stripe(3), 1, 10);
  EXPECT_EQ(watch.BeginReply(1, 4, &begins), 2u);
  EXPECT_FALSE(begins);
  EXPECT_EQ(watch.size(), 1);
  EXPECT_EQ(watch.BeginReply(3, 4, &begins), 1u);
  EXPECT_TRUE(begins);
  EXPECT_EQ(watch.size(), 0);
  EXPECT_EQ(watch.BeginReply(2, 4, &begins), 0u) << "a request that came late";
}

TEST(WatchingTest, SeenGoesAsFarAsEveryReplyWasTaken) {
  Watching watching;
  for (int i = 0; i < 4; ++i) watching.Open();
  EXPECT_TRUE(watching.Take(1));
  EXPECT_EQ(watching.seen(), 1u);
  EXPECT_TRUE(watching.Take(3));
  EXPECT_EQ(watching.seen(), 1u);
  EXPECT_FALSE(watching.Take(2)) << "another was the latest";
  EXPECT_EQ(watching.seen(), 3u);
  EXPECT_TRUE(watching.Take(4));
  EXPECT_TRUE(watching.counts());
}

TEST(WatchingTest, ALostReplyEndsTheEpochOnceNothingCountsOnIt) {
  Watching watching;
  const uint64_t epoch = watching.epoch();
  watching.Open();
  watching.Open();
  watching.GiveUp(epoch);
  EXPECT_FALSE(watching.counts());
  EXPECT_FALSE(watching.may_begin()) << "a step is open that has checked nothing";
  watching.Take(2);
  EXPECT_TRUE(watching.may_begin());
  watching.Begin();
  EXPECT_GT(watching.epoch(), epoch);
  EXPECT_TRUE(watching.counts());
  watching.GiveUp(epoch);  // of before
  EXPECT_TRUE(watching.counts());
}

TEST(WatchingTest, NumbersThatNeverComeEndTheEpoch) {
  Watching watching;
  for (uint64_t number = 2; watching.counts(); ++number) {
    ASSERT_LT(number, 1000u);
    watching.Open();
    watching.Take(number);
  }
  EXPECT_TRUE(watching.may_begin());
}

// As late and as often as they may be, beside a set.
TEST(WatchingTest, RepliesInAnyOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    Watching watching;
    std::vector<uint64_t> numbers(300);
    std::iota(numbers.begin(), numbers.end(), 1);
    for (size_t first = 0; first + 60 <= numbers.size(); first += 60) {
      std::shuffle(numbers.begin() + first, numbers.begin() + first + 60, random);
    }
    std::set<uint64_t> taken;
    for (const uint64_t number : numbers) {
      watching.Open();
      EXPECT_EQ(watching.Take(number), taken.empty() || number > *taken.rbegin());
      taken.insert(number);
      uint64_t seen = 0;
      while (taken.count(seen + 1) != 0) ++seen;
      ASSERT_EQ(watching.seen(), seen);
    }
    EXPECT_TRUE(watching.counts());
  }
}

TEST(WatchingTest, AShardThatMayWatchManyRowsThatHaveLeftIsToldToForget) {
  Watching watching;
  watching.Left(1024, 20);
  watching.Left(20, 20);
  EXPECT_TRUE(watching.counts());
  watching.Left(1, 20);
  EXPECT_FALSE(watching.counts());
  EXPECT_TRUE(watching.may_begin());
  watching.Begin();
  watching.Left(1, 20);
  EXPECT_TRUE(watching.counts());
}

}  // namespace
}  // namespace het_tf
