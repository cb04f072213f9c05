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
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

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
    std::lock_guard<std::mutex> lock(mutex_);
    records_[kRows].reserve(kMaxBytes);
    complete_ = true;
    open_ = true;
  }

  // It ends, and nobody waits for it any longer.
  void Close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open_ = false;
      for (auto& records : records_) std::vector<char>().swap(records);
    }
    changed_.notify_all();
  }

  void WaitUntilClosed() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !open_; });
  }

  // Room for what a call keeps, for as long as the call lasts. Where there is no snapshot it costs
  // one load.
  class Room {
   public:
    // REQUIRES: nothing of the table is locked.
    Room(KeptRows* kept, size_t bytes) : kept_(kept->open() ? kept : nullptr), bytes_(bytes) {
      if (kept_ == nullptr) return;
      std::unique_lock<std::mutex> lock(kept_->mutex_);
      const uint64_t turn = kept_->next_turn_++;
      kept_->changed_.wait(lock, [this, turn] {
        if (kept_->turn_ != turn) return false;
        const size_t used = kept_->size() + kept_->promised_;
        return !kept_->open_ || used == 0 || used + bytes_ <= kMaxBytes;
      });
      kept_->promised_ += bytes_;
      ++kept_->turn_;
      lock.unlock();
      kept_->changed_.notify_all();
    }
    ~Room() {
      if (kept_ == nullptr) return;
      {
        std::lock_guard<std::mutex> lock(kept_->mutex_);
        kept_->promised_ -= bytes_;
      }
      kept_->changed_.notify_all();
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
    std::lock_guard<std::mutex> lock(mutex_);
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
      std::lock_guard<std::mutex> lock(mutex_);
      records->clear();
      records->swap(records_[kind]);
      complete = complete_;
    }
    if (!records->empty()) changed_.notify_all();
    return complete;
  }

 private:
  size_t size() const { return records_[kRows].size() + records_[kCandidates].size(); }

  std::atomic<bool> open_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::array<std::vector<char>, kNumKinds> records_;
  size_t promised_ = 0;                // bytes of all rooms
  uint64_t next_turn_ = 0, turn_ = 0;  // whose it is to get room
  bool complete_ = true;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_KEPT_ROWS_H_
