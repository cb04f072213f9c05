// The rules of docs/protocol.md with rows in device caches: under the random schedules of both
// caches, and beside the host's.

#include <gtest/gtest.h>

#include <string>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/cache/row_cache_schedule_tests.h"
#include "ops/cuda/device_cache_testing.h"

namespace het_tf {
namespace testing {

INSTANTIATE_TYPED_TEST_SUITE_P(Device, RowCacheScheduleTest, DeviceSide);
INSTANTIATE_TYPED_TEST_SUITE_P(Keeping, RowCacheScheduleTest, KeepingSide);

constexpr int64_t kEachBound[] = {kUnbounded, 0, 1, 2, 5};

// One worker or several, all clock rules: host and device read the same and leave the same table,
// to the last bit.
TEST(DeviceScheduleTest, HostAndDeviceReadTheSame) {
  for (uint64_t seed = 0; seed < uint64_t{30} / kFewer; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    CacheConfig config = PlainConfig(static_cast<int>(1 + Below(&random, 4)));
    config.rows.dim = static_cast<int>(1 + Below(&random, 20));
    config.rows.clock = static_cast<ClockRule>(seed % 3);
    const int64_t scale = config.rows.clock == ClockRule::kDrift ? int64_t{1} << 14 : 1;
    const auto bound = [&] {
      const int64_t each = kEachBound[Below(&random, 5)];
      return each > 0 ? each * scale : each;
    };
    config.read_bound = bound();
    config.write_bound = bound();
    const int num_workers = static_cast<int>(1 + Below(&random, 3));
    const Cluster host(config, num_workers);
    const DeviceCluster device(config, num_workers);
    for (int step = 0; step < 80; ++step) {
      const int w = static_cast<int>(Below(&random, num_workers));
      const Ids ids = RandomIds(&random, 40);
      Floats gradients(ids.size() * config.rows.dim);
      for (float& g : gradients) g = static_cast<float>(Below(&random, 9) - 4);
      ASSERT_EQ(device.Step(w, ids, gradients), host.Step(w, ids, gradients)) << step;
      if (config.write_bound == 0 || Chance(&random, 0.1)) {
        host.Flush(w, false);
        device.Flush(w, false);
      }
    }
    for (int w = 0; w < num_workers; ++w) {
      host.Flush(w, true);
      device.Flush(w, true);
    }
    EXPECT_EQ(device.Rows(), host.Rows());
  }
}

// The same with every optimizer, one worker: what comes of it is what the host makes of it up to
// the last bits (a lone update travels as a gradient here, there as what is shorter).
TEST(DeviceScheduleTest, HostAndDeviceTrainTheSame) {
  for (const char* spec : {"momentum", "adagrad", "row_wise_adagrad", "adam", "row_wise_adam",
                           "rmsprop momentum=0.8 centered=1", "lion", "lamb", "ftrl l1=0.01",
                           "sgd weight_decay=0.1 max_norm=0.5"}) {
    SCOPED_TRACE(spec);
    Random random(1);
    CacheConfig config = PlainConfig(2);
    config.rows = {5, spec, "uniform", 3, ClockRule::kCount, 2};
    config.read_bound = 2;
    config.write_bound = 3;
    const Cluster host(config);
    const DeviceCluster device(config);
    for (int step = 0; step < 60; ++step) {
      const Ids ids = RandomIds(&random, 20);
      Floats gradients(ids.size() * config.rows.dim);
      for (float& g : gradients) g = static_cast<float>(Below(&random, 9) - 4) / 8;
      const Floats expected = host.Step(0, ids, gradients, 0.1f);
      const Floats values = device.Step(0, ids, gradients, 0.1f);
      for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], 1e-5) << step;
    }
    host.Flush(0);
    device.Flush(0);
    const TableRows expected = host.Rows(), rows = device.Rows();
    ASSERT_EQ(rows.size(), expected.size());
    for (const auto& [key, row] : expected) {
      EXPECT_EQ(rows.at(key).clock, row.clock);
      for (size_t i = 0; i < row.value.size(); ++i) {
        EXPECT_NEAR(rows.at(key).value[i], row.value[i], 1e-5);
      }
    }
  }
}

}  // namespace testing
}  // namespace het_tf
