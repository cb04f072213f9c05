// What lanes of a warp compute together is what one thread of the host computes, to the last bit.

#include "ops/cuda/lanes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "ops/core/row/lanes.h"
#include "ops/core/testing.h"
#include "ops/cuda/device.h"
#include "ops/cuda/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::DeviceArray;
using testing::kStream;
using testing::Random;

struct Results {
  float squares, squares_at, largest, stored;
  int32_t first, none, least, visited, transformed, summed;
};

// Item i works on the first sizes[i] floats of x.
struct Compute {
  const float* x;
  const int32_t* sizes;
  int32_t* counts;  // (items, 2000)
  float* floats;    // (items, 2000)
  Results* results;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t item) const {
    const int n = sizes[item];
    const float* from = x;
    Results r = {};
    r.squares = lanes.SumOfSquares(from, n);
    r.squares_at = lanes.SumOfSquares(n, [&](int i) { return from[i] * 0.5f; });
    r.largest = lanes.Largest(n, [&](int i) { return from[i]; });
    r.first = lanes.FirstWhere(n, [&](int i) { return i >= n / 2 && from[i] > 0; });
    r.none = lanes.FirstWhere(n, [&](int i) { return from[i] > 1e9f; });
    r.least = lanes.LeastOf(n, [&](int i) { return static_cast<int64_t>(from[i]); });
    int32_t* count = counts + item * 2000;
    lanes.ForEach(n, [&](int i) { count[i] = i; });
    // Reads what other lanes wrote.
    lanes.ForEach(n, [&](int i) { count[1000 + i] = count[n - 1 - i]; });
    lanes.Store(&results[item].stored, r.squares);
    r.stored = results[item].stored;
    r.visited = 0;
    for (int i = 0; i < n; ++i) r.visited += count[1000 + i] == n - 1 - i;
    // A column of `to` reads its own, and what is summed is added in order.
    float* to = floats + item * 2000;
    lanes.Transform(to, n, [&](int i) { return from[i]; });
    lanes.Transform(to, n, [&](int i) { return to[i] * 3; });
    lanes.Sum(to + 1000, n, 2, 13, [&](int32_t j, int i) { return from[i] / j; });
    r.transformed = r.summed = 0;
    for (int i = 0; i < n; ++i) {
      float sum = from[i] / 2;
      for (int32_t j = 3; j < 13; ++j) sum += from[i] / j;
      r.transformed += to[i] == from[i] * 3;
      r.summed += to[1000 + i] == sum;
    }
    lanes.Once([&] { results[item] = r; });
  }
};

template <int kLanes>
void ExpectTheHosts() {
  const std::vector<int32_t> sizes = {1,  2,  5,  7,  8,  9,  15, 16,  17,
                                      24, 31, 32, 33, 47, 64, 65, 100, 1000};
  Random random(1);
  std::vector<float> x(1000);
  for (float& each : x) each = static_cast<float>(Below(&random, 20001) - 10000) / 7;
  const auto items = static_cast<int64_t>(sizes.size());
  const DeviceArray<float> x_there(x);
  const DeviceArray<int32_t> sizes_there(sizes), counts(items * 2000);
  const DeviceArray<Results> results(items);
  const DeviceArray<float> floats(items * 2000);
  const Compute compute = {x_there.get(), sizes_there.get(), counts.get(), floats.get(),
                           results.get()};
  EXPECT_CUDA(cuda::LaunchLanes<kLanes>(compute, items, kStream));
  const std::vector<Results> read = results.Read();
  for (int64_t item = 0; item < items; ++item) {
    const int n = sizes[item];
    SCOPED_TRACE(n);
    const OneLane host;
    EXPECT_EQ(read[item].squares, host.SumOfSquares(x.data(), n));
    EXPECT_EQ(read[item].stored, read[item].squares);
    EXPECT_EQ(read[item].squares_at, host.SumOfSquares(n, [&](int i) { return x[i] * 0.5f; }));
    EXPECT_EQ(read[item].largest, host.Largest(n, [&](int i) { return x[i]; }));
    int first = -1, least = n - 1;
    for (int i = n - 1; i >= 0; --i) {
      if (i >= n / 2 && x[i] > 0) first = i;
      if (static_cast<int64_t>(x[i]) <= static_cast<int64_t>(x[least])) least = i;
    }
    EXPECT_EQ(read[item].first, first);
    EXPECT_EQ(read[item].none, -1);
    EXPECT_EQ(read[item].least, least);
    EXPECT_EQ(read[item].visited, n);
    EXPECT_EQ(read[item].transformed, n);
    EXPECT_EQ(read[item].summed, n);
  }
}

TEST(LanesTest, OfHalfAWarp) { ExpectTheHosts<16>(); }
TEST(LanesTest, OfAWarp) { ExpectTheHosts<32>(); }

}  // namespace
}  // namespace het_tf
