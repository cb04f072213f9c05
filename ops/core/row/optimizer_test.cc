#include "ops/core/row/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;
using Numbers = std::vector<double>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::unique_ptr<Optimizer> Make(const std::string& spec, int dim) {
  std::unique_ptr<Optimizer> optimizer;
  EXPECT_OK(Optimizer::Parse(spec, dim, &optimizer)) << spec;
  return optimizer;
}

std::vector<float> InitialRow(const Optimizer& optimizer, float value) {
  std::vector<float> row(optimizer.row_dim(), value);
  optimizer.InitSlots(row.data() + optimizer.dim());
  return row;
}

double SumOfSquares(const Numbers& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return sum;
}

// The formulas of Keras 3, column by column, in double precision. row: value, then the slots.
using Oracle = void (*)(Numbers& w, Numbers& slots, const Numbers& g, double rate);

void SgdOracle(Numbers& w, Numbers&, const Numbers& g, double rate) {
  for (size_t i = 0; i < w.size(); ++i) w[i] -= rate * g[i];
}

template <bool kNesterov>
void MomentumOracle(Numbers& w, Numbers& m, const Numbers& g, double rate) {
  for (size_t i = 0; i < w.size(); ++i) {
    m[i] = 0.8 * m[i] - rate * g[i];
    w[i] += kNesterov ? 0.8 * m[i] - rate * g[i] : m[i];
  }
}

void AdagradOracle(Numbers& w, Numbers& a, const Numbers& g, double rate) {
  for (size_t i = 0; i < w.size(); ++i) {
    a[i] += g[i] * g[i];
    w[i] -= rate * g[i] / std::sqrt(a[i] + 1e-3);
  }
}

void RowWiseAdagradOracle(Numbers& w, Numbers& a, const Numbers& g, double rate) {
  a[0] += SumOfSquares(g) / w.size();
  for (size_t i = 0; i < w.size(); ++i) w[i] -= rate * g[i] / std::sqrt(a[0] + 1e-3);
}

template <bool kRowWise>
void AdamOracle(Numbers& w, Numbers& slots, const Numbers& g, double rate) {
  const size_t dim = w.size();
  double* m = slots.data();
  double* v = m + dim;
  const double t = ++slots.back();
  const double alpha = rate * std::sqrt(1 - std::pow(0.95, t)) / (1 - std::pow(0.8, t));
  for (size_t i = 0; i < dim; ++i) {
    m[i] += (g[i] - m[i]) * (1 - 0.8);
    if (!kRowWise) v[i] += (g[i] * g[i] - v[i]) * (1 - 0.95);
  }
  if (kRowWise) v[0] += (SumOfSquares(g) / dim - v[0]) * (1 - 0.95);
  for (size_t i = 0; i < dim; ++i) w[i] -= alpha * m[i] / (std::sqrt(v[kRowWise ? 0 : i]) + 1e-3);
}

void FtrlOracle(Numbers& w, Numbers& slots, const Numbers& g, double rate) {
  const double l1 = 0.05, l2 = 0.1, shrinkage = 0.2, beta = 0.3;
  for (size_t i = 0; i < w.size(); ++i) {
    double& n = slots[i];
    double& z = slots[w.size() + i];
    const double next = n + g[i] * g[i];
    z += g[i] + 2 * shrinkage * w[i] - (std::sqrt(next) - std::sqrt(n)) / rate * w[i];
    n = next;
    const double quadratic = std::sqrt(n) / rate + 2 * (l2 + beta / (2 * rate));
    w[i] = (std::min(std::max(z, -l1), l1) - z) / quadratic;
  }
}

// Slots: v, the average, the velocity.
template <bool kFull>
void RmspropOracle(Numbers& w, Numbers& slots, const Numbers& g, double rate) {
  const size_t dim = w.size();
  for (size_t i = 0; i < dim; ++i) {
    double& v = slots[i];
    v = 0.8 * v + 0.2 * g[i] * g[i];
    if (!kFull) {
      w[i] -= rate * g[i] / std::sqrt(v + 1e-3);
      continue;
    }
    double& average = slots[dim + i];
    double& velocity = slots[2 * dim + i];
    average = 0.8 * average + 0.2 * g[i];
    velocity = 0.7 * velocity + rate * g[i] / std::sqrt(v - average * average + 1e-3);
    w[i] -= velocity;
  }
}

