// The cache in the host's memory under the random schedules of both caches, and one of its own.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/cache/row_cache_schedule_tests.h"

namespace het_tf {
namespace testing {

INSTANTIATE_TYPED_TEST_SUITE_P(Host, RowCacheScheduleTest, HostSide);

// The paper's Lemma 1: the clocks that two workers read a row at differ by at most 2s.
TEST(CacheScheduleTest, LamportClocksOfTwoWorkersStayWithinTwiceTheStaleness) {
  for (const int64_t staleness : {1, 2, 5}) {
    CacheConfig config = PlainConfig(2);
    config.rows.clock = ClockRule::kLamport;
    SetStaleness(&config, staleness);
    constexpr int kWorkers = 3;
    Cluster cluster(config, kWorkers);
    const Ids all = {0, 1, 2, 3, 4};
    Random random(1);
    int64_t furthest = 0;
    for (int step = 0; step < 600; ++step) {
      const int w = static_cast<int>(Below(&random, kWorkers));
      const Ids ids = RandomIds(&random, 5);
      const std::set<int64_t> keys(ids.begin(), ids.end());
      const Ids unique(keys.begin(), keys.end());
      cluster.Step(w, unique, Floats(unique.size(), 1));
      if (step % 10 != 0) continue;
      std::vector<Counts> clocks;
      // The first round sends what is due, so that in the second nothing changes between the reads.
      for (int reader = 0; reader < 2 * kWorkers; ++reader) cluster.Read(reader % kWorkers, all);
      for (int reader = 0; reader < kWorkers; ++reader) {
        clocks.push_back(ClocksSent(cluster.Lookup(reader, all)));
        EXPECT_EQ(clocks.back().size(), all.size());
      }
      for (const int64_t key : all) {
        for (int a = 0; a < kWorkers; ++a) {
          for (int b = 0; b < kWorkers; ++b) {
            furthest = std::max(furthest, clocks[a][key] - clocks[b][key]);
          }
        }
      }
    }
    EXPECT_LE(furthest, 2 * staleness);
    EXPECT_GT(furthest, 0) << "the bound was never tried";
  }
}

// Steps that overlap in any way, of which some are lost: with room made before an update, a shard
// never lacks more than write_bound updates of a row.
class WriteBoundSchedule {
 public:
  WriteBoundSchedule(const CacheConfig& config, uint64_t seed)
      : config_(config), cluster_(config), random_(seed) {}

  // Returns the most updates of a row that a shard has lacked.
  int64_t Run(int events) {
    for (int event = 0; event < events; ++event) {
      switch (Below(&random_, 4)) {
        case 0:
          if (under_way_.size() < 6)
            under_way_.push_back(cluster_.Lookup(0, RandomIds(&random_, 12)));
          break;
        case 1:
          if (!under_way_.empty()) {
            cluster_.Deliver(&under_way_[Below(&random_, under_way_.size())],
                             static_cast<int>(Below(&random_, cluster_.num_shards())));
          }
          break;
        case 2:
          Finish();
          break;
        case 3:
          if (Chance(&random_, 0.1)) cluster_.Flush(0, Chance(&random_, 0.5));
          break;
      }
    }
    return most_lacked_;
  }

  int64_t num_messages() const { return num_messages_; }

 private:
  void Finish() {
    if (under_way_.empty()) return;
    std::swap(under_way_[Below(&random_, under_way_.size())], under_way_.back());
    Cluster::Call step = std::move(under_way_.back());
    under_way_.pop_back();
    if (Chance(&random_, 0.1)) return;  // lost
    for (int s = 0; s < cluster_.num_shards(); ++s) {
      if (step.replies[s].empty()) cluster_.Deliver(&step, s);
    }
    cluster_.Fill(&step);
    Cluster::Call room = cluster_.NewCall(0);
    ASSERT_OK(cluster_.cache()->MakeRoom(*step.ticket, Cluster::Into(&room), &room.ticket));
    num_messages_ += room.num_requests();
    cluster_.Deliver(&room);
    if (Chance(&random_, 0.1)) return;  // lost when the shards have taken it
    cluster_.Install(&room);
    const UniqueIds& unique = UniqueIdsOf(*step.ticket);
    ASSERT_OK(cluster_.Update(step, OneForEachKey(unique)));
    const TableRows rows = cluster_.Rows();
    for (const int64_t key : unique.keys) {
      const auto row = rows.find(key);
      const int64_t merged = row == rows.end() ? 0 : static_cast<int64_t>(-row->second.value[0]);
      const int64_t lacked = ++made_[key] - merged;
      EXPECT_LE(lacked, std::max<int64_t>(config_.write_bound, 1)) << "of key " << key;
      most_lacked_ = std::max(most_lacked_, lacked);
    }
  }

