// Eight floats at a time, whatever the machine's vector width: so that sums come out the same.

#ifndef HET_TF_OPS_CORE_SIMD_H_
#define HET_TF_OPS_CORE_SIMD_H_

#include <cmath>
#include <cstring>

namespace het_tf {

typedef float Float8 __attribute__((vector_size(32)));

inline void Load(const float* from, Float8* to) { std::memcpy(to, from, sizeof(*to)); }

inline float Total(const Float8& x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// The sum of term(x) over n floats, in an order that depends on n alone. term takes and returns a
// Float8 and maps zeros to zeros.
template <typename Term>
float SumOf(const float* x, int n, const Term& term) {
  Float8 sum = {0};
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    Float8 part;
    Load(x + i, &part);
    sum += term(part);
  }
  if (i < n) {
    Float8 part = {0};
    std::memcpy(&part, x + i, sizeof(float) * (n - i));
    sum += term(part);
  }
  return Total(sum);
}

inline float SumOfSquares(const float* x, int n) {
  return SumOf(x, n, [](Float8 part) { return part * part; });
}

// Whether all n are numbers. (Zero times any number is zero, times infinity or NaN it is NaN.)
inline bool AllFinite(const float* x, int n) {
  return SumOf(x, n, [](Float8 part) { return part * 0.0f; }) == 0;
}

// The L2 distance of a and b, (n) each.
inline float Distance(const float* a, const float* b, int n) {
  Float8 sum = {0};
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    Float8 p, q;
    Load(a + i, &p);
    Load(b + i, &q);
    sum += (p - q) * (p - q);
  }
  if (i < n) {
    Float8 p = {0}, q = {0};
    std::memcpy(&p, a + i, sizeof(float) * (n - i));
    std::memcpy(&q, b + i, sizeof(float) * (n - i));
    sum += (p - q) * (p - q);
  }
  return std::sqrt(Total(sum));
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_SIMD_H_