void LionOracle(Numbers& w, Numbers& m, const Numbers& g, double rate) {
  for (size_t i = 0; i < w.size(); ++i) {
    const double direction = 0.8 * m[i] + 0.2 * g[i];
    w[i] -= rate * (direction > 0 ? 1 : direction < 0 ? -1 : 0);
    m[i] = 0.95 * m[i] + 0.05 * g[i];
  }
}

void LambOracle(Numbers& w, Numbers& slots, const Numbers& g, double rate) {
  const size_t dim = w.size();
  double* m = slots.data();
  double* v = m + dim;
  const double t = ++slots.back();
  Numbers direction(dim);
  for (size_t i = 0; i < dim; ++i) {
    m[i] += (g[i] - m[i]) * (1 - 0.8);
    v[i] += (g[i] * g[i] - v[i]) * (1 - 0.95);
    direction[i] =
        m[i] / (1 - std::pow(0.8, t)) / (std::sqrt(v[i] / (1 - std::pow(0.95, t))) + 1e-3);
  }
  const double ratio = std::sqrt(SumOfSquares(w) / SumOfSquares(direction));
  for (size_t i = 0; i < dim; ++i) w[i] -= rate * (ratio > 0 ? ratio : 1) * direction[i];
}

struct Case {
  std::string spec;
  Oracle oracle;
};
const std::vector<Case> kCases = {
    {"sgd", SgdOracle},
    {"momentum momentum=0.8", MomentumOracle<false>},
    {"momentum momentum=0.8 nesterov=1", MomentumOracle<true>},
    {"adagrad initial_accumulator_value=0.2 epsilon=1e-3", AdagradOracle},
    {"row_wise_adagrad initial_accumulator_value=0.2 epsilon=1e-3", RowWiseAdagradOracle},
    {"adam beta_1=0.8 beta_2=0.95 epsilon=1e-3", AdamOracle<false>},
    {"row_wise_adam beta_1=0.8 beta_2=0.95 epsilon=1e-3", AdamOracle<true>},
    {"ftrl initial_accumulator_value=0.2 l1=0.05 l2=0.1 l2_shrinkage=0.2 beta=0.3", FtrlOracle},
    {"rmsprop rho=0.8 epsilon=1e-3", RmspropOracle<false>},
    {"rmsprop rho=0.8 epsilon=1e-3 momentum=0.7 centered=1", RmspropOracle<true>},
    {"lion beta_1=0.8 beta_2=0.95", LionOracle},
    {"lamb beta_1=0.8 beta_2=0.95 epsilon=1e-3", LambOracle},
};

float RandomGradient(Random* random) {
  return static_cast<float>(Below(random, 2001) - 1000) / 500;
}

// Runs optimizer and oracle side by side. before and after are what Optimizer::Update does around
// the step: decay and clip, then max_norm.
void ExpectLikeOracle(const Case& c, const std::string& extra,
                      const std::function<void(Numbers& w, Numbers& g, double rate)>& before,
                      const std::function<void(Numbers& w)>& after) {
  for (const int dim : {1, 3, 8, 17}) {
    SCOPED_TRACE(c.spec + extra + " dim " + std::to_string(dim));
    const auto optimizer = Make(c.spec + extra, dim);
    std::vector<float> row = InitialRow(*optimizer, 0.5f);
    Numbers w(row.begin(), row.begin() + dim), slots(row.begin() + dim, row.end());
    Random random(dim);
    for (int step = 0; step < 40; ++step) {
      const float rate = 0.3f / static_cast<float>(1 + step % 5);
      std::vector<float> gradient(dim);
      for (float& g : gradient) g = RandomGradient(&random);
      optimizer->Update(row.data(), gradient.data(), rate);
      Numbers g(gradient.begin(), gradient.end());
      before(w, g, rate);
      c.oracle(w, slots, g, rate);
      after(w);
    }
    for (int i = 0; i < dim; ++i) EXPECT_NEAR(row[i], w[i], 2e-5 * (1 + std::abs(w[i])));
    for (size_t i = 0; i < slots.size(); ++i) {
      EXPECT_NEAR(row[dim + i], slots[i], 2e-5 * (1 + std::abs(slots[i]))) << "slot " << i;
    }
  }
}

