// How worth keeping a line is.
//
// Every line carries a score that rises when it is used. LRU: the time of the last use. LFU: the
// logarithm of its uses, each counted 2^(time / half-life), so that a use counts half as much as
// one a half-life later, and nothing ever has to be aged: the order of two lines that are not used
// does not change with time. (Forward decay: Cormode et al., ICDE 2009.) Time is counted in lines
// used. Scores wrap around, like sequence numbers: only differences mean anything.
//
// Scoring is a plain struct that a device can use as well as the host; the time is the caller's.

#ifndef HET_TF_OPS_CORE_CACHE_SCORE_H_
#define HET_TF_OPS_CORE_CACHE_SCORE_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "ops/core/host_device.h"

namespace het_tf {

enum class Policy { kLru, kLfu };

struct Scoring {
  static constexpr int kUnit = 4096;  // of a score, for a factor of 2
  static constexpr int kMaxLog = 16;  // weights from 2^-16 to 2^16 are told apart
  static constexpr int kCells = 16;   // for a factor of 2
  static constexpr int kGains = 2 * kMaxLog * kCells;
  static constexpr double kHalfLifeInCapacities = 4;

  using Gains = std::array<int32_t, kGains>;

  // What a use adds to a score, by the weight before it.
  static const Gains& HostGains() {
    static const Gains gains = [] {
      Gains made;
      for (int cell = 0; cell < kGains; ++cell) {
        const double weight = (static_cast<double>(cell) + 0.5) / kCells - kMaxLog;
        made[cell] = static_cast<int32_t>(std::lround(kUnit * std::log2(1 + std::exp2(-weight))));
      }
      return made;
    }();
    return gains;
  }

  Policy policy;
  double half_life;      // kHalfLifeInCapacities times the capacity
  const int32_t* gains;  // (kGains): HostGains(), on whatever side this is used

  // The time when that many lines were used after `time`.
  HET_HD double TimeAfter(double time, int64_t lines) const {
    return time + (policy == Policy::kLru ? 1 : static_cast<double>(lines) / half_life * kUnit);
  }
  // That time as the functions below want it.
  HET_HD static uint32_t Now(double time) {
    return static_cast<uint32_t>(static_cast<uint64_t>(time));
  }

  // By this, lines are compared.
  HET_HD static int32_t Weight(uint32_t score, uint32_t now) {
    return static_cast<int32_t>(score - now);
  }

  // The score of a line that is used now.
  HET_HD uint32_t Used(uint32_t score, uint32_t now) const {
    if (policy == Policy::kLru) return now;
    const int cell = (Weight(score, now) + int64_t{kMaxLog * kUnit}) / (kUnit / kCells);
    return score + gains[std::clamp(cell, 0, kGains - 1)];
  }

  // The score of a line that has just been used that often, at least once.
  HET_HD uint32_t New(int uses, uint32_t now) const {
    if (policy == Policy::kLru) return now;
    return now + static_cast<uint32_t>(std::lround(kUnit * std::log2(static_cast<double>(uses))));
  }

  // The uses that a score stands for now, decayed.
  HET_HD double Uses(uint32_t score, uint32_t now) const {
    if (policy == Policy::kLru) return 1;
    return std::exp2(static_cast<double>(Weight(score, now)) / kUnit);
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_SCORE_H_
