// Which lines a full cache gives up.
//
// Every line carries a score that rises when it is used. LRU: the time of the last use. LFU: the
// logarithm of its uses, each counted 2^(time / half-life), so that a use counts half as much as
// one a half-life later, and nothing ever has to be aged: the order of two lines that are not used
// does not change with time. (Forward decay: Cormode et al., ICDE 2009.) Time is counted in lines
// used. Scores wrap around, like sequence numbers: only differences mean anything.
//
// Victims are found by a hand that goes round the lines and takes the lowest sixteenth of those
// that it passes. A candidate that was used since has another score and is passed over. So a victim
// costs the reading of 16 lines, and no step looks at more than its victims take. Neighbours were
// made together and are often hot together, so the hand takes long strides.
//
// The functions take the lines as an object: end(), beyond the last slot; Prefetch(slot); and
// MayGo(slot, &score), whether there is a line that may go.

#ifndef HET_TF_OPS_CORE_CACHE_EVICTION_H_
#define HET_TF_OPS_CORE_CACHE_EVICTION_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/core/memory/hash.h"

namespace het_tf {

enum class Policy { kLru, kLfu };

class Eviction {
 public:
  Eviction(Policy policy, int64_t capacity)
      : policy_(policy), half_life_(kHalfLifeInCapacities * static_cast<double>(capacity)) {
    for (size_t cell = 0; cell < gain_.size(); ++cell) {
      const double weight = (static_cast<double>(cell) + 0.5) / kCells - kMaxLog;
      gain_[cell] = static_cast<int32_t>(std::lround(kUnit * std::log2(1 + std::exp2(-weight))));
    }
  }

  // That many lines are about to be used.
  void BeginUse(int64_t lines) {
    time_ += policy_ == Policy::kLru ? 1 : static_cast<double>(lines) / half_life_ * kUnit;
    now_ = static_cast<uint32_t>(static_cast<uint64_t>(time_));
  }

  // The score of a line that is used now.
  uint32_t Used(uint32_t score) const {
    if (policy_ == Policy::kLru) return now_;
    const int64_t cell = (Weight(score) + kMaxLog * kUnit) / (kUnit / kCells);
    return score + gain_[std::clamp<int64_t>(cell, 0, static_cast<int64_t>(gain_.size()) - 1)];
  }

  // The score of a line that has just been used that often, at least once.
  uint32_t New(int uses) const {
    if (policy_ == Policy::kLru) return now_;
    return now_ + static_cast<uint32_t>(std::lround(kUnit * std::log2(uses)));
  }

  // The uses that a score stands for now, decayed.
  double Uses(uint32_t score) const {
    if (policy_ == Policy::kLru) return 1;
    return std::exp2(static_cast<double>(Weight(score)) / kUnit);
  }

  // Whether a line with that score would outlast the next victim.
  template <typename Lines>
  bool Outlasts(uint32_t score, bool or_equals, const Lines& lines) {
    if (policy_ == Policy::kLru) return true;
    if (!FindCandidate(kLeast, lines)) return false;
    const int32_t victim = Weight(candidates_.back().score);
    return or_equals ? Weight(score) >= victim : Weight(score) > victim;
  }

  // Calls evict(slot) until wanted lines are gone or none is left that may go.
  template <typename Lines, typename Evict>
  void Run(int64_t wanted, const Lines& lines, const Evict& evict) {
    for (; wanted > 0; --wanted) {
      if (!FindCandidate(std::max(wanted, kLeast), lines)) return;
      const uint32_t slot = candidates_.back().slot;
      candidates_.pop_back();
      evict(slot);
    }
  }

 private:
  struct Candidate {
    int32_t weight;
    uint32_t score;
    uint32_t slot;
    bool operator<(const Candidate& other) const {
      return weight != other.weight ? weight < other.weight : slot < other.slot;
    }
  };

  static constexpr double kHalfLifeInCapacities = 4;
  static constexpr int kUnit = 4096;     // of a score, for a factor of 2
  static constexpr int kMaxLog = 16;     // weights from 2^-16 to 2^16 are told apart
  static constexpr int kCells = 16;      // for a factor of 2
  static constexpr int64_t kLeast = 64;  // victims looked for at a time
  static constexpr int64_t kLinesPerVictim = 16;

  int32_t Weight(uint32_t score) const { return static_cast<int32_t>(score - now_); }

  // Makes the last candidate one that may go and was not used since it was found.
  template <typename Lines>
  bool FindCandidate(int64_t victims, const Lines& lines) {
    int64_t passed = 0;
    while (true) {
      while (!candidates_.empty()) {
        const Candidate& candidate = candidates_.back();
        uint32_t score;
        const bool good = candidate.slot < lines.end() && lines.MayGo(candidate.slot, &score) &&
                          score == candidate.score;
        if (good) return true;
        candidates_.pop_back();
      }
      if (passed >= lines.end()) return false;
      passed += Look(victims, lines);
    }
  }

  // Passes lines for so many victims; returns how many it passed.
  template <typename Lines>
  int64_t Look(int64_t victims, const Lines& lines) {
    const uint32_t end = lines.end();
    const int64_t n = std::min<int64_t>(victims * kLinesPerVictim, end);
    // All of them in turn, or evenly spread ones (multiples of the golden ratio).
    const auto place = [&](uint64_t i) {
      return n == end ? static_cast<uint32_t>(i % end) : ScaleHash(i * 0x9e3779b97f4a7c15ULL, end);
    };
    constexpr int kAhead = 12;
    for (int64_t i = 0; i < n; ++i, ++hand_) {
      lines.Prefetch(place(hand_ + kAhead));
      const uint32_t slot = place(hand_);
      uint32_t score;
      if (lines.MayGo(slot, &score)) candidates_.push_back({Weight(score), score, slot});
    }
    if (candidates_.empty()) return n;
    const size_t keep = std::max<size_t>(1, candidates_.size() / kLinesPerVictim);
    std::nth_element(candidates_.begin(), candidates_.begin() + (keep - 1), candidates_.end());
    candidates_.resize(keep);
    std::sort(candidates_.rbegin(), candidates_.rend());  // the lowest is last
    return n;
  }

  const Policy policy_;
  const double half_life_;
  double time_ = 0;
  uint32_t now_ = 0;
  uint64_t hand_ = 0;
  std::array<int32_t, 2 * kMaxLog * kCells> gain_;  // of a use, by the weight before it
  std::vector<Candidate> candidates_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_EVICTION_H_
