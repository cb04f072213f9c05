// The number of rows that a store keeps, beside those that can be found in it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>
#include <vector>

#include "ops/core/testing.h"
#include "ops/cuda/store_testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::DeviceStore;
using testing::Random;
using testing::Step;

constexpr int64_t kKeys = 60;

int64_t CountFound(const DeviceStore& store) {
  std::vector<int64_t> all;
  for (int64_t key = 0; key < kKeys; ++key) all.push_back(key);
  const Step step(store, 1, all);
  int64_t found = 0;
  for (const int64_t base : step.check_bases()) found += base >= 0;
  step.Unpin();
  return found;
}

// Steps overlap; some end before their rows came, and shards restart under others, whose rows are
// then of now or of before.
TEST(DeviceStoreCountTest, IsOfTheRowsThatAreFound) {
  const DeviceStore store("sgd", 1, 10);
  Random random(1);
  std::list<Step> open;
  int64_t most = 0;
  const int rounds = 600 / testing::kFewer;
  for (int round = 0; round < rounds; ++round) {
    if (Below(&random, 60) == 0) {
      store.Forget(static_cast<int32_t>(Below(&random, 2)), 2);
    } else if (open.size() < 3) {
      std::vector<int64_t> ids;
      for (int64_t i = Below(&random, 3); i >= 0; --i) ids.push_back(Below(&random, kKeys));
      open.emplace_back(store, 1, ids);
      open.back().MakeLines();
    } else {
      auto step = open.begin();
      std::advance(step, Below(&random, 3));
      const int64_t misses = static_cast<int64_t>(step->miss_keys().size());
      if (Below(&random, 4) > 0) {
        const int64_t base = Below(&random, 8) - 1;
        step->InstallMisses(std::vector<std::vector<float>>(misses, {1}),
                            std::vector<int64_t>(misses, base));
        const std::vector<int32_t> hits = step->check_index();
        step->InstallChecked(hits, std::vector<std::vector<float>>(hits.size(), {1}),
                             std::vector<int64_t>(hits.size(), base));
      }
      step->Unpin();
      open.erase(step);
    }
    const int64_t rows = store.CountLines();
    ASSERT_EQ(rows, CountFound(store)) << round;
    most = std::max(most, rows);
  }
  EXPECT_GE(most, store.info().lines - 2) << "lines of open steps have no row yet";
}

}  // namespace
}  // namespace het_tf