  const CacheConfig config_;
  const Cluster cluster_;
  Random random_;
  std::vector<Cluster::Call> under_way_;
  Counts made_;
  int64_t most_lacked_ = 0;
  int64_t num_messages_ = 0;
};

TEST(CacheScheduleTest, ShardsLackNoMoreThanTheWriteBoundWhenStepsOverlap) {
  for (const ClockRule rule : {ClockRule::kCount, ClockRule::kLamport}) {
    for (const int64_t write_bound : {1, 2, 7}) {
      for (const int64_t due_bound : {kUnbounded, int64_t{1}, write_bound / 2}) {
        for (uint64_t seed = 0; seed < 6; ++seed) {
          SCOPED_TRACE("write_bound " + std::to_string(write_bound) + " due_bound " +
                       std::to_string(due_bound) + " seed " + std::to_string(seed));
          Random random(seed);
          CacheConfig config = PlainConfig(static_cast<int>(1 + Below(&random, 3)));
          config.rows.clock = rule;
          config.capacity = 1 + Below(&random, 20);
          config.read_bound = Below(&random, 4);
          config.write_bound = write_bound;
          config.due_bound = due_bound;
          WriteBoundSchedule schedule(config, seed);
          const int64_t most_lacked = schedule.Run(800);
          if (due_bound == kUnbounded) {
            EXPECT_EQ(most_lacked, write_bound) << "whether the bound was tried";
            EXPECT_GT(schedule.num_messages(), 0);
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(CacheScheduleTest, AShardLacksLessThanADriftBoundAndTheLastUpdate) {
  CacheConfig config = PlainConfig(2);
  config.rows.clock = ClockRule::kDrift;
  config.capacity = 10;
  config.write_bound = (2 << 14) + 1;  // every update goes 1 << 14
  for (uint64_t seed = 0; seed < 10; ++seed) {
    WriteBoundSchedule schedule(config, seed);
    EXPECT_EQ(schedule.Run(800), 3);
    if (HasFailure()) return;
  }
}

TEST(CacheScheduleTest, RoomIsAskedForOnlyWhereItIsLacked) {
  CacheConfig config = PlainConfig(2);
  config.write_bound = 2;
  const Cluster cluster(config);
  const auto messages = [&](const Cluster::Call& step) {
    Cluster::Call room = cluster.NewCall(0);
    EXPECT_OK(cluster.cache()->MakeRoom(*step.ticket, Cluster::Into(&room), &room.ticket));
    return room.num_requests();
  };
  std::vector<Cluster::Call> steps;
  for (int step = 0; step < 4; ++step) {
    steps.push_back(cluster.Lookup(0, {1, 2, 3}));
    cluster.Deliver(&steps.back());
    cluster.Fill(&steps.back());
  }
  Cluster::Call other = cluster.Lookup(0, {4, 5, 6});
  cluster.Deliver(&other);
  cluster.Fill(&other);
  EXPECT_EQ(messages(steps[0]), 0);
  ASSERT_OK(cluster.Update(steps[0], {1, 1, 1}));
  EXPECT_EQ(messages(steps[1]), 0);
  ASSERT_OK(cluster.Update(steps[1], {1, 1, 1}));
  EXPECT_EQ(messages(other), 0) << "its rows have room";
  EXPECT_GT(messages(steps[2]), 0) << "the outbox has what takes it";
  EXPECT_GT(messages(steps[2]), 0) << "it is under way";
  cluster.Flush(0, false);
  EXPECT_EQ(messages(steps[2]), 0);
}

TEST(CacheScheduleTest, AnAcknowledgementMakesRoomForWhatItsPushHad) {
  CacheConfig config = PlainConfig();
  config.write_bound = 2;
  config.due_bound = 1;
  const Cluster cluster(config);
  std::vector<Cluster::Call> steps, pushes;
  for (int step = 0; step < 4; ++step) {
    steps.push_back(cluster.Lookup(0, {1}));
    cluster.Deliver(&steps.back());
    cluster.Fill(&steps.back());
  }
  for (int step = 0; step < 2; ++step) {
    ASSERT_OK(cluster.Update(steps[step], {1}));
    pushes.push_back(cluster.Lookup(0, {9}));
  }
  cluster.Deliver(&pushes[0]);
  cluster.Fill(&pushes[0]);
  ASSERT_OK(cluster.Update(steps[2], {1}));
  Cluster::Call room = cluster.NewCall(0);
  EXPECT_OK(cluster.cache()->MakeRoom(*steps[3].ticket, Cluster::Into(&room), &room.ticket));
  EXPECT_EQ(room.num_requests(), 1) << "one update is under way, one waits";
}

}  // namespace testing
}  // namespace het_tf
