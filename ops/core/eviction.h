// Which lines a full cache gives up.
//
// Every line carries a score that rises when it is used. Time is counted in uses. LRU: the score is
// the time of the last use. LFU: each use adds 2^(time / half-life), so that a use counts half as
// much as one a half-life later, and nothing ever has to be aged: the order of two lines that are
// not used does not change with time. (Forward decay: Cormode et al., ICDE 2009.) Yesterday's hot
// rows leave once today's have been used as often within the last half-lives.
//
// Victims are found by a scan of all lines that collects the lowest sixteenth. A candidate that was
// used since has another score and is passed over; the others are still in order, so for LRU the
// victims are exact, and a victim costs the reading of 16 lines.

#ifndef HET_TF_OPS_CORE_EVICTION_H_
#define HET_TF_OPS_CORE_EVICTION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace het_tf {

enum class Policy { kLru, kLfu };

class Eviction {
 public:
  Eviction(Policy policy, int64_t capacity)
      : policy_(policy), capacity_(capacity), half_life_(kHalfLifeInCapacities * capacity) {}

  // A batch of that many lines is about to be used. Returns the factor by which the score of every
  // line must be multiplied first: 1 but once in hundreds of half-lives, when scores grow large.
  double BeginUse(int64_t lines) {
    time_ += lines;
    double factor = 1;
    if (policy_ == Policy::kLru) {
      use_ = static_cast<double>(time_);
    } else {
      double age = (time_ - origin_) / half_life_;
      if (age > kMaxAge) {
        factor = std::exp2(-age);
        origin_ = time_;
        age = 0;
        candidates_.clear();
      }
      use_ = std::exp2(age);
    }
    return factor;
  }

  // The score of a line that is used now.
  double Used(double score) const { return policy_ == Policy::kLru ? use_ : score + use_; }

  // Calls evict(slot) until wanted lines are gone or none is left that may go.
  // for_each_line(visit(slot, score)) lists the lines that may go; evictable(slot, score) says
  // whether one still may, and still has that score.
  template <typename ForEachLine, typename Evictable, typename Evict>
  void Run(int64_t wanted, const ForEachLine& for_each_line, const Evictable& evictable,
           const Evict& evict) {
    bool scanned = false;
    while (wanted > 0) {
      if (candidates_.empty()) {
        if (scanned) return;
        scanned = true;
        Scan(wanted, for_each_line);
        continue;
      }
      const Candidate candidate = candidates_.back();
      candidates_.pop_back();
      if (!evictable(candidate.slot, candidate.score)) continue;
      evict(candidate.slot);
      --wanted;
    }
  }

 private:
  struct Candidate {
    double score;
    uint32_t slot;
    bool operator>(const Candidate& other) const {
      return std::pair(score, slot) > std::pair(other.score, other.slot);
    }
  };

  static constexpr double kHalfLifeInCapacities = 4;
  static constexpr double kMaxAge = 500;  // 2^500 times any count is within a double

  template <typename ForEachLine>
  void Scan(int64_t wanted, const ForEachLine& for_each_line) {
    for_each_line([&](uint32_t slot, double score) { candidates_.push_back({score, slot}); });
    const size_t keep = std::min<size_t>(candidates_.size(), std::max(wanted, capacity_ / 16));
    const auto greater = [](const Candidate& a, const Candidate& b) { return a > b; };
    const auto less = [](const Candidate& a, const Candidate& b) { return b > a; };
    std::nth_element(candidates_.begin(), candidates_.begin() + keep, candidates_.end(), less);
    candidates_.resize(keep);
    std::sort(candidates_.begin(), candidates_.end(), greater);  // the lowest is last
  }

  const Policy policy_;
  const int64_t capacity_;
  const double half_life_;
  int64_t time_ = 0;
  int64_t origin_ = 0;
  double use_ = 0;
  std::vector<Candidate> candidates_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_EVICTION_H_
