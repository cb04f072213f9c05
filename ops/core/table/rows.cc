// Export, Import, Replace and Clear: all rows of a shard.

#include <algorithm>
#include <atomic>
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
  const uint32_t now = time_.now();
  int64_t r = 0;
  for (int s = first; s < last; ++s) {
    stripes_[s]->index.ForEach(
        [&](uint32_t slot) { CopyOut(stripes_[s]->records[slot], now, rows, r++); });
  }
  return Status();
}

void Table::CopyOut(const char* record, uint32_t now, const Rows& rows, int64_t r) const {
  rows.keys[r] = KeyOf(record);
  rows.clocks[r] = lives_ ? ClockOfLife::UpdatesOf(ClockOf(record)) : ClockOf(record);
  if (rows.ages != nullptr) rows.ages[r] = expires_ ? AgeOf(TimeOf(record), now) : 0;
  format_.Read(WordsOf(record), 0, rows.values + r * dim());
  std::copy_n(WordsOf(record) + format_.words(0), slot_dim(), rows.slots + r * slot_dim());
}

Status Table::CheckRow(const ConstRows& rows, int64_t r) const {
  if (rows.clocks[r] < 0 || rows.clocks[r] > kMaxClock) {
    return InvalidArgument("clocks holds ", rows.clocks[r], " for key ", rows.keys[r]);
  }
  if (rows.ages != nullptr && rows.ages[r] < 0) {
    return InvalidArgument("ages holds ", rows.ages[r], " for key ", rows.keys[r]);
  }
  const int num_slots = rows.slots == nullptr ? 0 : slot_dim();
  if (AllFinite(rows.values + r * dim(), dim()) &&
      AllFinite(rows.slots + r * num_slots, num_slots)) {
    return Status();
  }
  return InvalidArgument("values or slots hold NaN or infinity for key ", rows.keys[r]);
}

Status Table::SetRows(const ConstRows& rows, const std::vector<int64_t>& numbers,
                      const ParallelFor& parallel_for) {
  std::vector<uint64_t> hashes(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) hashes[i] = HashKey(rows.keys[numbers[i]]);
  const Groups groups(numbers.size(), kNumStripes,
                      [&](int64_t i) { return StripeOfHash(hashes[i], kNumStripes); });
  const Reservation reservation(this, groups);
  HET_RETURN_IF_ERROR(reservation.status());
  const auto set = [&](Stripe* stripe, uint64_t hash, int64_t r) {
    bool is_new;
    char* record = FindOrAdd(stripe, hash, rows.keys[r], &is_new);
    if (is_new && stripe->gate != nullptr) stripe->gate->Forget(hash, rows.keys[r]);
    const int64_t clock = ClockOf(record);
    if (!is_new && (lives_ ? ClockOfLife::UpdatesOf(clock) : clock) > rows.clocks[r]) {
      NoteDrop(stripe, rows.keys[r]);  // It is the row of another life.
    }
    SetClock(record,
             lives_ ? clocks_.born() + ClockOfLife::UpdatesOf(rows.clocks[r]) : rows.clocks[r]);
    SetRowTime(record, time_.TimeOfAge(rows.ages == nullptr ? 0 : rows.ages[r]));
    format_.Write(rows.values + r * dim(), 0, WordsOf(record));
    float* slots = WordsOf(record) + format_.words(0);
    if (rows.slots == nullptr) {
      kit_.optimizer->InitSlots(slots);
    } else {
      std::copy_n(rows.slots + r * slot_dim(), slot_dim(), slots);
    }
  };
  const int64_t cost = StripeCost(numbers.size(), row_dim_);
  parallel_for(kNumStripes, cost, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      Stripe& stripe = *stripes_[s];
      const int32_t* order = groups.order.data() + groups.begin[s];
      VisitAhead(
          groups.size(s), [&](int64_t i) { return IndexedHash{&stripe.index, hashes[order[i]]}; },
          [&](int64_t, uint32_t slot) { __builtin_prefetch(stripe.records[slot]); },
          [&](int64_t i) { set(&stripe, hashes[order[i]], numbers[order[i]]); });
    }
  });
  return Status();
}

