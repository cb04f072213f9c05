#include "ops/cuda/host_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace cuda {
namespace {

using testing::Below;
using testing::Random;

struct Row {
  int64_t key, base;
  std::vector<float> floats;
};

TEST(HostRowsTest, TheOneThatCameFirstGivesWay) {
  HostRows rows(2, 3);
  const float row[] = {1, 2, 3};
  for (const int64_t key : {7, 8, 9}) rows.Put(key, key + 1, row);
  int64_t base = -1;
  float out[3] = {};
  EXPECT_FALSE(rows.Take(7, &base, out));
  EXPECT_TRUE(rows.Take(9, &base, out));
  EXPECT_EQ(base, 10);
  EXPECT_EQ(std::vector<float>(out, out + 3), std::vector<float>(row, row + 3));
  EXPECT_FALSE(rows.Take(9, &base, out)) << "it was handed over";
  rows.Drop(8);
  rows.Drop(8);
  EXPECT_EQ(rows.size(), 0);
}

TEST(HostRowsTest, NoneIsKeptWithoutPlace) {
  HostRows rows(0, 3);
  EXPECT_FALSE(rows.is_enabled());
  rows.Drop(1);
  EXPECT_EQ(rows.memory_bytes(), 0);
}

// Random calls, beside a list.
TEST(HostRowsTest, KeepsWhatAListKeeps) {
  for (const int dim : {1, 2, 17}) {
    constexpr size_t kCapacity = 50;
    HostRows rows(kCapacity, dim);
    std::list<Row> expected;
    Random random(dim);
    const auto find = [&](int64_t key) {
      return std::find_if(expected.begin(), expected.end(),
                          [&](const Row& r) { return r.key == key; });
    };
    for (int event = 0; event < 20000; ++event) {
      const int64_t key = Below(&random, 150) - 20;
      const auto there = find(key);
      if (Below(&random, 500) == 0) {
        const int shards = static_cast<int>(1 + Below(&random, 3));
        rows.DropAll(0, shards);
        expected.remove_if([&](const Row& r) { return ShardOfHash(HashKey(r.key), shards) == 0; });
      } else if (there == expected.end() && Below(&random, 3) > 0) {
        Row row = {key, event, std::vector<float>(dim, static_cast<float>(event))};
        rows.Put(key, event, row.floats.data());
        if (expected.size() == kCapacity) expected.pop_front();
        expected.push_back(std::move(row));
      } else {
        int64_t base = -1;
        std::vector<float> floats(dim);
        ASSERT_EQ(rows.Take(key, &base, floats.data()), there != expected.end()) << event;
        if (there == expected.end()) continue;
        ASSERT_EQ(base, there->base);
        ASSERT_EQ(floats, there->floats);
        expected.erase(there);
      }
      ASSERT_EQ(rows.size(), static_cast<int64_t>(expected.size()));
    }
    EXPECT_LT(rows.memory_bytes(), 64 * 1024) << "slots are used again";
  }
}

}  // namespace
}  // namespace cuda
}  // namespace het_tf
