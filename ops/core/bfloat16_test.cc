// Rows and messages in bfloat16: what rounding takes from one update it gives to another.

#include "ops/core/bfloat16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/row/row_format.h"

namespace het_tf {
namespace {

using testing::Cluster;
using testing::Floats;
using testing::Ids;
using testing::MakeTable;
using testing::PlainConfig;
using testing::Random;
using testing::SetStaleness;

float Rounded(float x, uint64_t number, int place = 0) {
  Floats row(place + 1, x);
  std::vector<uint16_t> halves(row.size());
  RoundStochastically(row.data(), place + 1, number, halves.data());
  return FromBfloat16(halves[place]);
}

TEST(Bfloat16Test, RoundedStochasticallyTheMeanIsWhatItWas) {
  constexpr int kTimes = 20000;
  for (const float x : {1.0f, 1.001f, -1.001f, 1.0039f, 0.3333f, -1e-20f, 3.14159e10f, 1.2e-38f,
                        1e-42f, 0.0f, -0.0f}) {
    for (const int place : {0, 3, 4, 9}) {
      double sum = 0;
      float low = INFINITY, high = -INFINITY;
      for (int n = 0; n < kTimes; ++n) {
        const float rounded = Rounded(x, HashKey(n), place);
        sum += rounded;
        low = std::min(low, rounded);
        high = std::max(high, rounded);
      }
      SCOPED_TRACE(::testing::Message() << x << " at " << place);
      EXPECT_LE(low, x);
      EXPECT_GE(high, x);
      const double gap = double{high} - low;
      EXPECT_LE(gap, std::max(std::fabs(x) / 128.0, 1e-40)) << "neighbours";
      // Six standard deviations, of at most half a gap each.
      EXPECT_NEAR(sum / kTimes, x, 6 * gap / 2 / std::sqrt(kTimes));
      if (FromBfloat16(ToBfloat16(x)) == x) {
        EXPECT_EQ(gap, 0);
      }
    }
  }
}

TEST(Bfloat16Test, ColumnsAndNumbersAreRoundedApart) {
  constexpr int kColumns = 64, kNumbers = 4000;
  // Of pairs of columns: up and up, of a number between two of which it is in the middle.
  std::vector<int> ups(kColumns), both(kColumns);
  for (int n = 0; n < kNumbers; ++n) {
    const Floats row(kColumns, 1.00390625f);
    std::vector<uint16_t> halves(kColumns);
    RoundStochastically(row.data(), kColumns, n, halves.data());
    for (int i = 0; i < kColumns; ++i) {
      const bool up = FromBfloat16(halves[i]) > 1.00390625f;
      ups[i] += up;
      both[i] += up && FromBfloat16(halves[(i + 1) % kColumns]) > 1.00390625f;
    }
  }
  for (int i = 0; i < kColumns; ++i) {
    EXPECT_NEAR(ups[i], kNumbers / 2, 6 * std::sqrt(kNumbers / 4)) << i;
    EXPECT_NEAR(both[i], kNumbers / 4, 6 * std::sqrt(kNumbers * 3 / 16)) << i;
  }
}

TEST(Bfloat16Test, TheLargestFloatStaysFinite) {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const float x : {kMax, -kMax}) {
    for (int n = 0; n < 100; ++n) EXPECT_TRUE(std::isfinite(Rounded(x, n)));
    uint16_t half;
    RoundToNearest(&x, 1, &half);
    EXPECT_NEAR(FromBfloat16(half), x, kMax / 128);
  }
}

RowConfig HalfRows(int dim, const char* optimizer, const char* initializer) {
  RowConfig config = {dim, optimizer, initializer};
  config.half = true;
  return config;
}

TEST(Bfloat16RowsTest, TakeTheMemoryOfTheirValues) {
  const auto bytes_of = [](RowConfig config) {
    const auto table = MakeTable(config);
    Ids keys(10000);
    std::iota(keys.begin(), keys.end(), 0);
    const Floats gradients(keys.size() * config.dim, 1);
    EXPECT_OK(testing::ApplyRows(table.get(), keys, gradients));
    return static_cast<double>(table->memory_bytes()) / static_cast<double>(keys.size());
  };
  RowConfig config = HalfRows(64, "row_wise_adagrad", "zeros");
  const double half = bytes_of(config);
  config.half = false;
  const double whole = bytes_of(config);
  EXPECT_LT(half, 0.65 * whole) << "key, clock, accumulator and index stay what they were";
}

// An update of a sixteenth of what the value's neighbours are apart. Rounded to the nearest, it
// would be lost each time.
TEST(Bfloat16RowsTest, SmallUpdatesCountOnAverage) {
  constexpr int kKeys = 500, kDim = 3, kUpdates = 400;
  const auto table = MakeTable(HalfRows(kDim, "sgd", "constant value=1"));
  Ids keys(kKeys);
  std::iota(keys.begin(), keys.end(), -7);
  const float step = std::ldexp(1.0f, -12);
  const Floats gradients(kKeys * kDim, step);
  for (int t = 0; t < kUpdates; ++t) {
    ASSERT_OK(testing::ApplyRows(table.get(), keys, gradients, 1));
  }
  const Floats values = testing::LookupRows(*table, keys);
  double sum = 0;
  bool differ = false;
  for (const float value : values) {
    sum += value;
    differ |= value != values[0];
    EXPECT_EQ(FromBfloat16(ToBfloat16(value)), value);
  }
  EXPECT_TRUE(differ);
  // Each update adds a variance of at most step * (gap - step); values are below 1, where the gap
  // is 2^-8.
  const double deviation = std::sqrt(kUpdates * step * 0x1p-8 / (kKeys * kDim));
  EXPECT_NEAR(sum / (kKeys * kDim), 1 - kUpdates * step, 6 * deviation);
  const auto again = MakeTable(HalfRows(kDim, "sgd", "constant value=1"));
  for (int t = 0; t < kUpdates; ++t) {
    ASSERT_OK(testing::ApplyRows(again.get(), keys, gradients, 1));
  }
  EXPECT_EQ(testing::LookupRows(*again, keys), values) << "another run rounds alike";
}

// The mean of what rows of a bfloat16 table are after updates, and its deviation as they differ.
struct Spread {
  double mean = 0, deviation = 0;
};

Spread SpreadOf(const Floats& values) {
  Spread spread;
  const auto n = static_cast<double>(values.size());
  for (const float value : values) spread.mean += value / n;
  double squares = 0;
  for (const float value : values) squares += (value - spread.mean) * (value - spread.mean);
  spread.deviation = std::sqrt(squares / (n - 1) / n);
  return spread;
}

// FTRL's value follows from its slots, which are floats, and the slots from the value as it was
// rounded: in z that adds up, each time as likely up as down.
TEST(Bfloat16RowsTest, FtrlsWeightsAreRightOnAverage) {
  constexpr int kKeys = 2000, kDim = 2, kUpdates = 100;
  for (const char* optimizer : {"ftrl", "ftrl l1=0.02 l2=0.01 l2_shrinkage=0.01 beta=0.1"}) {
    SCOPED_TRACE(optimizer);
    Ids keys(kKeys);
    std::iota(keys.begin(), keys.end(), 0);
    Floats values[2];
    for (const bool half : {false, true}) {
      RowConfig config = HalfRows(kDim, optimizer, "zeros");
      config.half = half;
      const auto table = MakeTable(config);
      for (int t = 0; t < kUpdates; ++t) {
        // Mostly to one side, and with turns, so that n grows while z does not.
        const Floats gradients(kKeys * kDim, t % 3 == 0 ? -0.07f : 0.05f);
        ASSERT_OK(testing::ApplyRows(table.get(), keys, gradients, 0.1f));
      }
      values[half] = testing::LookupRows(*table, keys);
    }
    const Spread rounded = SpreadOf(values[true]);
    EXPECT_GT(rounded.deviation, 0) << "nothing was rounded at random";
    EXPECT_GT(std::fabs(values[false][0]), 100 * rounded.deviation) << "too few to show anything";
    EXPECT_NEAR(rounded.mean, values[false][0], 6 * rounded.deviation);
  }
}

TEST(Bfloat16RowsTest, SlotsAreFloatsAndRowsComeBackAsTheyWere) {
  const auto table = MakeTable(HalfRows(3, "adagrad", "zeros"));
  ASSERT_OK(testing::ApplyRows(table.get(), {5, 6}, {1, 2, 3, 0.1f, 0.2f, 0.3f}));
  const auto rows = testing::Snapshot(*table);
  EXPECT_NEAR(rows.at(6).slots[2], 0.1f + 0.09f, 1e-7);
  const auto other = MakeTable(HalfRows(3, "adagrad", "zeros"));
  for (const auto& [key, row] : rows) {
    ASSERT_OK(other->Import({&key, row.value.data(), row.slots.data(), &row.clock}, 1));
  }
  EXPECT_EQ(testing::Snapshot(*other), rows);
}

// Gradients as small as in a training that has converged. What a worker reads is what the shard
// has, and its own updates since: roundings that it has not heard of do not add up.
TEST(Bfloat16RowsTest, AWorkerHearsWhatItsUpdatesWereRoundedTo) {
  constexpr int kKeys = 50;
  for (const int64_t staleness : {int64_t{0}, int64_t{1}, int64_t{5}}) {
    for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
      SCOPED_TRACE(StrCat("staleness ", staleness, ", clock ", static_cast<int>(clock)));
      CacheConfig config = PlainConfig(2);
      config.rows.initializer = "constant value=1";
      config.rows.half = true;
      config.rows.clock = clock;
      SetStaleness(&config, staleness);
      config.read_bound = kUnbounded;
      Cluster cluster(config);
      Ids keys(kKeys);
      std::iota(keys.begin(), keys.end(), 0);
      Random random(1);
      for (int step = 0; step < 400; ++step) {
        Floats gradients(kKeys);
        for (float& g : gradients) g = testing::Chance(&random, 0.5) ? 0.002f : -0.002f;
        cluster.Step(0, keys, gradients);
        if (staleness == 0) cluster.Flush(0, false);
      }
      cluster.Flush(0);
      const Floats seen = cluster.Read(0, keys);
      const auto rows = cluster.Rows();
      for (int64_t k = 0; k < kKeys; ++k) EXPECT_EQ(seen[k], rows.at(k).value[0]) << k;
    }
  }
}

