// Memory for rows that is larger than the memory of the machine: pages of a file, of which so many
// are in memory as were asked for.
//
// The file is mapped, so a row has an address and stays there, whether it is in memory or not. Who
// is about to use rows says so (Want), and the kernel reads their pages all at once, not one after
// the other as they are touched. When more pages are in memory than were asked for, a thread looks
// for those that nobody has wanted since its last look (second chance), writes them, and has them
// leave the kernel's page cache. Who wants pages waits for it only if there are far too many. A
// page that is touched unasked is read as any mapped page is, and counted at the next look.
//
// The file has no name, and is gone with the process.

#ifndef HET_TF_OPS_CORE_MEMORY_FILE_ARENA_H_
#define HET_TF_OPS_CORE_MEMORY_FILE_ARENA_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/core/memory/arena.h"
#include "ops/core/mutex.h"
#include "ops/core/parallel.h"
#include "ops/core/status.h"

namespace het_tf {

class FileArena : public Arena {
 public:
  static constexpr size_t kPage = 4096;
  static constexpr int64_t kLeastPages = 64;

  // A file in a folder, of which so many bytes may be in memory.
  static Status Create(const std::string& folder, int64_t memory_bytes,
                       std::unique_ptr<FileArena>* arena);
  ~FileArena() override;

  // Throws OutOfMemory where the disk is full. Pages of two calls are apart.
  char* Allocate(size_t bytes) override;
  void Clear() override;

  // Pages that are to be read.
  using Pages = std::vector<uint32_t>;

  // What is at this address will be used. missing(page): those of its pages that are not in memory.
  template <typename Missing>
  void Want(const char* at, size_t bytes, const Missing& missing) {
    constexpr uint8_t wanted = kResident | kUsed;
    const size_t first = (at - base_) / kPage, last = (at - base_ + bytes - 1) / kPage;
    for (size_t page = first; page <= last; ++page) {
      if ((state_[page].load(std::memory_order_relaxed) & wanted) == wanted) continue;
      if (state_[page].fetch_or(wanted, std::memory_order_relaxed) & kResident) continue;
      resident_.fetch_add(1, std::memory_order_relaxed);
      missing(static_cast<uint32_t>(page));
    }
  }
  // Has the kernel read pages, and does not wait for them.
  void Read(const Pages& pages, const ParallelFor& parallel_for);

  // To be called after pages were wanted. Waits while far more are in memory than were asked for.
  // An error: pages could not be written. From then on there is no other answer, and no page leaves
  // memory, because the kernel takes a page that it could not write for one that is written.
  Status Trim() {
    const bool is_full = resident_.load(std::memory_order_relaxed) > most_ - most_ / kRoom;
    return is_full || failed_.load(std::memory_order_relaxed) ? Wait() : Status();
  }

  int64_t memory_bytes() const { return resident_.load(std::memory_order_relaxed) * kPage; }
  int64_t file_bytes() const { return file_bytes_.load(std::memory_order_relaxed); }
  // Pages that were read, and that left memory, since it was made.
  int64_t pages_read() const { return pages_read_.load(std::memory_order_relaxed); }
  int64_t pages_let_go() const { return pages_let_go_.load(std::memory_order_relaxed); }

 private:
  enum State : uint8_t { kResident = 1, kUsed = 2 };
  // The part of the memory that the thread keeps free.
  static constexpr int64_t kRoom = 16;
  struct Run {
    size_t first, last;
  };

  FileArena(int file, std::string folder, int64_t most_pages, size_t address_space, char* base,
            std::atomic<uint8_t>* state)
      : file_(file),
        address_space_(address_space),
        folder_(std::move(folder)),
        most_(most_pages),
        base_(base),
        state_(state),
        trimmer_([this] { RunTrimmer(); }) {}

  Status Wait();
  void RunTrimmer();
  // Lets go of pages until there is room.
  Status LetGo();
  // Takes note of the pages from `first` on that are in memory, up to the end of a piece.
  void Count(size_t first) HET_REQUIRES(trimming_);
  size_t num_pages() const { return file_bytes() / kPage; }

  const int file_;
  const size_t address_space_;
  const std::string folder_;
  const int64_t most_;                 // pages in memory
  char* const base_;                   // of the address space that was set aside
  std::atomic<uint8_t>* const state_;  // (pages of the address space)

  Mutex growing_;
  size_t taken_ HET_GUARDED_BY(growing_) = 0;  // bytes of the file that were handed out
  std::atomic<int64_t> file_bytes_{0};
  std::atomic<int64_t> resident_{0};
  std::atomic<int64_t> pages_read_{0}, pages_let_go_{0};

  Mutex trimming_;
  size_t hand_ HET_GUARDED_BY(trimming_) = 0;  // the page to look at next

  std::mutex waiting_;
  std::condition_variable changed_;
  bool ends_ = false;     // guarded by waiting_
  bool is_full_ = false;  // guarded by waiting_; the trimmer has something to do
  int64_t rounds_ = 0;    // guarded by waiting_; of the trimmer
  std::string failure_;   // guarded by waiting_; of its first round that failed
  std::atomic<bool> failed_{false};
  std::thread trimmer_;  // after all that it uses
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MEMORY_FILE_ARENA_H_
