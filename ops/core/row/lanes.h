// What a row's columns are worked on with: here one thread of the host, in ops/cuda the lanes of a
// warp. The optimizers are written for either:
//
//   ForEach(n, body)       calls body(i) for i in [0, n), in any order; all is done when it returns
//   Transform(to, n, at)   to[i] = at(i) for i in [0, n); of `to` at(i) may read to[i] alone
//   SumOfSquares(x, n)     of n floats, in an order that depends on n alone: that of Float8
//   SumOfSquares(n, at)    the same of at(0) .. at(n - 1)
//   Largest(n, at)         the greatest of at(i), at least 0
//   Store(to, x)           writes what all lanes computed, and may have read from there before

#ifndef HET_TF_OPS_CORE_ROW_LANES_H_
#define HET_TF_OPS_CORE_ROW_LANES_H_

#include <algorithm>

#include "ops/core/simd.h"

namespace het_tf {

struct OneLane {
  template <typename Body>
  void ForEach(int n, const Body& body) const {
    for (int i = 0; i < n; ++i) body(i);
  }

  template <typename At>
  void Transform(float* to, int n, const At& at) const {
    for (int i = 0; i < n; ++i) to[i] = at(i);
  }

  float SumOfSquares(const float* x, int n) const { return het_tf::SumOfSquares(x, n); }

  template <typename At>
  float SumOfSquares(int n, const At& at) const {
    Float8 sum = {0};
    for (int i = 0; i < n; i += 8) {
      Float8 part = {0};
      for (int j = 0; j < std::min(8, n - i); ++j) part[j] = at(i + j);
      sum += part * part;
    }
    return Total(sum);
  }

  template <typename At>
  float Largest(int n, const At& at) const {
    float largest = 0;
    for (int i = 0; i < n; ++i) largest = std::max(largest, at(i));
    return largest;
  }

  void Store(float* to, float x) const { *to = x; }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_LANES_H_
