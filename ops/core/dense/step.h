// Steps of dense variables by Keras's formulas, in one pass over variable, slots and gradient.
//
// Keras writes them as chains of elementwise ops, each a pass over memory of its own. What is
// computed per element is the same, in the same order.

#ifndef HET_TF_OPS_CORE_DENSE_STEP_H_
#define HET_TF_OPS_CORE_DENSE_STEP_H_

#include <cmath>
#include <cstdint>

namespace het_tf {

struct DenseAdagrad {
  static constexpr int kNumSlots = 1;

  float learning_rate, epsilon;

  // slots: accumulator. All (n).
  void Step(float* __restrict variable, float* const* slots, const float* __restrict gradient,
            int64_t n) const {
    float* __restrict accumulator = slots[0];
    for (int64_t i = 0; i < n; ++i) {
      accumulator[i] += gradient[i] * gradient[i];
      variable[i] -= learning_rate * gradient[i] / std::sqrt(accumulator[i] + epsilon);
    }
  }
};

struct DenseAdam {
  static constexpr int kNumSlots = 2;

  float rate;  // The learning rate with both corrections of bias.
  float one_minus_beta_1, one_minus_beta_2, epsilon;

  // slots: momentum, velocity. All (n).
  void Step(float* __restrict variable, float* const* slots, const float* __restrict gradient,
            int64_t n) const {
    float* __restrict momentum = slots[0];
    float* __restrict velocity = slots[1];
    for (int64_t i = 0; i < n; ++i) {
      momentum[i] += (gradient[i] - momentum[i]) * one_minus_beta_1;
      velocity[i] += (gradient[i] * gradient[i] - velocity[i]) * one_minus_beta_2;
      variable[i] -= momentum[i] * rate / (std::sqrt(velocity[i]) + epsilon);
    }
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_DENSE_STEP_H_