void Nothing(Numbers&, Numbers&, double) {}
void NothingAfter(Numbers&) {}

void ScaleTo(Numbers& x, double limit) {
  const double norm = std::sqrt(SumOfSquares(x));
  if (norm <= limit) return;
  for (double& v : x) v *= limit / norm;
}

TEST(OptimizerTest, MatchesTheOracle) {
  for (const Case& c : kCases) ExpectLikeOracle(c, "", Nothing, NothingAfter);
}

TEST(OptimizerTest, ClipnormLimitsTheGradientOfARow) {
  const auto clip = [](Numbers&, Numbers& g, double) { ScaleTo(g, 0.7); };
  for (const Case& c : kCases) ExpectLikeOracle(c, " clipnorm=0.7", clip, NothingAfter);
}

TEST(OptimizerTest, MaxNormLimitsTheValueOfARow) {
  const auto limit = [](Numbers& w) { ScaleTo(w, 0.4); };
  for (const Case& c : kCases) ExpectLikeOracle(c, " max_norm=0.4", Nothing, limit);
}

TEST(OptimizerTest, RowsStayWithinTheirBounds) {
  const auto not_negative = [](Numbers& w) {
    for (double& v : w) v = std::max(v, 0.0);
  };
  const auto at_least = [](Numbers& w) {
    const double norm = std::sqrt(SumOfSquares(w));
    if (norm == 0 || norm >= 0.9) return;
    for (double& v : w) v *= 0.9 / norm;
  };
  for (const Case& c : kCases) {
    ExpectLikeOracle(c, " nonnegative=1", Nothing, not_negative);
    ExpectLikeOracle(c, " min_norm=0.9", Nothing, at_least);
  }
}

TEST(OptimizerTest, L2IsThatOfALossAndComesBeforeClipping) {
  const auto penalty = [](Numbers& w, Numbers& g, double) {
    for (size_t i = 0; i < w.size(); ++i) g[i] += 2 * 0.1 * w[i];
    ScaleTo(g, 1.5);
  };
  for (const Case& c : kCases) {
    if (c.oracle != FtrlOracle) {
      ExpectLikeOracle(c, " l2=0.1 clipnorm=1.5", penalty, NothingAfter);
    }
  }
}

// Algorithm 1 of the paper, for one id.
TEST(OptimizerTest, CowClipLimitsAGradientByItsRowAndItsOccurrences) {
  const float value[] = {3, 4}, gradient[] = {6, 8};
  const auto factor = [&](const std::string& spec, const float* row, int64_t occurrences) {
    const auto optimizer = Make("sgd " + spec, 2);
    EXPECT_TRUE(optimizer->limits_by_row());
    return optimizer->LimitByRow(row, Gradient::Of(gradient, 2), occurrences);
  };
  EXPECT_FLOAT_EQ(factor("cowclip=1", value, 1), 0.5f);
  EXPECT_FLOAT_EQ(factor("cowclip=0.1", value, 3), 0.15f);
  EXPECT_FLOAT_EQ(factor("cowclip=1", value, 2), 1);
  EXPECT_FLOAT_EQ(factor("cowclip=1", value, 1000), 1);
  const float zeros[] = {0, 0};
  EXPECT_FLOAT_EQ(factor("cowclip=1", zeros, 2), 2e-6f);
  EXPECT_FLOAT_EQ(factor("cowclip=1 cowclip_floor=0.5", zeros, 2), 0.1f);
  EXPECT_FALSE(Make("sgd cowclip_floor=1", 2)->limits_by_row());
}

TEST(OptimizerTest, WeightDecayComesBeforeTheStep) {
  const auto decay = [](Numbers& w, Numbers&, double rate) {
    for (double& v : w) v -= v * 0.1 * rate;
  };
  for (const Case& c : kCases) {
    if (c.oracle != FtrlOracle) ExpectLikeOracle(c, " weight_decay=0.1", decay, NothingAfter);
  }
}

