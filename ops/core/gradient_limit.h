// CowClip where gradients come in (Optimizer::LimitByRow).

#ifndef HET_TF_OPS_CORE_GRADIENT_LIMIT_H_
#define HET_TF_OPS_CORE_GRADIENT_LIMIT_H_

#include <cstdint>
#include <vector>

#include "ops/core/row/optimizer.h"
#include "ops/core/unique_ids.h"

namespace het_tf {

// For one thread.
class GradientLimit {
 public:
  GradientLimit(const Optimizer& optimizer, const UniqueIds& ids)
      : optimizer_(optimizer),
        ids_(ids),
        limits_(optimizer.limits_by_row()),
        shortened_(limits_ ? optimizer.dim() : 0) {}

  // The gradient of key u as the optimizer is to have it; good until the next call. value: (dim).
  Gradient operator()(int64_t u, const Gradient& gradient, const float* value) {
    if (!limits_) return gradient;
    const int64_t occurrences = ids_.begin[u + 1] - ids_.begin[u];
    const float factor = optimizer_.LimitByRow(value, gradient, occurrences);
    if (factor == 1) return gradient;
    for (size_t i = 0; i < shortened_.size(); ++i) shortened_[i] = gradient.values[i] * factor;
    return Gradient::Of(shortened_.data(), optimizer_.dim());
  }

 private:
  const Optimizer& optimizer_;
  const UniqueIds& ids_;
  const bool limits_;
  std::vector<float> shortened_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_GRADIENT_LIMIT_H_
