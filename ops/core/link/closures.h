// Steps that count once, however often they are run. tf.distribute runs a closure again when the
// worker died that ran it, and that one may have sent what it did. So the pushes of a closure
// travel at its end with its number, and every shard merges those of the first run that gets there.

#ifndef HET_TF_OPS_CORE_LINK_CLOSURES_H_
#define HET_TF_OPS_CORE_LINK_CLOSURES_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>

#include "ops/core/mutex.h"

namespace het_tf {

// A run of a closure in one process, for as long as some tensor of it lives.
struct Closure {
  static constexpr const char* kVariantName = "Het>Closure";

  explicit Closure(int64_t number) : number(number) {}

  const int64_t number;  // the same for every run; from 1 on
};

// Which closures a shard has merged. Safe for concurrent use.
class Closures {
 public:
  struct Entry {
    explicit Entry(bool merged = false) : merged(merged) {}

    // Held over the merging of a run, so that another one waits to see whether it was merged.
    Mutex mutex;
    bool merged HET_GUARDED_BY(mutex);
  };

  // The entry of a closure. done: no closure up to this number will be run again, so what is
  // remembered of them is forgotten, and what comes late counts as merged.
  std::shared_ptr<Entry> Of(int64_t number, int64_t done) {
    MutexLock lock(&mutex_);
    done_ = std::max(done_, done);
    entries_.erase(entries_.begin(), entries_.upper_bound(done_));
    if (number <= done_) return std::make_shared<Entry>(/*merged=*/true);
    std::shared_ptr<Entry>& entry = entries_[number];
    if (entry == nullptr) entry = std::make_shared<Entry>();
    return entry;
  }

  void Clear() {
    MutexLock lock(&mutex_);
    entries_.clear();
    done_ = 0;
  }

  // Closures that it remembers.
  int64_t size() const {
    MutexLock lock(&mutex_);
    return static_cast<int64_t>(entries_.size());
  }

 private:
  mutable Mutex mutex_;
  std::map<int64_t, std::shared_ptr<Entry>> entries_ HET_GUARDED_BY(mutex_);
  int64_t done_ HET_GUARDED_BY(mutex_) = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_LINK_CLOSURES_H_
