#include "ops/core/cache.h"

#include <cstring>
#include <utility>

#include "ops/core/hash.h"

namespace het_tf {
namespace {

size_t RoundUpTo8(size_t bytes) { return (bytes + 7) & ~size_t{7}; }

}  // namespace

Ticket::Ticket(std::shared_ptr<Cache> cache, std::shared_ptr<const Batch> batch)
    : cache_(std::move(cache)), batch_(std::move(batch)), requests_(cache_->num_shards()) {}

Ticket::~Ticket() {
  cache_->Release(slots_);
  cache_->Release(extra_);
}

Status Cache::Create(const CacheConfig& config, std::shared_ptr<Cache>* cache) {
  RowKit kit;
  HET_RETURN_IF_ERROR(RowKit::Create(config.rows, &kit));
  if (config.rows.num_shards > 0xffff) {
    return InvalidArgument("num_shards = ", config.rows.num_shards, " must be at most 65535");
  }
  if (config.capacity < 1 || config.capacity > 0x7fffffff) {
    return InvalidArgument("capacity = ", config.capacity, " rows must be in [1, 2147483647]");
  }
  if (config.read_bound < kUnbounded) {
    return InvalidArgument("read_bound = ", config.read_bound,
                           " must not be negative (-1: unbounded)");
  }
  if (config.write_bound < kUnbounded) {
    return InvalidArgument("write_bound = ", config.write_bound,
                           " must not be negative (-1: unbounded)");
  }
  cache->reset(new Cache(config, std::move(kit)));
  return Status();
}

Cache::Cache(const CacheConfig& config, RowKit kit)
    : config_(config),
      kit_(std::move(kit)),
      row_dim_(kit_.optimizer->row_dim()),
      wire_width_(config.server_applies ? kit_.optimizer->dim() : row_dim_),
      id_(RandomId()),
      lines_(RoundUpTo8(sizeof(Line) + 2 * sizeof(float) * row_dim_), &arena_),
      eviction_(config.policy, config.capacity),
      shards_(config.rows.num_shards) {}

void Cache::Release(const std::vector<uint32_t>& slots) {
  std::lock_guard<std::mutex> lock(released_mutex_);
  released_.insert(released_.end(), slots.begin(), slots.end());
}

void Cache::TakeReleased() {
  std::vector<uint32_t> released;
  {
    std::lock_guard<std::mutex> lock(released_mutex_);
    released.swap(released_);
  }
  for (const uint32_t slot : released) Unhold(slot);
}

uint32_t Cache::MakeLine(int64_t key, uint64_t hash) {
  const uint32_t slot = lines_.Allocate();
  Line* line = LineAt(slot);
  *line = {key,       -1, 0, 0, 0, 0, 0, static_cast<uint16_t>(ShardOfHash(hash, num_shards())),
           kResident, 0};
  std::memset(DeltaAt(slot), 0, sizeof(float) * row_dim_);
  index_.Insert(hash, slot, [&](uint32_t s) { return HashKey(LineAt(s)->key); });
  return slot;
}

void Cache::RemoveFromIndex(uint32_t slot) {
  Line* line = LineAt(slot);
  index_.Erase(HashKey(line->key), slot);
  line->flags &= ~kResident;
  // A line with unsent updates lives on in the outbox until they are cut.
  if (line->pending > 0) {
    Enqueue(slot);
  } else {
    line->flags = 0;
    lines_.Free(slot);
  }
}

void Cache::Unhold(uint32_t slot) {
  Line* line = LineAt(slot);
  if (--line->holds > 0) return;
  if (config_.server_applies || !(line->flags & kFilled)) RemoveFromIndex(slot);
}

void Cache::Evict(uint32_t slot) {
  counters_.Add(CacheCounter::kEvictions, 1);
  if (LineAt(slot)->pending > 0) counters_.Add(CacheCounter::kDirtyEvictions, 1);
  RemoveFromIndex(slot);
}

void Cache::Trim() {
  const auto may_go = [](const Line& line) { return (line.flags & kResident) && line.holds == 0; };
  eviction_.Run(
      index_.size() - config_.capacity,
      [&](const auto& visit) {
        for (uint32_t slot = 0; slot < lines_.end(); ++slot) {
          const Line& line = *LineAt(slot);
          if (may_go(line)) visit(slot, line.score);
        }
      },
      [&](uint32_t slot, double score) {
        const Line& line = *LineAt(slot);
        return may_go(line) && line.score == score;
      },
      [&](uint32_t slot) { Evict(slot); });
}

void Cache::Enqueue(uint32_t slot) {
  Line* line = LineAt(slot);
  if (line->flags & kQueued) return;
  line->flags |= kQueued;
  shards_[line->shard].outbox.push_back(slot);
}

// Back to a line that nothing is known of, its place and its holders kept.
void Cache::Reset(uint32_t slot) {
  Line* line = LineAt(slot);
  line->base = -1;
  line->pending = 0;
  line->sent = 0;
  line->flags = kResident;
  std::memset(DeltaAt(slot), 0, sizeof(float) * row_dim_);
}

void Cache::ForgetShard(int shard) {
  Shard& state = shards_[shard];
  int64_t lost = 0;
  for (const Push& push : state.unacknowledged) {
    for (const int32_t pending : push.pendings) lost += pending;
  }
  state.unacknowledged.clear();
  state.outbox.clear();
  for (uint32_t slot = 0; slot < lines_.end(); ++slot) {
    Line* line = LineAt(slot);
    if (!(line->flags & (kResident | kQueued)) || line->shard != shard) continue;
    lost += line->pending;
    line->pending = 0;
    if (!(line->flags & kResident)) {  // only the outbox had it
      line->flags = 0;
      lines_.Free(slot);
    } else if (line->holds == 0) {
      RemoveFromIndex(slot);
    } else {
      Reset(slot);
    }
  }
  num_pending_ -= lost;
  counters_.Add(CacheCounter::kUpdatesLost, lost);
}

void Cache::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  TakeReleased();
  for (int s = 0; s < num_shards(); ++s) ForgetShard(s);
}

int64_t Cache::counter(CacheCounter counter) {
  std::lock_guard<std::mutex> lock(mutex_);
  TakeReleased();
  Trim();
  counters_.Set(CacheCounter::kRows, index_.size());
  counters_.Set(CacheCounter::kPending, num_pending_);
  return counters_.Get(counter);
}

void Cache::Freeze() {
  std::lock_guard<std::mutex> lock(mutex_);
  frozen_ = true;
}

Status Cache::CheckNotFrozen() const {
  if (!frozen_) return Status();
  return Cancelled("the cache is frozen: its process is about to end");
}

std::vector<uint64_t> Cache::incarnations() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<uint64_t> incarnations;
  for (const Shard& shard : shards_) incarnations.push_back(shard.incarnation);
  return incarnations;
}

}  // namespace het_tf
