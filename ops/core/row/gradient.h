// A gradient of a row, as the optimizers take it.

#ifndef HET_TF_OPS_CORE_ROW_GRADIENT_H_
#define HET_TF_OPS_CORE_ROW_GRADIENT_H_

#include "ops/core/host_device.h"
#include "ops/core/simd.h"

namespace het_tf {

// Whoever got it from outside has summed its squares to see that they are finite, and half of the
// optimizers want that sum.
struct Gradient {
  const float* values;  // (dim)
  float squares;        // SumOfSquares(values, dim)

  static Gradient Of(const float* values, int dim) { return {values, SumOfSquares(values, dim)}; }

  HET_HD float operator[](int i) const { return values[i]; }
};

// One that was too long for clipnorm.
struct ClippedGradient {
  const float* values;  // (dim)
  float factor;
  float squares;  // of the values times the factor

  HET_HD float operator[](int i) const { return values[i] * factor; }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_GRADIENT_H_
