// Fixed-size records in chunks: a record never moves, and growing copies nothing.

#ifndef HET_TF_OPS_CORE_MEMORY_SLAB_H_
#define HET_TF_OPS_CORE_MEMORY_SLAB_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/core/memory/arena.h"

namespace het_tf {

class Slab {
 public:
  // The records are in the arena's memory, which several slabs may share.
  Slab(size_t record_bytes, Arena* arena) : record_bytes_(record_bytes), arena_(arena) {}

  size_t record_bytes() const { return record_bytes_; }

  char* operator[](uint32_t slot) const {
    return chunks_[slot >> kChunkBits] + (slot & kChunkMask) * record_bytes_;
  }

  // A slot whose bytes are not initialised. Freed slots come back first.
  uint32_t Allocate() {
    if (!free_.empty()) {
      const uint32_t slot = free_.back();
      free_.pop_back();
      return slot;
    }
    Reserve(1);
    return end_++;
  }

  // Has memory for that many slots, so that as many calls of Allocate do not throw.
  void Reserve(size_t slots) {
    while (free_.size() + (chunks_.size() << kChunkBits) - end_ < slots) {
      chunks_.push_back(arena_->Allocate(record_bytes_ << kChunkBits));
    }
  }

  void Free(uint32_t slot) { free_.push_back(slot); }

  // Has memory to take note of that many slots, so that as many calls of Free do not throw.
  void ReserveFree(size_t slots) {
    const size_t needed = free_.size() + slots;
    if (needed > free_.capacity()) free_.reserve(std::max(needed, 2 * free_.capacity()));
  }
  const std::vector<uint32_t>& free() const { return free_; }

  // To be followed by clearing the arena.
  void Clear() {
    chunks_.clear();
    free_.clear();
    end_ = 0;
  }

  // Slots ever handed out since Clear lie in [0, end).
  uint32_t end() const { return end_; }

  int64_t bytes() const {
    return static_cast<int64_t>(chunks_.size() * (record_bytes_ << kChunkBits));
  }

 private:
  static constexpr int kChunkBits = 8;
  static constexpr uint32_t kChunkMask = (1u << kChunkBits) - 1;

  const size_t record_bytes_;
  Arena* const arena_;
  std::vector<char*> chunks_;
  std::vector<uint32_t> free_;
  uint32_t end_ = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MEMORY_SLAB_H_
