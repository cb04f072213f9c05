#include "ops/cuda/visitors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "ops/core/testing.h"

namespace het_tf {
namespace cuda {
namespace {

// Random steps beside a plain map: a key has one visitor for as long as a step keeps it, no two
// keys the same, and there are no more than were ever needed at a time.
TEST(VisitorsTest, AreOfOneKeyEach) {
  testing::Random random(1);
  Visitors visitors;
  struct Held {
    int64_t key;
    int32_t visitor;
  };
  std::vector<std::vector<Held>> steps;
  std::map<int64_t, int32_t> visitor_of;
  std::map<int64_t, int64_t> holds;
  int64_t most = 0;
  for (int round = 0; round < 2000; ++round) {
    if (steps.size() > 3 || (!steps.empty() && testing::Chance(&random, 0.3))) {
      const size_t over = testing::Below(&random, static_cast<int64_t>(steps.size()));
      for (const Held& held : steps[over]) {
        visitors.LetGo(held.visitor);
        if (--holds[held.key] == 0) visitor_of.erase(held.key);
      }
      steps.erase(steps.begin() + static_cast<int64_t>(over));
      continue;
    }
    steps.emplace_back();
    const int64_t first = testing::Below(&random, 50), n = 1 + testing::Below(&random, 20);
    most = std::max(most, static_cast<int64_t>(visitor_of.size()) + n);
    visitors.Reserve(n);
    std::map<int32_t, int64_t> taken;
    for (int64_t key = first; key < first + n; ++key) {
      const int32_t visitor = visitors.Take(key);
      EXPECT_LT(visitor, visitors.end());
      EXPECT_TRUE(taken.emplace(visitor, key).second) << "another key of the step has it";
      if (testing::Chance(&random, 0.4)) {  // the key got a line
        visitors.LetGo(visitor);
        taken.erase(visitor);
        continue;
      }
      const bool known = visitor_of.count(key) > 0;
      if (known) {
        EXPECT_EQ(visitor, visitor_of[key]);
      } else {
        for (const auto& [other, of_other] : visitor_of) EXPECT_NE(visitor, of_other) << other;
      }
      visitors.Keep(visitor);
      EXPECT_EQ(visitors.shared(visitor), known);
      visitor_of[key] = visitor;
      ++holds[key];
      steps.back().push_back({key, visitor});
    }
  }
  EXPECT_LE(visitors.end(), most);
}

}  // namespace
}  // namespace cuda
}  // namespace het_tf
