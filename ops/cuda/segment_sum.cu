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

// The gradient of the id at a place: its own, or what it has of its bag's, as the host has it
// (ops/core/pooling.h).
struct OfIds {
  const float* gradients;  // (n, dim)
  int32_t dim;

  HET_DEVICE float operator()(int32_t place, int c) const {
    return gradients[int64_t{place} * dim + c];
  }
};
struct OfSums {
  const int32_t* bag_of;
  const float* scales;
  const float* weights;
  const float* const* gradients;  // (num_bags), each (dim)

  HET_DEVICE float Factor(int32_t place) const {
    const float scale = scales[bag_of[place]];
    return weights == nullptr ? scale : weights[place] * scale;
  }
  HET_DEVICE float operator()(int32_t place, int c) const {
    return Factor(place) * gradients[bag_of[place]][c];
  }
};
// Some of the bags have the combiner max. This is a struct of its own because of its branches: the
// compiler does not move a load past a branch.
struct OfBags {
  OfSums sums;
  HetBags bags;
  const int32_t* key_of;
  int32_t dim;

  HET_DEVICE float operator()(int32_t place, int c) const {
    const int32_t bag = bags.bag_of[place], maximum = bags.max_of[bag];
    if (maximum < 0) return sums(place, c);
    const float factor = sums.Factor(place);
    const int64_t at = int64_t{maximum} * dim + c;
    const float x = factor * bags.kept[int64_t{key_of[place]} * dim + c];
    return x == bags.maxima[at] ? factor * (sums.gradients[bag][c] / bags.counts[at]) : 0.0f;
  }
};

template <typename Gradients>
struct Segments {
  HetBatch batch;
  Gradients gradient;
  int32_t dim;
  float* partials;  // (tiles, 2, dim): of the long segment at a tile's begin, of another at its end

  HET_DEVICE bool IsLong(int32_t u) const { return batch.begin[u + 1] - batch.begin[u] > kTile; }

  // The sum over the occurrences [first, last).
  template <typename LanesType>
  HET_DEVICE void Sum(const LanesType& lanes, int32_t first, int32_t last, float* to) const {
    lanes.Sum(to, dim, first, last,
              [&](int32_t i, int c) { return gradient(batch.positions[i], c); });
  }
};

template <typename Gradients>
struct SumTiles {
  Segments<Gradients> segments;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t tile) const {
    const HetBatch& batch = segments.batch;
    const int32_t dim = segments.dim;
    const auto first = static_cast<int32_t>(tile * kTile);
    const auto n = static_cast<int32_t>(batch.num_ids);
    const int32_t last = n - first < kTile ? n : first + kTile;
    const int32_t at_begin = batch.key_of[batch.positions[first]];
    const int32_t at_end = batch.key_of[batch.positions[last - 1]];
    if (segments.IsLong(at_begin)) {
      const int32_t end = batch.begin[at_begin + 1] < last ? batch.begin[at_begin + 1] : last;
      segments.Sum(lanes, first, end, segments.partials + 2 * tile * dim);
    }
    if (at_end != at_begin && segments.IsLong(at_end)) {
      segments.Sum(lanes, batch.begin[at_end], last, segments.partials + (2 * tile + 1) * dim);
    }
  }
};

template <typename Gradients>
struct SumKeys {
  Segments<Gradients> segments;
  float* sums;
  float* squares;
  int64_t* num_nonfinite;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t item) const {
    const HetBatch& batch = segments.batch;
    const int32_t dim = segments.dim;
    if (item >= *batch.num_keys) return;
    const auto u = static_cast<int32_t>(item);
    const int32_t begin = batch.begin[u], end = batch.begin[u + 1];
    float* out = sums + item * dim;
    if (segments.IsLong(u)) {
      const int32_t first_tile = begin / kTile, last_tile = (end - 1) / kTile;
      const int at_its_end = begin % kTile == 0 ? 0 : 1;
      lanes.Sum(out, dim, first_tile, last_tile + 1, [&](int32_t tile, int c) {
        const int64_t part = 2 * int64_t{tile} + (tile == first_tile ? at_its_end : 0);
        return segments.partials[part * dim + c];
      });
    } else {
      segments.Sum(lanes, begin, end, out);
    }
    const float square = lanes.SumOfSquares(out, dim);
    lanes.Once([&] {
      squares[u] = square;
      if (!(square <= std::numeric_limits<float>::max())) AtomicAdd(num_nonfinite, 1);
    });
  }
};

template <typename Gradients>
int Sum(const HetBatch& batch, const Gradients& gradient, int32_t dim, float* sums, float* squares,
        int64_t* num_nonfinite, void* memory, Stream stream) {
  Scratch scratch(memory);
  const int64_t n = batch.num_ids;
  const Segments<Gradients> segments = {batch, gradient, dim,
                                        scratch.Take<float>(Tiles(n) * 2 * dim)};
  const SumTiles<Gradients> tiles = {segments};
  const SumKeys<Gradients> keys = {segments, sums, squares, num_nonfinite};
  HET_CUDA_RETURN_IF_ERROR(Fill(0, sizeof(int64_t), num_nonfinite, stream));
  if (dim <= 16) {
    HET_CUDA_RETURN_IF_ERROR(LaunchLanes<16>(tiles, Tiles(n), stream));
    return LaunchLanes<16>(keys, n, stream);
  }
  HET_CUDA_RETURN_IF_ERROR(LaunchLanes<32>(tiles, Tiles(n), stream));
  return LaunchLanes<32>(keys, n, stream);
}

}  // namespace

extern "C" {

size_t het_segment_sum_scratch_bytes(int64_t n, int32_t dim) {
  Scratch scratch;
  scratch.Take<float>(Tiles(n) * 2 * dim);
  return scratch.bytes();
}

int het_segment_sum(const HetBatch* batch, const float* gradients, int32_t dim, float* sums,
                    float* squares, int64_t* num_nonfinite, void* scratch, HetStream stream) {
  return Sum(*batch, OfIds{gradients, dim}, dim, sums, squares, num_nonfinite, scratch, stream);
}

int het_segment_sum_pooled(const HetBatch* batch, const HetBags* bags,
                           const float* const* gradients, int32_t dim, float* sums, float* squares,
                           int64_t* num_nonfinite, void* scratch, HetStream stream) {
  const OfSums of_sums = {bags->bag_of, bags->scales, bags->weights, gradients};
  if (bags->max_of == nullptr) {
    return Sum(*batch, of_sums, dim, sums, squares, num_nonfinite, scratch, stream);
  }
  return Sum(*batch, OfBags{of_sums, *bags, batch->key_of, dim}, dim, sums, squares, num_nonfinite,
             scratch, stream);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
