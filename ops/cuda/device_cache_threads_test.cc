// Steps whose kernels run on several threads in the host build, whatever their number of items, so
// that ThreadSanitizer sees what items of a kernel share.

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/cache/row_cache_schedule_tests.h"
#include "ops/cuda/device_cache_testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::DeviceCluster;
using testing::Floats;
using testing::Ids;
using testing::PlainConfig;
using testing::Random;
using testing::TableRows;

class DeviceCacheThreadsTest : public ::testing::Test {
 protected:
  DeviceCacheThreadsTest() { cuda::threaded_from = 2; }
  ~DeviceCacheThreadsTest() override { cuda::threaded_from = before_; }

  // 12 steps of two workers in turn; every update counts once.
  static void Play(int capacity, size_t num_ids, int64_t num_keys, ClockRule clock);

 private:
  const int64_t before_ = cuda::threaded_from;
};

void DeviceCacheThreadsTest::Play(int capacity, size_t num_ids, int64_t num_keys, ClockRule clock) {
  CacheConfig config = PlainConfig(2);
  config.rows.clock = clock;
  config.capacity = capacity;
  config.read_bound = 1;
  config.write_bound = 2;
  const DeviceCluster cluster(config, 2);
  Random random(1);
  std::map<int64_t, float> sums;
  std::map<int64_t, int64_t> updates;
  for (int step = 0; step < 12; ++step) {
    Ids ids(num_ids);
    Floats gradients(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = Below(&random, num_keys);
      gradients[i] = static_cast<float>(Below(&random, 9) - 4);
      sums[ids[i]] += gradients[i];
    }
    for (const int64_t key : std::set<int64_t>(ids.begin(), ids.end())) ++updates[key];
    cluster.Step(step % 2, ids, gradients);
  }
  EXPECT_EQ(cluster.count(CacheCounter::kVisitors) > 0, capacity < num_keys);
  for (int w = 0; w < 2; ++w) cluster.Flush(w);
  const TableRows rows = cluster.Rows();
  ASSERT_EQ(rows.size(), sums.size());
  for (const auto& [key, sum] : sums) {
    EXPECT_EQ(rows.at(key).value[0], -sum) << key;
    if (clock == ClockRule::kCount) {
      EXPECT_EQ(rows.at(key).clock, updates[key]) << key;
    }
  }
}

TEST_F(DeviceCacheThreadsTest, HundredsOfKeysWithALineEach) {
  Play(2000, 500, 600, ClockRule::kCount);
}
TEST_F(DeviceCacheThreadsTest, HundredsOfKeysInFewerLines) {
  Play(200, 500, 600, ClockRule::kCount);
}
TEST_F(DeviceCacheThreadsTest, StepsOverlap) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    for (uint64_t seed = 0; seed < 2; ++seed) {
      SCOPED_TRACE(seed);
      testing::Schedule<testing::DeviceSide> schedule(seed, clock, false, false);
      schedule.Run(150);
      schedule.ExpectExactSums();
    }
  }
}
TEST_F(DeviceCacheThreadsTest, FewKeysByEveryClock) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    Play(4, 10, 20, clock);
  }
}

}  // namespace
}  // namespace het_tf
