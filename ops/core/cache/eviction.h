// Which lines a full cache gives up.
//
// Victims are found by a hand that goes round what is known of the lines' scores and takes the
// lowest sixteenth of those that it passes. Scores only grow, and what is known of one may be old:
// a use does not write it, but a candidate's line is looked at before it goes. A candidate that was
// used since is known better from then on. So a victim costs the reading of 16 numbers that lie
// side by side, and of a line or few, and no step looks at more than its victims take. Neighbours
// were made together and are often hot together, so the hand takes short runs far apart.
//
// The functions take the lines as an object: end(), beyond the last slot; Known(slot, &score),
// whether a line there counts for the capacity, and what is known of its score; MayGo(slot,
// &score), whether it may go, and its score, known from then on; and Prefetch(slot) and
// PrefetchLine(slot) for those. A line that counts and may not go is not Known any more, and MayGo
// gives another score, until the owner knows it again and calls LineMayGo: the lowest lines are
// often those of the steps under way, which came last, and no look may find only them.

#ifndef HET_TF_OPS_CORE_CACHE_EVICTION_H_
#define HET_TF_OPS_CORE_CACHE_EVICTION_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "ops/core/cache/score.h"
#include "ops/core/memory/hash.h"
#include "ops/core/thread_annotations.h"

namespace het_tf {

class Eviction {
 public:
  Eviction(Policy policy, int64_t capacity)
      : scoring_{policy, HalfLifeOf(capacity), Scoring::HostGains().data()} {}

  // Of the lines, from now on.
  void SetCapacity(int64_t capacity) { scoring_.half_life = HalfLifeOf(capacity); }

  // That many lines are about to be used.
  void BeginUse(int64_t lines) {
    time_ = scoring_.TimeAfter(time_, lines);
    now_ = Scoring::Now(time_);
  }

  // Scoring's, now.
  uint32_t Used(uint32_t score) const { return scoring_.Used(score, now_); }
  uint32_t New(int uses) const { return scoring_.New(uses, now_); }
  double Uses(uint32_t score) const { return scoring_.Uses(score, now_); }

  // How many lines the hand has passed: what victims have cost.
  int64_t passed() const { return all_passed_; }

  // Some line may go that could not before.
  void LineMayGo() { none_may_go_ = false; }

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
    int32_t weight;  // when the hand passed it
    uint32_t score;
    uint32_t slot;
    bool operator<(const Candidate& other) const {
      return weight != other.weight ? weight < other.weight : slot < other.slot;
    }
  };

  static constexpr int64_t kLeast = 64;  // victims looked for at a time
  static constexpr int64_t kLinesPerVictim = 16;
  static constexpr uint64_t kRun = 16;  // scores of a cache line

  // Makes the last candidate one that may go and has the lowest score of those that the hand
  // passed.
  template <typename Lines>
  bool FindCandidate(int64_t victims, const Lines& lines) {
    int64_t passed = 0;  // since something was learned of a line
    while (!none_may_go_) {
      while (!candidates_.empty()) {
        const Candidate candidate = candidates_.back();
        if (candidates_.size() > kAhead) {
          lines.PrefetchLine(candidates_[candidates_.size() - 1 - kAhead].slot);
        }
        uint32_t score = candidate.score;
        const bool may_go = candidate.slot < lines.end() && lines.MayGo(candidate.slot, &score);
        if (may_go && score == candidate.score) return true;
        candidates_.pop_back();
        if (score != candidate.score) passed = 0;
        if (may_go) KnowBetter({Scoring::Weight(score, passed_at_), score, candidate.slot});
      }
      none_may_go_ = passed >= lines.end();
      if (!none_may_go_) passed += Look(victims, lines);
    }
    return false;
  }

  // A candidate was used since the hand passed it, and is one still if it is below all others.
  void KnowBetter(const Candidate& candidate) {
    if (highest_ < candidate) return;
    const auto lower = [](const Candidate& a, const Candidate& b) { return b < a; };
    candidates_.insert(std::upper_bound(candidates_.begin(), candidates_.end(), candidate, lower),
                       candidate);
  }

  // Passes lines for so many victims; returns how many it passed.
  template <typename Lines>
  int64_t Look(int64_t victims, const Lines& lines) {
    const uint32_t end = lines.end();
    const auto n = static_cast<int64_t>(std::min<uint64_t>(victims * kLinesPerVictim, end));
    passed_at_ = now_;
    all_passed_ += n;
    int32_t limit = std::numeric_limits<int32_t>::max();
    const auto pass = [&](uint32_t slot) {
      uint32_t score;
      if (!lines.Known(slot, &score)) return;
      const int32_t weight = Scoring::Weight(score, passed_at_);
      if (weight <= limit) candidates_.push_back({weight, score, slot});
    };
    if (n == end) {
      for (int64_t i = 0; i < n; ++i, ++hand_) pass(static_cast<uint32_t>(hand_ % end));
      KeepLowest();
    } else {
      // Runs that are evenly spread (multiples of the golden ratio). The first say what is low.
      const uint64_t runs = (end + kRun - 1) / kRun;
      const auto place = [&](uint64_t run) {
        return static_cast<uint32_t>(kRun * ScaleHash(run * 0x9e3779b97f4a7c15ULL, runs));
      };
      for (int64_t i = 0; i < n; i += kRun, ++hand_) {
        lines.Prefetch(place(hand_ + kAhead));
        if (i == kLeast * kLinesPerVictim && !candidates_.empty()) limit = KeepLowest();
        const uint32_t first = place(hand_);
        const auto last = static_cast<uint32_t>(std::min<uint64_t>(first + kRun, end));
        for (uint32_t slot = first; slot < last; ++slot) pass(slot);
      }
      if (n <= kLeast * kLinesPerVictim) KeepLowest();
    }
    if (candidates_.empty()) return n;
    std::sort(candidates_.rbegin(), candidates_.rend());  // the lowest is last
    highest_ = candidates_.front();
    return n;
  }

  // Of the candidates the lowest sixteenth stays. Returns the highest weight of them.
  int32_t KeepLowest() {
    if (candidates_.empty()) return 0;
    const size_t keep = std::max<size_t>(1, candidates_.size() / kLinesPerVictim);
    const auto highest = candidates_.begin() + (keep - 1);
    std::nth_element(candidates_.begin(), highest, candidates_.end());
    candidates_.resize(keep);
    return candidates_.back().weight;
  }

  static constexpr size_t kAhead = 12;

  static double HalfLifeOf(int64_t capacity) {
    return Scoring::kHalfLifeInCapacities * static_cast<double>(std::max<int64_t>(capacity, 1));
  }

  Scoring scoring_;
  double time_ = 0;
  uint32_t now_ = 0;
  uint64_t hand_ = 0;
  bool none_may_go_ = false;
  int64_t all_passed_ = 0;
  uint32_t passed_at_ = 0;  // now_ when the hand passed the candidates
  Candidate highest_ = {};  // of them, at first
  std::vector<Candidate> candidates_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_EVICTION_H_
