#include "ops/core/memory/file_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace het_tf {
namespace {

// Address space, not memory: what the file system holds, and a byte for each of its pages.
constexpr size_t kMostAddressSpace = size_t{1} << 42;
// The file grows by so much, and pages are counted by so much.
constexpr size_t kPiece = size_t{16} << 20;
constexpr size_t kPiecePages = kPiece / FileArena::kPage;
// Of having a page read, for splitting work.
constexpr int64_t kReadCycles = 20'000;

constexpr long kTmpfs = 0x01021994, kRamfs = static_cast<long>(0x858458f6);

std::string Reason() { return std::strerror(errno); }

void* Reserve(size_t bytes, int protection) {
  void* memory =
      mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

// A file without a name.
int OpenIn(const std::string& folder) {
  const int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return file;
  std::string name = folder + "/het_tf_rows_XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) unlink(name.c_str());
  return named;
}

}  // namespace

Status FileArena::Create(const std::string& folder, int64_t memory_bytes,
                         std::unique_ptr<FileArena>* arena) {
  const int64_t most = memory_bytes / static_cast<int64_t>(kPage);
  if (most < kLeastPages) {
    return InvalidArgument("memory = ", memory_bytes, " of a storage must be at least ",
                           kLeastPages * kPage, " bytes");
  }
  const int file = OpenIn(folder);
  if (file < 0) {
    return InvalidArgument("path = '", folder,
                           "' of a storage: no file can be made there: ", Reason());
  }
  struct statfs info;
  if (fstatfs(file, &info) != 0) info = {};
  if (info.f_type == kTmpfs || info.f_type == kRamfs) {
    close(file);
    return InvalidArgument("path = '", folder,
                           "' of a storage is in memory (tmpfs), not on a disk");
  }
  const size_t disk = static_cast<size_t>(info.f_blocks) * static_cast<size_t>(info.f_bsize);
  const size_t space =
      disk == 0 ? kMostAddressSpace : std::min(kMostAddressSpace, (disk / kPiece + 2) * kPiece);
  void* base = Reserve(space, PROT_NONE);
  void* state = Reserve(space / kPage, PROT_READ | PROT_WRITE);
  if (base == nullptr || state == nullptr) {
    if (base != nullptr) munmap(base, space);
    if (state != nullptr) munmap(state, space / kPage);
    close(file);
    return ResourceExhausted("out of address space for a storage");
  }
  arena->reset(new FileArena(file, folder, most, space, static_cast<char*>(base),
                             static_cast<std::atomic<uint8_t>*>(state)));
  return Status();
}

FileArena::~FileArena() {
  {
    const std::lock_guard<std::mutex> lock(waiting_);
    ends_ = true;
  }
  changed_.notify_all();
  trimmer_.join();
  munmap(base_, address_space_);
  munmap(state_, address_space_ / kPage);
  close(file_);
}

char* FileArena::Allocate(size_t bytes) {
  bytes = (bytes + kPage - 1) / kPage * kPage;
  MutexLock lock(&growing_);
  const size_t size = file_bytes();
  if (taken_ + bytes > size) {
    const size_t grown = std::max(kPiece, (bytes + kPiece - 1) / kPiece * kPiece);
    // A page without room on the disk would end the process when it is written.
    if (size + grown > address_space_ ||
        posix_fallocate(file_, static_cast<off_t>(size), static_cast<off_t>(grown)) != 0) {
      throw DiskFull(grown);
    }
    if (mmap(base_ + size, grown, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_,
             static_cast<off_t>(size)) == MAP_FAILED) {
      throw OutOfMemory(grown);
    }
    // Neighbours of a page are of no use to its readers.
    madvise(base_ + size, grown, MADV_RANDOM);
    file_bytes_ = static_cast<int64_t>(size + grown);
  }
  char* taken = base_ + taken_;
  taken_ += bytes;
  return taken;
}

void FileArena::Clear() {
  MutexLock trimming(&trimming_);
  MutexLock lock(&growing_);
  const size_t size = file_bytes();
  if (size == 0) return;
  mmap(base_, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  // If this fails, the file keeps its room, and its contents do not matter.
  static_cast<void>(ftruncate(file_, 0) == 0);
  std::memset(static_cast<void*>(state_), 0, size / kPage);
  taken_ = 0;
  file_bytes_ = 0;
  resident_ = 0;
  hand_ = 0;
}

void FileArena::Read(const Pages& pages, const ParallelFor& parallel_for) {
  parallel_for(static_cast<int64_t>(pages.size()), kReadCycles, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const size_t first = pages[i];
      size_t last = first;
      while (++i < end && pages[i] == last + 1) ++last;
      madvise(base_ + first * kPage, (last + 1 - first) * kPage, MADV_WILLNEED);
    }
  });
  pages_read_.fetch_add(static_cast<int64_t>(pages.size()), std::memory_order_relaxed);
}

