#include "ops/core/row/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/core/row/spec.h"
#include "ops/core/simd.h"

namespace het_tf {
namespace {

float Clamped(float x) {
  constexpr float kMax = std::numeric_limits<float>::max();
  x = x < kMax ? x : kMax;
  return x > -kMax ? x : -kMax;
}

void AddClamped(float* sum, const float* x, int n) {
  for (int i = 0; i < n; ++i) sum[i] = Clamped(sum[i] + x[i]);
}

// What only adds: merging adds to value and slots what the updates did, the difference of two rows.
// So the record is the row before the first update, and no later one touches it.
class Additive : public Optimizer {
 public:
  void BeginRecord(const float* row, float* record) const final {
    std::copy_n(row, row_dim(), record);
  }
  bool updates_record() const final { return false; }
  void Contribute(const float* row, const float* record, float* contribution) const final {
    for (int i = 0; i < contribution_dim_; ++i) contribution[i] = Clamped(row[i] - record[i]);
  }

 protected:
  Additive(int dim, int slot_dim, float initial_slot)
      : Optimizer(dim, slot_dim, dim + slot_dim, 0, initial_slot) {}

 private:
  float* ValueOf(float*) const final { return nullptr; }
  void MergeSlotsAndValue(float* row, const float* contribution, int64_t) const final {
    AddClamped(row, contribution, contribution_dim_);
  }
  void RestartRecord(const float* before, const float*, float* record, int64_t) const final {
    BeginRecord(before, record);
  }
};

// No slots.
class Sgd final : public Additive {
 public:
  explicit Sgd(int dim) : Additive(dim, 0, 0) {}

 private:
  void Step(float* row, const Gradient& gradient, float learning_rate, float*) const override {
    const float* g = gradient.values;
    for (int i = 0; i < dim_; ++i) row[i] = Clamped(row[i] - learning_rate * g[i]);
  }
};

// factor^k for whole k, the first ones from a table.
class Powers {
 public:
  explicit Powers(double factor) : factor_(factor) {
    for (size_t k = 0; k < first_.size(); ++k) first_[k] = Compute(static_cast<double>(k));
  }
  // k: at least 0.
  float operator()(int64_t k) const {
    const auto known = static_cast<size_t>(k);
    return known < first_.size() ? first_[known] : Compute(static_cast<double>(k));
  }

 private:
  float Compute(double k) const { return static_cast<float>(std::pow(factor_, k)); }

  const double factor_;
  std::vector<float> first_ = std::vector<float>(256);
};

// slots: velocity[dim]; contribution: value[dim], velocity[dim], a row that starts from zero:
// momentum is linear.
class Momentum final : public Optimizer {
 public:
  Momentum(int dim, double momentum, bool nesterov)
      : Optimizer(dim, dim, 2 * dim, 0, 0),
        momentum_(momentum),
        nesterov_(nesterov),
        powers_(momentum) {}

 private:
  void Step(float* row, const Gradient& gradient, float learning_rate,
            float* contribution) const override {
    Roll(row, gradient.values, learning_rate);
    if (contribution != nullptr) Roll(contribution, gradient.values, learning_rate);
  }

  // The velocity that was there rolls on through all the updates.
  void MergeSlotsAndValue(float* row, const float* contribution, int64_t updates) const override {
    const float left = powers_(updates);
    const double momentum = momentum_;
    const double all =
        momentum < 1 ? momentum * (1 - left) / (1 - momentum) : static_cast<double>(updates);
    const auto way = static_cast<float>(nesterov_ ? momentum * all : all);
    float* velocity = row + dim_;
    for (int i = 0; i < dim_; ++i) {
      row[i] = Clamped(row[i] + (way * velocity[i] + contribution[i]));
      velocity[i] = Clamped(left * velocity[i] + contribution[dim_ + i]);
    }
  }

  void Roll(float* row, const float* gradient, float learning_rate) const {
    float* velocity = row + dim_;
    for (int i = 0; i < dim_; ++i) {
      const float step = learning_rate * gradient[i];
      velocity[i] = Clamped(momentum_ * velocity[i] - step);
      row[i] = Clamped(row[i] + (nesterov_ ? momentum_ * velocity[i] - step : velocity[i]));
    }
  }

