#include "ops/core/table/gate.h"

#include <gtest/gtest.h>

#include <map>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;

struct Gates {
  explicit Gates(const std::string& text) {
    EXPECT_OK(Lifetimes::Parse(text, &lifetimes));
    gate = std::make_unique<Gate>(lifetimes, 1, 7, &arena);
  }
  bool Admits(int64_t key, uint32_t updates = 1, uint32_t now = 0) {
    gate->Reserve(1);
    return gate->Admits(HashKey(key), key, updates, now);
  }

  Lifetimes lifetimes;
  Arena arena;
  std::unique_ptr<Gate> gate;
};

TEST(GateTest, CountsExactlyWhateverTheKeys) {
  Gates gates("admit count=4");
  Random random(1);
  std::map<int64_t, uint32_t> counts;
  for (int i = 0; i < 200000; ++i) {
    // Neighbours beyond what floats hold, of both signs.
    const int64_t key = (int64_t{1} << 60) * (Below(&random, 15) - 7) + Below(&random, 3000);
    const auto updates = static_cast<uint32_t>(1 + Below(&random, 3));
    uint32_t& count = counts[key];
    count += updates;
    ASSERT_EQ(gates.Admits(key, updates), count >= 4);
    if (count >= 4) counts.erase(key);
    ASSERT_EQ(gates.gate->num_candidates(), static_cast<int64_t>(counts.size()));
  }
}

TEST(GateTest, AWholePushIsOneDecision) {
  Gates gates("admit count=4");
  EXPECT_TRUE(gates.Admits(1, 4));
  EXPECT_FALSE(gates.Admits(2, 3));
  EXPECT_TRUE(gates.Admits(2, 3));
  EXPECT_TRUE(gates.Admits(3, ~uint32_t{0}));
}

TEST(GateTest, ASweptCandidateBeginsAnew) {
  Gates gates("admit count=2");
  for (int64_t key = 0; key < 1000; ++key) EXPECT_FALSE(gates.Admits(key, 1, key % 2));
  gates.gate->Sweep(0, gates.gate->end(),
                    [](int64_t key, uint32_t updated) { return key < 500 && updated == 0; });
  EXPECT_EQ(gates.gate->num_candidates(), 750);
  const int64_t bytes = gates.gate->bytes();
  for (int64_t key = 0; key < 1000; ++key) {
    EXPECT_EQ(gates.Admits(key), key >= 500 || key % 2 == 1) << key;
  }
  EXPECT_EQ(gates.gate->bytes(), bytes) << "freed slots are used again";
  gates.gate->Forget(HashKey(0), 0);
  EXPECT_FALSE(gates.Admits(0));
}

TEST(GateTest, ASketchOfItsSizeIsNeverLateAndSeldomEarly) {
  Gates gates("admit count=3 sketch=65536");
  Random random(2);
  int early = 0, late = 0, rare = 0;
  gates.Admits(0);
  const int64_t bytes = gates.gate->bytes();
  for (int round = 0; round < 20000; ++round) {
    const int64_t often = 1000000000 + round;
    for (int i = 0; i < 3; ++i) {
      const bool admitted = gates.Admits(often);
      if (i == 2) late += !admitted;
      // Between them keys that come once.
      for (int j = 0; j < 4; ++j, ++rare) early += gates.Admits(static_cast<int64_t>(random()));
    }
  }
  EXPECT_LT(late, 200) << "1 % may be halved in between";
  EXPECT_LT(early, rare / 20);
  EXPECT_EQ(gates.gate->bytes(), bytes);
  EXPECT_EQ(gates.gate->num_candidates(), 0);
}

TEST(GateTest, ChanceIsWhatItSaysAndTheSameInEachRun) {
  Gates gates("admit probability=0.1"), again("admit probability=0.1");
  int ones = 0, tens = 0;
  for (int64_t key = 0; key < 20000; ++key) {
    const bool one = gates.Admits(key), ten = gates.Admits(key, 10);
    EXPECT_EQ(again.Admits(key), one);
    EXPECT_EQ(again.Admits(key, 10), ten);
    ones += one;
    tens += ten;
  }
  EXPECT_NEAR(ones, 2000, 170);   // four standard deviations
  EXPECT_NEAR(tens, 13026, 280);  // 1 - .9^10
  Gates never("admit probability=0");
  for (int64_t key = 0; key < 1000; ++key) EXPECT_FALSE(never.Admits(key, 1000));
}

TEST(GateTest, RangesHaveRulesOfTheirOwn) {
  Gates gates("admit count=3; keys 10 19; admit count=2; keys 20 29; admit count=2 sketch=10000");
  for (const int64_t key : {0, 10, 20, 30}) EXPECT_FALSE(gates.Admits(key));
  EXPECT_TRUE(gates.Admits(10));
  EXPECT_TRUE(gates.Admits(20));
  EXPECT_FALSE(gates.Admits(0));
  EXPECT_TRUE(gates.Admits(0));
  EXPECT_EQ(gates.gate->num_candidates(), 1);
}

}  // namespace
}  // namespace het_tf
