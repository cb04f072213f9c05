#include "ops/core/table/sweep.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/simd.h"
#include "ops/core/table/record.h"

namespace het_tf {
namespace {

// Slots that are looked at under one lock of their stripe, and rows that are dropped under one lock
// of the table: each takes less than a millisecond (benchmarks/expiry.py says how long).
constexpr uint32_t kSlotsASlice = 4096;
constexpr size_t kDropsASlice = 1024;

}  // namespace

Status Table::SetTime(int64_t now) {
  const WriterLock contents(&contents_);
  return time_.Set(now);
}

uint32_t Table::AgeOf(uint32_t time, uint32_t now) {
  return now - std::min(time, now);  // somebody may have read the clock later
}

bool Table::IsExpired(const char* record, uint32_t now) const {
  const uint32_t age = AgeOf(TimeOf(record), now);
  const int64_t updates = ClockOfLife::UpdatesOf(ClockOf(record));
  for (const ExpiryRule& rule : lifetimes_.range(lifetimes_.RangeOf(KeyOf(record))).expiries) {
    if (age < rule.age || updates >= rule.updates_below) continue;
    if (std::isinf(rule.norm_below)) return true;
    static thread_local std::vector<float> value;
    value.resize(dim());
    format_.Read(WordsOf(record), 0, value.data());
    if (std::sqrt(SumOfSquares(value.data(), dim())) < rule.norm_below) return true;
  }
  return false;
}

bool Table::Sweep::Next() {
  if (!table_->expires_ || stripe_ == kNumStripes) return false;
  Stripe* stripe = table_->stripes_[stripe_].get();
  const uint32_t now = table_->time_.now();
  if (in_rows_) {
    SweepRows(stripe, now);
  } else {
    SweepCandidates(stripe, now);
  }
  if (is_last_) {
    slot_ = 0;
    if (in_rows_) ++stripe_;
    in_rows_ = !in_rows_;
  }
  return true;
}

void Table::Sweep::SweepCandidates(Stripe* stripe, uint32_t now) {
  is_last_ = true;
  if (stripe->gate == nullptr) return;
  const ReaderLockWithRoom held(table_, kSlotsASlice * sizeof(Gate::Candidate));
  UniqueLock lock(stripe->mutex);
  Gate& gate = *stripe->gate;
  const uint32_t first = std::min(slot_, gate.end());
  const uint32_t last = std::min(gate.end(), first + kSlotsASlice);
  // One that has no row has no updates and no norm: it goes after the shortest of the ages.
  gate.Sweep(first, last, [&](int64_t key, uint32_t updated) {
    const auto& rules = table_->lifetimes_.range(table_->lifetimes_.RangeOf(key)).expiries;
    return std::any_of(rules.begin(), rules.end(),
                       [&](const ExpiryRule& rule) { return AgeOf(updated, now) >= rule.age; });
  });
  is_last_ = last == gate.end();
  slot_ = last;
}

void Table::Sweep::SweepRows(Stripe* stripe, uint32_t now) {
  std::vector<uint32_t> expired;
  uint64_t incarnation;
  {
    const ReaderLock contents(&table_->contents_);
    incarnation = table_->incarnation_;
    SharedLock lock(stripe->mutex);
    const uint32_t end = stripe->records.end();
    const uint32_t last = std::min(end, slot_ + kSlotsASlice);
    if (table_->file_ != nullptr) {
      std::vector<const char*> records;
      for (uint32_t slot = slot_; slot < last; ++slot) records.push_back(stripe->records[slot]);
      // A disk that is full ends a step with an error, not a pass over the rows.
      static_cast<void>(table_->WarmOnce(records));
    }
    for (; slot_ < last && expired.size() < kDropsASlice; ++slot_) {
      const char* record = stripe->records[slot_];
      if (table_->TimeOf(record) == kFree) continue;
      if (table_->IsExpired(record, now)) expired.push_back(slot_);
    }
    is_last_ = slot_ >= end;
  }
  if (!expired.empty()) num_expired_ += Drop(stripe, incarnation, expired, now);
}

int64_t Table::Sweep::Drop(Stripe* stripe, uint64_t incarnation, const std::vector<uint32_t>& slots,
                           uint32_t now) {
  Table& table = *table_;
  // Alone: who answers a cache holds pointers to records between two locks of their stripe.
  const WriterLockWithRoom held(&table, slots.size() * table.record_bytes_);
  if (table.incarnation_ != incarnation) return 0;
  const UniqueLock lock(stripe->mutex);  // which the reader of a snapshot locks alone
  stripe->records.ReserveFree(slots.size());
  int64_t dropped = 0;
  for (const uint32_t slot : slots) {
    char* record = stripe->records[slot];
    if (table.TimeOf(record) == kFree || !table.IsExpired(record, now)) continue;
    const int64_t key = KeyOf(record);
    const uint64_t hash = HashKey(key);
    if (!stripe->unread.empty()) table.KeepRecord(stripe, hash, key);
    NoteDrop(stripe, key);
    stripe->log.Add(key);
    table.Erase(stripe, hash, slot);
    ++dropped;
  }
  table.num_drops_ += dropped;
  table.counters_.Add(TableCounter::kRowsExpired, dropped);
  return dropped;
}

}  // namespace het_tf