  const float momentum_;
  const bool nesterov_;
  const Powers powers_;
};

// slots: accumulator[dim]
class Adagrad final : public Additive {
 public:
  Adagrad(int dim, float initial, float epsilon) : Additive(dim, dim, initial), epsilon_(epsilon) {}

 private:
  void Step(float* row, const Gradient& gradient, float learning_rate, float*) const override {
    const float* g = gradient.values;
    float* accumulator = row + dim_;
    for (int i = 0; i < dim_; ++i) {
      accumulator[i] = Clamped(accumulator[i] + g[i] * g[i]);
      row[i] = Clamped(row[i] - learning_rate * g[i] / std::sqrt(accumulator[i] + epsilon_));
    }
  }

  const float epsilon_;
};

// slots: accumulator
class RowWiseAdagrad final : public Additive {
 public:
  RowWiseAdagrad(int dim, float initial, float epsilon)
      : Additive(dim, 1, initial), epsilon_(epsilon) {}

 private:
  void Step(float* row, const Gradient& gradient, float learning_rate, float*) const override {
    const float* g = gradient.values;
    const float square = gradient.squares / static_cast<float>(dim_);
    float& accumulator = row[dim_];
    accumulator = Clamped(accumulator + square);
    const float rate = learning_rate / std::sqrt(accumulator + epsilon_);
    for (int i = 0; i < dim_; ++i) row[i] = Clamped(row[i] - rate * g[i]);
  }

  const float epsilon_;
};

// sqrt(1 - beta_2^t) / (1 - beta_1^t)
class BiasCorrection {
 public:
  BiasCorrection(double beta_1, double beta_2) : beta_1_(beta_1), beta_2_(beta_2) {
    for (size_t t = 1; t < first_.size(); ++t) first_[t] = Compute(t);
  }
  // t: at least 1.
  float operator()(float t) const {
    const bool known = t < static_cast<float>(first_.size());
    return known ? first_[static_cast<size_t>(t)] : Compute(t);
  }

 private:
  float Compute(double t) const {
    return static_cast<float>(std::sqrt(1 - std::pow(beta_2_, t)) / (1 - std::pow(beta_1_, t)));
  }

  const double beta_1_, beta_2_;
  std::vector<float> first_ = std::vector<float>(1024);
};

// slots: m[dim], v[dim], t; contribution: value[dim], m[dim], v[dim], learning rate of the last
// update, with m and v from zero. Row-wise has one v.
//
// The m that was there when the updates were made moves the value too, by a tail that fades. Every
// worker would add such a tail of the same m, and the row would run away. So a record keeps the sum
// of the m that were not its own (tail[dim]); its contribution is the value without that tail, and
// merging adds the tail of the m that it finds. For one worker the two are the same number.
class Adam final : public Optimizer {
 public:
  Adam(int dim, bool row_wise, double beta_1, double beta_2, float epsilon)
      : Optimizer(dim, dim + (row_wise ? 1 : dim) + 1, 2 * dim + (row_wise ? 1 : dim) + 1, dim, 0),
        v_dim_(row_wise ? 1 : dim),
        beta_1_(beta_1),
        beta_2_(beta_2),
        epsilon_(epsilon),
        correction_(beta_1, beta_2),
        m_powers_(beta_1),
        v_powers_(beta_2) {}

  void Contribute(const float* row, const float* record, float* contribution) const override {
    std::copy_n(record, contribution_dim_, contribution);
    AddTail(row, record + contribution_dim_, record[contribution_dim_ - 1], contribution);
  }

  Status CheckContribution(const float* contribution) const override {
    HET_RETURN_IF_ERROR(Optimizer::CheckContribution(contribution));
    return CheckLearningRate(contribution[contribution_dim_ - 1]);
  }

 private:
  void Step(float* row, const Gradient& gradient, float learning_rate,
            float* record) const override {
    float* m = row + dim_;
    float* v = m + dim_;
    float& t = v[v_dim_];
    t = std::max(t, 0.0f) + 1;
    const float mean_square = gradient.squares / static_cast<float>(dim_);
    Moments(m, gradient.values, mean_square);
    const float rate = learning_rate * correction_(t);
    if (record != nullptr) {
      float* own = record + dim_;
      float* tail = record + contribution_dim_;
      Moments(own, gradient.values, mean_square);
      for (int i = 0; i < dim_; ++i) tail[i] = Clamped(tail[i] + (m[i] - own[i]));
      Move(m, v, -rate, record);
      record[contribution_dim_ - 1] = learning_rate;
    }
    Move(m, v, -rate, row);
  }

