// CowClip's limit depends on the row and the batch, so it is put where gradients come in: with a
// cache of any staleness as without one.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

#include "ops/core/cache/cache_testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Cluster;
using testing::Floats;
using testing::Ids;
using testing::PlainConfig;
using testing::Random;
using testing::SetStaleness;

constexpr int kSteps = 200;
constexpr float kRate = 0.1f;

struct Step {
  Ids ids;
  Floats gradients;  // (ids, 2)
};

std::vector<Step> Steps() {
  Random random(1);
  std::vector<Step> steps(kSteps);
  for (Step& step : steps) {
    for (int64_t n = 1 + Below(&random, 12); n > 0; --n) {
      step.ids.push_back(Below(&random, 1 + Below(&random, 20)));
      for (int i = 0; i < 2; ++i) {
        step.gradients.push_back(static_cast<float>(Below(&random, 2001) - 1000) / 500);
      }
    }
  }
  return steps;
}

// SGD with cowclip=0.5 cowclip_floor=0.01 from ones, by algorithm 1 of the paper.
std::map<int64_t, std::vector<double>> Expected(const std::vector<Step>& steps, int* clipped) {
  std::map<int64_t, std::vector<double>> rows;
  for (const Step& step : steps) {
    std::map<int64_t, std::vector<double>> sums;
    std::map<int64_t, int> occurrences;
    for (size_t n = 0; n < step.ids.size(); ++n) {
      auto& sum = sums.emplace(step.ids[n], std::vector<double>(2)).first->second;
      for (int i = 0; i < 2; ++i) sum[i] += step.gradients[2 * n + i];
      ++occurrences[step.ids[n]];
    }
    for (const auto& [id, sum] : sums) {
      auto& row = rows.emplace(id, std::vector<double>{1, 1}).first->second;
      const double limit = occurrences[id] * std::max(0.5 * std::hypot(row[0], row[1]), 0.01);
      const double factor = std::min(1.0, limit / std::hypot(sum[0], sum[1]));
      *clipped += factor < 1;
      for (int i = 0; i < 2; ++i) row[i] -= kRate * factor * sum[i];
    }
  }
  return rows;
}

CacheConfig Config() {
  CacheConfig config = PlainConfig();
  config.rows.dim = 2;
  config.rows.optimizer = "sgd cowclip=0.5 cowclip_floor=0.01";
  config.rows.initializer = "constant value=1";
  return config;
}

void ExpectRows(const testing::TableRows& rows, const std::vector<Step>& steps) {
  int clipped = 0;
  const auto expected = Expected(steps, &clipped);
  EXPECT_GT(clipped, kSteps / 4);
  ASSERT_EQ(rows.size(), expected.size());
  for (const auto& [id, row] : rows) {
    for (int i = 0; i < 2; ++i) EXPECT_NEAR(row.value[i], expected.at(id)[i], 1e-4) << id;
  }
}

TEST(CowClipTest, OneWorkerIsAsWithoutACache) {
  const std::vector<Step> steps = Steps();
  constexpr int64_t kNoCache = -2;
  for (const int64_t staleness : {kNoCache, int64_t{0}, int64_t{3}, int64_t{100}, kUnbounded}) {
    for (const int64_t capacity : {3, 1000}) {
      SCOPED_TRACE(StrCat("staleness ", staleness, ", capacity ", capacity));
      CacheConfig config = Config();
      config.capacity = staleness == kNoCache ? 0 : capacity;
      if (staleness != kNoCache) SetStaleness(&config, staleness);
      Cluster cluster(config);
      for (const Step& step : steps) {
        cluster.Step(0, step.ids, step.gradients, kRate);
        if (staleness == kNoCache || staleness == 0) cluster.Flush(0, false);
      }
      cluster.Flush(0);
      ExpectRows(cluster.Rows(), steps);
    }
  }
}

TEST(CowClipTest, InATableOfTheProcess) {
  const std::vector<Step> steps = Steps();
  const auto table = testing::MakeTable(Config().rows, 0);
  for (const Step& step : steps) {
    const UniqueIds ids(step.ids.data(), static_cast<int64_t>(step.ids.size()));
    EXPECT_OK(
        table->Apply(ids, FoundRows(), step.gradients.data(), kRate, Nonfinite::kError, SerialFor));
  }
  ExpectRows(testing::Snapshot(*table), steps);
}

}  // namespace
}  // namespace het_tf
