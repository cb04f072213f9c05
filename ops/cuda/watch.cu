// Rows that shards watch (link/watch.h): their checks are spared, and they come unasked.

#include "ops/cuda/flag_scratch.h"
#include "ops/cuda/primitives.h"
#include "ops/cuda/scratch.h"
#include "ops/cuda/store.h"

namespace het_tf {
namespace cuda {
namespace {

struct Watch {
  StoreView store;
  const int32_t* slots;
  HetList checks;
  HetShards watching;

  HET_DEVICE void operator()(int64_t i) const {
    if (i >= *checks.num || !IsMarked(watching, checks.keys[i])) return;
    const int32_t slot = slots[checks.index[i]];
    if (store.lines[slot].full) store.lines[slot].watched = 1;
  }
};

struct Unwatch {
  StoreView store;
  uint32_t shard, num_shards;

  HET_DEVICE void operator()(int64_t slot) const {
    DeviceLine& line = store.lines[slot];
    if (line.watched && ShardOfHash(HashKey(line.key), num_shards) == shard) line.watched = 0;
  }
};

struct FindUnasked {
  StoreView store;
  const int64_t* keys;
  const int64_t* bases;
  int32_t* slots;
  int64_t* num_found;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t r) const {
    int32_t slot = bases[r] < 0 ? -1 : store.Find(lanes, keys[r]);
    if (slot >= 0 && !store.lines[slot].full) slot = -1;  // its own is still to come
    lanes.Once([&] {
      slots[r] = slot;
      if (slot >= 0) AtomicAdd(num_found, 1);
    });
  }
};

struct MarkLacking {
  StoreView store;
  HetBatch batch;
  const int32_t* slots;
  HetShards shards;
  uint8_t* is_lacking;

  HET_DEVICE void operator()(int64_t u) const {
    is_lacking[u] = 0;
    if (u >= *batch.num_keys || !store.is_line(slots[u])) return;
    const uint8_t mark = MarkOf(shards, batch.keys[u]);
    is_lacking[u] =
        mark == HET_ALL_LINES || (mark == HET_LINES_WITHOUT_ROW && !store.lines[slots[u]].full);
  }
};

struct FillLacking {
  const int64_t* keys;
  HetList lacking;

  HET_DEVICE void operator()(int64_t i) const {
    if (i < *lacking.num) lacking.keys[i] = keys[lacking.index[i]];
  }
};

}  // namespace

extern "C" {

int het_watch(HetStore* store, const int32_t* slots, const HetList* checks, int64_t most,
              const HetShards* watching, HetStream stream) {
  return Launch(Watch{store->view, slots, *checks, *watching}, most, stream);
}

int het_unwatch(HetStore* store, int32_t shard, int32_t num_shards, HetStream stream) {
  const Unwatch unwatch = {store->view, static_cast<uint32_t>(shard),
                           static_cast<uint32_t>(num_shards)};
  return Launch(unwatch, store->view.num_lines, stream);
}

int het_find_unasked(HetStore* store, const int64_t* keys, const int64_t* bases, int64_t n,
                     int32_t* slots, int64_t* num_found, HetStream stream) {
  return LaunchLanes<32>(FindUnasked{store->view, keys, bases, slots, num_found}, n, stream);
}

int het_list_lacking(HetStore* store, const HetBatch* batch, const int32_t* slots,
                     const HetShards* shards, const HetList* lacking, void* memory,
                     HetStream stream) {
  const int64_t n = batch->num_ids;
  Scratch scratch(memory);
  FlagScratch s(&scratch, n);
  HET_CUDA_RETURN_IF_ERROR(
      Launch(MarkLacking{store->view, *batch, slots, *shards, s.first}, n, stream));
  HET_CUDA_RETURN_IF_ERROR(
      SelectIndices(s.select, &s.select_bytes, s.first, lacking->index, lacking->num, n, stream));
  return Launch(FillLacking{batch->keys, *lacking}, n, stream);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
