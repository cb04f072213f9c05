#include "ops/core/unique_ids.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;
using testing::ThreadedFor;

UniqueIds MakeUniqueIds(const std::vector<int64_t>& ids) {
  return UniqueIds(ids.data(), ids.size());
}

std::vector<int32_t> PositionsOf(const UniqueIds& unique, int64_t u) {
  return {unique.positions.begin() + unique.begin[u],
          unique.positions.begin() + unique.begin[u + 1]};
}

TEST(UniqueIdsTest, KeysKeepTheOrderOfTheirFirstOccurrence) {
  const UniqueIds unique = MakeUniqueIds({5, -3, 5, 9, -3, 5});
  EXPECT_EQ(unique.keys, (std::vector<int64_t>{5, -3, 9}));
  EXPECT_EQ(PositionsOf(unique, 0), (std::vector<int32_t>{0, 2, 5}));
  EXPECT_EQ(PositionsOf(unique, 1), (std::vector<int32_t>{1, 4}));
  EXPECT_EQ(PositionsOf(unique, 2), (std::vector<int32_t>{3}));
  EXPECT_EQ(unique.num_ids(), 6);
  EXPECT_EQ(unique.num_keys(), 3);
}

TEST(UniqueIdsTest, MatchesAMapOverRandomBatches) {
  Random random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> ids(Below(&random, 500));
    const int64_t range = 1 + Below(&random, 1000);
    for (int64_t& id : ids) id = Below(&random, range) - range / 2;
    std::vector<int64_t> order;
    std::map<int64_t, std::vector<int32_t>> positions;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (positions[ids[i]].empty()) order.push_back(ids[i]);
      positions[ids[i]].push_back(i);
    }
    const UniqueIds unique = MakeUniqueIds(ids);
    ASSERT_EQ(unique.keys, order);
    for (int64_t u = 0; u < unique.num_keys(); ++u) {
      EXPECT_EQ(PositionsOf(unique, u), positions[order[u]]);
      EXPECT_EQ(unique.hashes[u], HashKey(order[u]));
      for (const int32_t i : PositionsOf(unique, u)) EXPECT_EQ(unique.key_of[i], u);
    }
  }
}

TEST(UniqueIdsTest, KeysThatNarrowerTypesWouldMergeStayDistinct) {
  std::vector<int64_t> ids;
  for (const int64_t edge :
       {int64_t{1} << 24, int64_t{1} << 31, int64_t{1} << 32, int64_t{1} << 53, int64_t{1} << 62}) {
    for (int64_t offset = -2; offset <= 2; ++offset) {
      ids.push_back(edge + offset);
      ids.push_back(-(edge + offset));
    }
  }
  for (const int64_t id : {int64_t{0}, int64_t{1}, int64_t{-1}}) ids.push_back(id);
  for (int64_t offset = 0; offset < 3; ++offset) {
    ids.push_back(std::numeric_limits<int64_t>::max() - offset);
    ids.push_back(std::numeric_limits<int64_t>::min() + offset);
  }
  EXPECT_EQ(MakeUniqueIds(ids).keys, ids);
}

TEST(UniqueIdsTest, EmptyBatch) {
  const UniqueIds unique(nullptr, 0);
  EXPECT_EQ(unique.num_ids(), 0);
  EXPECT_EQ(unique.num_keys(), 0);
  EXPECT_EQ(unique.begin, std::vector<int32_t>{0});
  EXPECT_EQ(GradientSums(unique, nullptr, 4, SerialFor).num_nonfinite(), 0);
}

TEST(UniqueIdsTest, OneKeyManyTimes) {
  const UniqueIds unique = MakeUniqueIds(std::vector<int64_t>(200, 42));
  ASSERT_EQ(unique.num_keys(), 1);
  EXPECT_EQ(PositionsOf(unique, 0).size(), 200u);
  const std::vector<float> gradients(200 * 3, 0.5f);
  const GradientSums sums(unique, gradients.data(), 3, SerialFor);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(sums[0].values[i], 100.0f);
}

TEST(UniqueIdsTest, GatherCopiesToEveryPlace) {
  const UniqueIds unique = MakeUniqueIds({1, 2, 1, 3});
  const float one[] = {1, 10}, two[] = {2, 20}, three[] = {3, 30};
  const float* rows[] = {one, two, three};
  for (const auto& parallel_for : {ParallelFor(SerialFor), ParallelFor(ThreadedFor)}) {
    std::vector<float> out(8, -1);
    unique.Gather(rows, 2, parallel_for, out.data());
    EXPECT_EQ(out, (std::vector<float>{1, 10, 2, 20, 1, 10, 3, 30}));
  }
}

