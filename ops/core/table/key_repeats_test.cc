#include "ops/core/table/key_repeats.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;

// The keys found to come twice, and through how many shares.
std::vector<int64_t> Repeats(const std::vector<int64_t>& keys, int64_t keys_a_share,
                             int* num_shares = nullptr) {
  std::vector<int64_t> found;
  KeyRepeats repeats(keys.size(), keys_a_share);
  int shares = 0;
  for (; !repeats.done(); repeats.NextShare(), ++shares) {
    for (const int64_t key : keys) repeats.Add(key, HashKey(key));
    if (const auto key = repeats.Forget(SerialFor)) found.push_back(*key);
  }
  if (num_shares != nullptr) *num_shares = shares;
  return found;
}

TEST(KeyRepeatsTest, NoKeysAndOneHaveNone) {
  EXPECT_TRUE(Repeats({}, 10).empty());
  EXPECT_TRUE(Repeats({0}, 10).empty());
  EXPECT_EQ(Repeats({0, 0}, 10), std::vector<int64_t>{0});
}

TEST(KeyRepeatsTest, FindsOneAmongManyInAnyNumberOfShares) {
  constexpr int64_t kLow = std::numeric_limits<int64_t>::min();
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 20000; ++i) keys.push_back(i % 2 == 0 ? i << 40 : kLow + i);
  Random random(1);
  for (const int64_t keys_a_share : {1000, 20000, 1 << 20}) {
    int num_shares = 0;
    EXPECT_TRUE(Repeats(keys, keys_a_share, &num_shares).empty());
    EXPECT_EQ(num_shares, 1 + 20000 / keys_a_share);
    for (int i = 0; i < 20; ++i) {
      std::vector<int64_t> changed = keys;
      const int64_t from = Below(&random, 20000), to = Below(&random, 20000);
      if (from == to) continue;
      changed[to] = changed[from];
      EXPECT_EQ(Repeats(changed, keys_a_share), std::vector<int64_t>{keys[from]});
    }
  }
}

TEST(KeyRepeatsTest, WhatWasForgottenIsNoRepeat) {
  KeyRepeats repeats(10);
  repeats.Add(3, HashKey(3));
  EXPECT_FALSE(repeats.Forget(SerialFor).has_value());
  repeats.Add(3, HashKey(3));
  EXPECT_FALSE(repeats.Forget(SerialFor).has_value());
}

TEST(KeyRepeatsTest, BucketsAreSortedAtTheSameTime) {
  KeyRepeats repeats(100000);
  for (int64_t key = 0; key < 100000; ++key) repeats.Add(key, HashKey(key));
  repeats.Add(77, HashKey(77));
  EXPECT_EQ(repeats.Forget(testing::ThreadedFor), 77);
}

}  // namespace
}  // namespace het_tf
