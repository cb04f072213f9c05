#include "ops/core/table/snapshot.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "ops/core/table/record.h"

namespace het_tf {
namespace {

// Rows that are read under one lock of their stripe: less than a millisecond.
constexpr int64_t kRowsALock = 4096;
// Words of a sketch likewise: 1 MB.
constexpr int64_t kWordsALock = 1 << 17;

}  // namespace

Status Table::Cut(std::unique_ptr<Snapshot>* snapshot) {
  // Alone, so that no request is merged by half.
  const WriterLock contents(&contents_);
  try {
    std::vector<std::vector<uint64_t>> all;
    for (const auto& stripe : stripes_) all.push_back(Unread::AllOf(stripe->records.end()));
    return CutBits(std::move(all), snapshot);
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory for a snapshot");
  }
}

Status Table::CutBits(std::vector<std::vector<uint64_t>> unread,
                      std::unique_ptr<Snapshot>* snapshot) {
  if (kept_.open()) return FailedPrecondition("the table is already being saved by another call");
  auto cut = std::unique_ptr<Snapshot>(new Snapshot(this));
  cut->now_ = time_.now();
  if (lifetimes_.admits_some()) cut->num_candidates_ = 0;
  kept_.Open();
  for (size_t s = 0; s < stripes_.size(); ++s) {
    Stripe& stripe = *stripes_[s];
    const UniqueLock lock(stripe.mutex);  // under which the last snapshot ended
    stripe.unread.Begin(std::move(unread[s]), stripe.records.free());
    cut->num_rows_ += stripe.unread.size();
    if (stripe.gate == nullptr) continue;
    stripe.gate->BeginSnapshot();
    cut->num_candidates_ += stripe.gate->num_candidates();
  }
  *snapshot = std::move(cut);
  return Status();
}

void Table::KeepRecord(Stripe* stripe, uint64_t hash, int64_t key) {
  const uint32_t slot = Find(*stripe, hash, key);
  if (slot == Index::kNone) return;
  NoteChange(stripe, slot);
  if (!stripe->unread.Take(slot)) return;
  kept_.Keep(KeptRows::kRows, stripe->records[slot], record_bytes_);
}

Table::LockWithoutSnapshot::LockWithoutSnapshot(Table* table) {
  while (true) {
    contents_ = UniqueLock(table->contents_);
    if (!table->kept_.open()) return;
    contents_.unlock();
    table->kept_.WaitUntilClosed();
  }
}

void Table::Snapshot::End() {
  MutexLock lock(&mutex_);
  EndLocked();
}

void Table::Snapshot::EndLocked() {
  if (ended_) return;
  ended_ = true;
  for (const auto& stripe : table_->stripes_) {
    UniqueLock lock(stripe->mutex);
    stripe->unread.End();
    if (stripe->gate != nullptr) stripe->gate->EndSnapshot();
  }
  table_->kept_.Close();
}

// One pass over everything, stripe by stripe. Between two looks at the table it takes what others
// have kept, so that they do not wait long for room.
class Table::Snapshot::Reading {
 public:
  Reading(const Snapshot& snapshot, const Rows& columns, int64_t capacity,
          const std::function<Status(int64_t)>& write, const CountsSink* counts)
      : table_(*snapshot.table_),
        snapshot_(snapshot),
        columns_(columns),
        capacity_(capacity),
        write_(write),
        counts_(counts) {
    kept_[KeptRows::kRows].reserve(KeptRows::kMaxBytes);
  }

  Status Run() {
    for (int s = 0; s < kNumStripes; ++s) {
      HET_RETURN_IF_ERROR(ReadRows(s));
      if (counts_ == nullptr || table_.stripes_[s]->gate == nullptr) continue;
      HET_RETURN_IF_ERROR(ReadCandidates(s));
      for (int r = 0; r < table_.lifetimes_.num_ranges(); ++r) {
        HET_RETURN_IF_ERROR(ReadSketch(s, r));
      }
    }
    HET_RETURN_IF_ERROR(TakeKept());
    HET_RETURN_IF_ERROR(WriteRows(rows_ > 0));
    if (rows_written_ != snapshot_.num_rows_) {
      return FailedPrecondition("a snapshot of ", snapshot_.num_rows_, " rows gave ",
                                rows_written_);
    }
    if (counts_ == nullptr) return Status();
    HET_RETURN_IF_ERROR(WriteCandidates(candidates_ > 0));
    if (candidates_written_ == std::max(snapshot_.num_candidates_, int64_t{0})) return Status();
    return FailedPrecondition("a snapshot of ", snapshot_.num_candidates_, " counts gave ",
                              candidates_written_);
  }

 private:
  Status WriteRows(bool due) {
    if (!due) return Status();
    rows_written_ += rows_;
    return write_(std::exchange(rows_, 0));
  }