// Whatever is rounded on the way up is right on average: gradients, and what several of them did.
TEST(Bfloat16WireTest, WhatIsPushedCountsOnAverage) {
  constexpr int kKeys = 2000, kUpdates = 60;
  constexpr float kStep = 0.0010023f;  // between two of bfloat16
  for (const int64_t staleness : {int64_t{0}, int64_t{7}}) {
    CacheConfig config = PlainConfig();
    config.half = true;
    config.capacity = kKeys;
    SetStaleness(&config, staleness);
    Cluster cluster(config);
    Ids keys(kKeys);
    std::iota(keys.begin(), keys.end(), 0);
    for (int t = 0; t < kUpdates; ++t) {
      cluster.Step(0, keys, Floats(kKeys, kStep));
      if (staleness == 0) cluster.Flush(0, false);
    }
    cluster.Flush(0);
    double sum = 0, furthest = 0;
    for (const auto& [key, row] : cluster.Rows()) {
      sum += row.value[0];
      furthest = std::max(furthest, std::fabs(row.value[0] + double{kUpdates} * kStep));
    }
    const double expected = -double{kUpdates} * kStep;
    EXPECT_GT(furthest, 0) << "nothing was rounded";
    EXPECT_LT(furthest, 0.01 * -expected);
    const double gap_of_all = kUpdates * kStep / 128;
    EXPECT_NEAR(sum / kKeys, expected, 6 * gap_of_all / 2 / std::sqrt(kKeys));
    const Floats seen = cluster.Read(0, keys);
    for (const float value : seen) EXPECT_NEAR(value, expected, 0.01 * -expected);
  }
}

