#include "ops/core/pooling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;
using testing::ThreadedFor;

// Features of a lookup with their ids, rows and gradients: everything that Pooling is given.
struct Lookup {
  struct Feature {
    Combiner combiner;
    bool has_splits, has_weights;
    std::vector<int64_t> splits;
    std::vector<float> weights;  // ones where there are none
    std::vector<float> gradients;
  };

  int dim;
  std::vector<int64_t> ids;
  std::vector<Feature> features;
  std::unique_ptr<UniqueIds> unique;
  std::vector<float> rows;  // (keys, dim)

  std::vector<const float*> RowPointers() const {
    std::vector<const float*> pointers;
    for (int64_t u = 0; u < unique->num_keys(); ++u) pointers.push_back(&rows[u * dim]);
    return pointers;
  }

  std::vector<Pooling::Feature> Features() const {
    std::vector<Pooling::Feature> result;
    for (const Feature& feature : features) {
      Pooling::Feature each;
      each.combiner = feature.combiner;
      each.num_ids = static_cast<int64_t>(feature.weights.size());
      each.num_bags = static_cast<int64_t>(feature.splits.size()) - 1;
      each.splits = feature.has_splits ? feature.splits.data() : nullptr;
      each.weights = feature.has_weights ? feature.weights.data() : nullptr;
      result.push_back(each);
    }
    return result;
  }

  std::vector<const float*> Gradients() const {
    std::vector<const float*> pointers;
    for (const Feature& feature : features) pointers.push_back(feature.gradients.data());
    return pointers;
  }
};

float RandomFloat(Random* random) { return (Below(random, 2001) - 1000) / 500.0f; }

Lookup RandomLookup(Random* random) {
  Lookup lookup;
  lookup.dim = 1 + Below(random, 20);
  const int num_features = 1 + Below(random, 4);
  for (int f = 0; f < num_features; ++f) {
    Lookup::Feature feature;
    feature.combiner = static_cast<Combiner>(Below(random, 4));
    feature.has_splits = Below(random, 4) > 0;
    feature.has_weights = Below(random, 2) > 0;
    feature.splits = {0};
    const int64_t bags = Below(random, 12), bag_size = Below(random, 4);
    for (int64_t b = 0; b < bags; ++b) {
      const int64_t n = feature.has_splits ? Below(random, 3) * Below(random, 4) : bag_size;
      feature.splits.push_back(feature.splits.back() + n);
    }
    for (int64_t i = 0; i < feature.splits.back(); ++i) {
      lookup.ids.push_back(Below(random, 15));
      // Zeros, and weights that cancel out, are drawn often enough.
      feature.weights.push_back(feature.has_weights ? Below(random, 5) - 1.0f : 1.0f);
    }
    for (int64_t i = 0; i < bags * lookup.dim; ++i) {
      feature.gradients.push_back(RandomFloat(random));
    }
    lookup.features.push_back(feature);
  }
  lookup.unique = std::make_unique<UniqueIds>(lookup.ids.data(), lookup.ids.size());
  for (int64_t i = 0; i < lookup.unique->num_keys() * lookup.dim; ++i) {
    lookup.rows.push_back(RandomFloat(random));
  }
  return lookup;
}

struct Result {
  std::vector<std::vector<float>> outputs;
  std::vector<std::vector<float>> rows;     // gradients of the unique keys
  std::vector<std::vector<float>> weights;  // gradients, of weighted features
};

Result StepOf(const Lookup& lookup, const ParallelFor& parallel_for) {
  std::shared_ptr<Pooling> pooling;
  EXPECT_OK(Pooling::Create(lookup.Features(), &pooling));
  Result result;
  std::vector<float*> outputs;
  result.outputs.resize(lookup.features.size());
  for (size_t f = 0; f < lookup.features.size(); ++f) {
    result.outputs[f].assign(pooling->num_bags(f) * lookup.dim, -77);
    outputs.push_back(result.outputs[f].data());
  }
  {
    // Rows may change between pooling and its gradient, which is that of the rows that were pooled.
    Lookup then = {lookup.dim, {}, {}, nullptr, lookup.rows};
    std::vector<const float*> pointers;
    for (int64_t u = 0; u < lookup.unique->num_keys(); ++u) {
      pointers.push_back(&then.rows[u * lookup.dim]);
    }
    pooling->Pool(*lookup.unique, pointers.data(), lookup.dim, parallel_for, outputs);
    std::fill(then.rows.begin(), then.rows.end(), 1e9f);
  }
  const PooledGradients gradients(*pooling, *lookup.unique, lookup.dim, parallel_for,
                                  lookup.Gradients());
  const GradientSums sums(*lookup.unique, gradients, lookup.dim, parallel_for);
  EXPECT_EQ(sums.num_nonfinite(), 0);
  for (int64_t u = 0; u < lookup.unique->num_keys(); ++u) {
    result.rows.emplace_back(sums[u].values, sums[u].values + lookup.dim);
  }
  for (size_t f = 0; f < lookup.features.size(); ++f) {
    result.weights.emplace_back();
    if (!lookup.features[f].has_weights) continue;
    result.weights[f].assign(pooling->num_ids(f), -77);
    gradients.OfWeights(f, parallel_for, result.weights[f].data());
  }
  return result;
}

