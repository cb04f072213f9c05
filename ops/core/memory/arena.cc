#include "ops/core/memory/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace het_tf {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4 << 10;
// Address space, not memory: a page is taken when it is first touched.
constexpr size_t kRegionBytes = size_t{64} << 20;
// Blocks of this size are mapped, so that what a growing array leaves behind goes back to the
// kernel at once. malloc kept 56 MB of 1 GB (benchmarks/table_memory.py).
constexpr size_t kMappedBlock = size_t{64} << 10;

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// bytes: a multiple of kPage. From kHugePage on aligned to it; what is beyond the last whole huge
// page lies on small ones, so that no memory is taken for nothing.
char* Map(size_t bytes) {
  const size_t alignment = bytes < kHugePage ? kPage : kHugePage;
  const size_t mapped = bytes + alignment - kPage;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw OutOfMemory(mapped);
  char* begin = static_cast<char*>(memory);
  char* aligned = begin + (alignment - reinterpret_cast<uintptr_t>(begin) % alignment) % alignment;
  if (aligned > begin) munmap(begin, aligned - begin);
  char* end = begin + mapped;
  if (end > aligned + bytes) munmap(aligned + bytes, end - (aligned + bytes));
  // Advice only: without, the pages are small.
  if (bytes >= kHugePage) madvise(aligned, bytes, MADV_HUGEPAGE);
  return aligned;
}

}  // namespace

char* Arena::Allocate(size_t bytes) {
  bytes = RoundUp(bytes, 64);
  MutexLock lock(&mutex_);
  if (bytes > left_) {
    const size_t region = std::max(kRegionBytes, RoundUp(bytes, kHugePage));
    regions_.reserve(regions_.size() + 1);
    at_ = Map(region);
    left_ = region;
    regions_.push_back({at_, region});
  }
  char* taken = at_;
  at_ += bytes;
  left_ -= bytes;
  return taken;
}

void Arena::ReleaseAll() {
  MutexLock lock(&mutex_);
  for (const Region& region : regions_) munmap(region.begin, region.bytes);
  regions_.clear();
  at_ = nullptr;
  left_ = 0;
}

void* AllocateBlock(size_t bytes) {
  if (bytes >= kMappedBlock) return Map(RoundUp(bytes, kPage));
  void* block = std::aligned_alloc(64, RoundUp(bytes, 64));
  if (block == nullptr) throw OutOfMemory(bytes);
  return block;
}

void FreeBlock(void* block, size_t bytes) {
  if (bytes >= kMappedBlock) {
    munmap(block, RoundUp(bytes, kPage));
  } else {
    std::free(block);
  }
}

}  // namespace het_tf
