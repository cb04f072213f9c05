// A vector that the workers of a step add up on a server: the gradients of the dense variables.

#ifndef HET_TF_OPS_CORE_STEP_SUM_H_
#define HET_TF_OPS_CORE_STEP_SUM_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <set>
#include <vector>

#include "ops/core/mutex.h"
#include "ops/core/status.h"

namespace het_tf {

// Safe for concurrent use.
class StepSum {
 public:
  // Begins a round of so many members, and forgets what was added in a step that did not end.
  void Begin(int64_t num_members) {
    MutexLock lock(&mutex_);
    num_members_ = num_members;
    members_.clear();
  }

  // Adds a member's floats, in any order of the members: sums are doubles, so that the order does
  // not show. A member that comes again in a step adds nothing. floats: (size).
  Status Collect(int64_t member, const float* floats, size_t size) {
    MutexLock lock(&mutex_);
    if (!members_.empty() && size != next_.size()) {
      return InvalidArgument("member ", member, " of a step adds up ", size,
                             " numbers, the others ", next_.size());
    }
    if (members_.count(member) != 0) return Status();
    if (members_.empty()) next_.assign(size, 0);
    members_.insert(member);
    for (size_t i = 0; i < size; ++i) next_[i] += floats[i];
    return Status();
  }

  // Ends the step: its members get the mean over the members with which the round began. Those that
  // have left add zeros, as their rows do.
  Status Merge() try {
    MutexLock lock(&mutex_);
    if (members_.empty()) return Status();
    mean_.resize(next_.size());
    const auto count = static_cast<double>(num_members_);
    for (size_t i = 0; i < next_.size(); ++i) mean_[i] = static_cast<float>(next_[i] / count);
    members_.clear();
    return Status();
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory for the sum of a step");
  }

  // Of the last step that has ended. mean: (size).
  Status Read(size_t size, float* mean) const {
    MutexLock lock(&mutex_);
    if (size != mean_.size()) {
      return InvalidArgument("a member of a step asks for ", size, " numbers, the step had ",
                             mean_.size());
    }
    std::copy(mean_.begin(), mean_.end(), mean);
    return Status();
  }

  int64_t memory_bytes() const {
    MutexLock lock(&mutex_);
    return static_cast<int64_t>(next_.capacity() * sizeof(double) +
                                mean_.capacity() * sizeof(float));
  }

 private:
  mutable Mutex mutex_;
  int64_t num_members_ HET_GUARDED_BY(mutex_) = 1;
  std::vector<double> next_ HET_GUARDED_BY(mutex_);
  std::set<int64_t> members_ HET_GUARDED_BY(mutex_);  // that have added theirs
  std::vector<float> mean_ HET_GUARDED_BY(mutex_);
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_STEP_SUM_H_