  void MergeSlotsAndValue(float* row, const float* contribution, int64_t updates) const override {
    const float left = m_powers_(updates);
    const float v_left = v_powers_(updates);
    const float tail_weight = beta_1_ * (1 - left) / (1 - beta_1_);
    float* m = row + dim_;
    float* v = m + dim_;
    const float* own = contribution + dim_;
    static thread_local std::vector<float> tail;
    tail.resize(dim_);
    for (int i = 0; i < dim_; ++i) {
      tail[i] = -tail_weight * m[i];
      m[i] = Clamped(left * m[i] + own[i]);
    }
    for (int i = 0; i < v_dim_; ++i) {
      v[i] = std::max(Clamped(v_left * v[i] + own[dim_ + i]), 0.0f);
    }
    v[v_dim_] = std::max(v[v_dim_], 0.0f) + static_cast<float>(updates);
    AddClamped(row, contribution, dim_);
    AddTail(row, tail.data(), contribution[contribution_dim_ - 1], row);
  }

  void RestartRecord(const float* before, const float* row, float* record,
                     int64_t updates) const override {
    const float tail_weight = beta_1_ * (1 - m_powers_(updates)) / (1 - beta_1_);
    float* tail = record + contribution_dim_;
    for (int i = 0; i < dim_; ++i) {
      record[i] = Clamped(row[i] - before[i]);
      tail[i] = Clamped(tail_weight * before[dim_ + i]);
    }
  }

  // value += direction / (sqrt(v) + epsilon) * rate
  void Move(const float* direction, const float* v, float rate, float* value) const {
    if (v_dim_ == 1) {
      const float row_rate = rate / (std::sqrt(v[0]) + epsilon_);
      for (int i = 0; i < dim_; ++i) value[i] = Clamped(value[i] + row_rate * direction[i]);
    } else {
      for (int i = 0; i < dim_; ++i) {
        value[i] = Clamped(value[i] + rate * direction[i] / (std::sqrt(v[i]) + epsilon_));
      }
    }
  }

  // What a tail moves, by the rate and the v that a row has now. tail, value: (dim).
  void AddTail(const float* row, const float* tail, float learning_rate, float* value) const {
    const float* v = row + 2 * dim_;
    Move(tail, v, learning_rate * correction_(std::max(v[v_dim_], 1.0f)), value);
  }

  // moments: m[dim], v[v_dim_]
  void Moments(float* moments, const float* gradient, float mean_square) const {
    float* v = moments + dim_;
    for (int i = 0; i < dim_; ++i) {
      moments[i] = Clamped(moments[i] + (gradient[i] - moments[i]) * (1 - beta_1_));
    }
    if (v_dim_ == 1) {
      v[0] = Clamped(v[0] + (mean_square - v[0]) * (1 - beta_2_));
    } else {
      for (int i = 0; i < dim_; ++i) {
        v[i] = Clamped(v[i] + (gradient[i] * gradient[i] - v[i]) * (1 - beta_2_));
      }
    }
  }

  const int v_dim_;
  const float beta_1_, beta_2_, epsilon_;
  const BiasCorrection correction_;
  const Powers m_powers_, v_powers_;
};

// slots: n[dim], z[dim]; contribution: n[dim], z[dim], learning rate of the last update. The weight
// follows from n and z, so merging adds to these and recomputes it.
class Ftrl final : public Optimizer {
 public:
  Ftrl(int dim, float initial, float l1, float l2, float l2_shrinkage, float beta)
      : Optimizer(dim, 2 * dim, 2 * dim + 1, 0, initial),
        initial_(initial),
        l1_(l1),
        l2_(l2),
        l2_shrinkage_(l2_shrinkage),
        beta_(beta) {}

  void InitSlots(float* slots) const override {
    std::fill(slots, slots + dim_, initial_);
    std::fill(slots + dim_, slots + 2 * dim_, 0.0f);
  }

  Status CheckLearningRate(float learning_rate) const override {
    if (learning_rate > 0 && std::isfinite(learning_rate)) return Status();
    return InvalidArgument("learning_rate = ", learning_rate, " must be positive for ftrl");
  }

