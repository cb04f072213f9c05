// Find, and what it did not find.

#include "ops/cuda/flag_scratch.h"
#include "ops/cuda/primitives.h"
#include "ops/cuda/scratch.h"
#include "ops/cuda/store.h"

namespace het_tf {
namespace cuda {
namespace {

struct BeginUse {
  StoreView store;
  const int32_t* num_keys;

  HET_DEVICE void operator()(int64_t) const {
    *store.time = store.scoring.TimeAfter(*store.time, *num_keys);
  }
};

struct Find {
  StoreView store;
  HetBatch batch;
  int32_t* slots;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t u) const {
    if (u >= *batch.num_keys) return;
    const int32_t slot = store.Find(lanes, batch.keys[u]);
    lanes.Once([&] {
      slots[u] = slot;
      if (slot < 0) return;
      DeviceLine& line = store.lines[slot];
      line.score = store.scoring.Used(line.score, store.now());
      ++line.pins;
    });
  }
};

// A key that had no line when the step began may have got one since, by a step that overlaps. That
// has all own updates, so it is read and updated in the visitor's place.
struct FindLate {
  StoreView store;
  HetBatch batch;
  int32_t* slots;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t u) const {
    if (u >= *batch.num_keys || store.is_line(slots[u])) return;
    const int32_t slot = store.Find(lanes, batch.keys[u]);
    if (slot < 0 || !store.lines[slot].full) return;
    lanes.Once([&] {
      ++store.lines[slot].pins;
      store.Unpin(slots[u]);
      slots[u] = slot;
    });
  }
};

struct MarkListed {
  StoreView store;
  const int64_t* keys;
  const int32_t* num_keys;
  const int32_t* slots;
  HetShards watching;
  int32_t* spared;
  uint8_t* is_miss;
  uint8_t* is_check;

  HET_DEVICE void operator()(int64_t u) const {
    is_miss[u] = is_check[u] = 0;
    if (u >= *num_keys) return;
    if (slots[u] < 0) {
      is_miss[u] = 1;
      return;
    }
    if (spared == nullptr || !store.lines[slots[u]].watched || !IsMarked(watching, keys[u])) {
      is_check[u] = 1;
      return;
    }
    const int64_t shard = ShardOfHash(HashKey(keys[u]), watching.num_shards);
    AtomicAdd(&spared[shard * HET_SPREAD + u % HET_SPREAD], 1);
  }
};

struct FillLists {
  StoreView store;
  const int64_t* keys;
  const int32_t* slots;
  HetList misses, checks;

  HET_DEVICE void operator()(int64_t i) const {
    if (i < *misses.num) {
      misses.keys[i] = keys[misses.index[i]];
      misses.bases[i] = -1;
    }
    if (i < *checks.num) {
      const int32_t u = checks.index[i];
      checks.keys[i] = keys[u];
      checks.bases[i] = store.CheckedBase(store.lines[slots[u]]);
    }
  }
};

struct CountMissedIds {
  HetBatch batch;
  HetList misses, checks;
  int64_t* num_ids;

  HET_DEVICE int64_t CountOf(int32_t u) const { return batch.begin[u + 1] - batch.begin[u]; }

  HET_DEVICE void operator()(int64_t i) const {
    for (const HetList* list : {&misses, &checks}) {
      if (i < *list->num && list->bases[i] < 0) AtomicAdd(num_ids, CountOf(list->index[i]));
    }
  }
};

}  // namespace

extern "C" {

int het_find(HetStore* store, const HetBatch* batch, int32_t* slots, HetStream stream) {
  HET_CUDA_RETURN_IF_ERROR(Launch(BeginUse{store->view, batch->num_keys}, 1, stream));
  return LaunchLanes<32>(Find{store->view, *batch, slots}, batch->num_ids, stream);
}

int het_find_late(HetStore* store, const HetBatch* batch, int32_t* slots, HetStream stream) {
  return LaunchLanes<32>(FindLate{store->view, *batch, slots}, batch->num_ids, stream);
}

size_t het_list_scratch_bytes(int64_t n) {
  Scratch scratch;
  FlagScratch(&scratch, n);
  return scratch.bytes();
}

int het_list(HetStore* store, const HetBatch* batch, const int32_t* slots,
             const HetShards* watching, int32_t* spared, const HetList* misses,
             const HetList* checks, void* memory, HetStream stream) {
  const int64_t n = batch->num_ids;
  Scratch scratch(memory);
  FlagScratch s(&scratch, n);
  MarkListed mark = {store->view,  batch->keys, batch->num_keys, slots,
                     {0, nullptr}, nullptr,     s.first,         s.second};
  if (watching != nullptr) {
    mark.watching = *watching;
    mark.spared = spared;
    HET_CUDA_RETURN_IF_ERROR(
        Fill(0, sizeof(int32_t) * HET_SPREAD * watching->num_shards, spared, stream));
  }
  HET_CUDA_RETURN_IF_ERROR(Launch(mark, n, stream));
  HET_CUDA_RETURN_IF_ERROR(
      SelectIndices(s.select, &s.select_bytes, s.first, misses->index, misses->num, n, stream));
  HET_CUDA_RETURN_IF_ERROR(
      SelectIndices(s.select, &s.select_bytes, s.second, checks->index, checks->num, n, stream));
  return Launch(FillLists{store->view, batch->keys, slots, *misses, *checks}, n, stream);
}

int het_count_missed_ids(const HetBatch* batch, const HetList* misses, const HetList* checks,
                         int64_t* num_ids, HetStream stream) {
  HET_CUDA_RETURN_IF_ERROR(Fill(0, sizeof(int64_t), num_ids, stream));
  return Launch(CountMissedIds{*batch, *misses, *checks, num_ids}, batch->num_ids, stream);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
