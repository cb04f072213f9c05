// Many workers on one hot row: merging makes training no worse than what is late makes it anyway.
//
// The row is a number with the loss (row - 1)^2 / 2, and gradients are noisy. Plain SGD at the
// effective rate of momentum and Adam, rate / (1 - beta), shows how much delay itself costs.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "ops/core/cache/cache_testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Cluster;
using testing::Floats;
using testing::PlainConfig;
using testing::Random;
using testing::SetStaleness;

constexpr double kBeta = 0.9, kRate = 0.001;
constexpr int kSteps = 3000;
constexpr int64_t kNoCache = -2;

struct Outcome {
  double distance = 0;  // of the row in the table from 1, a mean over the last third
  double largest_gradient = 0;
  double largest_value = 0;
  double largest_slots[2] = {0, 0};
};

Outcome Train(const std::string& optimizer, double rate, int workers, int64_t staleness,
              bool lockstep, const std::string& initializer = "zeros") {
  CacheConfig config = PlainConfig();
  config.rows.optimizer = optimizer;
  config.rows.initializer = initializer;
  if (staleness == kNoCache) {
    config.capacity = 0;
  } else {
    SetStaleness(&config, staleness);
  }
  const bool writes_through = staleness == kNoCache || staleness == 0;
  Cluster cluster(config, workers);
  Random random(1);
  Outcome outcome;
  int64_t measured = 0;
  const auto update = [&](Cluster::Call* call, float read) {
    const double noise = static_cast<double>(Below(&random, 2001) - 1000) / 5000;
    const auto gradient = static_cast<float>(read - 1 + noise);
    outcome.largest_gradient = std::max(outcome.largest_gradient, std::fabs(double{gradient}));
    ASSERT_OK(cluster.Update(*call, {gradient}, static_cast<float>(rate)));
    if (writes_through) cluster.Flush(call->cache, false);
  };
  for (int step = 0; step < kSteps; step += lockstep ? workers : 1) {
    std::vector<Cluster::Call> calls;
    for (int w = lockstep ? 0 : step % workers; w < (lockstep ? workers : step % workers + 1);
         ++w) {
      calls.push_back(cluster.Lookup(w, {0}));
      cluster.Deliver(&calls.back());
    }
    Floats reads;
    for (Cluster::Call& call : calls) reads.push_back(cluster.Fill(&call)[0]);
    for (size_t c = 0; c < calls.size(); ++c) update(&calls[c], reads[c]);
    const auto rows = testing::Snapshot(*cluster.table());
    if (rows.empty()) continue;
    const testing::TableRow& row = rows.begin()->second;
    outcome.largest_value = std::max(outcome.largest_value, std::fabs(double{row.value[0]}));
    for (size_t i = 0; i < std::min<size_t>(row.slots.size(), 2); ++i) {
      outcome.largest_slots[i] =
          std::max(outcome.largest_slots[i], std::fabs(double{row.slots[i]}));
    }
    if (step < kSteps * 2 / 3) continue;
    outcome.distance += std::fabs(row.value[0] - 1.0);
    ++measured;
  }
  outcome.distance /= static_cast<double>(std::max<int64_t>(measured, 1));
  return outcome;
}

TEST(ConvergenceTest, MomentumAndAdamStandAsMuchDelayAsPlainSgd) {
  if (testing::kSanitized) GTEST_SKIP() << "arithmetic on one thread, a million steps of it";
  int held = 0, given_up = 0;
  for (const bool lockstep : {false, true}) {
    for (const int workers : {3, 24}) {
      const auto distances = [&](const char* optimizer, double rate) {
        std::vector<Outcome> outcomes;
        for (const int64_t staleness : {kNoCache, int64_t{5}, int64_t{20}, int64_t{100}}) {
          outcomes.push_back(Train(optimizer, rate, workers, staleness, lockstep));
        }
        return outcomes;
      };
      const auto sgd = distances("sgd", kRate / (1 - kBeta));
      for (const char* optimizer : {"momentum", "momentum nesterov=1", "adam", "row_wise_adam"}) {
        const auto tried = distances(optimizer, kRate);
        const bool adam = std::string(optimizer).find("adam") != std::string::npos;
        for (size_t i = 0; i < tried.size(); ++i) {
          SCOPED_TRACE(StrCat(optimizer, ", ", workers, " workers, ",
                              lockstep ? "lockstep" : "serial", ", staleness ",
                              std::vector<int64_t>{-1, 5, 20, 100}[i]));
          const double largest = tried[i].largest_gradient;
          // What gradients can make of slots, whatever the delay; a hair for rounding.
          if (adam) {
            EXPECT_LE(tried[i].largest_slots[0], largest * 1.0001);
            EXPECT_LE(tried[i].largest_slots[1], largest * largest * 1.0001);
          } else {
            EXPECT_LE(tried[i].largest_slots[0], kRate * largest / (1 - kBeta) * 1.0001);
          }
          if (sgd[i].distance > 3 * sgd[0].distance) {
            ++given_up;
            continue;
          }
          ++held;
          EXPECT_LE(tried[i].distance, 3 * tried[0].distance);
        }
      }
    }
  }
  EXPECT_GT(held, given_up) << "too few to show anything";
}