void FileArena::Count(size_t first) {
  const size_t count = std::min(kPiecePages, num_pages() - first);
  unsigned char in_memory[kPiecePages];
  if (mincore(base_ + first * kPage, count * kPage, in_memory) != 0) return;
  int64_t more = 0;
  for (size_t i = 0; i < count; ++i) {
    if ((in_memory[i] & 1) == 0) continue;
    more += (state_[first + i].fetch_or(kResident, std::memory_order_relaxed) & kResident) == 0;
  }
  resident_.fetch_add(more, std::memory_order_relaxed);
}

Status FileArena::Wait() {
  std::unique_lock<std::mutex> lock(waiting_);
  if (!is_full_) {
    is_full_ = true;
    changed_.notify_all();
  }
  // A round that began before may have found less to do.
  for (const int64_t last = rounds_ + 2; rounds_ < last;) {
    if (!failure_.empty()) return ResourceExhausted(failure_);
    if (resident_.load(std::memory_order_relaxed) <= most_ + most_ / kRoom) return Status();
    is_full_ = true;
    changed_.notify_all();
    changed_.wait(lock);
  }
  return Status();
}

void FileArena::RunTrimmer() {
  std::unique_lock<std::mutex> lock(waiting_);
  while (true) {
    changed_.wait(lock, [this] { return is_full_ || ends_; });
    if (ends_) return;
    is_full_ = false;
    lock.unlock();
    const Status status = failed_ ? Status() : LetGo();
    lock.lock();
    if (!status.ok()) {
      failure_ = status.message();
      failed_ = true;
    }
    ++rounds_;
    changed_.notify_all();
  }
}

Status FileArena::LetGo() {
  MutexLock lock(&trimming_);
  const size_t pages = num_pages();
  const int64_t enough = most_ - 2 * most_ / kRoom;
  std::vector<Run> runs;
  int64_t let_go = 0;
  // Two rounds: in the first every page may have been used.
  for (size_t looked = 0; looked < 2 * pages + kPiecePages; ++looked) {
    if (resident_.load(std::memory_order_relaxed) - let_go <= enough) break;
    if (hand_ >= pages) hand_ = 0;
    if (hand_ % kPiecePages == 0) Count(hand_);
    const size_t page = hand_++;
    uint8_t state = state_[page].load(std::memory_order_relaxed);
    if ((state & kResident) == 0) continue;
    if (state & kUsed) {
      state_[page].fetch_and(static_cast<uint8_t>(~kUsed), std::memory_order_relaxed);
      continue;
    }
    // Whoever wants it from now on has it read.
    if (!state_[page].compare_exchange_strong(state, 0, std::memory_order_relaxed)) continue;
    ++let_go;
    if (!runs.empty() && runs.back().last + 1 == page) {
      ++runs.back().last;
    } else {
      runs.push_back({page, page});
    }
  }
  resident_.fetch_sub(let_go, std::memory_order_relaxed);
  pages_let_go_.fetch_add(let_go, std::memory_order_relaxed);
  const auto write = [&](const Run& run, unsigned how) {
    return sync_file_range(file_, static_cast<off_t>(run.first * kPage),
                           static_cast<off_t>((run.last + 1 - run.first) * kPage), how);
  };
  const auto failed = [&] {
    return ResourceExhausted("rows cannot be written to '", folder_, "': ", Reason());
  };
  for (const Run& run : runs) {  // all at once
    if (write(run, SYNC_FILE_RANGE_WRITE) != 0) return failed();
  }
  for (const Run& run : runs) {
    const size_t bytes = (run.last + 1 - run.first) * kPage;
    if (write(run, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                       SYNC_FILE_RANGE_WAIT_AFTER) != 0) {
      return failed();
    }
    // A page that was changed meanwhile is dirty again, and stays.
    madvise(base_ + run.first * kPage, bytes, MADV_DONTNEED);
    posix_fadvise(file_, static_cast<off_t>(run.first * kPage), static_cast<off_t>(bytes),
                  POSIX_FADV_DONTNEED);
  }
  return Status();
}

}  // namespace het_tf
