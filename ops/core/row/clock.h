// A row's clock: what its merged updates come to, by one of three rules (docs/protocol.md, 2).

#ifndef HET_TF_OPS_CORE_ROW_CLOCK_H_
#define HET_TF_OPS_CORE_ROW_CLOCK_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/core/host_device.h"

namespace het_tf {

enum class ClockRule {
  kCount,    // merging adds the number of updates merged
  kLamport,  // merging takes the greater of the two clocks (the paper's rule)
  kDrift,    // merging adds how far the updates moved the value, in units of kDriftUnit
};

inline constexpr int64_t kUnbounded = -1;  // as a bound: none

// Clocks saturate here, far from where sums of them would overflow.
inline constexpr int64_t kMaxClock = int64_t{1} << 62;

// clock: in [0, kMaxClock]; units: not negative.
HET_HD inline int64_t Advance(int64_t clock, int64_t units) {
  return clock + std::min(units, kMaxClock - clock);
}

// The greatest bound: below what a drift clock's units in one message can say.
inline constexpr int64_t kMaxBound = (int64_t{1} << 31) - 1;

// L2 distance that one unit of a drift clock stands for.
inline constexpr double kDriftUnit = 0x1p-14;

// A distance in units, rounded up, so that bounds hold, and at least 1, so that a clock moves
// whenever its row does. A message has 32 bits for it: what is longer counts as 2^32 - 1 units
// (262,144), more than any bound.
HET_HD inline uint32_t DriftUnits(float distance) {
  const double units = std::ceil(static_cast<double>(distance) / kDriftUnit);
  return static_cast<uint32_t>(std::min(std::max(units, 1.0), 4294967295.0));
}

// The clock next to `near` whose low 32 bits are these: clocks of one row that meet on a shard are
// less than 2^31 apart.
inline int64_t ClockNear(int64_t near, uint32_t low) {
  const auto apart = static_cast<int32_t>(low - static_cast<uint32_t>(near));
  return std::min(std::max<int64_t>(near + apart, 0), kMaxClock);
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_CLOCK_H_