TEST(OptimizerTest, DefaultsAreThoseOfKeras) {
  const std::map<std::string, std::string> spelled_out = {
      {"momentum", "momentum momentum=0.9 nesterov=0"},
      {"adagrad", "adagrad initial_accumulator_value=0.1 epsilon=1e-7"},
      {"row_wise_adagrad", "row_wise_adagrad initial_accumulator_value=0.1 epsilon=1e-7"},
      {"adam", "adam beta_1=0.9 beta_2=0.999 epsilon=1e-7"},
      {"row_wise_adam", "row_wise_adam beta_1=0.9 beta_2=0.999 epsilon=1e-7"},
      {"rmsprop", "rmsprop rho=0.9 momentum=0 epsilon=1e-7 centered=0"},
      {"lion", "lion beta_1=0.9 beta_2=0.99"},
      {"lamb", "lamb beta_1=0.9 beta_2=0.999 epsilon=1e-7"},
      {"ftrl", "ftrl initial_accumulator_value=0.1 l1=0 l2=0 l2_shrinkage=0 beta=0"}};
  for (const auto& [name, full] : spelled_out) {
    std::vector<float> rows[2];
    for (int i = 0; i < 2; ++i) {
      const auto optimizer = Make(i == 0 ? name : full, 2);
      rows[i] = InitialRow(*optimizer, 1);
      const float gradient[] = {0.25f, -1e-7f};
      for (int step = 0; step < 3; ++step) optimizer->Update(rows[i].data(), gradient, 0.1f);
    }
    EXPECT_EQ(rows[0], rows[1]) << name;
  }
}

TEST(OptimizerTest, ClipnormOffAndOnDiffer) {
  const float gradient[] = {3, 4};
  std::vector<float> row = {0, 0};
  Make("sgd clipnorm=0", 2)->Update(row.data(), gradient, 1);
  EXPECT_EQ(row, (std::vector<float>{-3, -4}));
  row = {0, 0};
  Make("sgd clipnorm=2.5", 2)->Update(row.data(), gradient, 1);
  EXPECT_EQ(row, (std::vector<float>{-1.5, -2}));
}

// ---- Contributions ----

using Row = std::vector<float>;

// The contribution of updates with these gradients, made on `row`.
Row Contribution(const Optimizer& optimizer, Row row, const std::vector<Row>& gradients,
                 float rate) {
  Row record(optimizer.record_dim()), contribution(optimizer.contribution_dim());
  optimizer.BeginRecord(row.data(), record.data());
  for (const Row& gradient : gradients) {
    optimizer.Update(row.data(), gradient.data(), rate, record.data());
  }
  optimizer.Contribute(row.data(), record.data(), contribution.data());
  return contribution;
}

std::vector<Row> RandomGradients(Random* random, int n, int dim) {
  std::vector<Row> gradients(n, Row(dim));
  for (Row& gradient : gradients) {
    for (float& g : gradient) g = static_cast<float>(Below(random, 2000) - 1000) / 500;
  }
  return gradients;
}

const std::vector<std::string>& Specs() {
  static const auto* const specs =
      new std::vector<std::string>{"sgd",
                                   "sgd weight_decay=0.1 clipnorm=1 max_norm=0.5",
                                   "momentum",
                                   "momentum nesterov=1",
                                   "momentum weight_decay=0.1",
                                   "adagrad",
                                   "adagrad max_norm=0.3",
                                   "row_wise_adagrad",
                                   "adam",
                                   "adam beta_1=0",
                                   "adam weight_decay=0.1",
                                   "row_wise_adam",
                                   "adam l2=0.1 nonnegative=1",
                                   "momentum l2=0.1 min_norm=0.1 max_norm=0.5",
                                   "rmsprop",
                                   "rmsprop momentum=0.8 centered=1 weight_decay=0.1",
                                   "lion weight_decay=0.1",
                                   "lamb",
                                   "lamb weight_decay=0.1",
                                   "ftrl l1=0.01 l2=0.01 beta=0.1"};
  return *specs;
}

