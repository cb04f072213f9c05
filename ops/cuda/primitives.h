// Sort, scan and select of whole arrays: CUB's, and stand-ins for the host build. As with CUB, a
// call without scratch says how much it needs.

#ifndef HET_TF_OPS_CUDA_PRIMITIVES_H_
#define HET_TF_OPS_CUDA_PRIMITIVES_H_

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#include <thrust/iterator/counting_iterator.h>

#include <cub/cub.cuh>
#else
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>
#endif

#include "ops/cuda/device.h"

namespace het_tf {
namespace cuda {

// Bits that tell the numbers below n apart, at least 1.
inline int BitsBelow(int64_t n) {
  int bits = 1;
  while (bits < 31 && (int64_t{1} << bits) < n) ++bits;
  return bits;
}

// Sorts by keys in [0, 2^bits), equal ones in order. keys, values, their outputs: (n), all apart.
inline int SortPairs(void* scratch, size_t* scratch_bytes, const int32_t* keys, int32_t* keys_out,
                     const int32_t* values, int32_t* values_out, int64_t n, int bits,
                     Stream stream) {
#ifdef __CUDACC__
  return cub::DeviceRadixSort::SortPairs(scratch, *scratch_bytes, keys, keys_out, values,
                                         values_out, n, 0, bits, ToCuda(stream));
#else
  *scratch_bytes = 1;
  if (scratch == nullptr) return 0;
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  const int32_t mask = static_cast<int32_t>((int64_t{1} << bits) - 1);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return (keys[a] & mask) < (keys[b] & mask); });
  for (int64_t i = 0; i < n; ++i) {
    keys_out[i] = keys[order[i]];
    values_out[i] = values[order[i]];
  }
  (void)stream;
  return 0;
#endif
}

// sums[i]: of x[0] to x[i - 1]. Both: (n). (CUB's inclusive one spills registers on sm_90.)
inline int ExclusiveSum(void* scratch, size_t* scratch_bytes, const int32_t* x, int32_t* sums,
                        int64_t n, Stream stream) {
#ifdef __CUDACC__
  return cub::DeviceScan::ExclusiveSum(scratch, *scratch_bytes, x, sums, n, ToCuda(stream));
#else
  *scratch_bytes = 1;
  if (scratch != nullptr) std::exclusive_scan(x, x + n, sums, 0);
  (void)stream;
  return 0;
#endif
}

// The i in [0, n) with flags[i] != 0, in order. flags: (n), selected: (n), num_selected: (1).
inline int SelectIndices(void* scratch, size_t* scratch_bytes, const uint8_t* flags,
                         int32_t* selected, int32_t* num_selected, int64_t n, Stream stream) {
  if (n == 0 && scratch != nullptr) return Fill(0, sizeof(int32_t), num_selected, stream);
#ifdef __CUDACC__
  return cub::DeviceSelect::Flagged(scratch, *scratch_bytes, thrust::counting_iterator<int32_t>(0),
                                    flags, selected, num_selected, n, ToCuda(stream));
#else
  *scratch_bytes = 1;
  if (scratch == nullptr) return 0;
  *num_selected = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (flags[i] != 0) selected[(*num_selected)++] = static_cast<int32_t>(i);
  }
  (void)stream;
  return 0;
#endif
}

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_PRIMITIVES_H_
