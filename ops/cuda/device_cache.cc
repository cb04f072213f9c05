#include "ops/cuda/device_cache.h"

#include <algorithm>
#include <utility>

#include "ops/core/memory/hash.h"
#include "ops/cuda/error.h"
#include "ops/cuda/memory.h"
#include "ops/cuda/scratch.h"

namespace het_tf {
namespace cuda {
namespace {

constexpr int64_t kMostLines = int64_t{1} << 30;
constexpr int64_t kMostHostRows = (int64_t{1} << 31) - 1;

HetStoreConfig StoreConfig(const CacheConfig& config) {
  return {config.rows.dim, config.rows.optimizer.c_str(), config.capacity,
          config.policy == Policy::kLru ? HET_LRU : HET_LFU,
          static_cast<int32_t>(config.rows.clock)};
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
    : cache_(std::move(cache)),
      asked_(cache_->num_shards()),
      keys_in_(cache_->num_shards()),
      released_(1) {
  released_.front().requests.reserve(cache_->num_shards());
}

DeviceTicket::~DeviceTicket() { cache_->Release(this); }

const RowCache* DeviceTicket::owner() const { return cache_.get(); }

Status DeviceCache::Create(const CacheConfig& config, HetStream stream,
                           std::shared_ptr<DeviceMemory> memory,
                           std::shared_ptr<DeviceCache>* cache) {
  RowKit kit;
  HET_RETURN_IF_ERROR(RowKit::Create(config.rows, &kit));
  HET_RETURN_IF_ERROR(config.Check());
  if (config.capacity < 1 || config.capacity > kMostLines) {
    return InvalidArgument("capacity = ", config.capacity, " rows must be in [1, ", kMostLines,
                           "] on a device");
  }
  if (config.host_capacity < 0 || config.host_capacity > kMostHostRows) {
    return InvalidArgument("host_capacity = ", config.host_capacity, " rows must be in [0, ",
                           kMostHostRows, "]");
  }
  std::shared_ptr<DeviceCache> made(
      new DeviceCache(config, std::move(kit), stream, std::move(memory)));
  HET_RETURN_IF_ERROR(made->Allocate());
  *cache = std::move(made);
  return Status();
}

Status DeviceCache::LinesWithin(const CacheConfig& config, int64_t bytes, int64_t* lines) {
  RowKit kit;
  HET_RETURN_IF_ERROR(RowKit::Create(config.rows, &kit));
  char message[200] = "";
  const auto needed = [&](int64_t n, int64_t* all) {
    CacheConfig of_n = config;
    of_n.capacity = n;
    const HetStoreConfig store = StoreConfig(of_n);
    return ToStatus(het_store_bytes(&store, all, message, sizeof(message)), message);
  };
  int64_t fits = 0, most = kMostLines;
  while (fits < most) {
    const int64_t n = fits + (most - fits + 1) / 2;
    int64_t all = 0;
    HET_RETURN_IF_ERROR(needed(n, &all));
    all <= bytes ? fits = n : most = n - 1;
  }
  if (fits == 0) return ResourceExhausted(bytes, " bytes of device memory do not hold one row");
  *lines = fits;
  return Status();
}

DeviceCache::DeviceCache(const CacheConfig& config, RowKit kit, HetStream stream,
                         std::shared_ptr<DeviceMemory> memory)
    : config_(config),
      kit_(std::move(kit)),
      id_(RandomId()),
      asker_{id_, kit_.optimizer.get(), config.half},
      stream_(stream),
      memory_(std::move(memory)),
      store_block_(memory_.get()),
      scratch_(memory_.get()),
      counts_device_(memory_.get()),
      marked_(config.rows.num_shards),
      shards_device_(memory_.get()),
      push_device_(memory_.get()),
      arriving_(memory_.get()),
      host_rows_(config.host_capacity, kit_.optimizer->row_dim()),
      leaving_device_(memory_.get()),
      rows_in_(config.rows.num_shards),
      admission_(config.policy, config.capacity, static_cast<int>(asker_.format().words(0)),
                 kit_.optimizer->slot_dim()),
      shards_(config.rows.num_shards,
              {Link(), Watching(), Outbox(asker_.format(), kit_.optimizer->contribution_dim())}) {
  admission_.Fill(config.capacity);
}

DeviceCache::~DeviceCache() {
  SetDevice(device_);
  het_store_destroy(store_);
}

// Any thread may call, and may have worked with another device before.
Status DeviceCache::Begin() { return ToStatus(SetDevice(device_), "SetDevice"); }

Status DeviceCache::Allocate() {
  HET_RETURN_IF_CUDA_ERROR(GetDevice(&device_));
  const HetStoreConfig config = StoreConfig(config_);
  char message[200] = "";
  int64_t bytes = 0;
  HET_RETURN_IF_ERROR(
      ToStatus(het_store_bytes(&config, &bytes, message, sizeof(message)), message));
  HET_RETURN_IF_ERROR(store_block_.ReserveExactly(bytes));
  const int error =
      het_store_create(&config, store_block_.get(), &store_, message, sizeof(message), stream_);
  HET_RETURN_IF_ERROR(ToStatus(error, message));
  het_store_info(store_, &info_);
  const int64_t width = std::max(dim(), info_.contribution_dim);
  const size_t push_bytes = PlacePush(nullptr, kPushRows, width, &push_there_);
  HET_RETURN_IF_ERROR(push_device_.Reserve(push_bytes));
  HET_RETURN_IF_ERROR(push_pinned_.Reserve(push_bytes));
  PlacePush(push_device_.get(), kPushRows, width, &push_there_);
  PlacePush(push_pinned_.get(), kPushRows, width, &push_here_);
  if (host_rows_.is_enabled()) {
    const auto place = [&](void* memory, Leaving* leaving) HET_REQUIRES(mutex_) {
      Scratch scratch(memory);
      leaving->slots = scratch.Take<int32_t>(kPushRows);
      leaving->bases = scratch.Take<int64_t>(kPushRows);
      leaving->rows = scratch.Take<float>(kPushRows * info_.row_stride);
      return scratch.bytes();
    };
    const size_t leaving_bytes = place(nullptr, &leaving_there_);
    HET_RETURN_IF_ERROR(leaving_device_.Reserve(leaving_bytes));
    HET_RETURN_IF_ERROR(leaving_pinned_.Reserve(leaving_bytes));
    place(leaving_device_.get(), &leaving_there_);
    place(leaving_pinned_.get(), &leaving_here_);
  }
  HET_RETURN_IF_ERROR(counts_device_.Reserve(sizeof(Counts)));
  HET_RETURN_IF_ERROR(counts_pinned_.Reserve(sizeof(Counts)));
  const int64_t shards = num_shards();
  Scratch sizes;
  sizes.Take<uint8_t>(shards);
  sizes.Take<int32_t>(shards * HET_SPREAD);
  HET_RETURN_IF_ERROR(shards_device_.Reserve(sizes.bytes()));
  HET_RETURN_IF_ERROR(shards_pinned_.Reserve(sizeof(int32_t) * shards * HET_SPREAD));
  Scratch there(shards_device_.get());
  shards_there_ = {num_shards(), there.Take<uint8_t>(shards)};
  spared_there_ = there.Take<int32_t>(shards * HET_SPREAD);
  // Some of them are copied to the host before any verb has written them.
  return ToStatus(Fill(0, sizeof(Counts), counts_device_.get(), stream_), "Fill");
}

int DeviceCache::ToDevice(const void* from, size_t bytes, void* to) {
  counters_.Add(CacheCounter::kBytesToDevice, static_cast<int64_t>(bytes));
  return Copy(from, bytes, to, stream_);
}

int DeviceCache::FromDevice(const void* from, size_t bytes, void* to) {
  counters_.Add(CacheCounter::kBytesFromDevice, static_cast<int64_t>(bytes));
  return Copy(from, bytes, to, stream_);
}

uint32_t DeviceCache::ShardOf(int64_t key) const {
  return ShardOfHash(HashKey(key), config_.rows.num_shards);
}

Status DeviceCache::Wait() { return ToStatus(Synchronize(stream_), "waiting for the device"); }

Status DeviceCache::ReadCounts() {
  HET_RETURN_IF_CUDA_ERROR(FromDevice(counts_device_.get(), sizeof(Counts), counts_pinned_.get()));
  return Wait();
}

void DeviceCache::Release(DeviceTicket* ticket) {
  Holds& holds = ticket->released_.front();
  holds.found = std::move(ticket->found_);
  holds.forced = std::move(ticket->forced_);
  if (!ticket->taken_) AddUnanswered(ticket->asked_, &holds.requests);
  MutexLock lock(&released_mutex_);
  released_.splice(released_.end(), ticket->released_);
}

Status DeviceCache::TakeReleased() {
  std::list<Holds> released;
  {
    MutexLock lock(&released_mutex_);
    released.swap(released_);
  }
  Status status;
  for (Holds& holds : released) {
    for (const UnansweredRequest& request : holds.requests) {
      Shard& shard = shards_[request.shard];
      shard.link.Close(request.number);
      shard.watching.GiveUp(request.watch);
      --shard.num_open;
    }
    for (auto* found : {&holds.found, &holds.forced}) {
      if (*found == nullptr) continue;
      for (int32_t j = 0; j < (*found)->num_taken; ++j) {
        const int32_t visitor = (*found)->newcomers_here[j].visitor;
        if (visitor >= 0) visitors_.LetGo(visitor);
      }
      if ((*found)->holds_lines) {
        const Status unpinned =
            ToStatus(het_unpin(store_, &(*found)->batch, (*found)->slots, stream_), "het_unpin");
        if (status.ok()) status = unpinned;
      }
      spare_.push_back(std::move(*found));
    }
  }
  return status;
}

// updates_lost: out, in no push.
Status DeviceCache::ForgetShard(int shard, int num_shards, int64_t* updates_lost) {
  auto* counts = reinterpret_cast<Counts*>(counts_device_.get());
  HET_RETURN_IF_CUDA_ERROR(het_forget(store_, shard, num_shards, &counts->updates_lost, stream_));
  HET_RETURN_IF_ERROR(ReadCounts());
  *updates_lost = reinterpret_cast<const Counts*>(counts_pinned_.get())->updates_lost;
  host_rows_.DropAll(shard, num_shards);
  ++num_forgets_;
  return Status();
}

// Its shard has other rows now, or forgot this cache.
Status DeviceCache::RestartShard(int shard, const Link::Epoch& epoch) {
  Shard& state = shards_[shard];
  // Before a shard was first heard of it had no row to be wrong about. But where other requests
  // were cut then, too, one of them may have been answered by an older incarnation, and what it
  // says is only shown to its step, through lines that are forgotten.
  const bool first = state.link.epoch() == Link::Epoch() && state.num_open == 1;
  int64_t lost = state.outbox.updates(), unsent = 0;
  state.link.Restart(epoch, [&](const Link::Push& push) { lost += push.updates; });
  state.outbox.Clear();
  const Status status = first ? Status() : ForgetShard(shard, num_shards(), &unsent);
  state.watching.Begin();
  own_.Lose(lost + unsent);
  return status;
}

Status DeviceCache::Clear() {
  MutexLock lock(&mutex_);
  HET_RETURN_IF_ERROR(Begin());
  HET_RETURN_IF_ERROR(TakeReleased());
  int64_t lost = 0;
  HET_RETURN_IF_ERROR(ForgetShard(0, 1, &lost));
  for (Shard& shard : shards_) {
    lost += shard.outbox.updates();
    shard.outbox.Clear();
    shard.watching.Left(info_.lines, config_.capacity / num_shards());
  }
  own_.Lose(lost);
  return Status();
}

Status DeviceCache::GetStats(Stats* stats) {
  MutexLock lock(&mutex_);
  HET_RETURN_IF_ERROR(Begin());
  HET_RETURN_IF_ERROR(TakeReleased());
  auto* counts = reinterpret_cast<Counts*>(counts_device_.get());
  HET_RETURN_IF_CUDA_ERROR(het_count_lines(store_, &counts->lines, stream_));
  // Whoever looks is not counted.
  HET_RETURN_IF_CUDA_ERROR(
      Copy(counts_device_.get(), sizeof(Counts), counts_pinned_.get(), stream_));
  HET_RETURN_IF_ERROR(Wait());
  const auto* read = reinterpret_cast<const Counts*>(counts_pinned_.get());
  counters_.Set(CacheCounter::kRows, read->lines);
  counters_.Set(CacheCounter::kRowsUnasked, read->unasked);
  counters_.Set(CacheCounter::kPending, own_.num_pending());
  counters_.Set(CacheCounter::kMemoryBytes, info_.bytes + host_rows_.memory_bytes());
  *stats = counters_.Read();
  return Status();
}

// Undoes a closure whose run is over without having ended. Nobody hears any more of what was not
// merged.
Status DeviceCache::LeaveClosure() {
  if (!own_.closure_is_abandoned()) return Status();
  int64_t unsent = 0;  // of own_.num_pending()
  HET_RETURN_IF_ERROR(ForgetShard(0, 1, &unsent));
  asker_.cache_id = RandomId();
  for (Shard& shard : shards_) {
    shard.link.StartAnew();
    shard.outbox.Clear();
    shard.watching.Begin();
  }
  own_.UndoClosure();
  return Status();
}

Status DeviceCache::BeginClosure(int64_t number, std::shared_ptr<Closure>* closure) {
  return OrOutOfMemory([&]() -> Status {
    MutexLock lock(&mutex_);
    HET_RETURN_IF_ERROR(own_.CheckNotFrozen());
    HET_RETURN_IF_ERROR(Begin());
    HET_RETURN_IF_ERROR(TakeReleased());
    HET_RETURN_IF_ERROR(LeaveClosure());
    return own_.BeginClosure(number, closure);
  });
}

Status DeviceCache::CommitClosure(const Closure& closure, int64_t done,
                                  const AllocateRequest& allocate,
                                  std::shared_ptr<RowTicket>* ticket) {
  return OrOutOfMemory([&]() -> Status {
    auto made = std::make_shared<DeviceTicket>(shared_from_this());
    MutexLock lock(&mutex_);
    HET_RETURN_IF_ERROR(own_.CheckClosure(closure));
    HET_RETURN_IF_ERROR(own_.CheckNotFrozen());
    HET_RETURN_IF_ERROR(Begin());
    HET_RETURN_IF_ERROR(TakeReleased());
    HET_RETURN_IF_ERROR(own_.CommitClosure(closure, done, [&]() HET_REQUIRES(mutex_) {
      return WriteFlush(true, allocate, made.get());
    }));
    *ticket = std::move(made);
    return Status();
  });
}

Status DeviceCache::EndClosure(const Closure& closure) {
  MutexLock lock(&mutex_);
  return own_.EndClosure(closure);
}

void DeviceCache::Freeze() {
  MutexLock lock(&mutex_);
  own_.Freeze();
}

std::vector<uint64_t> DeviceCache::incarnations() {
  MutexLock lock(&mutex_);
  return IncarnationsOf(shards_);
}

}  // namespace cuda
}  // namespace het_tf