// One worker with any staleness is as without a cache: what it sends makes of the row that it
// fetched the row that it has.
TEST(ContributionTest, MergedIntoTheRowItWasMadeOnIsTheUpdatedRow) {
  for (const std::string& spec : Specs()) {
    const auto optimizer = Make(spec, 5);
    Random random(1);
    Row shard = InitialRow(*optimizer, 0.1f);
    for (int round = 0; round < 30; ++round) {
      const auto gradients = RandomGradients(&random, 1 + round % 7, 5);
      Row worker = shard;
      for (const Row& g : gradients) optimizer->Update(worker.data(), g.data(), 0.05f);
      optimizer->Merge(shard.data(), Contribution(*optimizer, shard, gradients, 0.05f).data(),
                       gradients.size());
      for (size_t i = 0; i < shard.size(); ++i) {
        ASSERT_NEAR(shard[i], worker[i], 2e-5 * (1 + std::abs(worker[i]))) << spec << " " << i;
      }
    }
  }
}

// Whatever the rows that the updates were made on, the slots are those of a serial run over the
// same gradients in merging order. (FTRL's z depends on the weights too.)
TEST(ContributionTest, SlotsAreThoseOfASerialRun) {
  for (const std::string& spec : Specs()) {
    const auto optimizer = Make(spec, 3);
    if (spec.find("l2=0.1") != std::string::npos) continue;  // as FTRL's z
    const bool ftrl = spec[0] == 'f', linear = spec == "sgd" || spec.substr(0, 8) == "momentum";
    Random random(2);
    Row shard = InitialRow(*optimizer, 0.1f), serial = shard;
    std::vector<Row> workers(5, shard);
    for (int round = 0; round < 400; ++round) {
      Row& worker = workers[Below(&random, 5)];
      const auto gradients = RandomGradients(&random, static_cast<int>(1 + Below(&random, 9)), 3);
      const Row contribution = Contribution(*optimizer, worker, gradients, 0.01f);
      optimizer->Merge(shard.data(), contribution.data(), gradients.size());
      for (const Row& g : gradients) optimizer->Update(serial.data(), g.data(), 0.01f);
      if (Below(&random, 3) == 0) worker = shard;
      const size_t first = linear && spec.find('_') == std::string::npos ? 0 : 3;
      // Of rmsprop's velocity the steps are divided by the v that was read.
      const size_t end = ftrl ? 6 : spec.substr(0, 8) == "rmsprop " ? 9 : shard.size();
      for (size_t i = first; i < end; ++i) {
        ASSERT_NEAR(shard[i], serial[i], 1e-5 * (1 + std::abs(serial[i]))) << spec << " " << i;
      }
    }
  }
}

// A refetched row takes unsent updates in as the shard will, and what is sent later fits it.
TEST(ContributionTest, MovedOntoANewRowAndSentLater) {
  for (const std::string& spec : Specs()) {
    // Applied twice, these are not the same.
    if (spec.find("_norm") != std::string::npos) continue;
    if (spec.find("nonnegative") != std::string::npos) continue;
    const auto optimizer = Make(spec, 3);
    Random random(3);
    Row old_row = InitialRow(*optimizer, 0.1f), shard = old_row;
    for (const Row& g : RandomGradients(&random, 6, 3)) {
      optimizer->Update(shard.data(), g.data(), 0.01f);  // what others did meanwhile
    }
    Row worker = old_row, record(optimizer->record_dim());
    optimizer->BeginRecord(worker.data(), record.data());
    for (const Row& g : RandomGradients(&random, 4, 3)) {
      optimizer->Update(worker.data(), g.data(), 0.01f, record.data());
    }
    Row moved = shard;
    optimizer->MoveOnto(worker.data(), moved.data(), record.data(), 4);
    for (const Row& g : RandomGradients(&random, 3, 3)) {
      optimizer->Update(moved.data(), g.data(), 0.01f, record.data());
    }
    Row contribution(optimizer->contribution_dim());
    optimizer->Contribute(moved.data(), record.data(), contribution.data());
    optimizer->Merge(shard.data(), contribution.data(), 7);
    for (size_t i = 0; i < shard.size(); ++i) {
      EXPECT_NEAR(shard[i], moved[i], 2e-5 * (1 + std::abs(moved[i]))) << spec << " " << i;
    }
  }
}

