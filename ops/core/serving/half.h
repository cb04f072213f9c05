// IEEE float16, for rows that are stored in two bytes a number.

#ifndef HET_TF_OPS_CORE_SERVING_HALF_H_
#define HET_TF_OPS_CORE_SERVING_HALF_H_

#ifdef __F16C__
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

namespace het_tf {

// Numbers from here on round to infinity.
inline constexpr float kHalfEnd = 65520.0f;

// Rounded to the nearest. REQUIRES: |value| < kHalfEnd.
inline uint16_t ToHalf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  // Below 2^-14 a half is a number of 2^-24.
  if (bits < 0x38800000)
    return sign | static_cast<uint32_t>(std::lrint(std::fabs(value) * 0x1p24f));
  bits += 0xfff + (bits >> 13 & 1);
  return sign | (bits - 0x38000000) >> 13;
}

inline float FromHalf(uint16_t half) {
  const uint32_t rest = half & 0x7fff;
  float value;
  if (rest < 0x400) {
    value = static_cast<float>(rest) * 0x1p-24f;
  } else {
    const uint32_t bits = (rest << 13) + (rest >= 0x7c00 ? 0x70000000 : 0x38000000);
    std::memcpy(&value, &bits, sizeof(value));
  }
  return half & 0x8000 ? -value : value;
}

// halves: (n), at any address; out: (n).
inline void FromHalf(const char* halves, int n, float* out) {
  int i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + 2 * i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(eight));
  }
#endif
  for (; i < n; ++i) {
    uint16_t half;
    std::memcpy(&half, halves + 2 * i, sizeof(half));
    out[i] = FromHalf(half);
  }
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_SERVING_HALF_H_
