// Export, Import, Replace and Clear: all rows of a shard.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/simd.h"
#include "ops/core/table/record.h"
#include "ops/core/table/reservation.h"
#include "ops/core/table/table.h"

namespace het_tf {

Status Table::Export(int64_t part, int64_t num_parts, const std::function<Rows(int64_t)>& allocate,
                     int64_t max_age) const {
  if (part < 0 || part >= num_parts) {
    return InvalidArgument("part = ", part, " must be in [0, num_parts = ", num_parts, ")");
  }
  // A part is a range of 64-bit numbers: a key's are its stripe's and OrderOfHash, cut off.
  constexpr int kStripeBits = 5;
  static_assert(kNumStripes == 1 << kStripeBits);
  const auto begin_of = [&](int64_t p) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(p) << 64) / num_parts);
  };
  const uint64_t first = begin_of(part), last = begin_of(part + 1) - 1;
  const int first_stripe = first >> (64 - kStripeBits), last_stripe = last >> (64 - kStripeBits);

  const ReaderLock contents(&contents_);
  // All of them at once, in ascending order, so that the rows are of one moment.
  const auto locks = LockStripes<SharedLock>(first_stripe, last_stripe + 1);
  const uint32_t now = time_.now();
  std::vector<const char*> records;
  for (int s = first_stripe; s <= last_stripe; ++s) {
    const Stripe& stripe = *stripes_[s];
    stripe.index.ForEachBetween(
        s == first_stripe ? first << kStripeBits : 0,
        s == last_stripe ? ~(~last << kStripeBits) : ~uint64_t{0},
        [&](uint32_t slot) { return HashKey(KeyAt(stripe, slot)); },
        [&](uint32_t slot) { records.push_back(stripe.records[slot]); });
  }
  // On a disk those that lie together are read together.
  if (file_ != nullptr) std::sort(records.begin(), records.end());
  if (max_age != kAnyAge) {
    const auto is_old = [&](const char* record) { return AgeOf(record, now) > max_age; };
    HET_RETURN_IF_ERROR(WarmOnce(records));
    records.erase(std::remove_if(records.begin(), records.end(), is_old), records.end());
  }
  const Rows rows = allocate(static_cast<int64_t>(records.size()));
  constexpr size_t kBlock = 4096;
  for (size_t begin = 0; begin < records.size(); begin += kBlock) {
    const size_t end = std::min(begin + kBlock, records.size());
    if (file_ != nullptr) {
      HET_RETURN_IF_ERROR(WarmOnce({records.begin() + begin, records.begin() + end}));
    }
    for (size_t r = begin; r < end; ++r) CopyOut(records[r], now, rows, static_cast<int64_t>(r));
  }
  return Status();
}

void Table::CopyOut(const char* record, uint32_t now, const Rows& rows, int64_t r) const {
  rows.keys[r] = KeyOf(record);
  rows.clocks[r] = lives_ ? ClockOfLife::UpdatesOf(ClockOf(record)) : ClockOf(record);
  if (rows.ages != nullptr) rows.ages[r] = AgeOf(record, now);
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
  const auto stripe_of = [&](int64_t i) {
    return StripeOfHash(HashKey(rows.keys[numbers[i]]), kNumStripes);
  };
  const Reservation reservation(this, Groups(numbers.size(), kNumStripes, stripe_of));
  HET_RETURN_IF_ERROR(reservation.status());
  if (file_ == nullptr) {
    SetReserved(rows, numbers, parallel_for);
    return Status();
  }
  HET_RETURN_IF_ERROR(file_->Trim());
  constexpr size_t kBlock = 16'384;
  for (size_t first = 0; first < numbers.size(); first += kBlock) {
    const size_t end = std::min(first + kBlock, numbers.size());
    const std::vector<int64_t> block(numbers.begin() + first, numbers.begin() + end);
    // All rows are set, whatever becomes of their pages. Whoever comes next hears of an error.
    static_cast<void>(Warm(
        static_cast<int64_t>(block.size()), [&](int64_t i) { return HashKey(rows.keys[block[i]]); },
        [&](int64_t i) { return rows.keys[block[i]]; }, parallel_for));
    SetReserved(rows, block, parallel_for);
  }
  static_cast<void>(file_->Trim());
  return Status();
}

// SetRows, with memory for the rows.
void Table::SetReserved(const ConstRows& rows, const std::vector<int64_t>& numbers,
                        const ParallelFor& parallel_for) {
  std::vector<uint64_t> hashes(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) hashes[i] = HashKey(rows.keys[numbers[i]]);
  const Groups groups(numbers.size(), kNumStripes,
                      [&](int64_t i) { return StripeOfHash(hashes[i], kNumStripes); });
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
      VisitInBlocks(
          groups.size(s), [&](int64_t i) { return IndexedHash{&stripe.index, hashes[order[i]]}; },
          [&](int64_t, uint32_t slot) { Prefetch(stripe.records[slot]); },
          [&](int64_t i, uint32_t) { set(&stripe, hashes[order[i]], numbers[order[i]]); });
    }
  });
}

