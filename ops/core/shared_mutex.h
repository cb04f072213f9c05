// A lock for many readers or one writer, under which neither waits for ever.

#ifndef HET_TF_OPS_CORE_SHARED_MUTEX_H_
#define HET_TF_OPS_CORE_SHARED_MUTEX_H_

#include <mutex>
#include <shared_mutex>

#include "ops/core/thread_annotations.h"

namespace het_tf {

// std::shared_mutex lets readers in while a writer waits, on Linux, and so has it wait for as long
// as they overlap. Here those that come after a writer wait for it. No thread may lock it twice.
class HET_CAPABILITY("shared mutex") SharedMutex {
 public:
  void lock() HET_ACQUIRE() {
    std::lock_guard<std::mutex> turn(turn_);
    mutex_.lock();
  }
  void unlock() HET_RELEASE() { mutex_.unlock(); }
  bool try_lock() HET_TRY_ACQUIRE(true) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    return turn.owns_lock() && mutex_.try_lock();
  }

  void lock_shared() HET_ACQUIRE_SHARED() {
    std::lock_guard<std::mutex> turn(turn_);
    mutex_.lock_shared();
  }
  void unlock_shared() HET_RELEASE_SHARED() { mutex_.unlock_shared(); }
  bool try_lock_shared() HET_TRY_ACQUIRE_SHARED(true) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    return turn.owns_lock() && mutex_.try_lock_shared();
  }

 private:
  std::mutex turn_;
  std::shared_mutex mutex_;
};

// Hold it for as long as they live.
class HET_SCOPED_CAPABILITY ReaderLock {
 public:
  explicit ReaderLock(SharedMutex* mutex) HET_ACQUIRE_SHARED(mutex) : mutex_(mutex) {
    mutex->lock_shared();
  }
  ~ReaderLock() HET_RELEASE() { mutex_->unlock_shared(); }
  ReaderLock(const ReaderLock&) = delete;
  ReaderLock& operator=(const ReaderLock&) = delete;

 private:
  SharedMutex* const mutex_;
};
class HET_SCOPED_CAPABILITY WriterLock {
 public:
  explicit WriterLock(SharedMutex* mutex) HET_ACQUIRE(mutex) : mutex_(mutex) { mutex->lock(); }
  ~WriterLock() HET_RELEASE() { mutex_->unlock(); }
  WriterLock(const WriterLock&) = delete;
  WriterLock& operator=(const WriterLock&) = delete;

 private:
  SharedMutex* const mutex_;
};

// The same for locks that are moved or only tried, which the analysis does not follow.
using SharedLock = std::shared_lock<SharedMutex>;
using UniqueLock = std::unique_lock<SharedMutex>;

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_SHARED_MUTEX_H_
