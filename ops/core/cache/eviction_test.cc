#include "ops/core/cache/eviction.h"

#include <gtest/gtest.h>

#include <algorithm>
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
    eviction_.BeginUse(static_cast<int64_t>(keys.size()));
    for (const uint32_t key : keys) {
      const auto found = scores_.find(key);
      scores_[key] = found == scores_.end() ? eviction_.New(1) : eviction_.Used(found->second);
      if (found == scores_.end()) known_[key] = scores_[key];
      end_ = std::max(end_, key + 1);
    }
    held_.insert(keys.begin(), keys.end());
    const std::vector<uint32_t> victims = Trim();
    if (!hold_on) Release();
    return victims;
  }

  std::vector<uint32_t> Trim() {
    std::vector<uint32_t> victims;
    eviction_.Run(static_cast<int64_t>(scores_.size()) - capacity_, *this, [&](uint32_t key) {
      EXPECT_EQ(scores_.erase(key), 1u) << "evicted twice";
      known_.erase(key);
      victims.push_back(key);
    });
    return victims;
  }

  // For Eviction.
  uint32_t end() const { return end_; }
  void Prefetch(uint32_t key) const { EXPECT_LT(key, end_); }
  void PrefetchLine(uint32_t key) const { EXPECT_LT(key, end_); }
  bool Known(uint32_t key, uint32_t* score) const {
    ++looks_;
    const auto found = known_.find(key);
    if (found == known_.end()) return false;
    *score = found->second;
    return true;
  }
  bool MayGo(uint32_t key, uint32_t* score) const {
    ++line_looks_;
    const auto found = scores_.find(key);
    if (found == scores_.end()) return false;
    if (held_.count(key) == 1) {
      known_.erase(key);
      *score = 0;
      return false;
    }
    known_[key] = *score = found->second;
    return true;
  }

  void Release() {
    for (const uint32_t key : held_) {
      if (Has(key)) known_[key] = scores_[key];
    }
    held_.clear();
    eviction_.LineMayGo();
  }
  bool Has(uint32_t key) const { return scores_.count(key) == 1; }
  size_t size() const { return scores_.size(); }
  int64_t looks() const { return looks_; }
  int64_t line_looks() const { return line_looks_; }
  double uses(uint32_t key) const { return eviction_.Uses(scores_.at(key)); }

 private:
  Eviction eviction_;
  const int64_t capacity_;
  std::map<uint32_t, uint32_t> scores_;
  mutable std::map<uint32_t, uint32_t> known_;
  std::set<uint32_t> held_;
  uint32_t end_ = 0;
  mutable int64_t looks_ = 0, line_looks_ = 0;
};

