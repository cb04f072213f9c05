// How a table keeps a row: key, clock, and value and slots as RowFormat has them.

#ifndef HET_TF_OPS_CORE_TABLE_RECORD_H_
#define HET_TF_OPS_CORE_TABLE_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ops/core/table/table.h"

namespace het_tf {

inline constexpr size_t kClockOffset = sizeof(int64_t);
inline constexpr size_t kRowOffset = 2 * sizeof(int64_t);

// Records are packed to 4 bytes, so 8-byte fields are copied, not dereferenced.
inline int64_t LoadInt64(const char* at) {
  int64_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}
inline void StoreInt64(char* at, int64_t value) { std::memcpy(at, &value, sizeof(value)); }

inline int64_t KeyOf(const char* record) { return LoadInt64(record); }
inline int64_t ClockOf(const char* record) { return LoadInt64(record + kClockOffset); }
inline void SetClock(char* record, int64_t clock) { StoreInt64(record + kClockOffset, clock); }
// (format.words(slot_dim))
inline float* WordsOf(char* record) { return reinterpret_cast<float*>(record + kRowOffset); }
inline const float* WordsOf(const char* record) {
  return reinterpret_cast<const float*>(record + kRowOffset);
}

inline int64_t Table::KeyAt(const Stripe& stripe, uint32_t slot) const {
  return file_ == nullptr ? KeyOf(stripe.records[slot]) : stripe.keys[slot];
}

template <typename HashOf, typename KeyOfPlace>
Status Table::Warm(int64_t n, const HashOf& hash_of, const KeyOfPlace& key_of,
                   const ParallelFor& parallel_for) const {
  if (file_ == nullptr || n == 0) return Status();
  FileArena::Pages pages;
  {
    const auto locks = LockStripes<SharedLock>(0, kNumStripes);
    for (int64_t i = 0; i < n; ++i) {
      const Stripe& stripe = *stripes_[StripeOfHash(hash_of(i), kNumStripes)];
      const uint32_t slot = Find(stripe, hash_of(i), key_of(i));
      if (slot == Index::kNone) continue;
      file_->Want(stripe.records[slot], record_bytes_,
                  [&](uint32_t page) { pages.push_back(page); });
    }
  }
  HET_RETURN_IF_ERROR(file_->Trim());
  file_->Read(pages, parallel_for);
  return Status();
}

inline uint32_t Table::Find(const Stripe& stripe, uint64_t hash, int64_t key,
                            uint32_t guess) const {
  return stripe.index.Find(hash, guess, [&](uint32_t slot) { return KeyAt(stripe, slot) == key; });
}

// Cycles that a stripe's share of the rows costs, for splitting work. Measured with perf on the
// workload of benchmarks/local_step.py: a probe is two to three cache misses, in part hidden.
inline constexpr int64_t kProbeCycles = 200;
inline int64_t StripeCost(int64_t rows, int64_t floats_a_row) {
  return rows * (kProbeCycles + 2 * floats_a_row) / Table::kNumStripes + 1;
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_RECORD_H_
