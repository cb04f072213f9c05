// Each bag's rows, summed and scaled. Some lanes of a warp pool a bag.

#include "ops/cuda/device.h"
#include "ops/cuda/het_cuda.h"

namespace het_tf {
namespace cuda {
namespace {

struct Pool {
  HetBags bags;
  const int32_t* key_of;
  const int32_t* slots;
  const float* rows;
  const float* visitors;
  int64_t stride, visitor_stride, lines;
  int32_t dim;
  float* const* out;

  HET_DEVICE const float* RowOf(int32_t id) const {
    const int32_t slot = slots[key_of[id]];
    return slot < lines ? rows + slot * stride : visitors + (slot - lines) * visitor_stride;
  }

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t bag) const {
    const int32_t begin = bags.begin[bag], end = bags.begin[bag + 1];
    const float scale = bags.scales[bag];
    float* to = out[bag];
    lanes.ForEach(dim, [&](int c) {
      float sum = begin == end ? 0.0f : RowOf(begin)[c];
      for (int32_t i = begin + 1; i < end; ++i) sum += RowOf(i)[c];
      to[c] = sum * scale;
    });
  }
};

}  // namespace

extern "C" {

int het_pool(const HetBatch* batch, const HetBags* bags, const int32_t* slots, const float* rows,
             int64_t stride, int64_t lines, const float* visitors, int64_t visitor_stride,
             int32_t dim, float* const* out, HetStream stream) {
  const Pool pool = {*bags,  batch->key_of,  slots, rows, visitors,
                     stride, visitor_stride, lines, dim,  out};
  return dim <= 16 ? LaunchLanes<16>(pool, bags->num_bags, stream)
                   : LaunchLanes<32>(pool, bags->num_bags, stream);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
