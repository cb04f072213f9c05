// The verbs of a batch, beside what the host makes of the same ids.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ops/core/testing.h"
#include "ops/core/unique_ids.h"
#include "ops/cuda/het_cuda.h"
#include "ops/cuda/testing.h"

namespace het_tf {
namespace {

using testing::Batch;
using testing::Below;
using testing::DeviceArray;
using testing::kStream;
using testing::Random;
using Ids = std::vector<int64_t>;
using Floats = std::vector<float>;

struct Shape {
  std::string name;
  Ids ids;
};

Ids RandomIds(int64_t n, int64_t keys, uint64_t seed) {
  Random random(seed);
  Ids ids(n);
  // Half of them one of seven, so that there are long segments beside short ones.
  for (int64_t& id : ids) id = Below(&random, random() % 2 ? 7 : keys) * 0x10001 - 50;
  return ids;
}

std::vector<Shape> Shapes() {
  Ids same(3000, 5), distinct(1000), descending(300);
  for (size_t i = 0; i < distinct.size(); ++i) distinct[i] = static_cast<int64_t>(i) << 40;
  for (size_t i = 0; i < descending.size(); ++i) descending[i] = -static_cast<int64_t>(i / 3);
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return {{"none", {}},
          {"one", {42}},
          {"extremes", {0, -1, kMost, kLeast, -1, kMost, 0, kLeast}},
          {"tile", Ids(256, 9)},
          {"tile and one", Ids(257, 9)},
          {"same", same},
          {"distinct", distinct},
          {"descending", descending},
          {"few", RandomIds(5000, 20, 1)},
          {"many", RandomIds(20000, 9000, 2)}};
}

TEST(UniqueTest, IsTheHosts) {
  for (const Shape& shape : Shapes()) {
    SCOPED_TRACE(shape.name);
    const UniqueIds host(shape.ids.data(), static_cast<int64_t>(shape.ids.size()));
    const Batch batch(shape.ids);
    ASSERT_EQ(batch.num_keys(), host.num_keys());
    EXPECT_EQ(batch.keys(), host.keys);
    EXPECT_EQ(batch.key_of(), host.key_of);
    EXPECT_EQ(batch.begin(), host.begin);
    EXPECT_EQ(batch.positions(), host.positions);
  }
}

// Of rows in the table, and of visitors.
TEST(GatherTest, CopiesEachIdsRow) {
  for (const int dim : {1, 3, 4, 16, 17, 64, 100, 1024}) {
    for (const int64_t stride : {int64_t{dim}, int64_t{dim} + 1, int64_t{(dim + 7) / 4 * 4}}) {
      SCOPED_TRACE(std::to_string(dim) + " of " + std::to_string(stride));
      const Batch batch(RandomIds(500, 50, dim));
      const int64_t keys = batch.num_keys(), lines = keys / 2, visitor_stride = stride + 4;
      std::vector<int32_t> slots(keys);
      for (int64_t u = 0; u < keys; ++u) slots[u] = static_cast<int32_t>(keys - 1 - u);
      Floats rows(lines * stride), visitors((keys - lines) * visitor_stride);
      for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
      for (size_t i = 0; i < visitors.size(); ++i) visitors[i] = -static_cast<float>(i) - 1;
      const DeviceArray<int32_t> slots_there(slots);
      const DeviceArray<float> rows_there(rows), visitors_there(visitors);
      const DeviceArray<float> out(batch.num_ids() * dim);
      EXPECT_CUDA(het_gather(batch.get(), slots_there.get(), rows_there.get(), stride, lines,
                             visitors_there.get(), visitor_stride, dim, out.get(), kStream));
      const Floats result = out.Read();
      const std::vector<int32_t> key_of = batch.key_of();
      for (int64_t i = 0; i < batch.num_ids(); ++i) {
        const int32_t slot = slots[key_of[i]];
        const float* row = slot < lines ? rows.data() + slot * stride
                                        : visitors.data() + (slot - lines) * visitor_stride;
        ASSERT_TRUE(std::equal(row, row + dim, result.data() + i * dim)) << i;
      }
    }
  }
}

struct Sums {
  Floats sums, squares;
  int64_t num_nonfinite;
};

Sums SegmentSum(const Batch& batch, const Floats& gradients, int dim) {
  const int64_t n = batch.num_ids();
  const DeviceArray<float> gradients_there(gradients), sums(n * dim), squares(n);
  const DeviceArray<int64_t> num_nonfinite(1);
  const DeviceArray<char> scratch(het_segment_sum_scratch_bytes(n, dim));
  EXPECT_CUDA(het_segment_sum(batch.get(), gradients_there.get(), dim, sums.get(), squares.get(),
                              num_nonfinite.get(), scratch.get(), kStream));
  return {sums.Read(batch.num_keys() * dim), squares.Read(batch.num_keys()),
          num_nonfinite.Read()[0]};
}

TEST(SegmentSumTest, IsTheHosts) {
  for (const Shape& shape : Shapes()) {
    for (const int dim : {1, 5, 16, 33, 64}) {
      SCOPED_TRACE(shape.name + " " + std::to_string(dim));
      Random random(dim);
      Floats gradients(shape.ids.size() * dim);
      for (float& g : gradients) g = static_cast<float>(Below(&random, 2001) - 1000);
      const UniqueIds host_ids(shape.ids.data(), static_cast<int64_t>(shape.ids.size()));
      const GradientSums host(host_ids, gradients.data(), dim, SerialFor);
      const Sums device = SegmentSum(Batch(shape.ids), gradients, dim);
      EXPECT_EQ(device.num_nonfinite, 0);
      ASSERT_EQ(static_cast<int64_t>(device.squares.size()), host_ids.num_keys());
      for (int64_t u = 0; u < host_ids.num_keys(); ++u) {
        ASSERT_EQ(Floats(device.sums.data() + u * dim, device.sums.data() + (u + 1) * dim),
                  Floats(host[u].values, host[u].values + dim));
        ASSERT_EQ(device.squares[u], host[u].squares);
      }
    }
  }
}

// Short segments are added in the host's order, so that any floats give its sums; long ones give
// the same sums every time.
TEST(SegmentSumTest, OrderDoesNotChange) {
  constexpr int kDim = 20;
  const Ids ids = RandomIds(20000, 9000, 3);
  Random random(4);
  Floats gradients(ids.size() * kDim);
  for (float& g : gradients) g = static_cast<float>(random() % 1000003) / 7919;
  const UniqueIds host_ids(ids.data(), static_cast<int64_t>(ids.size()));
  const GradientSums host(host_ids, gradients.data(), kDim, SerialFor);
  const Batch batch(ids);
  const Sums device = SegmentSum(batch, gradients, kDim);
  EXPECT_EQ(SegmentSum(batch, gradients, kDim).sums, device.sums);
  int64_t long_ones = 0;
  for (int64_t u = 0; u < host_ids.num_keys(); ++u) {
    const bool is_long = host_ids.begin[u + 1] - host_ids.begin[u] > 256;
    long_ones += is_long;
    for (int c = 0; c < kDim; ++c) {
      const float expected = host[u].values[c];
      ASSERT_NEAR(device.sums[u * kDim + c], expected, is_long ? 1e-3f * expected : 0);
    }
  }
  EXPECT_EQ(long_ones, 7);
}

TEST(SegmentSumTest, NonfiniteKeysAreCounted) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const Ids ids = {1, 2, 3, 4, 2, 3};
  // Key 2: two infinities that cancel to NaN; key 3: a sum whose square overflows; key 4: NaN.
  const Floats gradients = {1, kInf, 1e25f, std::nanf(""), -kInf, 1e25f};
  const Sums sums = SegmentSum(Batch(ids), gradients, 1);
  EXPECT_EQ(sums.num_nonfinite, 3);
  EXPECT_EQ(sums.squares[0], 1);
  for (int u = 1; u < 4; ++u) EXPECT_FALSE(std::isfinite(sums.squares[u])) << u;
}

}  // namespace
}  // namespace het_tf
