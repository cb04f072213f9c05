#include "ops/core/plan/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;
using testing::ThreadedFor;

using Ids = std::vector<int64_t>;

struct Planned {
  explicit Planned(const PlanConfig& config, std::vector<int32_t> tables = {0})
      : planner(config), tables(std::move(tables)), scored(this->tables.size()) {
    std::iota(scored.begin(), scored.end(), 0);
  }

  const std::vector<int32_t>& Plan(const Ids& keys, const ParallelFor& parallel_for = SerialFor) {
    const auto num_examples = static_cast<int64_t>(keys.size() / tables.size());
    planner.Plan({keys.data(), num_examples, tables, scored}, parallel_for, &step);
    return step.worker_of;
  }
  std::vector<Ids> Due() const {
    std::vector<Ids> due;
    for (const auto& of_worker : step.due) {
      due.emplace_back();
      for (const Planner::TableKey& key : of_worker) due.back().push_back(key.key);
      std::sort(due.back().begin(), due.back().end());
    }
    return due;
  }

  Planner planner;
  std::vector<int32_t> tables, scored;
  Planner::Step step;
};

using Workers = std::vector<int32_t>;

TEST(PlannerTest, ExamplesGoToWhoHasTheirRows) {
  Planned two({2});
  EXPECT_EQ(two.Plan({1, 2, 3, 4}), (Workers{0, 1, 0, 1})) << "ties in turn";
  EXPECT_EQ(two.step.num_hits, 0);
  EXPECT_EQ(two.Plan({4, 2, 3, 1}), (Workers{1, 1, 0, 0}));
  EXPECT_EQ(two.step.num_hits, 4);
  EXPECT_EQ(two.Plan({1, 3, 1, 3}), (Workers{0, 0, 1, 1})) << "worker 0 has no more room";
  EXPECT_EQ(two.step.num_hits, 2);
}

TEST(PlannerTest, ARowThatTwoTrainIsFreshNowhere) {
  Planned two({2}), anyhow({2, 0, /*synchronous=*/false});
  for (Planned* planned : {&two, &anyhow}) {
    planned->Plan({1, 1});
    planned->Plan({1, 1});
  }
  EXPECT_EQ(two.step.num_hits, 0);
  EXPECT_EQ(anyhow.step.num_hits, 2);
}

TEST(PlannerTest, RowsLeaveAShadowThatWereNotUsedForLongest) {
  Planned one({1, 2});
  for (const int64_t key : {1, 2, 1, 3}) one.Plan({key});
  one.Plan({1});
  EXPECT_EQ(one.step.num_hits, 1);
  one.Plan({2});
  EXPECT_EQ(one.step.num_hits, 0) << "3 came when 1 and 2 were there, and 2 was older";
  EXPECT_EQ(one.planner.size(), 2);
}

