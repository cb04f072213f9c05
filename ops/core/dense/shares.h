// How much of what workers trained is merged when it comes (docs/protocol.md, 8).
//
// N workers that step from the same values in parallel, `interval` steps each, all move the same
// way. Their contributions in full, all at once, would go N times as far as one worker goes in
// `interval` steps, and diverge. Their mean goes as far as one worker. So 1 / N of a contribution
// is merged when it comes, and the rest of what counts is owed. In the end the contributions go
// `gain` times as far as their mean; N times if they count in full. With every push a share of what
// is owed is merged, 1 / gain of it for one push of every worker. (Block momentum: Chen & Huo 2016,
// with the factor 1 - 1 / gain; SlowMo: Wang et al. 2020. What is owed is their velocity, but for a
// factor.) A worker alone has nothing to spread. What workers that are gone are owed is merged by
// halves.

#ifndef HET_TF_OPS_CORE_DENSE_SHARES_H_
#define HET_TF_OPS_CORE_DENSE_SHARES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace het_tf {

struct DenseShares {
  float at_once;  // of the contribution
  float of_owed;  // of what is owed, the rest of the contribution included
};

// Of a push of a number of steps, of one of several workers, who pushes every `interval` steps.
// total: what of a contribution counts in the end.
inline DenseShares SharesOf(int64_t steps, int64_t interval, int num_workers, double total) {
  if (num_workers == 1) return {1, 0.5};
  const double gain = std::max(1.0, num_workers * total);
  const double pushes = static_cast<double>(steps) / static_cast<double>(std::max(steps, interval));
  const double left = std::pow(1 - 1 / gain, pushes / num_workers);
  return {static_cast<float>(std::min(total, 1.0 / num_workers)), static_cast<float>(1 - left)};
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_DENSE_SHARES_H_