void Table::DropRows() {
  for (const auto& stripe : stripes_) {
    stripe->index.Clear();
    stripe->records.Clear();
    stripe->keys.clear();
    if (stripe->gate != nullptr) stripe->gate->Clear();
  }
  arena_.Clear();
  if (file_ != nullptr) file_->Clear();
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
  const LockWithoutSnapshot contents(this);
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

Status Table::CheckCandidates(const ConstRows& rows, int64_t num_keys, int64_t* owned) const {
  for (int64_t k = 0; k < num_keys; ++k) {
    if (rows.clocks[k] < 1 || rows.clocks[k] >= int64_t{1} << 31) {
      return InvalidArgument("counts holds ", rows.clocks[k], " for key ", rows.keys[k]);
    }
    if (rows.ages != nullptr && rows.ages[k] < 0) {
      return InvalidArgument("candidate_ages holds ", rows.ages[k], " for key ", rows.keys[k]);
    }
    *owned += Owns(HashKey(rows.keys[k]));
  }
  return Status();
}

int64_t Table::sketch_words(int range) const {
  const bool known = lifetimes_.admits_some() && range >= 0 && range < lifetimes_.num_ranges();
  return known ? kNumStripes * stripes_[0]->gate->sketch_words(range) : 0;
}

Status Table::CheckSketch(const Piece& piece) const {
  const int64_t words = sketch_words(piece.range);
  if (piece.first < 0 || piece.size > words - piece.first) {
    return InvalidArgument("sketch_", piece.range, " has ", piece.size, " words after ",
                           piece.first, ", the table's has ", words);
  }
  const Sketch* sketch = words == 0 ? nullptr : &stripes_[0]->gate->sketch(piece.range);
  for (int64_t i = 0; i < piece.size; ++i) {
    if (!sketch->Takes((piece.first + i) % sketch->state_words(), piece.words[i])) {
      return InvalidArgument("sketch_", piece.range, " holds ", piece.words[i], " at ",
                             piece.first + i);
    }
  }
  return Status();
}

Status Table::CheckPiece(const Piece& piece, const ParallelFor& parallel_for,
                         int64_t* owned) const {
  *owned = 0;
  switch (piece.kind) {
    case Piece::kRows:
      return CheckRows(piece.rows, piece.size, parallel_for, owned);
    case Piece::kDropped:
      return Status();
    case Piece::kCandidates:
      return CheckCandidates(piece.rows, piece.size, owned);
    case Piece::kSketch:
      return CheckSketch(piece);
  }
  return Status();
}

void Table::SetCandidates(const ConstRows& rows, int64_t num_keys) {
  for (int64_t k = 0; k < num_keys; ++k) {
    const uint64_t hash = HashKey(rows.keys[k]);
    Stripe* stripe = stripes_[StripeOfHash(hash, kNumStripes)].get();
    if (!Owns(hash) || stripe->gate == nullptr) continue;
    if (Find(*stripe, hash, rows.keys[k]) != Index::kNone) continue;
    const uint32_t updated = time_.TimeOfAge(rows.ages == nullptr ? 0 : rows.ages[k]);
    stripe->gate->Restore(hash, {rows.keys[k], static_cast<uint32_t>(rows.clocks[k]), updated});
  }
}

void Table::MergeSketch(const Piece& piece) {
  const int64_t of_stripe = sketch_words(piece.range) / kNumStripes;
  for (int64_t i = 0; i < piece.size;) {
    const int64_t at = (piece.first + i) % of_stripe;
    const int64_t words = std::min(piece.size - i, of_stripe - at);
    Gate* gate = stripes_[(piece.first + i) / of_stripe]->gate.get();
    gate->MergeSketch(piece.range, at, words, piece.words + i);
    i += words;
  }
}

Status Table::Replace(const std::function<Status(Piece*)>& next, const ParallelFor& parallel_for,
                      int64_t time) {
  const LockWithoutSnapshot contents(this);
  DropRows();
  time_.Restart(time);
  NewIncarnation();
  const auto load = [&]() HET_REQUIRES(contents_) {
    while (true) {
      Piece piece;
      HET_RETURN_IF_ERROR(next(&piece));
      if (piece.size == 0) return Status();
      if (piece.kind == Piece::kDropped) DropKeys(piece.rows.keys, piece.size);
      if (piece.kind == Piece::kCandidates) SetCandidates(piece.rows, piece.size);
      if (piece.kind == Piece::kSketch) MergeSketch(piece);
      if (piece.kind != Piece::kRows) continue;
      std::vector<int64_t> owned;
      for (int64_t r = 0; r < piece.size; ++r) {
        if (Owns(HashKey(piece.rows.keys[r]))) owned.push_back(r);
      }
      HET_RETURN_IF_ERROR(SetRows(piece.rows, owned, parallel_for));
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
  const LockWithoutSnapshot contents(this);
  DropRows();
  NewIncarnation();
}

}  // namespace het_tf
