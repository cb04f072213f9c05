// Which lines a full cache gives up.
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
#include <cstdint>
#include <vector>

#include "ops/core/cache/score.h"
#include "ops/core/memory/hash.h"
#include "ops/core/thread_annotations.h"

namespace het_tf {

class Eviction {
 public:
  Eviction(Policy policy, int64_t capacity)
      : scoring_{policy, Scoring::kHalfLifeInCapacities * static_cast<double>(capacity),
                 Scoring::HostGains().data()} {}

  // That many lines are about to be used.
  void BeginUse(int64_t lines) {
    time_ = scoring_.TimeAfter(time_, lines);
    now_ = Scoring::Now(time_);
  }

  // Scoring's, now.
  uint32_t Used(uint32_t score) const { return scoring_.Used(score, now_); }
  uint32_t New(int uses) const { return scoring_.New(uses, now_); }
  double Uses(uint32_t score) const { return scoring_.Uses(score, now_); }

  // Whether a line with that score would outlast the next victim.
  template <typename Lines>
  bool Outlasts(uint32_t score, bool or_equals, const Lines& lines) {
    if (scoring_.policy == Policy::kLru) return true;
    if (!FindCandidate(kLeast, lines)) return false;
    const int32_t victim = Weight(candidates_.back().score);
    return or_equals ? Weight(score) >= victim : Weight(score) > victim;
  }

  // Calls evict(slot) until wanted lines are gone or none is left that may go.
  template <typename Lines, typename Evict>
  void Run(int64_t wanted, const Lines& lines, const Evict& evict) HET_NO_THREAD_SAFETY_ANALYSIS {
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

  static constexpr int64_t kLeast = 64;  // victims looked for at a time
  static constexpr int64_t kLinesPerVictim = 16;

  int32_t Weight(uint32_t score) const { return Scoring::Weight(score, now_); }

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

  const Scoring scoring_;
  double time_ = 0;
  uint32_t now_ = 0;
  uint64_t hand_ = 0;
  std::vector<Candidate> candidates_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_EVICTION_H_
