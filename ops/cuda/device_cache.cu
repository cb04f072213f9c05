#include <algorithm>
#include <utility>

#include "ops/core/memory/hash.h"
#include "ops/cuda/device.h"
#include "ops/cuda/device_cache.h"
#include "ops/cuda/error.h"
#include "ops/cuda/scratch.h"

namespace het_tf {
namespace cuda {
namespace {

Status CheckBound(const char* name, int64_t bound) {
  if (bound >= kUnbounded && bound <= kMaxBound) return Status();
  return InvalidArgument(name, " = ", bound, " must be in [0, ", kMaxBound, "] (-1: unbounded)");
}

// A push's arrays for so many rows.
size_t PlacePush(void* memory, int64_t rows, int64_t width, HetPush* push) {
  Scratch scratch(memory);
  push->keys = scratch.Take<int64_t>(rows);
  push->updates = scratch.Take<int32_t>(rows);
  push->clocks = scratch.Take<uint32_t>(rows);
  push->floats = scratch.Take<float>(rows * width);
  return scratch.bytes();
}

}  // namespace

DeviceTicket::DeviceTicket(std::shared_ptr<DeviceCache> cache)
    : cache_(std::move(cache)), asked_(cache_->num_shards()) {}

DeviceTicket::~DeviceTicket() { cache_->Release(this); }

int64_t DeviceTicket::KeyOf(const Subject& subject) const {
  switch (subject.list) {
    case Subject::kMiss:
      return found_->miss_keys[subject.at];
    case Subject::kCheck:
      return found_->check_keys[subject.at];
    case Subject::kForced:
      return forced_->check_keys[subject.at];
  }
  return 0;
}

Status DeviceCache::Create(const CacheConfig& config, HetStream stream,
                           std::shared_ptr<DeviceCache>* cache) {
  RowKit kit;
  HET_RETURN_IF_ERROR(RowKit::Create(config.rows, &kit));
  if (config.rows.num_shards > 0xffff) {
    return InvalidArgument("num_shards = ", config.rows.num_shards, " must be at most 65535");
  }
  constexpr int64_t kMostLines = int64_t{1} << 30;
  if (config.capacity < 1 || config.capacity > kMostLines) {
    return InvalidArgument("capacity = ", config.capacity, " rows must be in [1, ", kMostLines,
                           "] on a device");
  }
  HET_RETURN_IF_ERROR(CheckBound("read_bound", config.read_bound));
  HET_RETURN_IF_ERROR(CheckBound("write_bound", config.write_bound));
  std::shared_ptr<DeviceCache> made(new DeviceCache(config, std::move(kit), stream));
  HET_RETURN_IF_ERROR(made->Allocate());
  *cache = std::move(made);
  return Status();
}

DeviceCache::DeviceCache(const CacheConfig& config, RowKit kit, HetStream stream)
    : config_(config),
      kit_(std::move(kit)),
      id_(RandomId()),
      stream_(stream),
      admission_(config.capacity, kit_.optimizer->dim(), kit_.optimizer->slot_dim()),
      shards_(config.rows.num_shards,
              {Link(), Outbox(kit_.optimizer->dim(), kit_.optimizer->contribution_dim())}) {}

// Freeing waits for what the stream still does with it.
DeviceCache::~DeviceCache() { het_store_destroy(store_); }

Status DeviceCache::Allocate() {
  const HetStoreConfig config = {
      config_.rows.dim,
      config_.rows.optimizer.c_str(),
      config_.capacity,
      config_.policy == Policy::kLru ? HET_LRU : HET_LFU,
      static_cast<int32_t>(config_.rows.clock),
      1,
  };
  char message[200] = "";
  const int error = het_store_create(&config, &store_, message, sizeof(message), stream_);
  HET_RETURN_IF_ERROR(ToStatus(error, message));
  het_store_info(store_, &info_);
  const int64_t width = std::max(dim(), info_.contribution_dim);
  const size_t push_bytes = PlacePush(nullptr, kPushRows, width, &push_there_);
  HET_RETURN_IF_ERROR(push_device_.Reserve(push_bytes));
  HET_RETURN_IF_ERROR(push_pinned_.Reserve(push_bytes));
  PlacePush(push_device_.get(), kPushRows, width, &push_there_);
  PlacePush(push_pinned_.get(), kPushRows, width, &push_here_);
  HET_RETURN_IF_ERROR(counts_device_.Reserve(sizeof(Counts)));
  HET_RETURN_IF_ERROR(counts_pinned_.Reserve(sizeof(Counts)));
  // Some of them are copied to the host before any verb has written them.
  return ToStatus(Fill(0, sizeof(Counts), counts_device_.get(), stream_), "Fill");
}

uint32_t DeviceCache::ShardOf(int64_t key) const {
  return ShardOfHash(HashKey(key), config_.rows.num_shards);
}

Status DeviceCache::Wait() { return ToStatus(Synchronize(stream_), "waiting for the device"); }

Status DeviceCache::ReadCounts() {
  HET_RETURN_IF_CUDA_ERROR(
      Copy(counts_device_.get(), sizeof(Counts), counts_pinned_.get(), stream_));
  return Wait();
}

void DeviceCache::Release(DeviceTicket* ticket) {
  std::lock_guard<std::mutex> lock(released_mutex_);
  for (auto* found : {&ticket->found_, &ticket->forced_}) {
    if (*found != nullptr) released_.found.push_back(std::move(*found));
  }
  for (size_t s = 0; s < ticket->asked_.size(); ++s) {
    const uint64_t number = ticket->asked_[s].request.number;
    if (number != 0 && !ticket->installed_) released_.requests.emplace_back(s, number);
  }
}

Status DeviceCache::TakeReleased() {
  Released released;
  {
    std::lock_guard<std::mutex> lock(released_mutex_);
    std::swap(released, released_);
  }
  for (const auto& [shard, number] : released.requests) {
    shards_[shard].link.Close(number);
    --shards_[shard].num_open;
  }
  Status status;
  for (auto& found : released.found) {
    if (found->holds_lines) {
      const Status unpinned =
          ToStatus(het_unpin(store_, &found->batch, found->slots, stream_), "het_unpin");
      if (status.ok()) status = unpinned;
    }
    spare_.push_back(std::move(found));
  }
  return status;
}

// Its shard has other rows now, or forgot this cache.
Status DeviceCache::RestartShard(int shard, const Link::Epoch& epoch) {
  Shard& state = shards_[shard];
  // Before a shard was first heard of it had no row to be wrong about. But where other requests
  // were cut then, too, one of them may have been answered by an older incarnation, and what it
  // says is only shown to its step, through lines that are forgotten.
  const bool first = state.link.epoch() == Link::Epoch() && state.num_open == 1;
  int64_t lost = state.outbox.updates();
  state.link.Restart(epoch, [&](const Link::Push& push) { lost += push.updates; });
  state.outbox.Clear();
  Status status;
  if (!first) {
    auto* counts = reinterpret_cast<Counts*>(counts_device_.get());
    status =
        ToStatus(het_forget(store_, shard, config_.rows.num_shards, &counts->updates_lost, stream_),
                 "het_forget");
    if (status.ok()) status = ReadCounts();
    if (status.ok()) lost += reinterpret_cast<Counts*>(counts_pinned_.get())->updates_lost;
  }
  num_pending_ -= lost;
  counters_.Add(CacheCounter::kUpdatesLost, lost);
  return status;
}

Status DeviceCache::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_ERROR(TakeReleased());
  auto* counts = reinterpret_cast<Counts*>(counts_device_.get());
  HET_RETURN_IF_CUDA_ERROR(het_forget(store_, 0, 1, &counts->updates_lost, stream_));
  HET_RETURN_IF_ERROR(ReadCounts());
  int64_t lost = reinterpret_cast<Counts*>(counts_pinned_.get())->updates_lost;
  for (Shard& shard : shards_) {
    lost += shard.outbox.updates();
    shard.outbox.Clear();
  }
  num_pending_ -= lost;
  counters_.Add(CacheCounter::kUpdatesLost, lost);
  return Status();
}

Status DeviceCache::stats(Cache::Stats* stats) {
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_ERROR(TakeReleased());
  auto* counts = reinterpret_cast<Counts*>(counts_device_.get());
  HET_RETURN_IF_CUDA_ERROR(het_count_lines(store_, &counts->lines, stream_));
  HET_RETURN_IF_ERROR(ReadCounts());
  counters_.Set(CacheCounter::kRows, reinterpret_cast<Counts*>(counts_pinned_.get())->lines);
  counters_.Set(CacheCounter::kPending, num_pending_);
  counters_.Set(CacheCounter::kMemoryBytes, info_.bytes);
  for (size_t c = 0; c < stats->size(); ++c) {
    (*stats)[c] = counters_.Get(static_cast<CacheCounter>(c));
  }
  return Status();
}

void DeviceCache::Freeze() {
  std::lock_guard<std::mutex> lock(mutex_);
  frozen_ = true;
}

Status DeviceCache::CheckNotFrozen() const {
  if (!frozen_) return Status();
  return Cancelled("the cache is frozen: its process is about to end");
}

std::vector<uint64_t> DeviceCache::incarnations() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<uint64_t> incarnations;
  for (const Shard& shard : shards_) incarnations.push_back(shard.link.epoch().incarnation);
  return incarnations;
}

}  // namespace cuda
}  // namespace het_tf