// The outputs by the definition of the combiners.
std::vector<std::vector<double>> Expected(const Lookup& lookup, const std::vector<double>& rows,
                                          const std::vector<std::vector<double>>& weights) {
  std::vector<std::vector<double>> outputs;
  int64_t place = 0;
  for (size_t f = 0; f < lookup.features.size(); ++f) {
    const auto& feature = lookup.features[f];
    outputs.emplace_back();
    for (size_t b = 0; b + 1 < feature.splits.size(); ++b) {
      for (int c = 0; c < lookup.dim; ++c) {
        double sum = 0, maximum = 0, sum_of_weights = 0, sum_of_squares = 0;
        for (int64_t i = feature.splits[b]; i < feature.splits[b + 1]; ++i) {
          const double w = weights[f][i];
          const double x = w * rows[lookup.unique->key_of[place + i] * lookup.dim + c];
          maximum = i == feature.splits[b] ? x : std::max(maximum, x);
          sum += x;
          sum_of_weights += w;
          sum_of_squares += w * w;
        }
        double divisor = 1;
        if (feature.combiner == Combiner::kMean) divisor = sum_of_weights;
        if (feature.combiner == Combiner::kSqrtN) divisor = std::sqrt(sum_of_squares);
        const double pooled = feature.combiner == Combiner::kMax ? maximum : sum;
        outputs[f].push_back(divisor == 0 ? 0 : pooled / divisor);
      }
    }
    place += feature.splits.back();
  }
  return outputs;
}

double Loss(const Lookup& lookup, const std::vector<double>& rows,
            const std::vector<std::vector<double>>& weights) {
  const auto outputs = Expected(lookup, rows, weights);
  double loss = 0;
  for (size_t f = 0; f < outputs.size(); ++f) {
    for (size_t i = 0; i < outputs[f].size(); ++i) {
      loss += outputs[f][i] * lookup.features[f].gradients[i];
    }
  }
  return loss;
}

// The derivative, or NaN at a kink or a pole: where the maximum goes from one id to another, or the
// sum of the weights is zero.
template <typename LossOf>
double Derivative(double x, const LossOf& loss_of) {
  constexpr double kStep = 1e-6;
  const double left = (loss_of(x) - loss_of(x - kStep)) / kStep;
  const double right = (loss_of(x + kStep) - loss_of(x)) / kStep;
  const bool smooth = std::abs(left) < 1e4 && std::abs(left - right) < 1e-3 * (1 + std::abs(left));
  return smooth ? (left + right) / 2 : NAN;
}