// Of FTRL's rows gradients travel in bfloat16, or the sums of their squares, from which the shard
// makes the value.
TEST(Bfloat16WireTest, FtrlsWeightsAreRightOnAverage) {
  constexpr int kKeys = 2000, kUpdates = 40;
  Ids keys(kKeys);
  std::iota(keys.begin(), keys.end(), 0);
  for (const int64_t staleness : {int64_t{0}, int64_t{7}}) {
    SCOPED_TRACE(staleness);
    Floats values[2];
    for (const bool half : {false, true}) {
      CacheConfig config = PlainConfig();
      config.rows.optimizer = "ftrl l1=0.02 l2=0.01";
      config.half = half;
      config.capacity = kKeys;
      SetStaleness(&config, staleness);
      Cluster cluster(config);
      for (int t = 0; t < kUpdates; ++t) {
        cluster.Step(0, keys, Floats(kKeys, t % 3 == 0 ? -0.07f : 0.0501f));
        if (staleness == 0) cluster.Flush(0, false);
      }
      cluster.Flush(0);
      for (const auto& [key, row] : cluster.Rows()) values[half].push_back(row.value[0]);
    }
    const Spread rounded = SpreadOf(values[true]);
    EXPECT_GT(rounded.deviation, 0) << "nothing was rounded at random";
    EXPECT_GT(std::fabs(values[false][0]), 100 * rounded.deviation) << "too few to show anything";
    // A rounded gradient's square is larger on average, by up to a 2^-16th.
    EXPECT_NEAR(rounded.mean, values[false][0],
                6 * rounded.deviation + 0x1p-16 * std::fabs(values[false][0]));
  }
}

TEST(Bfloat16WireTest, MessagesAreShorter) {
  const auto bytes_of = [](bool half, CacheCounter counter) {
    CacheConfig config = PlainConfig();
    config.rows.dim = 64;
    config.half = half;
    config.capacity = 0;
    Cluster cluster(config);
    Ids keys(100);
    std::iota(keys.begin(), keys.end(), 0);
    for (int t = 0; t < 3; ++t) cluster.Step(0, keys, Floats(64 * keys.size(), 1));
    cluster.Flush(0);
    return static_cast<double>(cluster.count(counter));
  };
  for (const auto counter : {CacheCounter::kBytesUpPush, CacheCounter::kBytesDown}) {
    EXPECT_LT(bytes_of(true, counter), 0.58 * bytes_of(false, counter));
  }
}

}  // namespace
}  // namespace het_tf
