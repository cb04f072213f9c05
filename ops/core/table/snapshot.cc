#include "ops/core/table/snapshot.h"

#include <algorithm>
#include <vector>

#include "ops/core/table/record.h"

namespace het_tf {
namespace {

// Rows that are read under one lock of their stripe: less than a millisecond.
constexpr int64_t kRowsALock = 4096;

}  // namespace

std::vector<uint64_t> Table::AllRows(const Stripe& stripe) {
  const uint32_t end = stripe.records.end();
  std::vector<uint64_t> bits((end + 63) / 64, ~uint64_t{0});
  if (end % 64 != 0) bits.back() = (uint64_t{1} << end % 64) - 1;
  return bits;
}

Status Table::Cut(std::unique_ptr<Snapshot>* snapshot) {
  // Alone, so that no request is merged by half.
  const UniqueLock contents(contents_);
  try {
    std::vector<std::vector<uint64_t>> all;
    for (const auto& stripe : stripes_) all.push_back(AllRows(*stripe));
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
  kept_.Open();
  for (size_t s = 0; s < stripes_.size(); ++s) {
    const UniqueLock lock(stripes_[s]->mutex);  // under which the last snapshot ended
    for (const uint32_t slot : stripes_[s]->records.free()) {
      if (slot / 64 < unread[s].size()) unread[s][slot / 64] &= ~(uint64_t{1} << slot % 64);
    }
    for (const uint64_t word : unread[s]) cut->num_rows_ += __builtin_popcountll(word);
    stripes_[s]->unread.swap(unread[s]);
  }
  *snapshot = std::move(cut);
  return Status();
}

void Table::KeepRecord(Stripe* stripe, uint64_t hash, int64_t key) {
  const uint32_t slot = Find(*stripe, hash, key);
  if (slot == Index::kNone) return;
  NoteChange(stripe, slot);
  if (slot / 64 >= stripe->unread.size()) return;
  uint64_t& marks = stripe->unread[slot / 64];
  const uint64_t mark = uint64_t{1} << slot % 64;
  if ((marks & mark) == 0) return;
  marks &= ~mark;
  kept_.Keep(stripe->records[slot], record_bytes_);
}

UniqueLock Table::LockContents() {
  while (true) {
    UniqueLock contents(contents_);
    if (!kept_.open()) return contents;
    contents.unlock();
    kept_.WaitUntilClosed();
  }
}

void Table::Snapshot::End() {
  std::lock_guard<std::mutex> lock(mutex_);
  EndLocked();
}

void Table::Snapshot::EndLocked() {
  if (ended_) return;
  ended_ = true;
  for (const auto& stripe : table_->stripes_) {
    UniqueLock lock(stripe->mutex);
    std::vector<uint64_t>().swap(stripe->unread);
  }
  table_->kept_.Close();
}

Status Table::Snapshot::Read(const Rows& columns, int64_t capacity,
                             const std::function<Status(int64_t)>& write) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ended_) return FailedPrecondition("the snapshot has ended");
  const Status status = ReadAll(columns, capacity, write);
  EndLocked();
  return status;
}

Status Table::Snapshot::ReadAll(const Rows& columns, int64_t capacity,
                                const std::function<Status(int64_t)>& write) {
  int64_t rows = 0, written = 0;
  const auto write_if = [&](bool due) {
    if (!due) return Status();
    written += rows;
    return write(std::exchange(rows, 0));
  };
  std::vector<char> kept;
  const auto read_kept = [&] {
    if (!table_->kept_.Take(&kept)) {
      return ResourceExhausted("out of memory for rows that were updated while they were saved");
    }
    for (size_t at = 0; at < kept.size(); at += table_->record_bytes_) {
      table_->CopyOut(&kept[at], now_, columns, rows++);
      HET_RETURN_IF_ERROR(write_if(rows == capacity));
    }
    return Status();
  };
  kept.reserve(KeptRows::kMaxBytes);
  for (const auto& stripe : table_->stripes_) {
    // Nobody else shortens or lengthens it.
    const uint32_t end = stripe->unread.size() * 64;
    for (uint32_t slot = 0; slot < end;) {
      HET_RETURN_IF_ERROR(read_kept());
      const int64_t last = std::min(capacity, rows + kRowsALock);
      {
        SharedLock lock(stripe->mutex);
        while (slot < end && rows < last) {
          uint64_t& marks = stripe->unread[slot / 64];
          if (marks == 0) {
            slot = (slot / 64 + 1) * 64;
            continue;
          }
          slot = slot / 64 * 64 + __builtin_ctzll(marks);
          marks &= marks - 1;
          table_->CopyOut(stripe->records[slot], now_, columns, rows++);
        }
      }
      HET_RETURN_IF_ERROR(write_if(rows == capacity));
    }
  }
  HET_RETURN_IF_ERROR(read_kept());
  HET_RETURN_IF_ERROR(write_if(rows > 0));
  if (written == num_rows_) return Status();
  return FailedPrecondition("a snapshot of ", num_rows_, " rows gave ", written);
}

}  // namespace het_tf
