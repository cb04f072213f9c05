// How much of what workers trained is merged when it comes (docs/protocol.md, 8).
//
// N workers that step from the same values in parallel, `interval` steps each, all move the same
// way. Their contributions in full, all at once, would go N times as far as one worker goes in
// `interval` steps, and diverge. Their average would go no farther than one worker, and N times
// slower than N workers that step on the server. So a contribution counts in full, but is spread
// over the pushes that follow: 1 / N is merged when it comes, the rest is owed, and a share of what
// is owed is merged with every push, by which 1 / N of it is merged when every worker has pushed.
// (Block momentum: Chen & Huo 2016, with the factor 1 - 1/N; SlowMo: Wang et al. 2020. What is owed
// is their velocity, but for a factor.) A worker alone has nothing to spread. What
// workers that are gone are owed is merged by halves.

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
inline DenseShares SharesOf(int64_t steps, int64_t interval, int num_workers) {
  if (num_workers == 1) return {1, 0.5};
  const double at_once = 1.0 / num_workers;
  const double pushes = static_cast<double>(steps) / static_cast<double>(std::max(steps, interval));
  const double left = std::pow(1 - at_once, pushes / num_workers);
  return {static_cast<float>(at_once), static_cast<float>(1 - left)};
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_DENSE_SHARES_H_
