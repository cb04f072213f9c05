#include "ops/core/row/rule.h"

#include "ops/core/row/spec.h"

namespace het_tf {

Status ParseRule(const std::string& text, int dim, AnyRule* rule) {
  Spec spec;
  HET_RETURN_IF_ERROR(Spec::Parse("optimizer", text, &spec));
  if (dim < 1 || dim > kMaxDim) {
    return InvalidArgument("dim = ", dim, " must be from 1 to ", kMaxDim);
  }

  std::string out_of_range;
  const auto take = [&](const char* name, double default_value, double low, double high) {
    const double value = spec.Take(name, default_value);
    if (!(value >= low && value <= high)) out_of_range = name;
    return value;
  };
  constexpr double kMax = 1e30;
  const double weight_decay = take("weight_decay", 0, 0, kMax);
  const double l2 = take("l2", 0, 0, kMax);
  const double clipnorm = take("clipnorm", 0, 0, kMax);
  const double cowclip = take("cowclip", 0, 0, kMax);
  const double cowclip_floor = take("cowclip_floor", 1e-5, 0, kMax);
  const double min_norm = take("min_norm", 0, 0, kMax);
  const double max_norm = take("max_norm", 0, 0, kMax);
  const bool nonnegative = take("nonnegative", 0, 0, 1) != 0;

  const std::string& name = spec.name();
  AnyRule result;
  const auto adam = [&](auto algorithm) {
    algorithm.exact_beta_1 = take("beta_1", 0.9, 0, 1 - 1e-9);
    algorithm.exact_beta_2 = take("beta_2", 0.999, 0, 1 - 1e-9);
    algorithm.beta_1 = static_cast<float>(algorithm.exact_beta_1);
    algorithm.beta_2 = static_cast<float>(algorithm.exact_beta_2);
    algorithm.epsilon = static_cast<float>(take("epsilon", 1e-7, 1e-30, kMax));
    return Rule<decltype(algorithm)>{algorithm};
  };
  const auto betas = [&](auto* algorithm, double beta_2) {
    algorithm->exact_beta_2 = take("beta_2", beta_2, 0, 1 - 1e-9);
    algorithm->beta_2 = static_cast<float>(algorithm->exact_beta_2);
  };
  const auto adagrad = [&](auto algorithm) {
    algorithm.initial = static_cast<float>(take("initial_accumulator_value", 0.1, 0, kMax));
    algorithm.epsilon = static_cast<float>(take("epsilon", 1e-7, 1e-30, kMax));
    return Rule<decltype(algorithm)>{algorithm};
  };
  if (name == "sgd") {
    result = Rule<Sgd>();
  } else if (name == "momentum") {
    Momentum momentum = {};
    momentum.powers.factor = take("momentum", 0.9, 0, 1);
    momentum.momentum = static_cast<float>(momentum.powers.factor);
    momentum.nesterov = take("nesterov", 0, 0, 1) != 0;
    result = Rule<Momentum>{momentum};
  } else if (name == "adagrad") {
    result = adagrad(Adagrad{});
  } else if (name == "row_wise_adagrad") {
    result = adagrad(RowWiseAdagrad{});
  } else if (name == "adam") {
    result = adam(Adam<false>{});
  } else if (name == "row_wise_adam") {
    result = adam(Adam<true>{});
  } else if (name == "ftrl") {
    if (weight_decay > 0) return spec.Invalid("ftrl takes l2 instead of weight_decay");
    Ftrl ftrl = {};
    ftrl.initial = static_cast<float>(take("initial_accumulator_value", 0.1, 0, kMax));
    ftrl.l1 = static_cast<float>(take("l1", 0, 0, kMax));
    ftrl.l2 = static_cast<float>(l2);
    ftrl.l2_shrinkage = static_cast<float>(take("l2_shrinkage", 0, 0, kMax));
    ftrl.beta = static_cast<float>(take("beta", 0, 0, kMax));
    result = Rule<Ftrl>{ftrl};
  } else if (name == "rmsprop") {
    Rmsprop rmsprop = {};
    rmsprop.centered = take("centered", 0, 0, 1) != 0;
    rmsprop.exact_rho = take("rho", 0.9, 0, 1 - 1e-9);
    rmsprop.rho = static_cast<float>(rmsprop.exact_rho);
    rmsprop.exact_momentum = take("momentum", 0, 0, 1);
    rmsprop.momentum = static_cast<float>(rmsprop.exact_momentum);
    rmsprop.epsilon = static_cast<float>(take("epsilon", 1e-7, 1e-30, kMax));
    result = Rule<Rmsprop>{rmsprop};
  } else if (name == "lion") {
    Lion lion = {};
    lion.beta_1 = static_cast<float>(take("beta_1", 0.9, 0, 1));
    betas(&lion, 0.99);
    result = Rule<Lion>{lion};
  } else if (name == "lamb") {
    Lamb lamb = {};
    lamb.exact_beta_1 = take("beta_1", 0.9, 0, 1 - 1e-9);
    lamb.beta_1 = static_cast<float>(lamb.exact_beta_1);
    betas(&lamb, 0.999);
    lamb.epsilon = static_cast<float>(take("epsilon", 1e-7, 1e-30, kMax));
    result = Rule<Lamb>{lamb};
  } else {
    return spec.Invalid(
        "known are sgd, momentum, adagrad, row_wise_adagrad, adam, row_wise_adam, ftrl, rmsprop, "
        "lion, lamb");
  }
  HET_RETURN_IF_ERROR(spec.Finish());
  if (max_norm > 0 && min_norm > max_norm) return spec.Invalid("min_norm is more than max_norm");
  if (!out_of_range.empty()) return spec.Invalid(StrCat(out_of_range, " is out of range"));
  std::visit(
      [&](auto& made) {
        made.algorithm.dim = dim;
        made.weight_decay = static_cast<float>(weight_decay);
        if (name != "ftrl") made.l2 = static_cast<float>(l2);
        made.clipnorm = static_cast<float>(clipnorm);
        made.cowclip = static_cast<float>(cowclip);
        made.cowclip_floor = static_cast<float>(cowclip_floor);
        made.min_norm = static_cast<float>(min_norm);
        made.max_norm = static_cast<float>(max_norm);
        made.nonnegative = nonnegative;
      },
      result);
  *rule = result;
  return Status();
}

}  // namespace het_tf