TEST(PlannerTest, SharesDifferByOneAtMost) {
  Planned three({3});
  const Workers& workers = three.Plan({1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_EQ(std::count(workers.begin(), workers.end(), 0), 3);
  EXPECT_EQ(std::count(workers.begin(), workers.end(), 1), 3);
  EXPECT_EQ(std::count(workers.begin(), workers.end(), 2), 2);
  EXPECT_TRUE(three.Plan({}).empty());
}

TEST(PlannerTest, TablesAndColumnsAreKeptApart) {
  Planned two({2}, {0, 1});
  two.Plan({7, 8, 8, 7});  // worker 0: 7 of table 0 and 8 of table 1
  EXPECT_EQ(two.Plan({8, 7, 7, 8}), (Workers{1, 0}));
  EXPECT_EQ(two.step.num_hits, 4);
  two.scored = {1};
  EXPECT_EQ(two.Plan({9, 8, 9, 7}), (Workers{0, 1}));
  EXPECT_EQ(two.step.num_hits, 2);
  EXPECT_EQ(two.step.num_keys, 4);
}

TEST(PlannerTest, WhatOthersTrainNextIsDue) {
  Planned two({2});
  two.Plan({1, 2});
  EXPECT_EQ(two.Due(), (std::vector<Ids>{{}, {}}));
  two.Plan({1, 2, 1, 1});  // 1 goes to worker 0 twice, then there is no room
  EXPECT_EQ(two.step.worker_of, (Workers{0, 1, 0, 1}));
  EXPECT_EQ(two.Due(), (std::vector<Ids>{{1}, {}})) << "worker 1 trains 1 now, too";
  two.Plan({2, 3});
  EXPECT_EQ(two.Due(), (std::vector<Ids>{{1}, {1}})) << "both have trained 1";
  two.Plan({4, 4});
  EXPECT_EQ(two.Due(), (std::vector<Ids>{{}, {}})) << "nobody else needs 2 and 3";
}

TEST(PlannerTest, WhatAShadowEvictsIsDue) {
  Planned two({2, 1});
  two.Plan({1, 2});
  two.Plan({3, 4});
  two.Plan({5, 6});
  EXPECT_EQ(two.Due(), (std::vector<Ids>{{1}, {2}}));
}

TEST(PlannerTest, BadConfigsAreRefused) {
  EXPECT_REFUSED(Planner::Check({0}), "num_workers = 0");
  EXPECT_REFUSED(Planner::Check({65}), "num_workers = 65 must be in [1, 64]");
  EXPECT_REFUSED(Planner::Check({2, -1}), "capacity = -1");
  EXPECT_OK(Planner::Check({64, 10}));
}

// The rules once more, with maps and lists.
class Model {
 public:
  explicit Model(const PlanConfig& config) : config_(config), caches_(config.num_workers) {}

  Workers Plan(const Ids& keys, int64_t width) {
    const auto n = static_cast<int64_t>(keys.size()) / width;
    Workers workers(n);
    std::vector<int64_t> room(config_.num_workers);
    for (int w = 0; w < config_.num_workers; ++w) {
      room[w] = n / config_.num_workers + (w < n % config_.num_workers ? 1 : 0);
    }
    std::map<int64_t, std::set<int>> trainers;
    for (int64_t e = 0; e < n; ++e) {
      int best = -1;
      int64_t most = -1;
      for (int i = 0; i < config_.num_workers; ++i) {
        const int w = (rotation_ + i) % config_.num_workers;
        int64_t score = 0;
        for (int64_t c = 0; c < width; ++c) {
          const auto& cached = caches_[w];
          const auto row = cached.find(keys[e * width + c]);
          score += row != cached.end() && (row->second.is_fresh || !config_.synchronous);
        }
        if (room[w] > 0 && score > most) {
          best = w;
          most = score;
        }
      }
      --room[best];
      workers[e] = best;
      rotation_ = (best + 1) % config_.num_workers;
    }
    ++now_;
    for (int64_t e = 0; e < n; ++e) {
      for (int64_t c = 0; c < width; ++c) {
        const int64_t key = keys[e * width + c];
        trainers[key].insert(workers[e]);
        int64_t& used_at = caches_[workers[e]][key].used_at;
        if (used_at / kStep != now_) used_at = now_ * kStep + order_++;  // its first in the step
      }
    }
    for (const auto& [key, of_key] : trainers) {
      for (int w = 0; w < config_.num_workers; ++w) {
        const auto row = caches_[w].find(key);
        if (row != caches_[w].end()) row->second.is_fresh = of_key.size() == 1 && of_key.count(w);
      }
    }
    for (auto& cache : caches_) {
      while (config_.capacity > 0 && static_cast<int64_t>(cache.size()) > config_.capacity) {
        cache.erase(std::min_element(cache.begin(), cache.end(), [](const auto& a, const auto& b) {
          return a.second.used_at < b.second.used_at;
        }));
      }
    }
    return workers;
  }

 private:
  struct Row {
    int64_t used_at = 0;
    bool is_fresh = false;
  };
  static constexpr int64_t kStep = 1000000;
  const PlanConfig config_;
  std::vector<std::map<int64_t, Row>> caches_;
  int64_t now_ = 0, order_ = 0;
  int rotation_ = 0;
};

TEST(PlannerTest, PlansAsTheModelDoes) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    constexpr int kWorkers[] = {1, 2, 7, 9, 17};
    PlanConfig config;
    config.num_workers = kWorkers[Below(&random, 5)];
    // A step does not use more rows than a shadow holds: in which order it uses them is not kept.
    const int64_t share = 1 + Below(&random, 4), width = 1 + Below(&random, 3);
    config.capacity = testing::Chance(&random, 0.5) ? 0 : share * width + Below(&random, 20);
    config.synchronous = testing::Chance(&random, 0.5);
    Planned planned(config, std::vector<int32_t>(width));
    Model model(config);
    for (int step = 0; step < 40; ++step) {
      Ids keys(config.num_workers * share * width);
      for (int64_t& key : keys) key = Below(&random, 1 + Below(&random, 60));
      ASSERT_EQ(planned.Plan(keys, ThreadedFor), model.Plan(keys, width)) << "step " << step;
    }
  }
}

}  // namespace
}  // namespace het_tf