TEST(ContributionTest, MergingKeepsTheNormLimit) {
  for (const char* spec : {"sgd max_norm=0.5", "adam max_norm=0.5", "ftrl max_norm=0.5"}) {
    const auto optimizer = Make(spec, 4);
    Random random(4);
    Row shard = InitialRow(*optimizer, 0);
    for (int round = 0; round < 50; ++round) {
      const Row stale = InitialRow(*optimizer, 0);
      const auto gradients = RandomGradients(&random, 3, 4);
      optimizer->Merge(shard.data(), Contribution(*optimizer, stale, gradients, 1).data(), 3);
      double square = 0;
      for (int i = 0; i < 4; ++i) square += shard[i] * shard[i];
      ASSERT_LE(std::sqrt(square), 0.5 + 1e-6) << spec;
    }
  }
}

// However large what comes in: rows and contributions stay numbers.
TEST(ContributionTest, NothingOverflows) {
  constexpr float kHuge = 1.8e19f;  // its square is a number
  for (const std::string& spec : Specs()) {
    const auto optimizer = Make(spec, 2);
    Row row = InitialRow(*optimizer, 1), shard = row, record(optimizer->record_dim());
    Row contribution(optimizer->contribution_dim());
    optimizer->BeginRecord(row.data(), record.data());
    for (int k = 1; k <= 40; ++k) {
      const Row gradient = {kHuge, k % 3 == 0 ? -kHuge : kHuge};
      optimizer->Update(row.data(), gradient.data(), 1e20f, record.data());
      for (const float x : row) ASSERT_TRUE(std::isfinite(x)) << spec;
      if (k % 5 != 0) continue;
      optimizer->Contribute(row.data(), record.data(), contribution.data());
      ASSERT_OK(optimizer->CheckContribution(contribution.data())) << spec;
      optimizer->Merge(shard.data(), contribution.data(), 5);
      for (const float x : shard) ASSERT_TRUE(std::isfinite(x)) << spec;
      optimizer->BeginRecord(row.data(), record.data());
    }
  }
}

TEST(ContributionTest, WhatIsNoContributionIsRefused) {
  for (const std::string& spec : Specs()) {
    const auto optimizer = Make(spec, 2);
    Row contribution(optimizer->contribution_dim(), 1);
    EXPECT_OK(optimizer->CheckContribution(contribution.data()));
    contribution.back() = kNan;
    EXPECT_FALSE(optimizer->CheckContribution(contribution.data()).ok());
    contribution.back() = 1;
    contribution[0] = -kInf;
    EXPECT_REFUSED(optimizer->CheckContribution(contribution.data()), "NaN or infinity");
  }
  const auto ftrl = Make("ftrl", 1);
  EXPECT_REFUSED(ftrl->CheckContribution(Row{1, 1, 0}.data()), "learning_rate = 0");
}

// What updates did is as long as the row that takes it, not as the one on which they were made.
TEST(ContributionTest, LambMergesInProportionToTheRow) {
  const auto optimizer = Make("lamb", 2);
  const Row begun = {3, 4, 0, 0, 0, 0, 0};
  Row updated = begun;
  const std::vector<Row> gradients(5, {1, -2});
  for (const Row& g : gradients) optimizer->Update(updated.data(), g.data(), 0.1f);
  const Row contribution = Contribution(*optimizer, begun, gradients, 0.1f);
  Row shorter = {0.3f, 0.4f, 0, 0, 0, 0, 0}, zeros(7);
  optimizer->Merge(shorter.data(), contribution.data(), 5);
  optimizer->Merge(zeros.data(), contribution.data(), 5);
  for (int i = 0; i < 2; ++i) {
    const float moved = updated[i] - begun[i];
    EXPECT_NEAR(shorter[i], (i == 0 ? 0.3f : 0.4f) + moved / 10, 1e-6);
    EXPECT_NEAR(zeros[i], moved, 1e-6);
  }
}

