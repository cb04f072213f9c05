#include "ops/core/row/optimizer.h"

#include <cmath>
#include <type_traits>
#include <variant>
#include <vector>

#include "ops/core/row/lanes.h"
#include "ops/core/row/rule.h"
#include "ops/core/simd.h"

namespace het_tf {
namespace {

template <typename RuleType>
class OptimizerOf final : public Optimizer {
 public:
  using Algorithm = typename RuleType::Algorithm;

  explicit OptimizerOf(const RuleType& rule)
      : Optimizer(rule.dim(), rule.algorithm.slot_dim(), rule.algorithm.contribution_dim(),
                  rule.algorithm.record_dim()),
        rule_(rule) {
    if constexpr (Algorithm::kHasTable) {
      table_ = rule_.algorithm.MakeTable();
      rule_.algorithm.table = table_.data();
    }
  }

  void InitSlots(float* slots) const override {
    for (int i = 0; i < slot_dim(); ++i) slots[i] = rule_.algorithm.InitialSlot(i);
  }

  Status CheckLearningRate(float learning_rate) const override {
    constexpr bool kDividesByRate = std::is_same_v<Algorithm, Ftrl>;
    if (kDividesByRate && !(learning_rate > 0 && std::isfinite(learning_rate))) {
      return InvalidArgument("learning_rate = ", learning_rate, " must be positive for ftrl");
    }
    if (learning_rate >= 0 && std::isfinite(learning_rate)) return Status();
    return InvalidArgument("learning_rate = ", learning_rate, " must be finite and not negative");
  }

  bool limits_by_row() const override { return rule_.cowclip > 0; }
  float LimitByRow(const float* value, const Gradient& gradient,
                   int64_t occurrences) const override {
    return rule_.CowClip(OneLane(), value, gradient, occurrences);
  }

  void BeginRecord(const float* row, float* record) const override {
    rule_.algorithm.BeginRecord(OneLane(), row, record);
  }
  bool updates_record() const override { return Algorithm::kUpdatesRecord; }

  void Update(float* row, const Gradient& gradient, float learning_rate,
              float* record) const override {
    rule_.Update(OneLane(), row, gradient, learning_rate, record);
  }

  void Contribute(const float* row, const float* record, float* contribution) const override {
    rule_.algorithm.Contribute(OneLane(), row, record, contribution);
  }

  void Merge(float* row, const float* contribution, int64_t updates) const override {
    rule_.Merge(OneLane(), row, contribution, updates);
  }

  void MoveOnto(const float* old_row, float* row, float* record, int64_t updates) const override {
    rule_.MoveOnto(OneLane(), old_row, row, record, updates);
  }

  Status CheckContribution(const float* contribution) const override {
    if (!AllFinite(contribution, contribution_dim())) {
      return InvalidArgument("a contribution holds NaN or infinity");
    }
    if (!Algorithm::kKeepsRate) return Status();
    return CheckLearningRate(contribution[contribution_dim() - 1]);
  }

 private:
  RuleType rule_;
  std::vector<float> table_;
};

}  // namespace

Status Optimizer::Parse(const std::string& text, int dim, std::unique_ptr<Optimizer>* optimizer) {
  AnyRule any;
  HET_RETURN_IF_ERROR(ParseRule(text, dim, &any));
  std::visit(
      [&](const auto& rule) {
        *optimizer = std::make_unique<OptimizerOf<std::decay_t<decltype(rule)>>>(rule);
      },
      any);
  return Status();
}

}  // namespace het_tf