TEST(PoolingTest, OutputsAndGradientsAreThoseOfTheDefinition) {
  Random random(1);
  int64_t checked = 0, kinks = 0;
  for (int round = 0; round < 300; ++round) {
    const Lookup lookup = RandomLookup(&random);
    const Result result = StepOf(lookup, SerialFor);
    std::vector<double> rows(lookup.rows.begin(), lookup.rows.end());
    std::vector<std::vector<double>> weights;
    for (const auto& feature : lookup.features) {
      weights.emplace_back(feature.weights.begin(), feature.weights.end());
    }
    const auto expected = Expected(lookup, rows, weights);
    for (size_t f = 0; f < expected.size(); ++f) {
      ASSERT_EQ(result.outputs[f].size(), expected[f].size());
      for (size_t i = 0; i < expected[f].size(); ++i) {
        ASSERT_NEAR(result.outputs[f][i], expected[f][i], 1e-5) << round;
      }
    }
    const auto check = [&](double* x, float gradient) {
      const double at = *x;
      const double derivative = Derivative(at, [&](double value) {
        *x = value;
        return Loss(lookup, rows, weights);
      });
      *x = at;
      ++(std::isnan(derivative) ? kinks : checked);
      if (std::isnan(derivative)) return;
      ASSERT_NEAR(gradient, derivative, 2e-3) << round;
    };
    for (size_t u = 0; u < result.rows.size(); ++u) {
      const int c = Below(&random, lookup.dim);
      check(&rows[u * lookup.dim + c], result.rows[u][c]);
    }
    for (size_t f = 0; f < weights.size(); ++f) {
      for (size_t i = 0; i < result.weights[f].size(); ++i) {
        check(&weights[f][i], result.weights[f][i]);
      }
    }
  }
  EXPECT_GT(checked, 5000);
  EXPECT_LT(kinks, checked / 10);
}

TEST(PoolingTest, ThreadsChangeNothing) {
  Random random(2);
  for (int round = 0; round < 50; ++round) {
    const Lookup lookup = RandomLookup(&random);
    const Result serial = StepOf(lookup, SerialFor);
    const Result threaded = StepOf(lookup, ThreadedFor);
    EXPECT_EQ(serial.outputs, threaded.outputs);
    EXPECT_EQ(serial.rows, threaded.rows);
    EXPECT_EQ(serial.weights, threaded.weights);
  }
}

Lookup OneBag(Combiner combiner, const std::vector<int64_t>& ids, const std::vector<float>& rows,
              const std::vector<float>& weights) {
  Lookup lookup;
  lookup.dim = 1;
  lookup.ids = ids;
  lookup.rows = rows;
  lookup.features = {
      {combiner, true, true, {0, static_cast<int64_t>(ids.size())}, weights, {1.0f}}};
  lookup.unique = std::make_unique<UniqueIds>(lookup.ids.data(), lookup.ids.size());
  return lookup;
}

TEST(PoolingTest, IdsThatShareTheMaximumShareItsGradient) {
  const Result result =
      StepOf(OneBag(Combiner::kMax, {4, 5, 6, 4}, {2, 1, 3}, {1.5, 1, 1, 1.5}), SerialFor);
  EXPECT_EQ(result.outputs[0], (std::vector<float>{3}));
  EXPECT_EQ(result.rows, (std::vector<std::vector<float>>{{1}, {0}, {1 / 3.0f}}));
  EXPECT_EQ(result.weights[0], (std::vector<float>{2 / 3.0f, 0, 1, 2 / 3.0f}));
}

TEST(PoolingTest, WithoutWeightToDivideByThereIsNothing) {
  for (const Combiner combiner : {Combiner::kMean, Combiner::kSqrtN}) {
    const Result result = StepOf(OneBag(combiner, {4, 5}, {2, 1}, {0, 0}), SerialFor);
    EXPECT_EQ(result.outputs[0], (std::vector<float>{0}));
    EXPECT_EQ(result.rows, (std::vector<std::vector<float>>{{0}, {0}}));
    EXPECT_EQ(result.weights[0], (std::vector<float>{0, 0}));
  }
}

TEST(PoolingTest, SplitsThatAreNoneAreRefused) {
  std::shared_ptr<Pooling> pooling;
  const auto create = [&](const std::vector<int64_t>& splits, int64_t num_ids) {
    Pooling::Feature fine, feature;
    feature.splits = splits.data();
    feature.num_ids = num_ids;
    feature.num_bags = static_cast<int64_t>(splits.size()) - 1;
    return Pooling::Create({fine, feature}, &pooling);
  };
  EXPECT_OK(create({0, 2, 2, 5}, 5));
  EXPECT_REFUSED(create({1, 5}, 5), "splits of feature 1 begin with 1");
  EXPECT_REFUSED(create({0, 3, 2, 5}, 5), "splits of feature 1 fall from 3 to 2 at 2");
  EXPECT_REFUSED(create({0, 4}, 5), "splits of feature 1 end with 4, but it has 5 ids");
  Pooling::Feature without;
  without.num_ids = 3;
  without.num_bags = 2;
  EXPECT_REFUSED(Pooling::Create({without}, &pooling), "feature 0 has 3 ids for 2 bags");
}

}  // namespace
}  // namespace het_tf
