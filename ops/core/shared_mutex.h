// A lock for many readers or one writer, under which neither waits for ever.

#ifndef HET_TF_OPS_CORE_SHARED_MUTEX_H_
#define HET_TF_OPS_CORE_SHARED_MUTEX_H_

#include <mutex>
#include <shared_mutex>

namespace het_tf {

// std::shared_mutex lets readers in while a writer waits, on Linux, and so has it wait for as long
// as they overlap. Here those that come after a writer wait for it. No thread may lock it twice.
class SharedMutex {
 public:
  void lock() {
    std::lock_guard<std::mutex> turn(turn_);
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }
  bool try_lock() {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    return turn.owns_lock() && mutex_.try_lock();
  }

  void lock_shared() {
    std::lock_guard<std::mutex> turn(turn_);
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }
  bool try_lock_shared() {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    return turn.owns_lock() && mutex_.try_lock_shared();
  }

 private:
  std::mutex turn_;
  std::shared_mutex mutex_;
};

using SharedLock = std::shared_lock<SharedMutex>;
using UniqueLock = std::unique_lock<SharedMutex>;

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_SHARED_MUTEX_H_
