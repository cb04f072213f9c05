// std::mutex and what goes with it, with annotations that clang's analysis reads: those of
// libstdc++ have none.

#ifndef HET_TF_OPS_CORE_MUTEX_H_
#define HET_TF_OPS_CORE_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "ops/core/thread_annotations.h"

namespace het_tf {

class HET_CAPABILITY("mutex") Mutex {
 public:
  void lock() HET_ACQUIRE() { mutex_.lock(); }
  void unlock() HET_RELEASE() { mutex_.unlock(); }
  bool try_lock() HET_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a mutex for as long as it lives, or until Unlock.
class HET_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) HET_ACQUIRE(mutex) : mutex_(mutex) { mutex->lock(); }
  // The caller has locked it.
  MutexLock(Mutex* mutex, std::adopt_lock_t) HET_REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() HET_RELEASE() {
    if (mutex_ != nullptr) mutex_->unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void Unlock() HET_RELEASE() {
    mutex_->unlock();
    mutex_ = nullptr;
  }

 private:
  Mutex* mutex_;
};

// Waits may end without a reason: they belong into a loop.
class CondVar {
 public:
  void Wait(Mutex* mutex) HET_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();  // the caller still holds it
  }
  // Returns false once the time has come.
  bool WaitUntil(Mutex* mutex, std::chrono::steady_clock::time_point time) HET_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    const std::cv_status status = changed_.wait_until(lock, time);
    lock.release();
    return status == std::cv_status::no_timeout;
  }
  void NotifyAll() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MUTEX_H_