// Those whose steps do not grow with the gradient, or are divided or limited by the row: late
// updates take them further past the minimum, but not further each time.
TEST(ConvergenceTest, NothingDivergesWith24Workers) {
  if (testing::kSanitized) GTEST_SKIP() << "arithmetic on one thread, a million steps of it";
  constexpr int kWorkers = 24;
  for (const std::string optimizer :
       {"rmsprop", "rmsprop momentum=0.9", "rmsprop centered=1", "lion", "lion weight_decay=0.1",
        "lamb", "lamb weight_decay=0.1", "adam weight_decay=0.1", "sgd l2=0.05", "adagrad l2=0.05",
        "sgd cowclip=0.5", "adam cowclip=0.5"}) {
    for (const int64_t staleness : {kNoCache, int64_t{5}, int64_t{100}}) {
      // Gradients of one sign have so little variance that such a delay alone is too much: one
      // worker with gradients that are 144 updates old, and a momentum of .9, gets to 500.
      if (optimizer == "rmsprop centered=1" && staleness == 100) continue;
      SCOPED_TRACE(StrCat(optimizer, ", staleness ", staleness));
      const Outcome outcome =
          Train(optimizer, kRate, kWorkers, staleness, true, "constant value=0.5");
      // So many updates of others may be missing; a momentum of .9 makes ten of one, and
      // rmsprop's are up to 1 / sqrt(1 - rho) = 3.2 rates long, lamb's a share of the row.
      const double late = kRate * kWorkers * static_cast<double>(std::max<int64_t>(staleness, 1));
      EXPECT_LE(outcome.largest_value, 2 + 32 * late);
      if (late < 0.2) {
        EXPECT_LE(outcome.distance, 0.6);
      }
    }
  }
}

// Added as it is, what updates did to a row that is larger now would throw it to the other side,
// each time further (to 15,000 here). In proportion it takes 480 late updates to at most exp(4.8) =
// 121 times what it was, as they would one after another.
TEST(ConvergenceTest, LambMergesInProportion) {
  if (testing::kSanitized) GTEST_SKIP() << "arithmetic on one thread";
  const Outcome outcome = Train("lamb", 0.01, 24, 20, true, "constant value=3");
  EXPECT_LE(outcome.largest_value, 122);
}

// A norm limit holds on the shard and in every cache, however many merge into the row.
TEST(ConvergenceTest, TheNormLimitHolds) {
  for (const char* optimizer : {"sgd max_norm=1", "adam max_norm=1", "ftrl max_norm=1"}) {
    for (const int64_t staleness : {int64_t{0}, int64_t{1}, int64_t{10}}) {
      CacheConfig config = PlainConfig();
      config.rows.optimizer = optimizer;
      config.rows.dim = 3;
      SetStaleness(&config, staleness);
      Cluster cluster(config, 4);
      for (int round = 0; round < 100; ++round) {
        for (int w = 0; w < 4; ++w) {
          const Floats read = cluster.Step(w, {0}, {-1, -2, 3}, 1);
          EXPECT_LE(std::hypot(std::hypot(read[0], read[1]), read[2]), 1.00001);
          if (staleness == 0) cluster.Flush(w, false);
        }
        for (const auto& [key, row] : cluster.Rows()) {
          const Floats& value = row.value;
          EXPECT_LE(std::hypot(std::hypot(value[0], value[1]), value[2]), 1.00001) << key;
        }
      }
    }
  }
}

// docs/protocol.md, 2, drift: what a read lacks is at most read_bound + (N - 1) * write_bound long;
// a worker whose last update passed its bound holds back that much more until its next message.
TEST(ConvergenceTest, DriftBoundsTheDistance) {
  constexpr int kWorkers = 3;
  for (const double bound : {0.0, 0.5, 2.0}) {
    CacheConfig config = PlainConfig(2);
    config.rows.clock = ClockRule::kDrift;
    SetStaleness(&config, static_cast<int64_t>(bound / kDriftUnit));
    config.capacity = 6;
    Cluster cluster(config, kWorkers);
    Random random(1);
    std::vector<double> sums(10);
    double furthest = 0;
    for (int step = 0; step < 5000; ++step) {
      const int w = static_cast<int>(Below(&random, kWorkers));
      const int64_t key = Below(&random, 1 + Below(&random, 10));
      const float gradient = static_cast<float>(Below(&random, 200) - 100) / 500;  // 0.2 at most
      const float read = cluster.Step(w, {key}, {gradient})[0];
      furthest = std::max(furthest, std::fabs(read + sums[key]));
      sums[key] += gradient;
      if (bound == 0) cluster.Flush(w, false);
    }
    const double unsent = bound == 0 ? 0 : bound + 0.2;
    EXPECT_LE(furthest, bound + (kWorkers - 1) * unsent + 1e-4);
    EXPECT_EQ(furthest > 1e-3, bound > 0) << "whether the bound was tried";
  }
}

}  // namespace
}  // namespace het_tf
