// A gradient of a row, as the optimizers take it.

#ifndef HET_TF_OPS_CORE_ROW_GRADIENT_H_
#define HET_TF_OPS_CORE_ROW_GRADIENT_H_

#include "ops/core/host_device.h"
#include "ops/core/row/algorithm.h"
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

// One with the gradient of an l2 penalty on top, shortened to what clipnorm allows.
struct AdjustedGradient {
  const float* values;  // (dim)
  const float* row;     // (dim): as it is until the step has moved column i
  float decay;          // the penalty's gradient is this times the row
  float factor;
  float squares;  // of what operator[] returns

  HET_HD float operator[](int i) const { return Clamped(values[i] + decay * row[i]) * factor; }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_GRADIENT_H_
