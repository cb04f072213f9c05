// Floats in 16 bits: their upper half.

#ifndef HET_TF_OPS_CORE_BFLOAT16_H_
#define HET_TF_OPS_CORE_BFLOAT16_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/core/memory/hash.h"

namespace het_tf {

// Rounded to the nearest, ties to even. NaN stays NaN.
inline uint16_t ToBfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float FromBfloat16(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// x without what rounding made infinite. x: that of a finite float.
inline uint16_t FiniteBfloat16(uint32_t x) {
  return static_cast<uint16_t>((x & 0x8000) | std::min<uint32_t>(x & 0x7fff, 0x7f7f));
}

// (n) finite floats, each to the nearest. halves: (n)
inline void RoundToNearest(const float* x, int n, uint16_t* halves) {
  for (int i = 0; i < n; ++i) halves[i] = FiniteBfloat16(ToBfloat16(x[i]));
}

// (n) finite floats, each up or down, with a mean of what it was (Gupta et al., ICML 2015, section
// 3): 16 random bits are added to those that are cut off. number: they are a function of it and of
// the place. halves: (n)
inline void RoundStochastically(const float* x, int n, uint64_t number, uint16_t* halves) {
  for (int i = 0; i < n; i += 4) {
    uint64_t random = HashKey(static_cast<int64_t>(number + 0x9e3779b97f4a7c15ULL * i));
    for (int j = i; j < std::min(i + 4, n); ++j, random >>= 16) {
      uint32_t bits;
      std::memcpy(&bits, &x[j], sizeof(bits));
      halves[j] = FiniteBfloat16((bits + static_cast<uint32_t>(random & 0xffff)) >> 16);
    }
  }
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_BFLOAT16_H_
