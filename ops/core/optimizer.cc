#include "ops/core/optimizer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/core/simd.h"
#include "ops/core/spec.h"

namespace het_tf {
namespace {

float SumOfSquares(const float* x, int n) {
  return SumOf(x, n, [](Float8 part) { return part * part; });
}

class Sgd final : public Optimizer {
 public:
  explicit Sgd(int dim) : Optimizer(dim, 0, 0) {}

 private:
  void Step(float* row, const float* gradient, float learning_rate) const override {
    for (int i = 0; i < dim_; ++i) row[i] -= learning_rate * gradient[i];
  }
};

// slots: velocity[dim]
class Momentum final : public Optimizer {
 public:
  Momentum(int dim, float momentum, bool nesterov)
      : Optimizer(dim, dim, 0), momentum_(momentum), nesterov_(nesterov) {}

 private:
  void Step(float* row, const float* gradient, float learning_rate) const override {
    float* velocity = row + dim_;
    for (int i = 0; i < dim_; ++i) {
      const float step = learning_rate * gradient[i];
      velocity[i] = momentum_ * velocity[i] - step;
      row[i] += nesterov_ ? momentum_ * velocity[i] - step : velocity[i];
    }
  }

  const float momentum_;
  const bool nesterov_;
};

// slots: accumulator[dim]
class Adagrad final : public Optimizer {
 public:
  Adagrad(int dim, float initial, float epsilon)
      : Optimizer(dim, dim, initial), epsilon_(epsilon) {}

 private:
  void Step(float* row, const float* gradient, float learning_rate) const override {
    float* accumulator = row + dim_;
    for (int i = 0; i < dim_; ++i) {
      accumulator[i] += gradient[i] * gradient[i];
      row[i] -= learning_rate * gradient[i] / std::sqrt(accumulator[i] + epsilon_);
    }
  }

  const float epsilon_;
};

// slots: accumulator
class RowWiseAdagrad final : public Optimizer {
 public:
  RowWiseAdagrad(int dim, float initial, float epsilon)
      : Optimizer(dim, 1, initial), epsilon_(epsilon) {}

 private:
  void Step(float* row, const float* gradient, float learning_rate) const override {
    float& accumulator = row[dim_];
    accumulator += SumOfSquares(gradient, dim_) / static_cast<float>(dim_);
    const float rate = learning_rate / std::sqrt(accumulator + epsilon_);
    for (int i = 0; i < dim_; ++i) row[i] -= rate * gradient[i];
  }

  const float epsilon_;
};

// sqrt(1 - beta_2^t) / (1 - beta_1^t)
class BiasCorrection {
 public:
  BiasCorrection(double beta_1, double beta_2) : beta_1_(beta_1), beta_2_(beta_2) {
    for (size_t t = 1; t < first_.size(); ++t) first_[t] = Compute(t);
  }
  float operator()(float t) const {
    // A row from a message or a checkpoint may hold any t.
    const bool known = t >= 0 && t < static_cast<float>(first_.size());
    return known ? first_[static_cast<size_t>(t)] : Compute(t);
  }

 private:
  float Compute(double t) const {
    return static_cast<float>(std::sqrt(1 - std::pow(beta_2_, t)) / (1 - std::pow(beta_1_, t)));
  }

  const double beta_1_, beta_2_;
  std::vector<float> first_ = std::vector<float>(1024);
};

// slots: m[dim], v[dim], t; row-wise: m[dim], v, t
class Adam final : public Optimizer {
 public:
  Adam(int dim, bool row_wise, double beta_1, double beta_2, float epsilon)
      : Optimizer(dim, dim + (row_wise ? 1 : dim) + 1, 0),
        v_dim_(row_wise ? 1 : dim),
        beta_1_(beta_1),
        beta_2_(beta_2),
        epsilon_(epsilon),
        correction_(beta_1, beta_2) {}

  void Merge(float* row, const float* delta, float learning_rate) const override {
    Optimizer::Merge(row, delta, learning_rate);
    // Two workers' changes of v may add up to less than nothing.
    float* v = row + 2 * dim_;
    for (int i = 0; i < v_dim_; ++i) v[i] = std::max(v[i], 0.0f);
  }

