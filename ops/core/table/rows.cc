// Export, Import and Clear: all rows of a shard.

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/simd.h"
#include "ops/core/table/record.h"
#include "ops/core/table/reservation.h"
#include "ops/core/table/table.h"

namespace het_tf {

Status Table::Export(int first, int last, const std::function<Rows(int64_t)>& allocate) const {
  if (first < 0 || last < first || last > kNumStripes) {
    return InvalidArgument("stripes = [", first, ", ", last, ") must lie in [0, ", kNumStripes,
                           ")");
  }
  SharedLock contents(contents_);
  // All of them at once, in ascending order, so that the rows are of one moment.
  const auto locks = LockStripes<SharedLock>(first, last);
  int64_t num_rows = 0;
  for (int s = first; s < last; ++s) num_rows += stripes_[s]->index.size();
  const Rows rows = allocate(num_rows);
  int64_t r = 0;
  for (int s = first; s < last; ++s) {
    stripes_[s]->index.ForEach([&](uint32_t slot) {
      const char* record = stripes_[s]->records[slot];
      rows.keys[r] = KeyOf(record);
      rows.clocks[r] = ClockOf(record);
      format_.Read(WordsOf(record), 0, rows.values + r * dim());
      std::copy_n(WordsOf(record) + format_.words(0), slot_dim(), rows.slots + r * slot_dim());
      ++r;
    });
  }
  return Status();
}

Status Table::Import(const ConstRows& rows, int64_t num_rows) {
  for (int64_t r = 0; r < num_rows; ++r) {
    HET_RETURN_IF_ERROR(CheckOwned("keys", rows.keys[r], HashKey(rows.keys[r])));
    if (rows.clocks[r] < 0 || rows.clocks[r] > kMaxClock) {
      return InvalidArgument("clocks holds ", rows.clocks[r], " for key ", rows.keys[r]);
    }
    if (!AllFinite(rows.values + r * dim(), dim()) ||
        (rows.slots != nullptr && !AllFinite(rows.slots + r * slot_dim(), slot_dim()))) {
      return InvalidArgument("values or slots hold NaN or infinity for key ", rows.keys[r]);
    }
  }
  UniqueLock contents(contents_);
  const Groups groups(num_rows, kNumStripes,
                      [&](int64_t r) { return StripeOfHash(HashKey(rows.keys[r]), kNumStripes); });
  const Reservation reservation(this, groups);
  HET_RETURN_IF_ERROR(reservation.status());
  for (int64_t r = 0; r < num_rows; ++r) {
    const uint64_t hash = HashKey(rows.keys[r]);
    Stripe& stripe = *stripes_[StripeOfHash(hash, kNumStripes)];
    char* record = FindOrInsert(&stripe, hash, rows.keys[r]);
    SetClock(record, rows.clocks[r]);
    format_.Write(rows.values + r * dim(), 0, WordsOf(record));
    float* slots = WordsOf(record) + format_.words(0);
    if (rows.slots == nullptr) {
      kit_.optimizer->InitSlots(slots);
    } else {
      std::copy_n(rows.slots + r * slot_dim(), slot_dim(), slots);
    }
  }
  NewIncarnation();
  return Status();
}

void Table::Clear() {
  UniqueLock contents(contents_);
  for (const auto& stripe : stripes_) {
    stripe->index.Clear();
    stripe->records.Clear();
  }
  arena_.Clear();
  NewIncarnation();
}

}  // namespace het_tf
