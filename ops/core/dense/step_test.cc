#include "ops/core/dense/step.h"

#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace het_tf {
namespace {

std::vector<float> RandomFloats(int64_t n, float low, float high, std::mt19937* rng) {
  std::uniform_real_distribution<float> draw(low, high);
  std::vector<float> floats(n);
  for (float& x : floats) x = draw(*rng);
  return floats;
}

class DenseStep : public testing::TestWithParam<int64_t> {};

TEST_P(DenseStep, OfAdagradIsKerass) {
  const int64_t n = GetParam();
  std::mt19937 rng(1);
  std::vector<float> variable = RandomFloats(n, -1, 1, &rng);
  std::vector<float> accumulator = RandomFloats(n, 0, 1, &rng);
  for (int step = 0; step < 3; ++step) {
    const std::vector<float> gradient = RandomFloats(n, -1, 1, &rng);
    std::vector<float> wanted = variable, sums = accumulator;
    for (int64_t i = 0; i < n; ++i) {
      sums[i] = sums[i] + gradient[i] * gradient[i];
      wanted[i] = wanted[i] - 0.1f * gradient[i] / std::sqrt(sums[i] + 1e-7f);
    }
    float* slots[] = {accumulator.data()};
    DenseAdagrad{0.1f, 1e-7f}.Step(variable.data(), slots, gradient.data(), n);
    EXPECT_EQ(variable, wanted);
    EXPECT_EQ(accumulator, sums);
  }
}

TEST_P(DenseStep, OfAdamIsKerass) {
  const int64_t n = GetParam();
  std::mt19937 rng(1);
  std::vector<float> variable = RandomFloats(n, -1, 1, &rng);
  std::vector<float> momentum(n), velocity(n);
  for (int step = 0; step < 3; ++step) {
    const std::vector<float> gradient = RandomFloats(n, -1, 1, &rng);
    std::vector<float> wanted = variable, m = momentum, v = velocity;
    for (int64_t i = 0; i < n; ++i) {
      m[i] = m[i] + (gradient[i] - m[i]) * 0.1f;
      v[i] = v[i] + (gradient[i] * gradient[i] - v[i]) * 0.001f;
      wanted[i] = wanted[i] - m[i] * 0.02f / (std::sqrt(v[i]) + 1e-7f);
    }
    float* slots[] = {momentum.data(), velocity.data()};
    DenseAdam{0.02f, 0.1f, 0.001f, 1e-7f}.Step(variable.data(), slots, gradient.data(), n);
    EXPECT_EQ(variable, wanted);
    EXPECT_EQ(momentum, m);
    EXPECT_EQ(velocity, v);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, DenseStep, testing::Values(0, 1, 7, 8, 100));

}  // namespace
}  // namespace het_tf
