#include "ops/core/cache/cache.h"

#include <utility>

#include "ops/core/memory/hash.h"

namespace het_tf {

Ticket::Ticket(std::shared_ptr<Cache> cache, std::shared_ptr<const UniqueIds> ids)
    : cache_(std::move(cache)), ids_(std::move(ids)), asked_(cache_->num_shards()) {}

Ticket::~Ticket() { cache_->Release(*this); }

const RowCache* Ticket::owner() const { return cache_.get(); }

Status Cache::Create(const CacheConfig& config, std::shared_ptr<Cache>* cache) {
  RowKit kit;
  HET_RETURN_IF_ERROR(RowKit::Create(config.rows, &kit));
  HET_RETURN_IF_ERROR(config.Check());
  if (config.capacity == kSharedMemory ? config.memory == nullptr
                                       : config.capacity < 0 || config.capacity > kMostRows) {
    return InvalidArgument("capacity = ", config.capacity, " rows must be in [0, ", kMostRows, "]");
  }
  cache->reset(new Cache(config, std::move(kit)));
  return Status();
}

Cache::Cache(const CacheConfig& config, RowKit kit)
    : config_(config),
      kit_(std::move(kit)),
      id_(RandomId()),
      asker_{id_, kit_.optimizer.get(), config.half},
      store_(kit_, config, asker_.format()),
      admission_(config.policy, store_.capacity(), static_cast<int>(asker_.format().words(0)),
                 kit_.optimizer->slot_dim()),
      shards_(config.rows.num_shards) {}

void Cache::Release(const Ticket& ticket) {
  MutexLock lock(&released_mutex_);
  for (const auto* slots : {&ticket.slots_, &ticket.also_held_}) {
    released_.slots.insert(released_.slots.end(), slots->begin(), slots->end());
  }
  if (!ticket.installed_) AddUnanswered(ticket.asked_, &released_.requests);
}

void Cache::TakeReleased() {
  Released released;
  {
    MutexLock lock(&released_mutex_);
    std::swap(released, released_);
  }
  for (const UnansweredRequest& request : released.requests) {
    Shard& shard = shards_[request.shard];
    shard.link.Close(request.number);
    shard.watching.GiveUp(request.watch);
  }
  store_.ForEachAhead(released.slots, [&](uint32_t slot) HET_REQUIRES(mutex_) {
    if (store_.Unhold(slot)) Dismiss(slot);
  });
}

void Cache::Enqueue(uint32_t slot) {
  Line* line = store_.line(slot);
  if (line->has(Line::kQueued)) return;
  line->set(Line::kQueued);
  shards_[line->shard].outbox.push_back(slot);
}

// The line need not stay for its row: it goes once its updates are merged.
void Cache::Dismiss(uint32_t slot) {
  const Line& line = *store_.line(slot);
  if (line.holds > 0) return;
  if (line.pending > 0) {
    Enqueue(slot);
  } else if (line.in_flight == 0) {
    store_.Free(slot);
  }
}

void Cache::Trim() {
  store_.Trim([this](uint32_t slot) HET_REQUIRES(mutex_) {
    Line* line = store_.line(slot);
    counters_.Add(CacheCounter::kEvictions, 1);
    if (line->pending > 0) counters_.Add(CacheCounter::kDirtyEvictions, 1);
    admission_.Evicted(HashKey(line->key), store_.Uses(*line));
    Unwatch(line);
    store_.ClearResident(slot);
    Dismiss(slot);
  });
}

// Its shard has another row now, or nobody wants it. Steps that hold the line may still read what
// they saw; what they update goes up as a gradient.
void Cache::ForgetRow(uint32_t slot) {
  Line* line = store_.line(slot);
  store_.ClearResident(slot);
  Unwatch(line);
  line->clear(Line::kFull);
  line->base = 0;
}

// The same with updates that were in no push yet. counter: of them.
void Cache::ForgetLine(uint32_t slot, CacheCounter counter) {
  own_.Lose(store_.line(slot)->pending, counter);
  store_.MakeClean(slot);
  ForgetRow(slot);
}

void Cache::ForgetShard(int shard, CacheCounter counter) {
  shards_[shard].outbox.clear();
  for (uint32_t slot = 0; slot < store_.end(); ++slot) {
    Line* line = store_.line(slot);
    if (!store_.exists(slot) || line->shard != shard) continue;
    ForgetLine(slot, counter);
    line->clear(Line::kQueued);
    line->in_flight = line->units_in_flight = 0;
    Dismiss(slot);
  }
  shards_[shard].watching.Begin();
}

void Cache::RestartShard(int shard, const Link::Epoch& epoch) {
  int64_t lost = 0;
  shards_[shard].link.Restart(epoch, [&](const Link::Push& push) { lost += push.updates; });
  own_.Lose(lost);
  ForgetShard(shard, CacheCounter::kUpdatesLost);
}

Status Cache::Clear() {
  MutexLock lock(&mutex_);
  TakeReleased();
  for (Shard& shard : shards_) {
    for (const uint32_t slot : shard.outbox) store_.line(slot)->clear(Line::kQueued);
    shard.outbox.clear();
  }
  for (uint32_t slot = 0; slot < store_.end(); ++slot) {
    if (!store_.exists(slot)) continue;
    ForgetLine(slot, CacheCounter::kUpdatesLost);
    Dismiss(slot);
  }
  return Status();
}

Status Cache::GetStats(Stats* stats) {
  MutexLock lock(&mutex_);
  counters_.Set(CacheCounter::kRows, store_.num_resident());
  counters_.Set(CacheCounter::kPending, own_.num_pending());
  counters_.Set(CacheCounter::kMemoryBytes, store_.memory_bytes());
  *stats = counters_.Read();
  return Status();
}

void Cache::Freeze() {
  MutexLock lock(&mutex_);
  own_.Freeze();
}

std::vector<uint64_t> Cache::incarnations() {
  MutexLock lock(&mutex_);
  return IncarnationsOf(shards_);
}

}  // namespace het_tf
