// Records, of rows and of keys that are counted, as they were when a snapshot was cut, kept by
// whoever was about to change them until the snapshot has read them.
//
// There is room for so many. Who changes rows says before it takes any lock how many, and waits
// until the reader of the snapshot has made room for them; under a lock nobody waits. Room is given
// in the order in which it is asked for. A call that changes more rows than there is room for waits
// until nothing else is kept.

#ifndef HET_TF_OPS_CORE_TABLE_KEPT_ROWS_H_
#define HET_TF_OPS_CORE_TABLE_KEPT_ROWS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "ops/core/mutex.h"

namespace het_tf {

// Safe for concurrent use.
class KeptRows {
 public:
  // Twice that many bytes are in use at most: the reader takes all of them at once.
  // They take memory as they are used. Few steps push as many rows to a shard.
  static constexpr size_t kMaxBytes = 32 << 20;

  enum Kind { kRows, kCandidates, kNumKinds };

  // Whether there is a snapshot. Stays as it is for as long as the table's contents are locked,
  // but for a snapshot that ends.
  bool open() const { return open_.load(std::memory_order_relaxed); }

  // A snapshot begins. Throws std::bad_alloc.
  void Open() {
    MutexLock lock(&mutex_);
    records_[kRows].reserve(kMaxBytes);
    complete_ = true;
    open_ = true;
  }

  // It ends, and nobody waits for it any longer.
  void Close() {
    {
      MutexLock lock(&mutex_);
      open_ = false;
      for (auto& records : records_) std::vector<char>().swap(records);
    }
    changed_.NotifyAll();
  }

  void WaitUntilClosed() {
    MutexLock lock(&mutex_);
    while (open_) changed_.Wait(&mutex_);
  }

  // Room for what a call keeps, for as long as the call lasts. Where there is no snapshot it costs
  // one load.
  class Room {
   public:
    // REQUIRES: nothing of the table is locked.
    Room(KeptRows* kept, size_t bytes) : kept_(kept->open() ? kept : nullptr), bytes_(bytes) {
      if (kept_ == nullptr) return;
      {
        MutexLock lock(&kept_->mutex_);
        const uint64_t turn = kept_->next_turn_++;
        while (kept_->turn_ != turn || !kept_->HasRoom(bytes_)) {
          kept_->changed_.Wait(&kept_->mutex_);
        }
        kept_->promised_ += bytes_;
        ++kept_->turn_;
      }
      kept_->changed_.NotifyAll();
    }
    ~Room() {
      if (kept_ == nullptr) return;
      {
        MutexLock lock(&kept_->mutex_);
        kept_->promised_ -= bytes_;
      }
      kept_->changed_.NotifyAll();
    }
    // Whether there was a snapshot.
    bool held() const { return kept_ != nullptr; }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

   private:
    KeptRows* const kept_;
    const size_t bytes_;
  };

  void Keep(Kind kind, const void* record, size_t bytes) {
    MutexLock lock(&mutex_);
    if (!open_ || !complete_) return;
    try {
      const char* begin = static_cast<const char*>(record);
      records_[kind].insert(records_[kind].end(), begin, begin + bytes);
    } catch (const std::bad_alloc&) {
      complete_ = false;
    }
  }

  // Moves what is kept of a kind into `records`, whose memory is used again. False if there was no
  // memory to keep a record.
  bool Take(Kind kind, std::vector<char>* records) {
    bool complete;
    {
      MutexLock lock(&mutex_);
      records->clear();
      records->swap(records_[kind]);
      complete = complete_;
    }
    if (!records->empty()) changed_.NotifyAll();
    return complete;
  }

 private:
  bool HasRoom(size_t bytes) const HET_REQUIRES(mutex_) {
    const size_t used = records_[kRows].size() + records_[kCandidates].size() + promised_;
    return !open_ || used == 0 || used + bytes <= kMaxBytes;
  }

  std::atomic<bool> open_{false};
  Mutex mutex_;
  CondVar changed_;
  std::array<std::vector<char>, kNumKinds> records_ HET_GUARDED_BY(mutex_);
  size_t promised_ HET_GUARDED_BY(mutex_) = 0;  // bytes of all rooms
  // Whose it is to get room.
  uint64_t next_turn_ HET_GUARDED_BY(mutex_) = 0;
  uint64_t turn_ HET_GUARDED_BY(mutex_) = 0;
  bool complete_ HET_GUARDED_BY(mutex_) = true;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_KEPT_ROWS_H_