// Slots come from checkpoints and from the network, so they may hold anything.
TEST(OptimizerTest, AdamTakesAnyStepCount) {
  for (const char* spec : {"adam", "row_wise_adam", "lamb"}) {
    const auto optimizer = Make(spec, 2);
    for (const float t : {-1.5f, -2.0f, -1e6f, -1e30f, 1e6f, 1e30f, kInf, -kInf, kNan}) {
      std::vector<float> row = InitialRow(*optimizer, 1);
      row.back() = t;
      const float gradient[] = {1, 1};
      optimizer->Update(row.data(), gradient, 0.1f);
    }
  }
}

TEST(OptimizerTest, AdamBiasCorrectionGoesOnBeyondItsTable) {
  const auto optimizer = Make("adam beta_1=0.8 beta_2=0.95 epsilon=1e-3", 1);
  std::vector<float> row = InitialRow(*optimizer, 0);
  Numbers w = {0}, slots(3);
  for (int step = 0; step < 3000; ++step) {
    const float gradient = step % 2 ? 1 : -0.5f;
    optimizer->Update(row.data(), &gradient, 0.01f);
    AdamOracle<false>(w, slots, {gradient}, 0.01f);
  }
  EXPECT_NEAR(row[0], w[0], 1e-3 * std::abs(w[0]));
  EXPECT_EQ(row.back(), 3000);
}

TEST(OptimizerTest, LearningRatesThatCannotBeUsedAreRefused) {
  for (const Case& c : kCases) {
    const auto optimizer = Make(c.spec, 1);
    EXPECT_OK(optimizer->CheckLearningRate(0.5f));
    for (const float rate : {-0.5f, kInf, -kInf, kNan}) {
      EXPECT_REFUSED(optimizer->CheckLearningRate(rate), "learning_rate = ") << c.spec;
    }
    EXPECT_EQ(optimizer->CheckLearningRate(0).ok(), c.oracle != FtrlOracle) << c.spec;
  }
}

TEST(OptimizerTest, SpecErrorsNameTheParameter) {
  std::unique_ptr<Optimizer> optimizer;
  const auto parse = [&](const std::string& spec) { return Optimizer::Parse(spec, 2, &optimizer); };
  EXPECT_REFUSED(parse("lino"), "optimizer = 'lino': known are sgd");
  EXPECT_REFUSED(parse("rmsprop rho=1"), "rho is out of range");
  EXPECT_REFUSED(parse("rmsprop momentum=1.1"), "momentum is out of range");
  EXPECT_REFUSED(parse("lion beta_2=1"), "beta_2 is out of range");
  EXPECT_REFUSED(parse("lamb epsilon=0"), "epsilon is out of range");
  EXPECT_REFUSED(parse("sgd min_norm=2 max_norm=1"), "min_norm is more than max_norm");
  EXPECT_REFUSED(parse("sgd nonnegative=2"), "nonnegative is out of range");
  EXPECT_REFUSED(parse("sgd momentum=0.9"), "'momentum'");
  EXPECT_REFUSED(parse("momentum momentum=1.5"), "momentum is out of range");
  EXPECT_REFUSED(parse("momentum nesterov=2"), "nesterov is out of range");
  EXPECT_REFUSED(parse("adam beta_1=1"), "beta_1 is out of range");
  EXPECT_REFUSED(parse("adam beta_2=-0.1"), "beta_2 is out of range");
  EXPECT_REFUSED(parse("adam epsilon=0"), "epsilon is out of range");
  EXPECT_REFUSED(parse("adagrad initial_accumulator_value=-1"), "initial_accumulator_value");
  EXPECT_REFUSED(parse("ftrl l1=-1"), "l1 is out of range");
  EXPECT_REFUSED(parse("ftrl beta=1e39"), "beta is out of range");
  EXPECT_REFUSED(parse("ftrl weight_decay=0.1"), "l2 instead of weight_decay");
  for (const char* name :
       {"weight_decay", "l2", "clipnorm", "cowclip", "cowclip_floor", "min_norm", "max_norm"}) {
    EXPECT_REFUSED(parse(std::string("sgd ") + name + "=-1"), name);
  }
  EXPECT_REFUSED(Optimizer::Parse("sgd", 0, &optimizer), "dim = 0");
  EXPECT_EQ(optimizer, nullptr);
}

}  // namespace
}  // namespace het_tf
