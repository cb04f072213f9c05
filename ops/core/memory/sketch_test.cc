#include "ops/core/memory/sketch.h"

#include <gtest/gtest.h>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;

TEST(SketchTest, CountsUpToItsMost) {
  Sketch sketch(100);
  for (int n = 1; n <= 20; ++n) EXPECT_EQ(sketch.Count(HashKey(7)), std::min(n, Sketch::kMax));
  EXPECT_EQ(sketch.Get(HashKey(8)), 0);
  sketch.AtLeast(HashKey(8), 5);
  EXPECT_EQ(sketch.Get(HashKey(8)), 5);
  sketch.AtLeast(HashKey(8), 3);
  EXPECT_EQ(sketch.Get(HashKey(8)), 5);
}

TEST(SketchTest, CountsHalveOnceInAWindow) {
  constexpr int64_t kCapacity = 1000;
  Sketch sketch(kCapacity);
  for (int64_t key = 0; key < 100; ++key) sketch.AtLeast(HashKey(key), 12);
  for (int i = 0; i < 80; ++i) sketch.Age(kCapacity / 10);
  for (int64_t key = 0; key < 100; ++key) EXPECT_NEAR(sketch.Get(HashKey(key)), 6, 1);
}

TEST(SketchTest, NeverCountsTooFewAndSeldomTooMany) {
  constexpr int64_t kCapacity = 1000;
  Sketch sketch(kCapacity);
  Random random(1);
  std::vector<int> counts(3 * kCapacity);
  for (int64_t n = 0; n < 2 * kCapacity; ++n) {
    const int64_t key = Below(&random, 1 + Below(&random, 3 * kCapacity));
    ++counts[key];
    sketch.Count(HashKey(key));
  }
  int wrong = 0;
  for (int64_t key = 0; key < 3 * kCapacity; ++key) {
    const int count = std::min(counts[key], Sketch::kMax);
    EXPECT_GE(sketch.Get(HashKey(key)), count);
    wrong += sketch.Get(HashKey(key)) != count;
  }
  EXPECT_LE(wrong, 3 * kCapacity / 100);
}

}  // namespace
}  // namespace het_tf