 private:
  void Step(float* row, const float* gradient, float learning_rate) const override {
    float* m = row + dim_;
    float* v = m + dim_;
    float& t = v[v_dim_];
    t += 1;
    const float rate = learning_rate * correction_(t);
    for (int i = 0; i < dim_; ++i) m[i] += (gradient[i] - m[i]) * (1 - beta_1_);
    if (v_dim_ == dim_) {
      for (int i = 0; i < dim_; ++i) {
        v[i] += (gradient[i] * gradient[i] - v[i]) * (1 - beta_2_);
        row[i] -= rate * m[i] / (std::sqrt(v[i]) + epsilon_);
      }
    } else {
      v[0] += (SumOfSquares(gradient, dim_) / static_cast<float>(dim_) - v[0]) * (1 - beta_2_);
      const float row_rate = rate / (std::sqrt(v[0]) + epsilon_);
      for (int i = 0; i < dim_; ++i) row[i] -= row_rate * m[i];
    }
  }

  const int v_dim_;
  const float beta_1_, beta_2_, epsilon_;
  const BiasCorrection correction_;
};

// slots: n[dim], z[dim]. The weight follows from them, so merging adds to n and z and recomputes
// it.
class Ftrl final : public Optimizer {
 public:
  Ftrl(int dim, float initial, float l1, float l2, float l2_shrinkage, float beta)
      : Optimizer(dim, 2 * dim, initial),
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

  void Merge(float* row, const float* delta, float learning_rate) const override {
    for (int i = dim_; i < row_dim(); ++i) row[i] += delta[i];
    for (int i = 0; i < dim_; ++i) row[i] = Weight(row[dim_ + i], row[2 * dim_ + i], learning_rate);
    LimitNorm(row);
  }
  bool MergeUsesLearningRate() const override { return true; }

 private:
  void Step(float* row, const float* gradient, float learning_rate) const override {
    float* n = row + dim_;
    float* z = n + dim_;
    for (int i = 0; i < dim_; ++i) {
      const float next = n[i] + gradient[i] * gradient[i];
      z[i] += gradient[i] + 2 * l2_shrinkage_ * row[i] -
              (std::sqrt(next) - std::sqrt(n[i])) / learning_rate * row[i];
      n[i] = next;
      row[i] = Weight(n[i], z[i], learning_rate);
    }
  }

  float Weight(float n, float z, float learning_rate) const {
    const float quadratic = std::sqrt(n) / learning_rate + 2 * (l2_ + beta_ / (2 * learning_rate));
    return quadratic > 0 ? (std::clamp(z, -l1_, l1_) - z) / quadratic : 0.0f;
  }

  const float initial_, l1_, l2_, l2_shrinkage_, beta_;
};

// What brings x within the norm limit.
float NormFactor(const float* x, int n, float limit) {
  const float norm = std::sqrt(SumOfSquares(x, n));
  return norm > limit ? limit / norm : 1.0f;
}

}  // namespace

void Optimizer::LimitNorm(float* row) const {
  if (max_norm_ <= 0) return;
  const float factor = NormFactor(row, dim_, max_norm_);
  if (factor >= 1) return;
  for (int i = 0; i < dim_; ++i) row[i] *= factor;
}

void Optimizer::InitSlots(float* slots) const {
  std::fill(slots, slots + slot_dim_, initial_slot_);
}

Status Optimizer::CheckLearningRate(float learning_rate) const {
  if (learning_rate >= 0 && std::isfinite(learning_rate)) return Status();
  return InvalidArgument("learning_rate = ", learning_rate, " must be finite and not negative");
}

void Optimizer::Update(float* row, const float* gradient, float learning_rate) const {
  if (weight_decay_ > 0) {
    const float keep = 1 - weight_decay_ * learning_rate;
    for (int i = 0; i < dim_; ++i) row[i] *= keep;
  }
  if (clipnorm_ > 0) {
    const float factor = NormFactor(gradient, dim_, clipnorm_);
    if (factor < 1) {
      static thread_local std::vector<float> clipped;
      clipped.resize(dim_);
      for (int i = 0; i < dim_; ++i) clipped[i] = gradient[i] * factor;
      gradient = clipped.data();
    }
  }
  Step(row, gradient, learning_rate);
  LimitNorm(row);
}

void Optimizer::Merge(float* row, const float* delta, float /*learning_rate*/) const {
  for (int i = 0; i < row_dim(); ++i) row[i] += delta[i];
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