TEST(GroupsTest, SortsByGroupAndKeepsTheOrderWithin) {
  const std::vector<int> group = {2, 0, 2, 3, 0, 0};
  const Groups groups(group.size(), 4, [&](int64_t i) { return group[i]; });
  EXPECT_EQ(groups.order, (std::vector<int32_t>{1, 4, 5, 0, 2, 3}));
  EXPECT_EQ(groups.begin, (std::vector<int32_t>{0, 3, 3, 5, 6}));
  EXPECT_EQ(groups.size(1), 0);
  EXPECT_EQ(groups.size(2), 2);
}

TEST(GradientSumsTest, SumsInTheOrderOfOccurrence) {
  // In any other order the small numbers would not vanish in the large one.
  const UniqueIds unique = MakeUniqueIds({7, 8, 7, 7});
  const std::vector<float> gradients = {1e8f, 3, 1, -1e8f};
  const GradientSums sums(unique, gradients.data(), 1, SerialFor);
  EXPECT_EQ(sums[0].values[0], (1e8f + 1) + -1e8f);
  EXPECT_NE(sums[0].values[0], (1e8f + -1e8f) + 1);
  EXPECT_EQ(sums[1].values[0], 3);
}

TEST(GradientSumsTest, MatchesALoopForEveryWidthAndSplit) {
  Random random(2);
  for (int dim = 1; dim <= 33; ++dim) {
    std::vector<int64_t> ids(100);
    for (int64_t& id : ids) id = Below(&random, 40);
    std::vector<float> gradients(ids.size() * dim);
    for (float& gradient : gradients) gradient = static_cast<float>(Below(&random, 1000)) / 8 - 50;
    std::map<int64_t, std::vector<float>> expected;
    for (size_t i = 0; i < ids.size(); ++i) {
      std::vector<float>& sum = expected[ids[i]];
      sum.resize(dim);
      for (int c = 0; c < dim; ++c) sum[c] += gradients[i * dim + c];
    }
    const UniqueIds unique = MakeUniqueIds(ids);
    for (const auto& parallel_for : {ParallelFor(SerialFor), ParallelFor(ThreadedFor)}) {
      const GradientSums sums(unique, gradients.data(), dim, parallel_for);
      EXPECT_EQ(sums.num_nonfinite(), 0);
      for (int64_t u = 0; u < unique.num_keys(); ++u) {
        EXPECT_EQ(std::vector<float>(sums[u].values, sums[u].values + dim),
                  expected[unique.keys[u]]);
      }
    }
  }
}

TEST(GradientSumsTest, FlagsNonfiniteInEveryColumn) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInf, -kInf}) {
    for (const int dim : {1, 7, 8, 9, 20}) {
      for (int column = 0; column < dim; ++column) {
        const UniqueIds unique = MakeUniqueIds({1, 2, 3, 3});
        std::vector<float> gradients(4 * dim, 1);
        gradients[dim + column] = bad;      // key 2, which occurs once
        gradients[3 * dim + column] = bad;  // key 3, which occurs twice
        const GradientSums sums(unique, gradients.data(), dim, SerialFor);
        EXPECT_EQ(sums.num_nonfinite(), 2);
        EXPECT_TRUE(sums.finite(0));
        EXPECT_FALSE(sums.finite(1));
        EXPECT_FALSE(sums.finite(2));
      }
    }
  }
}

TEST(GradientSumsTest, FlagsFiniteGradientsWhoseSumOrSquareIsNot) {
  constexpr float kMax = std::numeric_limits<float>::max();
  const UniqueIds unique = MakeUniqueIds({1, 1, 2, 3, 3, 4});
  const std::vector<float> gradients = {1e19f, 1e19f, 1.5e19f, kMax, -kMax, 2e19f};
  const GradientSums sums(unique, gradients.data(), 1, SerialFor);
  EXPECT_EQ(sums.num_nonfinite(), 2);
  EXPECT_FALSE(sums.finite(0));
  EXPECT_EQ(sums[1].values[0], 1.5e19f);
  EXPECT_EQ(sums[2].values[0], 0);
  EXPECT_FALSE(sums.finite(3));
}

}  // namespace
}  // namespace het_tf