  Status CheckContribution(const float* contribution) const override {
    HET_RETURN_IF_ERROR(Optimizer::CheckContribution(contribution));
    return CheckLearningRate(contribution[2 * dim_]);
  }

 private:
  float* ValueOf(float*) const override { return nullptr; }

  void Step(float* row, const Gradient& gradient, float learning_rate,
            float* contribution) const override {
    const float* g = gradient.values;
    float* n = row + dim_;
    float* z = n + dim_;
    for (int i = 0; i < dim_; ++i) {
      const float square = g[i] * g[i];
      const float next = Clamped(n[i] + square);
      const float change = g[i] + 2 * l2_shrinkage_ * row[i] -
                           (std::sqrt(next) - std::sqrt(n[i])) / learning_rate * row[i];
      z[i] = Clamped(z[i] + change);
      n[i] = next;
      row[i] = Weight(n[i], z[i], learning_rate);
      if (contribution == nullptr) continue;
      contribution[i] = Clamped(contribution[i] + square);
      contribution[dim_ + i] = Clamped(contribution[dim_ + i] + change);
    }
    if (contribution != nullptr) contribution[2 * dim_] = learning_rate;
  }

  void MergeSlotsAndValue(float* row, const float* contribution, int64_t) const override {
    AddClamped(row + dim_, contribution, 2 * dim_);
    const float* n = row + dim_;
    for (int i = 0; i < dim_; ++i) row[i] = Weight(n[i], n[dim_ + i], contribution[2 * dim_]);
  }

  float Weight(float n, float z, float learning_rate) const {
    const float quadratic = std::sqrt(n) / learning_rate + 2 * (l2_ + beta_ / (2 * learning_rate));
    return quadratic > 0 ? Clamped((std::clamp(z, -l1_, l1_) - z) / quadratic) : 0.0f;
  }

