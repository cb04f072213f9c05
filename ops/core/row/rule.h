// An algorithm with what every optimizer has around it: weight decay, clipnorm, max_norm. A plain
// struct, one definition for host and device (algorithm.h); its functions are Optimizer's.

#ifndef HET_TF_OPS_CORE_ROW_RULE_H_
#define HET_TF_OPS_CORE_ROW_RULE_H_

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <variant>

#include "ops/core/host_device.h"
#include "ops/core/row/adam.h"
#include "ops/core/row/additive.h"
#include "ops/core/row/algorithm.h"
#include "ops/core/row/ftrl.h"
#include "ops/core/row/gradient.h"
#include "ops/core/row/momentum.h"
#include "ops/core/status.h"

namespace het_tf {

template <typename AlgorithmType>
struct Rule {
  using Algorithm = AlgorithmType;

  Algorithm algorithm;
  float weight_decay = 0, clipnorm = 0, max_norm = 0;

  HET_HD int dim() const { return algorithm.dim; }
  HET_HD int row_dim() const { return algorithm.dim + algorithm.slot_dim(); }

  template <typename Lanes>
  HET_HD void Update(const Lanes& lanes, float* row, const Gradient& gradient, float learning_rate,
                     float* record) const {
    float* value_contribution = record == nullptr ? nullptr : algorithm.ValueOf(record);
    if (weight_decay > 0) Scale(lanes, row, 1 - weight_decay * learning_rate, value_contribution);
    const float factor =
        clipnorm > 0 ? NormFactor(lanes, gradient.values, gradient.squares, clipnorm) : 1;
    if (factor < 1) {
      const float squares =
          lanes.SumOfSquares(dim(), [&](int i) { return gradient.values[i] * factor; });
      const ClippedGradient clipped = {gradient.values, factor, squares};
      algorithm.Step(lanes, row, clipped, learning_rate, record);
    } else {
      algorithm.Step(lanes, row, gradient, learning_rate, record);
    }
    LimitNorm(lanes, row, value_contribution);
  }

  template <typename Lanes>
  HET_HD void Merge(const Lanes& lanes, float* row, const float* contribution,
                    int64_t updates) const {
    algorithm.Merge(lanes, row, contribution, updates);
    LimitNorm(lanes, row, nullptr);
  }

  template <typename Lanes>
  HET_HD void MoveOnto(const Lanes& lanes, const float* old_row, float* row, float* record,
                       int64_t updates) const {
    algorithm.MoveOnto(lanes, old_row, row, record, updates);
    LimitNorm(lanes, row, nullptr);
    algorithm.FinishMove(lanes, row, record);
  }

 private:
  template <typename Lanes>
  HET_HD void LimitNorm(const Lanes& lanes, float* row, float* value_contribution) const {
    if (max_norm <= 0) return;
    const float factor = NormFactor(lanes, row, lanes.SumOfSquares(row, dim()), max_norm);
    if (factor < 1) Scale(lanes, row, factor, value_contribution);
  }

  // What brings x (dim), whose squares come to that sum, within the norm limit.
  template <typename Lanes>
  HET_HD float NormFactor(const Lanes& lanes, const float* x, float squares, float limit) const {
    const float norm = std::sqrt(squares);
    if (!(norm > limit)) return 1;
    if (norm <= std::numeric_limits<float>::max()) return limit / norm;
    // The squares overflow: by the largest element first.
    const float largest = lanes.Largest(dim(), [&](int i) { return std::fabs(x[i]); });
    const float sum = lanes.SumOfSquares(dim(), [&](int i) { return x[i] / largest; });
    return limit / largest / std::sqrt(sum);
  }

  // value *= factor, and the contribution takes the change in.
  template <typename Lanes>
  HET_HD void Scale(const Lanes& lanes, float* value, float factor,
                    float* value_contribution) const {
    if (value_contribution == nullptr) {
      lanes.ForEach(dim(), [&](int i) { value[i] = Clamped(value[i] * factor); });
      return;
    }
    lanes.ForEach(dim(), [&](int i) {
      const float scaled = Clamped(value[i] * factor);
      value_contribution[i] = Clamped(value_contribution[i] + (scaled - value[i]));
      value[i] = scaled;
    });
  }
};

using AnyRule = std::variant<Rule<Sgd>, Rule<Momentum>, Rule<Adagrad>, Rule<RowWiseAdagrad>,
                             Rule<Adam<false>>, Rule<Adam<true>>, Rule<Ftrl>>;

// The rule of a spec (Optimizer::Parse). Its algorithm's table, where it has one, is not set.
Status ParseRule(const std::string& text, int dim, AnyRule* rule);

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_RULE_H_
