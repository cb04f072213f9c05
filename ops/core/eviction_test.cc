#include "ops/core/eviction.h"

#include <gtest/gtest.h>

#include <cmath>
#include <list>
#include <map>
#include <set>
#include <vector>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;

// A cache that keeps nothing but scores: slot = key.
class Lines {
 public:
  Lines(Policy policy, int64_t capacity) : eviction_(policy, capacity), capacity_(capacity) {}

  // Uses the keys together; the lines in use may not go. Returns the victims in their order.
  std::vector<uint32_t> Use(const std::vector<uint32_t>& keys, bool hold_on = false) {
    const double factor = eviction_.BeginUse(keys.size());
    if (factor != 1) {
      ++rescalings_;
      for (auto& entry : scores_) entry.second *= factor;
    }
    for (const uint32_t key : keys) scores_[key] = eviction_.Used(scores_[key]);
    held_.insert(keys.begin(), keys.end());
    const std::vector<uint32_t> victims = Trim();
    if (!hold_on) Release();
    return victims;
  }

  std::vector<uint32_t> Trim() {
    std::vector<uint32_t> victims;
    eviction_.Run(
        static_cast<int64_t>(scores_.size()) - capacity_,
        [&](const auto& visit) {
          ++scans_;
          for (const auto& [key, score] : scores_) {
            if (held_.count(key) == 0) visit(key, score);
          }
        },
        [&](uint32_t key, double score) {
          const auto found = scores_.find(key);
          return found != scores_.end() && found->second == score && held_.count(key) == 0;
        },
        [&](uint32_t key) {
          EXPECT_EQ(scores_.erase(key), 1u) << "evicted twice";
          victims.push_back(key);
        });
    return victims;
  }

  void Release() { held_.clear(); }
  bool Has(uint32_t key) const { return scores_.count(key) == 1; }
  size_t size() const { return scores_.size(); }
  int scans() const { return scans_; }
  int rescalings() const { return rescalings_; }
  double score(uint32_t key) const { return scores_.at(key); }

 private:
  Eviction eviction_;
  const int64_t capacity_;
  std::map<uint32_t, double> scores_;
  std::set<uint32_t> held_;
  int scans_ = 0, rescalings_ = 0;
};

TEST(LruTest, VictimsAreThoseOfAList) {
  for (const int64_t capacity : {1, 2, 15, 16, 17, 100, 640}) {
    Lines lines(Policy::kLru, capacity);
    std::list<uint32_t> recent;
    Random random(capacity);
    for (int use = 0; use < 5000; ++use) {
      const auto key = static_cast<uint32_t>(Below(&random, 1 + Below(&random, 3 * capacity)));
      recent.remove(key);
      recent.push_front(key);
      std::vector<uint32_t> expected;
      if (recent.size() > static_cast<size_t>(capacity)) {
        expected.push_back(recent.back());
        recent.pop_back();
      }
      ASSERT_EQ(lines.Use({key}), expected) << "use " << use << " of capacity " << capacity;
    }
  }
}

TEST(LruTest, AVictimCostsTheReadingOfSixteenLines) {
  constexpr int64_t kCapacity = 1600, kEvictions = 10000;
  Lines lines(Policy::kLru, kCapacity);
  for (uint32_t key = 0; key < kCapacity + kEvictions; ++key) lines.Use({key});
  EXPECT_LE(lines.scans(), kEvictions / (kCapacity / 16) + 1);
}

TEST(EvictionTest, HeldLinesStayAndGoLater) {
  for (const Policy policy : {Policy::kLru, Policy::kLfu}) {
    Lines lines(policy, 3);
    lines.Use({100, 101, 102});
    EXPECT_EQ(lines.Use({0, 1, 2, 3, 4}, true).size(), 3u);
    EXPECT_TRUE(lines.Trim().empty());
    for (uint32_t key = 0; key < 5; ++key) EXPECT_TRUE(lines.Has(key));
    lines.Release();
    EXPECT_EQ(lines.Trim().size(), 2u);
  }
}

TEST(EvictionTest, ABatchBeyondTheCapacity) {
  for (const Policy policy : {Policy::kLru, Policy::kLfu}) {
    Lines lines(policy, 10);
    std::vector<uint32_t> batch(10000);
    for (uint32_t i = 0; i < batch.size(); ++i) batch[i] = i;
    lines.Use(batch);
    EXPECT_EQ(lines.size(), batch.size());
    lines.Trim();
    EXPECT_EQ(lines.size(), 10u);
  }
}

TEST(LfuTest, FrequentLinesSurviveAScanOfOnceUsedLines) {
  constexpr uint32_t kCapacity = 160, kHot = 100;
  Lines lfu(Policy::kLfu, kCapacity), lru(Policy::kLru, kCapacity);
  for (Lines* lines : {&lfu, &lru}) {
    for (int round = 0; round < 10; ++round) {
      for (uint32_t key = 0; key < kHot; ++key) lines->Use({key});
    }
    for (uint32_t key = 1000; key < 1000 + 3 * kCapacity; ++key) lines->Use({key});
  }
  uint32_t kept = 0;
  for (uint32_t key = 0; key < kHot; ++key) {
    kept += lfu.Has(key);
    EXPECT_FALSE(lru.Has(key));
  }
  EXPECT_EQ(kept, kHot);
}

TEST(LfuTest, YesterdaysHotLinesLeave) {
  constexpr uint32_t kCapacity = 160;
  Lines lines(Policy::kLfu, kCapacity);
  for (int round = 0; round < 200; ++round) {
    for (uint32_t key = 0; key < kCapacity; ++key) lines.Use({key});
  }
  // Twenty rounds are five half-lives.
  for (int round = 0; round < 20; ++round) {
    for (uint32_t key = 1000; key < 1000 + kCapacity; ++key) lines.Use({key});
  }
  uint32_t old_kept = 0;
  for (uint32_t key = 0; key < kCapacity; ++key) old_kept += lines.Has(key);
  EXPECT_LE(old_kept, kCapacity / 16);
}

TEST(LfuTest, AUseCountsHalfAfterAHalfLife) {
  constexpr int64_t kCapacity = 10;
  Lines lines(Policy::kLfu, kCapacity);
  lines.Use({1});
  for (int i = 0; i < 4 * kCapacity - 1; ++i) lines.Use({2});
  lines.Use({3});
  EXPECT_NEAR(lines.score(3) / lines.score(1), 2, 1e-9);
}

// The count of a line's uses, each halved for every half-life that has passed since.
TEST(LfuTest, OrderOutlastsHundredsOfHalfLives) {
  constexpr int64_t kCapacity = 8, kHalfLife = 4 * kCapacity;
  Lines lines(Policy::kLfu, kCapacity);
  std::map<uint32_t, double> aged;
  Random random(1);
  for (int64_t use = 0; use < 1300 * kHalfLife; ++use) {
    const auto key = static_cast<uint32_t>(Below(&random, 1 + Below(&random, kCapacity)));
    lines.Use({key});
    for (auto& entry : aged) entry.second *= std::exp2(-1.0 / kHalfLife);
    aged[key] += 1;
    for (uint32_t a = 0; a < kCapacity; ++a) {
      for (uint32_t b = 0; b < a; ++b) {
        if (!aged.count(a) || !aged.count(b) || aged[a] < aged[b] * 1.000001) continue;
        ASSERT_GT(lines.score(a), lines.score(b)) << "use " << use;
      }
    }
  }
  EXPECT_EQ(lines.rescalings(), 2);
  EXPECT_EQ(lines.size(), static_cast<size_t>(kCapacity));
}

}  // namespace
}  // namespace het_tf