void Table::DropRows() {
  for (const auto& stripe : stripes_) {
    stripe->index.Clear();
    stripe->records.Clear();
    if (stripe->gate != nullptr) stripe->gate->Clear();
  }
  arena_.Clear();
  for (const auto& stripe : stripes_) stripe->changed.clear();
  readers_.clear();
}

void Table::Erase(Stripe* stripe, uint64_t hash, uint32_t slot) {
  char* record = stripe->records[slot];
  if (lives_) clocks_.Ended(ClockOf(record));
  stripe->index.Erase(hash, slot);
  SetRowTime(record, kFree);
  stripe->records.Free(slot);
}

void Table::DropKeys(const int64_t* keys, int64_t num_keys) {
  for (int64_t k = 0; k < num_keys; ++k) {
    const uint64_t hash = HashKey(keys[k]);
    Stripe* stripe = stripes_[StripeOfHash(hash, kNumStripes)].get();
    const uint32_t slot = Find(*stripe, hash, keys[k]);
    if (slot == Index::kNone) continue;
    stripe->records.ReserveFree(1);
    Erase(stripe, hash, slot);
  }
}

Status Table::Import(const ConstRows& rows, int64_t num_rows) {
  std::vector<int64_t> numbers(num_rows);
  for (int64_t r = 0; r < num_rows; ++r) {
    HET_RETURN_IF_ERROR(CheckOwned("keys", rows.keys[r], HashKey(rows.keys[r])));
    HET_RETURN_IF_ERROR(CheckRow(rows, r));
    numbers[r] = r;
  }
  const UniqueLock contents = LockContents();
  HET_RETURN_IF_ERROR(SetRows(rows, numbers, SerialFor));
  NewIncarnation();
  return Status();
}

Status Table::CheckRows(const ConstRows& rows, int64_t num_rows, const ParallelFor& parallel_for,
                        int64_t* owned) const {
  std::atomic<int64_t> bad{-1}, mine{0};
  parallel_for(num_rows, 50 + row_dim_, [&](int64_t first, int64_t last) {
    int64_t count = 0;
    for (int64_t r = first; r < last; ++r) {
      if (!CheckRow(rows, r).ok()) bad = r;
      count += Owns(HashKey(rows.keys[r]));
    }
    mine += count;
  });
  *owned = mine;
  return bad < 0 ? Status() : CheckRow(rows, bad);
}

Status Table::Replace(const std::function<Status(ConstRows*, int64_t*)>& next,
                      const ParallelFor& parallel_for, int64_t time) {
  const UniqueLock contents = LockContents();
  DropRows();
  time_.Restart(time);
  NewIncarnation();
  const auto load = [&] {
    while (true) {
      ConstRows rows;
      int64_t num_rows = 0;
      HET_RETURN_IF_ERROR(next(&rows, &num_rows));
      if (num_rows == 0) return Status();
      if (rows.values == nullptr) {
        DropKeys(rows.keys, num_rows);
        continue;
      }
      std::vector<int64_t> owned;
      for (int64_t r = 0; r < num_rows; ++r) {
        if (Owns(HashKey(rows.keys[r]))) owned.push_back(r);
      }
      HET_RETURN_IF_ERROR(SetRows(rows, owned, parallel_for));
    }
  };
  Status status;
  try {
    status = load();
  } catch (const std::bad_alloc&) {
    status = ResourceExhausted("out of memory for rows");
  }
  if (!status.ok()) DropRows();
  return status;
}

void Table::Clear() {
  const UniqueLock contents = LockContents();
  DropRows();
  NewIncarnation();
}

}  // namespace het_tf
