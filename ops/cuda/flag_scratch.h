// Scratch of a verb that flags some of n and selects them.

#ifndef HET_TF_OPS_CUDA_FLAG_SCRATCH_H_
#define HET_TF_OPS_CUDA_FLAG_SCRATCH_H_

#include <cstddef>
#include <cstdint>

#include "ops/cuda/primitives.h"
#include "ops/cuda/scratch.h"

namespace het_tf {
namespace cuda {

struct FlagScratch {
  uint8_t* first;   // (n)
  uint8_t* second;  // (n)
  size_t select_bytes = 0;
  void* select;

  FlagScratch(Scratch* scratch, int64_t n) {
    first = scratch->Take<uint8_t>(n);
    second = scratch->Take<uint8_t>(n);
    SelectIndices(nullptr, &select_bytes, first, nullptr, nullptr, n, nullptr);
    select = scratch->Take<char>(select_bytes);
  }
};

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_FLAG_SCRATCH_H_