TEST(LruTest, VictimsAreThoseOfAList) {
  for (const int64_t capacity : {1, 2, 15, 16, 17, 100, 340}) {
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

// Whatever the number of lines: no step looks at more than 16 for each victim, or 1,024.
TEST(EvictionTest, AVictimCostsTheReadingOfSixteenScoresAndALine) {
  constexpr uint32_t kCapacity = 20000, kKeys = 21000;
  for (const Policy policy : {Policy::kLru, Policy::kLfu}) {
    Lines lines(policy, kCapacity);
    std::vector<uint32_t> all(kCapacity);
    for (uint32_t key = 0; key < kCapacity; ++key) all[key] = key;
    lines.Use(all);
    int64_t before = lines.looks(), most = 0;
    for (uint32_t key = kCapacity; key < kKeys; ++key) {
      lines.Use({key});
      most = std::max(most, lines.looks() - before);
      before = lines.looks();
    }
    EXPECT_LE(most, 16 * 64 + 64);
    EXPECT_LE(lines.looks(), (kKeys - kCapacity) * 20);
    EXPECT_LE(lines.line_looks(), (kKeys - kCapacity) * 3);
  }
}

// As with steps under way, whose lines came last and were used least.
TEST(LfuTest, HeldLinesWithTheLowestScoresCostLittle) {
  constexpr uint32_t kCapacity = 20000, kHeld = 5000, kSteps = 40;
  Lines lines(Policy::kLfu, kCapacity);
  std::vector<uint32_t> hot(kCapacity), held(kHeld);
  for (uint32_t key = 0; key < kCapacity; ++key) hot[key] = key;
  for (int use = 0; use < 8; ++use) lines.Use(hot);
  for (uint32_t key = 0; key < kHeld; ++key) held[key] = kCapacity + key;
  EXPECT_EQ(lines.Use(held, true).size(), kHeld);
  const int64_t before = lines.looks();
  for (uint32_t step = 0; step < kSteps; ++step) {
    EXPECT_EQ(lines.Use({kCapacity + kHeld + step}, true).size(), 1u);
  }
  EXPECT_LE(lines.looks() - before, 2 * (kCapacity + kHeld));
}

// Nothing is looked at again while nothing may go.
TEST(EvictionTest, LinesThatAreAllHeldAreLookedAtOnce) {
  Lines lines(Policy::kLfu, 100);
  std::vector<uint32_t> keys(2000);
  for (uint32_t i = 0; i < keys.size(); ++i) keys[i] = i;
  EXPECT_TRUE(lines.Use(keys, true).empty());
  const int64_t before = lines.looks();
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(lines.Trim().empty());
  EXPECT_EQ(lines.looks(), before);
  lines.Release();
  EXPECT_EQ(lines.Trim().size(), 1900u);
}

// Beyond the lines that one look takes in, victims are among the least used.
TEST(LruTest, VictimsAreOldInALargeCache) {
  constexpr int64_t kCapacity = 8000;
  Lines lines(Policy::kLru, kCapacity);
  std::map<uint32_t, int> last;
  Random random(1);
  for (int use = 0; use < 60000; ++use) {
    const auto key = static_cast<uint32_t>(Below(&random, 2 * kCapacity));
    last[key] = use;
    for (const uint32_t victim : lines.Use({key})) {
      int64_t younger = 0;
      if (use % 100 == 0) {
        for (const auto& [other, at] : last) younger += lines.Has(other) && at > last[victim];
        EXPECT_GE(younger, kCapacity * 3 / 4) << "use " << use;
      }
    }
  }
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

TEST(EvictionTest, MoreLinesInUseThanTheCapacity) {
  for (const Policy policy : {Policy::kLru, Policy::kLfu}) {
    Lines lines(policy, 10);
    std::vector<uint32_t> keys(10000);
    for (uint32_t i = 0; i < keys.size(); ++i) keys[i] = i;
    lines.Use(keys);
    EXPECT_EQ(lines.size(), keys.size());
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
  EXPECT_NEAR(lines.uses(1), 0.5, 0.01);
}

// The count of a line's uses, each halved for every half-life that has passed since, however many
// have: scores wrap around.
TEST(LfuTest, CountsHoldForMillionsOfHalfLives) {
  constexpr int64_t kCapacity = 8, kHalfLife = 4 * kCapacity;
  Eviction eviction(Policy::kLfu, kCapacity);
  for (const int64_t far : {int64_t{0}, int64_t{1} << 18, int64_t{1} << 19, int64_t{1} << 21}) {
    eviction.BeginUse(far * kHalfLife);
    std::map<uint32_t, double> aged;
    std::map<uint32_t, uint32_t> scores;
    Random random(1);
    for (int use = 0; use < 3000; ++use) {
      const auto key = static_cast<uint32_t>(Below(&random, 1 + Below(&random, kCapacity)));
      eviction.BeginUse(1);
      scores[key] = scores.count(key) ? eviction.Used(scores[key]) : eviction.New(1);
      for (auto& entry : aged) entry.second *= std::exp2(-1.0 / kHalfLife);
      aged[key] += 1;
      for (const auto& [each, uses] : aged) {
        ASSERT_NEAR(eviction.Uses(scores[each]) / uses, 1, 0.15) << "use " << use;
      }
    }
  }
}

}  // namespace
}  // namespace het_tf
