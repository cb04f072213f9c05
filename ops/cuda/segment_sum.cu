// The gradient of each key: its occurrences' sum, always added in the same order. Some lanes of a
// warp sum a key. A key that occurs more often than kTile would keep them for long, so its
// occurrences are first summed by tile: kTile neighbours in the list of all keys' occurrences.

#include <cmath>
#include <limits>

#include "ops/cuda/device.h"
#include "ops/cuda/het_cuda.h"
#include "ops/cuda/scratch.h"

namespace het_tf {
namespace cuda {
namespace {

constexpr int32_t kTile = 256;  // also the square root of how often the hottest keys occur

HET_HD int64_t Tiles(int64_t n) { return (n + kTile - 1) / kTile; }

// Has several loads under way at a time: they are of rows far apart.
#ifdef __CUDACC__
#define HET_UNROLL _Pragma("unroll 4")
#else
#define HET_UNROLL
#endif

struct Segments {
  HetBatch batch;
  const float* gradients;
  int32_t dim;
  float* partials;  // (tiles, 2, dim): of the long segment at a tile's begin, of another at its end

  HET_DEVICE bool IsLong(int32_t u) const { return batch.begin[u + 1] - batch.begin[u] > kTile; }

  // The sum of column c over the occurrences [first, last).
  HET_DEVICE float Sum(int32_t first, int32_t last, int c) const {
    float sum = gradients[int64_t{batch.positions[first]} * dim + c];
    HET_UNROLL
    for (int32_t i = first + 1; i < last; ++i) {
      sum += gradients[int64_t{batch.positions[i]} * dim + c];
    }
    return sum;
  }
};

struct SumTiles : Segments {
  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t tile) const {
    const auto first = static_cast<int32_t>(tile * kTile);
    const auto n = static_cast<int32_t>(batch.num_ids);
    const int32_t last = n - first < kTile ? n : first + kTile;
    const int32_t at_begin = batch.key_of[batch.positions[first]];
    const int32_t at_end = batch.key_of[batch.positions[last - 1]];
    if (IsLong(at_begin)) {
      const int32_t end = batch.begin[at_begin + 1] < last ? batch.begin[at_begin + 1] : last;
      lanes.ForEach(dim, [&](int c) { partials[2 * tile * dim + c] = Sum(first, end, c); });
    }
    if (at_end != at_begin && IsLong(at_end)) {
      lanes.ForEach(dim, [&](int c) {
        partials[(2 * tile + 1) * dim + c] = Sum(batch.begin[at_end], last, c);
      });
    }
  }
};

struct SumKeys : Segments {
  float* sums;
  float* squares;
  int64_t* num_nonfinite;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t item) const {
    if (item >= *batch.num_keys) return;
    const auto u = static_cast<int32_t>(item);
    const int32_t begin = batch.begin[u], end = batch.begin[u + 1];
    float* out = sums + item * dim;
    if (IsLong(u)) {
      const int64_t first_tile = begin / kTile, last_tile = (end - 1) / kTile;
      const int64_t at = 2 * first_tile + (begin % kTile == 0 ? 0 : 1);
      lanes.ForEach(dim, [&](int c) {
        float sum = partials[at * dim + c];
        HET_UNROLL
        for (int64_t tile = first_tile + 1; tile <= last_tile; ++tile) {
          sum += partials[2 * tile * dim + c];
        }
        out[c] = sum;
      });
    } else {
      lanes.ForEach(dim, [&](int c) { out[c] = Sum(begin, end, c); });
    }
    const float square = lanes.SumOfSquares(out, dim);
    lanes.Once([&] {
      squares[u] = square;
      if (!(square <= std::numeric_limits<float>::max())) AtomicAdd(num_nonfinite, 1);
    });
  }
};

}  // namespace

extern "C" {

size_t het_segment_sum_scratch_bytes(int64_t n, int32_t dim) {
  Scratch scratch;
  scratch.Take<float>(Tiles(n) * 2 * dim);
  return scratch.bytes();
}

int het_segment_sum(const HetBatch* batch, const float* gradients, int32_t dim, float* sums,
                    float* squares, int64_t* num_nonfinite, void* memory, HetStream stream) {
  Scratch scratch(memory);
  const int64_t n = batch->num_ids;
  const Segments segments = {*batch, gradients, dim, scratch.Take<float>(Tiles(n) * 2 * dim)};
  const SumTiles tiles = {segments};
  const SumKeys keys = {segments, sums, squares, num_nonfinite};
  HET_CUDA_RETURN_IF_ERROR(Fill(0, sizeof(int64_t), num_nonfinite, stream));
  if (dim <= 16) {
    HET_CUDA_RETURN_IF_ERROR(LaunchLanes<16>(tiles, Tiles(n), stream));
    return LaunchLanes<16>(keys, n, stream);
  }
  HET_CUDA_RETURN_IF_ERROR(LaunchLanes<32>(tiles, Tiles(n), stream));
  return LaunchLanes<32>(keys, n, stream);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