  const float initial_, l1_, l2_, l2_shrinkage_, beta_;
};

// What brings x, whose squares come to that sum, within the norm limit.
float NormFactor(const float* x, float squares, int n, float limit) {
  const float norm = std::sqrt(squares);
  if (!(norm > limit)) return 1;
  if (std::isfinite(norm)) return limit / norm;
  // The squares overflow: by the largest element first.
  float largest = 0;
  for (int i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += (x[i] / largest) * (x[i] / largest);
  return limit / largest / std::sqrt(sum);
}

// value *= factor, and the contribution takes the change in.
void Scale(float* value, int dim, float factor, float* value_contribution) {
  if (value_contribution == nullptr) {
    for (int i = 0; i < dim; ++i) value[i] = Clamped(value[i] * factor);
    return;
  }
  for (int i = 0; i < dim; ++i) {
    const float scaled = Clamped(value[i] * factor);
    value_contribution[i] = Clamped(value_contribution[i] + (scaled - value[i]));
    value[i] = scaled;
  }
}

}  // namespace

void Optimizer::DecayWeight(float* row, float learning_rate, float* value_contribution) const {
  if (weight_decay_ > 0) Scale(row, dim_, 1 - weight_decay_ * learning_rate, value_contribution);
}

void Optimizer::LimitNorm(float* row, float* value_contribution) const {
  if (max_norm_ <= 0) return;
  const float factor = NormFactor(row, SumOfSquares(row, dim_), dim_, max_norm_);
  if (factor < 1) Scale(row, dim_, factor, value_contribution);
}

void Optimizer::InitSlots(float* slots) const {
  std::fill(slots, slots + slot_dim_, initial_slot_);
}

Status Optimizer::CheckLearningRate(float learning_rate) const {
  if (learning_rate >= 0 && std::isfinite(learning_rate)) return Status();
  return InvalidArgument("learning_rate = ", learning_rate, " must be finite and not negative");
}

Status Optimizer::CheckContribution(const float* contribution) const {
  if (AllFinite(contribution, contribution_dim_)) return Status();
  return InvalidArgument("a contribution holds NaN or infinity");
}

void Optimizer::Update(float* row, const Gradient& gradient, float learning_rate,
                       float* record) const {
  float* value_contribution = record == nullptr ? nullptr : ValueOf(record);
  DecayWeight(row, learning_rate, value_contribution);
  const float factor =
      clipnorm_ > 0 ? NormFactor(gradient.values, gradient.squares, dim_, clipnorm_) : 1;
  if (factor < 1) {
    static thread_local std::vector<float> clipped;
    clipped.resize(dim_);
    for (int i = 0; i < dim_; ++i) clipped[i] = gradient.values[i] * factor;
    Step(row, Gradient::Of(clipped.data(), dim_), learning_rate, record);
  } else {
    Step(row, gradient, learning_rate, record);
  }
  LimitNorm(row, value_contribution);
}

void Optimizer::BeginRecord(const float* /*row*/, float* record) const {
  std::fill_n(record, record_dim_, 0.0f);
}

void Optimizer::Contribute(const float* /*row*/, const float* record, float* contribution) const {
  std::copy_n(record, contribution_dim_, contribution);
}

void Optimizer::MoveOnto(const float* old_row, float* row, float* record, int64_t updates) const {
  static thread_local std::vector<float> contribution, before;
  contribution.resize(contribution_dim_);
  before.assign(row, row + row_dim());
  Contribute(old_row, record, contribution.data());
  Merge(row, contribution.data(), updates);
  RestartRecord(before.data(), row, record, updates);
}

void Optimizer::Merge(float* row, const float* contribution, int64_t updates) const {
  MergeSlotsAndValue(row, contribution, updates);
  LimitNorm(row, nullptr);
}

Status Optimizer::Parse(const std::string& text, int dim, std::unique_ptr<Optimizer>* optimizer) {
  Spec spec;
  HET_RETURN_IF_ERROR(Spec::Parse("optimizer", text, &spec));
  if (dim < 1) return InvalidArgument("dim = ", dim, " must be at least 1");

  std::string out_of_range;
  const auto take = [&](const char* name, double default_value, double low, double high) {
    const double value = spec.Take(name, default_value);
    if (!(value >= low && value <= high)) out_of_range = name;
    return value;
  };
  constexpr double kMax = 1e30;
  const double weight_decay = take("weight_decay", 0, 0, kMax);
  const double clipnorm = take("clipnorm", 0, 0, kMax);
  const double max_norm = take("max_norm", 0, 0, kMax);

  std::unique_ptr<Optimizer> result;
  const std::string& name = spec.name();
  if (name == "sgd") {
    result = std::make_unique<Sgd>(dim);
  } else if (name == "momentum") {
    const double momentum = take("momentum", 0.9, 0, 1);
    result = std::make_unique<Momentum>(dim, momentum, take("nesterov", 0, 0, 1) != 0);
  } else if (name == "adagrad" || name == "row_wise_adagrad") {
    const double initial = take("initial_accumulator_value", 0.1, 0, kMax);
    const double epsilon = take("epsilon", 1e-7, 1e-30, kMax);
    if (name == "adagrad") {
      result = std::make_unique<Adagrad>(dim, initial, epsilon);
    } else {
      result = std::make_unique<RowWiseAdagrad>(dim, initial, epsilon);
    }
  } else if (name == "adam" || name == "row_wise_adam") {
    const double beta_1 = take("beta_1", 0.9, 0, 1 - 1e-9);
    const double beta_2 = take("beta_2", 0.999, 0, 1 - 1e-9);
    const double epsilon = take("epsilon", 1e-7, 1e-30, kMax);
    result = std::make_unique<Adam>(dim, name == "row_wise_adam", beta_1, beta_2, epsilon);
  } else if (name == "ftrl") {
    if (weight_decay > 0) return spec.Invalid("ftrl takes l2 instead of weight_decay");
    const double initial = take("initial_accumulator_value", 0.1, 0, kMax);
    const double l1 = take("l1", 0, 0, kMax);
    const double l2 = take("l2", 0, 0, kMax);
    const double l2_shrinkage = take("l2_shrinkage", 0, 0, kMax);
    result = std::make_unique<Ftrl>(dim, initial, l1, l2, l2_shrinkage, take("beta", 0, 0, kMax));
  } else {
    return spec.Invalid(
        "known are sgd, momentum, adagrad, row_wise_adagrad, adam, row_wise_adam, ftrl");
  }
  HET_RETURN_IF_ERROR(spec.Finish());
  if (!out_of_range.empty()) return spec.Invalid(StrCat(out_of_range, " is out of range"));
  result->weight_decay_ = weight_decay;
  result->clipnorm_ = clipnorm;
  result->max_norm_ = max_norm;
  *optimizer = std::move(result);
  return Status();
}

}  // namespace het_tf
