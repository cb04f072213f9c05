// Lookup and Flush: the lines of a step.

#include <algorithm>
#include <utility>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/cuda/device_cache.h"
#include "ops/cuda/error.h"
#include "ops/cuda/memory.h"
#include "ops/cuda/scratch.h"

namespace het_tf {
namespace cuda {
namespace {

constexpr int64_t kMostIds = (int64_t{1} << 30) - 128;  // HetBatch's

// Where a lookup's arrays lie, or, without memory, how much that takes.
size_t PlaceOnDevice(void* memory, int64_t n, Found* found) {
  Scratch scratch(memory);
  HetBatch& batch = found->batch;
  batch.keys = scratch.Take<int64_t>(n);
  batch.key_of = scratch.Take<int32_t>(n);
  batch.begin = scratch.Take<int32_t>(n + 1);
  batch.positions = scratch.Take<int32_t>(n);
  for (HetList* list : {&found->misses, &found->checks}) {
    list->index = scratch.Take<int32_t>(n);
    list->keys = scratch.Take<int64_t>(n);
    list->bases = scratch.Take<int64_t>(n);
  }
  found->slots = scratch.Take<int32_t>(n);
  found->newcomers = scratch.Take<HetNewcomer>(n);
  found->victims = scratch.Take<int32_t>(n);
  found->evicted = scratch.Take<float>(n);
  found->nums = scratch.Take<Found::Nums>(1);
  if (memory == nullptr) return scratch.bytes();
  batch.num_keys = &found->nums->keys;
  found->misses.num = &found->nums->misses;
  found->checks.num = &found->nums->checks;
  return scratch.bytes();
}

size_t PlacePinned(void* memory, int64_t n, int64_t num_shards, Found* found) {
  Scratch scratch(memory);
  found->nums_here = scratch.Take<Found::Nums>(1);
  found->miss_keys = scratch.Take<int64_t>(n);
  found->check_keys = scratch.Take<int64_t>(n);
  found->check_bases = scratch.Take<int64_t>(n);
  found->check_index = scratch.Take<int32_t>(n);
  found->miss_bases = scratch.Take<int64_t>(n);
  found->miss_index = scratch.Take<int32_t>(n);
  found->slots_here = scratch.Take<int32_t>(n);
  found->newcomers_here = scratch.Take<HetNewcomer>(n);
  found->evicted_keys = scratch.Take<int64_t>(n);
  found->evicted_here = scratch.Take<float>(n);
  found->marked_here = scratch.Take<uint8_t>(num_shards);
  return scratch.bytes();
}

}  // namespace

// All that a lookup of n ids needs of a device, so that nothing fails half-way.
Status DeviceCache::NewFound(int64_t n, std::unique_ptr<Found>* found) {
  if (spare_.empty()) {
    auto another = std::make_unique<Found>(memory_.get());
    spare_.reserve(num_found_ + 1);  // a ticket's end gets no memory
    ++num_found_;
    spare_.push_back(std::move(another));
  }
  Found* spare = spare_.back().get();
  Found sizes(memory_.get());
  HET_RETURN_IF_ERROR(spare->device.Reserve(PlaceOnDevice(nullptr, n, &sizes)));
  HET_RETURN_IF_ERROR(spare->pinned.Reserve(PlacePinned(nullptr, n, num_shards(), &sizes)));
  HET_RETURN_IF_ERROR(scratch_.Reserve(
      std::max({het_unique_scratch_bytes(n), het_list_scratch_bytes(n),
                het_evict_scratch_bytes(store_, n), het_list_victims_scratch_bytes(n)})));
  PlaceOnDevice(spare->device.get(), n, spare);
  PlacePinned(spare->pinned.get(), n, num_shards(), spare);
  spare->batch.num_ids = n;
  spare->here = {0, 0, 0};
  spare->num_taken = spare->num_visitors = 0;
  spare->holds_lines = false;
  *found = std::move(spare_.back());
  spare_.pop_back();
  return Status();
}

// Has the device know the marks. marked: (num_shards), which stay as they are until it does.
Status DeviceCache::MarkShards(const uint8_t* marked) {
  auto* there = const_cast<uint8_t*>(shards_there_.marked);
  return ToStatus(ToDevice(marked, marked_.size(), there), "marking shards");
}

// Marks the shards whose watch a step counts on. The step waits for the device before marked_
// changes.
Status DeviceCache::BeginWatches(std::vector<Questions>* questions) {
  for (int s = 0; s < num_shards(); ++s) {
    Watching& watching = shards_[s].watching;
    if (watching.may_begin()) {
      HET_RETURN_IF_CUDA_ERROR(het_unwatch(store_, s, num_shards(), stream_));
      watching.Begin();
    }
    marked_[s] = (*questions)[s].watches = watching.counts();
  }
  return MarkShards(marked_.data());
}

// ids: (found->batch.num_ids), host memory. spares: the marked shards are not asked about what they
// watch.
Status DeviceCache::Find(const int64_t* ids, bool spares, Found* found) {
  const HetBatch& batch = found->batch;
  // The bases of misses are not otherwise used.
  int64_t* ids_there = found->misses.bases;
  HET_RETURN_IF_CUDA_ERROR(ToDevice(ids, sizeof(int64_t) * batch.num_ids, ids_there));
  HET_RETURN_IF_CUDA_ERROR(het_unique(ids_there, &batch, scratch_.get(), stream_));
  HET_RETURN_IF_CUDA_ERROR(het_find(store_, &batch, found->slots, stream_));
  found->holds_lines = true;
  HET_RETURN_IF_CUDA_ERROR(het_list(store_, &batch, found->slots, spares ? &shards_there_ : nullptr,
                                    spared_there_, &found->misses, &found->checks, scratch_.get(),
                                    stream_));
  auto* counts = reinterpret_cast<Counts*>(counts_device_.get());
  HET_RETURN_IF_CUDA_ERROR(het_count_lines(store_, &counts->lines, stream_));
  HET_RETURN_IF_CUDA_ERROR(
      het_count_missed_ids(&batch, &found->misses, &found->checks, &counts->missed_ids, stream_));
  const auto copy = [&](const auto* from, int64_t n, auto* to) {
    return FromDevice(from, sizeof(*from) * n, to);
  };
  HET_RETURN_IF_CUDA_ERROR(copy(found->nums, 1, found->nums_here));
  if (spares) {
    HET_RETURN_IF_CUDA_ERROR(copy(spared_there_, int64_t{num_shards()} * HET_SPREAD,
                                  reinterpret_cast<int32_t*>(shards_pinned_.get())));
  }
  HET_RETURN_IF_ERROR(ReadCounts());
  found->here = *found->nums_here;
  const int64_t m = found->here.misses, c = found->here.checks;
  if (m + c == 0) return Status();
  HET_RETURN_IF_CUDA_ERROR(copy(found->misses.keys, m, found->miss_keys));
  HET_RETURN_IF_CUDA_ERROR(copy(found->checks.keys, c, found->check_keys));
  HET_RETURN_IF_CUDA_ERROR(copy(found->checks.bases, c, found->check_bases));
  HET_RETURN_IF_CUDA_ERROR(copy(found->checks.index, c, found->check_index));
  return Wait();
}

// A visitor for each miss, should it get no line.
Status DeviceCache::TakeVisitors(Found* found) {
  const int32_t m = found->here.misses;
  visitors_.Reserve(m);
  if (visitors_.end() > visitors_there_) {
    const int64_t more = visitors_.end() + visitors_.end() / 4;
    auto block = std::make_unique<Block>(memory_.get());
    HET_RETURN_IF_ERROR(block->ReserveExactly(het_visitors_bytes(store_, more)));
    HET_RETURN_IF_CUDA_ERROR(het_set_visitors(store_, block->get(), more, stream_));
    visitors_block_ = std::move(block);
    visitors_there_ = more;
    het_store_info(store_, &info_);
  }
  for (; found->num_taken < m; ++found->num_taken) {
    const int32_t j = found->num_taken;
    found->newcomers_here[j].visitor = visitors_.Take(found->miss_keys[j]);
  }
  return Status();
}

// A step whose keys have got lines since reads and updates these.
Status DeviceCache::FindLate(const Found& found) {
  if (found.num_visitors == 0) return Status();
  return ToStatus(het_find_late(store_, &found.batch, found.slots, stream_), "het_find_late");
}

// Lines for the misses that are worth one. has_line: (misses): out
Status DeviceCache::MakeLines(DeviceTicket* ticket, std::vector<char>* has_line) {
  Found* found = ticket->found_.get();
  const int64_t m = found->here.misses;
  if (m == 0) return Status();
  HET_RETURN_IF_ERROR(TakeVisitors(found));
  const auto* read = reinterpret_cast<const Counts*>(counts_pinned_.get());
  auto* counts = reinterpret_cast<Counts*>(counts_device_.get());
  const bool has_room = read->lines < info_.lines;
  for (int64_t j = 0; j < m; ++j) {
    const int uses = admission_.Missed(HashKey(found->miss_keys[j]));
    // As on the host, a row that another step has, too, stays.
    const bool shared = visitors_.shared(found->newcomers_here[j].visitor);
    const bool worth = shared || (admission_.Admits(uses, has_room) && admission_.Affords());
    found->newcomers_here[j].uses = worth ? std::max(uses, 1) : 0;
    if (worth) admission_.Ask(1);
  }
  HET_RETURN_IF_CUDA_ERROR(
      ToDevice(found->newcomers_here, sizeof(HetNewcomer) * m, found->newcomers));
  const HetSlots victims = {found->victims, &counts->first_slots};
  HET_RETURN_IF_CUDA_ERROR(het_evict(store_, &found->misses, m, found->newcomers, found->slots,
                                     &counts->evicted, scratch_.get(), stream_));
  HET_RETURN_IF_CUDA_ERROR(het_count_missed_ids(&found->batch, &found->misses, &found->checks,
                                                &counts->missed_ids, stream_));
  int64_t* evicted_keys = found->checks.bases;  // the host has them
  HET_RETURN_IF_CUDA_ERROR(het_list_evicted(store_, &found->misses, m, found->slots, evicted_keys,
                                            found->evicted, stream_));
  HET_RETURN_IF_CUDA_ERROR(FromDevice(evicted_keys, sizeof(int64_t) * m, found->evicted_keys));
  HET_RETURN_IF_CUDA_ERROR(FromDevice(found->evicted, sizeof(float) * m, found->evicted_here));
  HET_RETURN_IF_CUDA_ERROR(
      het_list_victims(store_, &found->misses, m, found->slots, &victims, scratch_.get(), stream_));
  HET_RETURN_IF_CUDA_ERROR(FromDevice(found->misses.bases, sizeof(int64_t) * m, found->miss_bases));
  HET_RETURN_IF_CUDA_ERROR(FromDevice(found->misses.index, sizeof(int32_t) * m, found->miss_index));
  HET_RETURN_IF_CUDA_ERROR(
      FromDevice(found->slots, sizeof(int32_t) * found->here.keys, found->slots_here));
  HET_RETURN_IF_ERROR(ReadCounts());
  const int64_t num_evicted = read->evicted, num_victims = read->first_slots;
  HET_RETURN_IF_ERROR(CollectLines(found->victims, num_victims));
  HET_RETURN_IF_ERROR(KeepEvicted(*found));
  counters_.Add(CacheCounter::kEvictions, num_evicted);
  counters_.Add(CacheCounter::kDirtyEvictions, num_victims);
  HET_RETURN_IF_CUDA_ERROR(
      het_make(store_, &found->misses, m, found->newcomers, found->slots, stream_));
  for (int64_t j = 0; j < m; ++j) {
    HetNewcomer& newcomer = found->newcomers_here[j];
    (*has_line)[j] = found->slots_here[found->miss_index[j]] < info_.lines;
    if ((*has_line)[j]) {
      visitors_.LetGo(std::exchange(newcomer.visitor, -1));
    } else {
      visitors_.Keep(newcomer.visitor);
      ++found->num_visitors;
      if (newcomer.uses > 0) admission_.GiveBack(1);
    }
    if (found->evicted_here[j] > 0) {
      const int64_t key = found->evicted_keys[j];
      admission_.Evicted(HashKey(key), found->evicted_here[j]);
      shards_[ShardOf(key)].watching.Left(1, config_.capacity / num_shards());
    }
  }
  return Status();
}

Status DeviceCache::Lookup(const LookupIds& ids, bool fresh, const ParallelFor&,
                           const AllocateRequest& allocate, std::shared_ptr<RowTicket>* ticket) {
  const int64_t n = ids.num_ids;
  if (n < 0 || n > kMostIds) {
    return InvalidArgument("ids holds ", n, " ids, a lookup at most ", kMostIds);
  }
  return OrOutOfMemory([&]() -> Status {
    auto made = std::make_shared<DeviceTicket>(shared_from_this());
    MutexLock lock(&mutex_);
    HET_RETURN_IF_ERROR(own_.CheckNotFrozen());
    HET_RETURN_IF_ERROR(Begin());
    HET_RETURN_IF_ERROR(TakeReleased());
    HET_RETURN_IF_ERROR(LeaveClosure());
    HET_RETURN_IF_ERROR(NewFound(n, &made->found_));
    const std::vector<int64_t> forced = KeysToForce();
    if (!forced.empty()) {
      HET_RETURN_IF_ERROR(NewFound(static_cast<int64_t>(forced.size()), &made->forced_));
    }
    std::vector<Questions> questions(num_shards());
    const bool spares = config_.watches() && !fresh;
    if (spares) HET_RETURN_IF_ERROR(BeginWatches(&questions));
    HET_RETURN_IF_ERROR(Find(ids.ids, spares, made->found_.get()));
    admission_.BeginUse(made->found_->here.keys);
    std::vector<char> has_line(made->found_->here.misses);
    HET_RETURN_IF_ERROR(MakeLines(made.get(), &has_line));
    const int64_t read_bound = fresh ? 0 : config_.read_bound;
    Ask(has_line, read_bound, made.get(), &questions);
    if (!forced.empty()) HET_RETURN_IF_ERROR(Force(forced, made.get(), &questions));
    if (own_.holds_back()) AskForWaiting(&questions);
    for (int s = 0; s < num_shards(); ++s) {
      SendRequest(s, Link::Carry::kIdle, read_bound, std::move(questions[s]), allocate, made.get());
    }
    *ticket = std::move(made);
    return Status();
  });
}

Status DeviceCache::MakeRoom(const RowTicket&, const AllocateRequest& allocate,
                             std::shared_ptr<RowTicket>* made) {
  *made = std::make_shared<DeviceTicket>(shared_from_this());
  for (int s = 0; s < num_shards(); ++s) allocate(s, 0);
  return Status();
}

Status DeviceCache::Flush(bool all, const AllocateRequest& allocate,
                          std::shared_ptr<RowTicket>* ticket) {
  return OrOutOfMemory([&]() -> Status {
    auto made = std::make_shared<DeviceTicket>(shared_from_this());
    MutexLock lock(&mutex_);
    HET_RETURN_IF_ERROR(Begin());
    HET_RETURN_IF_ERROR(TakeReleased());
    HET_RETURN_IF_ERROR(LeaveClosure());
    if (own_.in_closure()) {
      for (int s = 0; s < num_shards(); ++s) allocate(s, 0);
    } else {
      HET_RETURN_IF_ERROR(WriteFlush(all, allocate, made.get()));
    }
    *ticket = std::move(made);
    return Status();
  });
}

// Requests that push what is due, or all that there is.
Status DeviceCache::WriteFlush(bool all, const AllocateRequest& allocate, DeviceTicket* ticket) {
  if (all) {
    Scratch sizes;
    sizes.Take<int32_t>(info_.lines);
    const size_t list_bytes = sizes.bytes();
    HET_RETURN_IF_ERROR(scratch_.Reserve(list_bytes + het_list_dirty_scratch_bytes(store_)));
    auto* counts = reinterpret_cast<Counts*>(counts_device_.get());
    const HetSlots dirty = {reinterpret_cast<int32_t*>(scratch_.get()), &counts->first_slots};
    HET_RETURN_IF_CUDA_ERROR(het_list_dirty(store_, &dirty, scratch_.get() + list_bytes, stream_));
    HET_RETURN_IF_ERROR(ReadCounts());
    const int64_t n = reinterpret_cast<const Counts*>(counts_pinned_.get())->first_slots;
    HET_RETURN_IF_ERROR(CollectLines(dirty.slots, n));
  }
  std::vector<Questions> questions(num_shards());
  const std::vector<int64_t> forced = KeysToForce();
  if (!forced.empty()) {
    HET_RETURN_IF_ERROR(NewFound(static_cast<int64_t>(forced.size()), &ticket->forced_));
    HET_RETURN_IF_ERROR(Force(forced, ticket, &questions));
  }
  const Link::Carry carry = all ? Link::Carry::kAll : Link::Carry::kAwaited;
  for (int s = 0; s < num_shards(); ++s) {
    SendRequest(s, carry, config_.read_bound, std::move(questions[s]), allocate, ticket);
  }
  return Status();
}

}  // namespace cuda
}  // namespace het_tf