  Status WriteCandidates(bool due) {
    if (!due) return Status();
    candidates_written_ += candidates_;
    return counts_->write(std::exchange(candidates_, 0));
  }

  void Add(const char* record) { table_.CopyOut(record, snapshot_.now_, columns_, rows_++); }

  void Add(const Gate::Candidate& candidate) {
    counts_->keys[candidates_] = candidate.key;
    counts_->counts[candidates_] = candidate.count;
    counts_->ages[candidates_++] = AgeOf(candidate.updated, snapshot_.now_);
  }

  Status TakeKept() {
    for (const auto kind : {KeptRows::kRows, KeptRows::kCandidates}) {
      if (table_.kept_.Take(kind, &kept_[kind])) continue;
      return ResourceExhausted("out of memory for rows that were updated while they were saved");
    }
    const std::vector<char>& rows = kept_[KeptRows::kRows];
    for (size_t at = 0; at < rows.size(); at += table_.record_bytes_) {
      Add(&rows[at]);
      HET_RETURN_IF_ERROR(WriteRows(rows_ == capacity_));
    }
    if (counts_ == nullptr) return Status();
    const std::vector<char>& candidates = kept_[KeptRows::kCandidates];
    for (size_t at = 0; at < candidates.size(); at += sizeof(Gate::Candidate)) {
      Gate::Candidate candidate;
      std::memcpy(&candidate, &candidates[at], sizeof(candidate));
      Add(candidate);
      HET_RETURN_IF_ERROR(WriteCandidates(candidates_ == counts_->capacity));
    }
    return Status();
  }

  Status ReadRows(int s) {
    Stripe& stripe = *table_.stripes_[s];
    uint32_t slot = 0;
    for (bool more = true; more;) {
      HET_RETURN_IF_ERROR(TakeKept());
      HET_RETURN_IF_ERROR(WarmRows(stripe, slot));
      {
        const SharedLock lock(stripe.mutex);
        more = stripe.unread.TakeNext(&slot, std::min(capacity_ - rows_, kRowsALock),
                                      [&](uint32_t each) { Add(stripe.records[each]); });
      }
      HET_RETURN_IF_ERROR(WriteRows(rows_ == capacity_));
    }
    return Status();
  }

  // The next rows from a slot on, if they are on a disk.
  Status WarmRows(const Stripe& stripe, uint32_t slot) {
    if (table_.file_ == nullptr) return Status();
    std::vector<const char*> records;
    {
      const SharedLock lock(stripe.mutex);
      stripe.unread.Peek(slot, kRowsALock,
                         [&](uint32_t each) { records.push_back(stripe.records[each]); });
    }
    return table_.WarmOnce(records);
  }

  Status ReadCandidates(int s) {
    Stripe& stripe = *table_.stripes_[s];
    uint32_t slot = 0;
    for (bool more = true; more;) {
      HET_RETURN_IF_ERROR(TakeKept());
      {
        const SharedLock lock(stripe.mutex);
        more = stripe.gate->ReadNext(&slot, std::min(counts_->capacity - candidates_, kRowsALock),
                                     [&](const Gate::Candidate& each) { Add(each); });
      }
      HET_RETURN_IF_ERROR(WriteCandidates(candidates_ == counts_->capacity));
    }
    return Status();
  }

  Status ReadSketch(int s, int range) {
    Stripe& stripe = *table_.stripes_[s];
    const int64_t words = stripe.gate->sketch_words(range);
    for (int64_t first = 0; first < words; first += kWordsALock) {
      HET_RETURN_IF_ERROR(TakeKept());
      words_.resize(std::min(kWordsALock, words - first));
      {
        const SharedLock lock(stripe.mutex);
        stripe.gate->sketch(range).Read(first, words_.size(), words_.data());
      }
      HET_RETURN_IF_ERROR(counts_->write_sketch(range, s * words + first, words_));
    }
    return Status();
  }

  Table& table_;
  const Snapshot& snapshot_;
  const Rows columns_;
  const int64_t capacity_;
  const std::function<Status(int64_t)>& write_;
  const CountsSink* const counts_;
  // In the columns, not yet written.
  int64_t rows_ = 0, candidates_ = 0;
  int64_t rows_written_ = 0, candidates_written_ = 0;
  std::array<std::vector<char>, KeptRows::kNumKinds> kept_;
  std::vector<int64_t> words_;
};

Status Table::Snapshot::Read(const Rows& columns, int64_t capacity,
                             const std::function<Status(int64_t)>& write,
                             const CountsSink* counts) {
  MutexLock lock(&mutex_);
  if (ended_) return FailedPrecondition("the snapshot has ended");
  const Status status = Reading(*this, columns, capacity, write, counts).Run();
  EndLocked();
  return status;
}

}  // namespace het_tf
