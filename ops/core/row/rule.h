// An algorithm with what every optimizer has around it: CowClip, weight decay, l2, clipnorm, and
// bounds of the row: not negative, min_norm, max_norm. A plain struct, one definition for host and
// device (algorithm.h); its functions are Optimizer's.

#ifndef HET_TF_OPS_CORE_ROW_RULE_H_
#define HET_TF_OPS_CORE_ROW_RULE_H_

#include <algorithm>
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
#include "ops/core/row/lamb.h"
#include "ops/core/row/lion.h"
#include "ops/core/row/momentum.h"
#include "ops/core/row/rmsprop.h"
#include "ops/core/status.h"

namespace het_tf {

// The most columns of a row. An int has room for the bytes of a row with its slots.
constexpr int kMaxDim = 1 << 24;

template <typename AlgorithmType>
struct Rule {
  using Algorithm = AlgorithmType;

  Algorithm algorithm;
  float weight_decay = 0, l2 = 0, clipnorm = 0, min_norm = 0, max_norm = 0;
  float cowclip = 0, cowclip_floor = 0;
  bool nonnegative = false;

  HET_HD int dim() const { return algorithm.dim; }
  HET_HD int row_dim() const { return algorithm.dim + algorithm.slot_dim(); }

  // CowClip's factor for a gradient that came together from so many occurrences. row: (row_dim).
  template <typename Lanes>
  HET_HD float CowClip(const Lanes& lanes, const float* row, const Gradient& gradient,
                       int64_t occurrences) const {
    const float norm = Clamped(std::sqrt(lanes.SumOfSquares(row, dim())));
    const float limit =
        Clamped(static_cast<float>(occurrences) * std::max(cowclip * norm, cowclip_floor));
    const float length = std::sqrt(gradient.squares);
    return length > limit ? limit / length : 1.0f;
  }

  template <typename Lanes>
  HET_HD void Update(const Lanes& lanes, float* row, const Gradient& gradient, float learning_rate,
                     float* record) const {
    float* value_contribution = record == nullptr ? nullptr : algorithm.ValueOf(record);
    if (weight_decay > 0) Scale(lanes, row, 1 - weight_decay * learning_rate, value_contribution);
    if (l2 > 0 || (clipnorm > 0 && gradient.squares > clipnorm * clipnorm)) {
      AdjustedGradient adjusted = {gradient.values, row, 2 * l2, 1, 0};
      const auto at = [&](int i) { return adjusted[i]; };
      adjusted.squares = lanes.SumOfSquares(dim(), at);
      if (clipnorm > 0) adjusted.factor = NormFactor(lanes, at, adjusted.squares, clipnorm);
      if (adjusted.factor < 1) adjusted.squares = lanes.SumOfSquares(dim(), at);
      algorithm.Step(lanes, row, adjusted, learning_rate, record);
    } else {
      algorithm.Step(lanes, row, gradient, learning_rate, record);
    }
    Bound(lanes, row, value_contribution);
  }

  template <typename Lanes>
  HET_HD void Merge(const Lanes& lanes, float* row, const float* contribution,
                    int64_t updates) const {
    algorithm.Merge(lanes, row, contribution, updates);
    Bound(lanes, row, nullptr);
  }

  template <typename Lanes>
  HET_HD void MoveOnto(const Lanes& lanes, const float* old_row, float* row, float* record,
                       int64_t updates) const {
    algorithm.MoveOnto(lanes, old_row, row, record, updates);
    Bound(lanes, row, nullptr);
    algorithm.FinishMove(lanes, row, record);
  }

 private:
  template <typename Lanes>
  HET_HD void Bound(const Lanes& lanes, float* row, float* value_contribution) const {
    if (nonnegative) {
      lanes.ForEach(dim(), [&](int i) { Set(row, i, std::max(row[i], 0.0f), value_contribution); });
    }
    if (min_norm <= 0 && max_norm <= 0) return;
    const auto at = [&](int i) { return row[i]; };
    const float squares = lanes.SumOfSquares(dim(), at);
    if (max_norm > 0) {
      const float factor = NormFactor(lanes, at, squares, max_norm);
      if (factor < 1) return Scale(lanes, row, factor, value_contribution);
    }
    // A row of zeros has no direction to be longer in.
    if (squares > 0 && squares < min_norm * min_norm) {
      Scale(lanes, row, min_norm / std::sqrt(squares), value_contribution);
    }
  }

  // What brings at(0) .. at(dim - 1), whose squares come to that sum, within the norm limit.
  template <typename Lanes, typename At>
  HET_HD float NormFactor(const Lanes& lanes, const At& at, float squares, float limit) const {
    const float norm = std::sqrt(squares);
    if (!(norm > limit)) return 1;
    if (norm <= std::numeric_limits<float>::max()) return limit / norm;
    // The squares overflow: by the largest element first.
    const float largest = lanes.Largest(dim(), [&](int i) { return std::fabs(at(i)); });
    const float sum = lanes.SumOfSquares(dim(), [&](int i) { return at(i) / largest; });
    return limit / largest / std::sqrt(sum);
  }

  // value[i] = x, and the contribution takes the change in.
  HET_HD static void Set(float* value, int i, float x, float* value_contribution) {
    if (value_contribution != nullptr) {
      value_contribution[i] = Clamped(value_contribution[i] + (x - value[i]));
    }
    value[i] = x;
  }

  template <typename Lanes>
  HET_HD void Scale(const Lanes& lanes, float* value, float factor,
                    float* value_contribution) const {
    lanes.ForEach(dim(),
                  [&](int i) { Set(value, i, Clamped(value[i] * factor), value_contribution); });
  }
};

using AnyRule =
    std::variant<Rule<Sgd>, Rule<Momentum>, Rule<Adagrad>, Rule<RowWiseAdagrad>, Rule<Adam<false>>,
                 Rule<Adam<true>>, Rule<Ftrl>, Rule<Rmsprop>, Rule<Lion>, Rule<Lamb>>;

// The rule of a spec (Optimizer::Parse). Its algorithm's table, where it has one, is not set.
Status ParseRule(const std::string& text, int dim, AnyRule* rule);

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_RULE_H_
