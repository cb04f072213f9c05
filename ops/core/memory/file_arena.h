// Memory for rows that is larger than the memory of the machine: pages of a file, of which so many
// are in memory as were asked for.
//
// The file is mapped, so a row has an address and stays there, whether it is in memory or not. Who
// is about to use rows says so (Want), and the kernel reads their pages all at once, not one after
// the other as they are touched. When more pages are in memory than were asked for, those that
// nobody has wanted since the last look (second chance) are written and leave the kernel's page
// cache (Trim). A page that is touched unasked is read as any mapped page is, and counted at the
// next look.
//
// The file has no name, and is gone with the process.

#ifndef HET_TF_OPS_CORE_MEMORY_FILE_ARENA_H_
#define HET_TF_OPS_CORE_MEMORY_FILE_ARENA_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ops/core/memory/arena.h"
#include "ops/core/mutex.h"
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

  // What is at this address will be used; again: probably several times, as rows of a step, and
  // unlike rows that are saved. missing(page): those of its pages that are not in memory.
  template <typename Missing>
  void Want(const char* at, size_t bytes, bool again, const Missing& missing) {
    const uint8_t wanted = again ? kResident | kUsed : kResident;
    const size_t first = (at - base_) / kPage, last = (at - base_ + bytes - 1) / kPage;
    for (size_t page = first; page <= last; ++page) {
      if ((state_[page].load(std::memory_order_relaxed) & wanted) == wanted) continue;
      if (state_[page].fetch_or(wanted, std::memory_order_relaxed) & kResident) continue;
      resident_.fetch_add(1, std::memory_order_relaxed);
      missing(static_cast<uint32_t>(page));
    }
  }
  // Has the kernel read pages, and does not wait for them.
  void Read(const Pages& pages);

  // Writes pages that were not used lately and lets go of them, until no more are in memory than
  // were asked for.
  Status Trim() {
    return resident_.load(std::memory_order_relaxed) > most_ ? LetGo() : Status();
  }
  // Counts the pages that are in memory, after many were touched unasked, and trims.
  Status TrimAll();

  int64_t memory_bytes() const { return resident_.load(std::memory_order_relaxed) * kPage; }
  int64_t file_bytes() const { return file_bytes_.load(std::memory_order_relaxed); }
  // Pages that were read, and that left memory, since it was made.
  int64_t pages_read() const { return pages_read_.load(std::memory_order_relaxed); }
  int64_t pages_let_go() const { return pages_let_go_.load(std::memory_order_relaxed); }

 private:
  enum State : uint8_t { kResident = 1, kUsed = 2 };
  struct Run {
    size_t first, last;
  };

  FileArena(int file, std::string folder, int64_t most_pages, char* base,
            std::atomic<uint8_t>* state)
      : file_(file), folder_(std::move(folder)), most_(most_pages), base_(base), state_(state) {}

  Status LetGo();
  // Takes note of the pages from `first` on that are in memory, up to the end of a piece.
  void Count(size_t first) HET_REQUIRES(trimming_);
  size_t num_pages() const { return file_bytes() / kPage; }

  const int file_;
  const std::string folder_;
  const int64_t most_;  // pages in memory
  char* const base_;    // of the address space that was set aside
  std::atomic<uint8_t>* const state_;  // (pages of the address space)

  Mutex growing_;
  size_t taken_ HET_GUARDED_BY(growing_) = 0;  // bytes of the file that were handed out
  std::atomic<int64_t> file_bytes_{0};
  std::atomic<int64_t> resident_{0};
  std::atomic<int64_t> pages_read_{0}, pages_let_go_{0};

  Mutex trimming_;
  size_t hand_ HET_GUARDED_BY(trimming_) = 0;  // the page to look at next
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MEMORY_FILE_ARENA_H_
