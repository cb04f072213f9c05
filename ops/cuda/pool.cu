// Each bag's rows brought to one. Some lanes of a warp pool a bag.

#include "ops/cuda/device.h"
#include "ops/cuda/het_cuda.h"

namespace het_tf {
namespace cuda {
namespace {

struct Rows {
  const int32_t* slots;
  const float* rows;
  const float* visitors;
  int64_t stride, visitor_stride, lines;

  HET_DEVICE const float* OfKey(int32_t u) const {
    const int32_t slot = slots[u];
    return slot < lines ? rows + slot * stride : visitors + (slot - lines) * visitor_stride;
  }
};

struct Pool {
  HetBags bags;
  const int32_t* key_of;
  Rows rows;
  int32_t dim;
  float* const* out;

  HET_DEVICE float WeightedRow(int32_t id, int c) const {
    const float x = rows.OfKey(key_of[id])[c];
    return bags.weights == nullptr ? x : bags.weights[id] * x;
  }

  HET_DEVICE float Scaled(int64_t bag, int c) const {
    const int32_t begin = bags.begin[bag], end = bags.begin[bag + 1];
    float sum = begin == end ? 0.0f : WeightedRow(begin, c);
    for (int32_t i = begin + 1; i < end; ++i) sum += WeightedRow(i, c);
    return sum * bags.scales[bag];
  }

  HET_DEVICE float Largest(int64_t bag, int c) const {
    const int32_t begin = bags.begin[bag], end = bags.begin[bag + 1];
    float largest = begin == end ? 0.0f : WeightedRow(begin, c);
    float count = largest == largest ? 1.0f : 0.0f;  // NaN stays, and nothing has it
    for (int32_t i = begin + 1; i < end; ++i) {
      const float x = WeightedRow(i, c);
      count = largest < x ? 1.0f : x == largest ? count + 1.0f : count;
      largest = largest < x ? x : largest;
    }
    const int64_t at = int64_t{bags.max_of[bag]} * dim + c;
    bags.maxima[at] = largest;
    bags.counts[at] = count;
    return largest;
  }

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t bag) const {
    const bool is_max = bags.max_of != nullptr && bags.max_of[bag] >= 0;
    float* to = out[bag];
    lanes.ForEach(dim, [&](int c) { to[c] = is_max ? Largest(bag, c) : Scaled(bag, c); });
  }
};

struct Keep {
  const int32_t* num_keys;
  Rows rows;
  int32_t dim;
  float* kept;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t u) const {
    if (u >= *num_keys) return;
    const float* row = rows.OfKey(static_cast<int32_t>(u));
    lanes.Transform(kept + u * dim, dim, [&](int c) { return row[c]; });
  }
};

template <int kLanes>
int Run(const HetBatch& batch, const Pool& pool, Stream stream) {
  HET_CUDA_RETURN_IF_ERROR(LaunchLanes<kLanes>(pool, pool.bags.num_bags, stream));
  if (pool.bags.kept == nullptr) return 0;
  const Keep keep = {batch.num_keys, pool.rows, pool.dim, pool.bags.kept};
  return LaunchLanes<kLanes>(keep, batch.num_ids, stream);
}

}  // namespace

extern "C" {

int het_pool(const HetBatch* batch, const HetBags* bags, const int32_t* slots, const float* rows,
             int64_t stride, int64_t lines, const float* visitors, int64_t visitor_stride,
             int32_t dim, float* const* out, HetStream stream) {
  const Rows all = {slots, rows, visitors, stride, visitor_stride, lines};
  const Pool pool = {*bags, batch->key_of, all, dim, out};
  return dim <= 16 ? Run<16>(*batch, pool, stream) : Run<32>(*batch, pool, stream);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
