// What a cache keeps of a key.

#ifndef HET_TF_OPS_CORE_CACHE_LINE_H_
#define HET_TF_OPS_CORE_CACHE_LINE_H_

#include <cstdint>

namespace het_tf {

// Followed in memory by the row: value[dim], slots[slot_dim], with all own updates.
struct Line {
  int64_t key;
  int64_t base;              // the row's clock when last refreshed, moved by own pushes since
  uint32_t in_flight;        // own updates in pushes that are not acknowledged
  uint32_t units_in_flight;  // drift clock: their length
  uint32_t score;            // Eviction's
  int32_t pending;           // own updates in no push yet
  uint32_t units;            // drift clock: the length of those
  uint32_t record;           // Unsent's
  uint32_t gradients;        // Unsent's
  uint32_t dirty_at;         // where Store lists it as dirty; kNone: pending is 0
  int32_t holds;             // tickets that hold the line
  uint16_t shard;
  uint16_t flags;

  static constexpr uint32_t kNone = 0xffffffff;

  enum Flags : uint16_t {
    kReadable = 1,   // the value may be read
    kFull = 2,       // value and slots are good, own updates are made here
    kResident = 4,   // stays when no ticket holds it; counts for the capacity
    kQueued = 8,     // in an outbox
    kStays = 16,     // it becomes resident once it is full
    kWatched = 32,   // its shard sends it once it is beyond the bound (link/watch.h)
    kPassedBy = 64,  // Eviction does not know it while it is held
  };

  bool has(uint16_t flag) const { return (flags & flag) != 0; }
  void set(uint16_t flag) { flags |= flag; }
  void clear(uint16_t flag) { flags = static_cast<uint16_t>(flags & ~flag); }
};
static_assert(sizeof(Line) == 56);

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_LINE_H_
