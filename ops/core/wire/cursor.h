// Reading and writing a block of bytes from front to back.

#ifndef HET_TF_OPS_CORE_WIRE_CURSOR_H_
#define HET_TF_OPS_CORE_WIRE_CURSOR_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ops/core/status.h"

namespace het_tf {

// Takes arrays off the front of a block, never beyond its end.
class ReadCursor {
 public:
  ReadCursor(const char* bytes, size_t size) : at_(bytes), left_(size) {}

  // Returns nullptr when fewer than count are left. record_bytes is not 0.
  const char* Take(uint64_t count, uint64_t record_bytes) {
    if (count > left_ / record_bytes) return nullptr;
    const char* taken = at_;
    at_ += count * record_bytes;
    left_ -= count * record_bytes;
    return taken;
  }

  template <typename Record>
  const Record* Take(uint64_t count) {
    return reinterpret_cast<const Record*>(Take(count, sizeof(Record)));
  }

  size_t left() const { return left_; }

 private:
  const char* at_;
  size_t left_;
};

// Hands out places for arrays, one after the other.
class WriteCursor {
 public:
  explicit WriteCursor(char* at) : at_(at) {}

  template <typename Record>
  Record* Take(uint64_t count) {
    auto* taken = reinterpret_cast<Record*>(at_);
    at_ += count * sizeof(Record);
    return taken;
  }

  char* at() const { return at_; }

 private:
  char* at_;
};

inline Status CheckAlignment(const char* what, const char* bytes) {
  if (reinterpret_cast<uintptr_t>(bytes) % 8 == 0) return Status();
  return InvalidArgument(what, " is not aligned to 8 bytes");
}

// What could not be in memory at all, so that products stay within 64 bits.
inline constexpr uint64_t kMaxWidth = 1ULL << 24;
inline constexpr uint64_t kMaxCount = 1ULL << 31;

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_WIRE_CURSOR_H_
