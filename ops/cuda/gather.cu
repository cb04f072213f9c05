// Each id's row. A thread copies one Part of a row, 16 bytes where all rows allow it.

#include "ops/cuda/device.h"
#include "ops/cuda/het_cuda.h"

namespace het_tf {
namespace cuda {
namespace {

struct alignas(16) Float4 {
  float x[4];
};

bool Aligned(const void* memory) {
  return reinterpret_cast<uintptr_t>(memory) % alignof(Float4) == 0;
}

template <typename Part>
struct Gather {
  const int32_t* key_of;
  const int32_t* slots;
  const Part* rows;
  const Part* visitors;
  int64_t stride, visitor_stride, lines;  // strides in parts
  uint32_t parts;                         // of a row
  Part* out;

  HET_DEVICE void operator()(int64_t item) const {
    // Of items below 2^32 the division is much cheaper.
    const bool small = item >> 32 == 0;
    const int64_t i = small ? static_cast<uint32_t>(item) / parts : item / parts;
    const int64_t part = item - i * parts;
    const int32_t slot = slots[key_of[i]];
    const Part* row =
        slot < lines ? rows + slot * stride : visitors + (slot - lines) * visitor_stride;
    out[item] = row[part];
  }
};

}  // namespace

extern "C" {

int het_gather(const HetBatch* batch, const int32_t* slots, const float* rows, int64_t stride,
               int64_t lines, const float* visitors, int64_t visitor_stride, int32_t dim,
               float* out, HetStream stream) {
  const auto launch = [&](auto part) {
    using Part = decltype(part);
    constexpr int kFloats = sizeof(Part) / sizeof(float);
    const auto parts = static_cast<uint32_t>(dim / kFloats);
    const Gather<Part> kernel = {batch->key_of,
                                 slots,
                                 reinterpret_cast<const Part*>(rows),
                                 reinterpret_cast<const Part*>(visitors),
                                 stride / kFloats,
                                 visitor_stride / kFloats,
                                 lines,
                                 parts,
                                 reinterpret_cast<Part*>(out)};
    return Launch(kernel, batch->num_ids * parts, stream);
  };
  const bool in_fours = dim % 4 == 0 && stride % 4 == 0 && visitor_stride % 4 == 0 &&
                        Aligned(rows) && Aligned(visitors) && Aligned(out);
  return in_fours ? launch(Float4()) : launch(0.0f);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
