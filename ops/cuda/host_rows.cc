#include "ops/cuda/host_rows.h"

#include <algorithm>

#include "ops/core/memory/hash.h"

namespace het_tf {
namespace cuda {
namespace {

// Records follow one another, so each takes a multiple of its alignment.
size_t RecordBytes(size_t header, int row_dim) {
  return header + sizeof(float) * (row_dim + row_dim % 2);
}

}  // namespace

HostRows::HostRows(int64_t capacity, int row_dim)
    : capacity_(capacity),
      row_dim_(row_dim),
      slab_(RecordBytes(sizeof(Record), row_dim), &arena_) {}

uint32_t HostRows::Find(int64_t key) const {
  return index_.Find(HashKey(key), [&](uint32_t slot) { return record(slot).key == key; });
}

void HostRows::Put(int64_t key, int64_t base, const float* row) {
  const auto hash_of = [this](uint32_t slot) { return HashKey(record(slot).key); };
  index_.Reserve(index_.size() + 1, hash_of);
  slab_.ReserveFree(index_.size() + 1);  // Remove gets no memory
  if (index_.size() == capacity_) Remove(oldest_);
  const uint32_t slot = slab_.Allocate();
  Record& made = record(slot);
  made.key = key;
  made.base = base;
  made.older = newest_;
  made.newer = kNone;
  std::copy_n(row, row_dim_, made.row());
  (newest_ == kNone ? oldest_ : record(newest_).newer) = slot;
  newest_ = slot;
  index_.Insert(HashKey(key), slot, hash_of);
}

bool HostRows::Take(int64_t key, int64_t* base, float* row) {
  const uint32_t slot = Find(key);
  if (slot == kNone) return false;
  Record& found = record(slot);
  *base = found.base;
  std::copy_n(found.row(), row_dim_, row);
  Remove(slot);
  return true;
}

void HostRows::Drop(int64_t key) {
  const uint32_t slot = Find(key);
  if (slot != kNone) Remove(slot);
}

void HostRows::DropAll(int shard, int num_shards) {
  uint32_t next = kNone;
  for (uint32_t slot = oldest_; slot != kNone; slot = next) {
    next = record(slot).newer;
    if (ShardOfHash(HashKey(record(slot).key), num_shards) == static_cast<uint32_t>(shard)) {
      Remove(slot);
    }
  }
}

void HostRows::Remove(uint32_t slot) {
  const Record& dropped = record(slot);
  (dropped.older == kNone ? oldest_ : record(dropped.older).newer) = dropped.newer;
  (dropped.newer == kNone ? newest_ : record(dropped.newer).older) = dropped.older;
  index_.Erase(HashKey(dropped.key), slot);
  slab_.Free(slot);
}

}  // namespace cuda
}  // namespace het_tf
