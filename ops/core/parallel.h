// How the core splits work: over whatever pool the caller has.

#ifndef HET_TF_OPS_CORE_PARALLEL_H_
#define HET_TF_OPS_CORE_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace het_tf {

// Calls body(begin, end) on disjoint ranges that cover [0, total), possibly at the same time, and
// returns when all are done. cost is the cycles one unit takes, so that little work stays on the
// calling thread.
using ParallelFor = std::function<void(int64_t total, int64_t cost,
                                       const std::function<void(int64_t, int64_t)>& body)>;

inline void SerialFor(int64_t total, int64_t /*cost*/,
                      const std::function<void(int64_t, int64_t)>& body) {
  if (total > 0) body(0, total);
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_PARALLEL_H_
