// Memory for rows and indexes, on huge pages where the kernel gives them.
//
// A lookup touches thousands of rows at random: on 4 KiB pages every one of them misses the TLB.
// (benchmarks/local_step.py with and without the madvise calls shows what that costs.)

#ifndef HET_TF_OPS_CORE_MEMORY_ARENA_H_
#define HET_TF_OPS_CORE_MEMORY_ARENA_H_

#include <cstddef>
#include <new>
#include <vector>

#include "ops/core/mutex.h"

namespace het_tf {

// Thrown where there is no memory.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) : bytes_(bytes) {}
  const char* what() const noexcept override { return "out of memory"; }
  size_t bytes() const { return bytes_; }  // that were asked for

 private:
  size_t bytes_;
};

// The same of memory that is on a disk.
class DiskFull : public OutOfMemory {
 public:
  using OutOfMemory::OutOfMemory;
  const char* what() const noexcept override { return "no room on the disk"; }
};

// Hands out memory that lives until the arena is cleared. Safe for concurrent use.
class Arena {
 public:
  Arena() = default;
  virtual ~Arena() { ReleaseAll(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Not initialised, aligned to 64 bytes. Throws OutOfMemory.
  virtual char* Allocate(size_t bytes);

  virtual void Clear() { ReleaseAll(); }

 private:
  void ReleaseAll();

  struct Region {
    char* begin;
    size_t bytes;
  };

  Mutex mutex_;
  std::vector<Region> regions_ HET_GUARDED_BY(mutex_);
  char* at_ HET_GUARDED_BY(mutex_) = nullptr;
  size_t left_ HET_GUARDED_BY(mutex_) = 0;
};

// Blocks of their own, for arrays that are replaced by larger ones. bytes must be the same in both.
// AllocateBlock throws OutOfMemory.
void* AllocateBlock(size_t bytes);
void FreeBlock(void* block, size_t bytes);

template <typename T>
struct BlockAllocator {
  using value_type = T;

  BlockAllocator() = default;
  template <typename U>
  BlockAllocator(const BlockAllocator<U>&) {}

  T* allocate(size_t n) { return static_cast<T*>(AllocateBlock(n * sizeof(T))); }
  void deallocate(T* block, size_t n) { FreeBlock(block, n * sizeof(T)); }

  template <typename U>
  bool operator==(const BlockAllocator<U>&) const {
    return true;
  }
  template <typename U>
  bool operator!=(const BlockAllocator<U>&) const {
    return false;
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MEMORY_ARENA_H_
