// Memory that the caches of a process share which have no capacity of their own.
//
// A cache may grow as long as there is memory left, and always to an equal part. A cache with more
// gives back what the others need for theirs. So a large table has what small ones leave.

#ifndef HET_TF_OPS_CORE_CACHE_MEMORY_SHARE_H_
#define HET_TF_OPS_CORE_CACHE_MEMORY_SHARE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace het_tf {

// Safe for concurrent use. Must outlive its parts.
class MemoryShare {
 public:
  explicit MemoryShare(int64_t bytes) : bytes_(bytes) {}
  MemoryShare(const MemoryShare&) = delete;
  MemoryShare& operator=(const MemoryShare&) = delete;

  int64_t bytes() const { return bytes_; }

  // What one cache has of it. share: nullptr: the cache has a capacity of its own.
  class Part {
   public:
    explicit Part(MemoryShare* share) : share_(share) {
      if (share_ != nullptr) share_->parts_.fetch_add(1, std::memory_order_relaxed);
    }
    ~Part() {
      if (share_ == nullptr) return;
      share_->used_.fetch_sub(used_, std::memory_order_relaxed);
      share_->parts_.fetch_sub(1, std::memory_order_relaxed);
    }
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;

    explicit operator bool() const { return share_ != nullptr; }

    // The cache uses that many bytes. Returns how many it may use.
    int64_t Allowed(int64_t used) {
      const int64_t more = used - used_;
      const int64_t all = share_->used_.fetch_add(more, std::memory_order_relaxed) + more;
      used_ = used;
      const int64_t equal = share_->bytes_ / share_->parts_.load(std::memory_order_relaxed);
      return std::max(equal, share_->bytes_ - (all - used));
    }

   private:
    MemoryShare* const share_;
    int64_t used_ = 0;
  };

 private:
  const int64_t bytes_;
  std::atomic<int64_t> used_{0}, parts_{0};
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_MEMORY_SHARE_H_
