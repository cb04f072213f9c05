// The cache in the host's memory under the random schedules of both caches, and one of its own.

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
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

}  // namespace testing
}  // namespace het_tf
