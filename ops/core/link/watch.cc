#include "ops/core/link/watch.h"

namespace het_tf {

void WatchedRows::Watch(uint64_t hash, int64_t key, int64_t base) {
  if (Row* row = Find(hash, key)) {
    row->base = base;
    if (row->sent != 0) row->sent = kWatchedAgain;
    return;
  }
  if (free_.empty()) {
    rows_.emplace_back();
    free_.reserve(rows_.capacity());  // so that Seen and Send need no memory
    sent_.reserve(rows_.capacity());
    free_.push_back(static_cast<uint32_t>(rows_.size() - 1));
  }
  const uint32_t slot = free_.back();
  index_.Insert(hash, slot, [&](uint32_t s) { return HashKey(rows_[s].key); });
  free_.pop_back();
  rows_[slot] = {key, base, 0};
}

void WatchedRows::Send(Row* row, uint64_t reply) {
  if (IsSent(*row)) return;
  if (row->sent == 0) sent_.push_back(static_cast<uint32_t>(row - rows_.data()));
  row->sent = reply;
}

void WatchedRows::Seen(uint64_t reply) {
  const auto is_over = [&](uint32_t slot) {
    Row& row = rows_[slot];
    if (row.sent == kWatchedAgain) {
      row.sent = 0;
      return true;
    }
    if (row.sent > reply) return false;
    index_.Erase(HashKey(row.key), slot);
    free_.push_back(slot);
    return true;
  };
  sent_.erase(std::remove_if(sent_.begin(), sent_.end(), is_over), sent_.end());
}

uint64_t Watch::BeginReply(uint64_t epoch, size_t num_stripes, bool* begins) {
  *begins = epoch > epoch_;
  if (epoch < epoch_ || (epoch == epoch_ && is_over_)) return 0;
  if (*begins) {
    is_over_ = false;
    stripes_.clear();
    stripes_.resize(num_stripes);
    epoch_ = epoch;
    replies_ = 0;
  }
  return ++replies_;
}

void Watching::Begin() {
  ++epoch_;
  over_ = false;
  open_ = 0;
  seen_ = last_ = 0;
  ahead_ = 0;
  num_left_ = 0;
}

bool Watching::Take(uint64_t reply) {
  --open_;
  const bool latest = reply > last_;
  last_ = std::max(last_, reply);
  if (reply <= seen_) return latest;
  const uint64_t ahead = reply - seen_ - 1;
  if (ahead < kMostAhead) {
    ahead_ |= uint64_t{1} << ahead;
  } else {
    over_ = true;
  }
  for (; ahead_ & 1; ahead_ >>= 1) ++seen_;
  return latest;
}

void Watching::GiveUp(uint64_t epoch) {
  if (epoch != epoch_) return;
  --open_;
  over_ = true;
}

void Watching::Left(int64_t lines, int64_t capacity) {
  num_left_ += lines;
  over_ = over_ || num_left_ > capacity + 1024;
}

}  // namespace het_tf
