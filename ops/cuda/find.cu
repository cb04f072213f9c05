// Find, and what it did not find.

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

struct MarkListed {
  StoreView store;
  const int32_t* num_keys;
  const int32_t* slots;
  uint8_t* is_miss;
  uint8_t* is_check;

  HET_DEVICE void operator()(int64_t u) const {
    const bool key = u < *num_keys;
    is_miss[u] = key && slots[u] < 0 ? 1 : 0;
    is_check[u] = key && slots[u] >= 0 ? 1 : 0;
  }
};

struct FillLists {
  StoreView store;
  const int64_t* keys;
  const int32_t* slots;
  HetList misses, checks;

  HET_DEVICE void operator()(int64_t i) const {
    if (i < *misses.num) misses.keys[i] = keys[misses.index[i]];
    if (i < *checks.num) {
      const int32_t u = checks.index[i];
      const DeviceLine& line = store.lines[slots[u]];
      checks.keys[i] = keys[u];
      checks.bases[i] = store.clock == ClockRule::kLamport ? store.BaseAfterPush(line) : line.base;
    }
  }
};

struct CountMissedIds {
  HetBatch batch;
  HetList misses, checks;
  int64_t* num_ids;

  HET_DEVICE int64_t CountOf(int32_t u) const { return batch.begin[u + 1] - batch.begin[u]; }

  HET_DEVICE void operator()(int64_t i) const {
    if (i < *misses.num) AtomicAdd(num_ids, CountOf(misses.index[i]));
    if (i < *checks.num && checks.bases[i] < 0) AtomicAdd(num_ids, CountOf(checks.index[i]));
  }
};

struct ListScratch {
  uint8_t* is_miss;   // (n)
  uint8_t* is_check;  // (n)
  size_t select_bytes = 0;
  void* select;

  ListScratch(Scratch* scratch, int64_t n) {
    is_miss = scratch->Take<uint8_t>(n);
    is_check = scratch->Take<uint8_t>(n);
    SelectIndices(nullptr, &select_bytes, is_miss, nullptr, nullptr, n, nullptr);
    select = scratch->Take<char>(select_bytes);
  }
};

}  // namespace

extern "C" {

int het_find(HetStore* store, const HetBatch* batch, int32_t* slots, HetStream stream) {
  HET_CUDA_RETURN_IF_ERROR(Launch(BeginUse{store->view, batch->num_keys}, 1, stream));
  return LaunchLanes<32>(Find{store->view, *batch, slots}, batch->num_ids, stream);
}

size_t het_list_scratch_bytes(int64_t n) {
  Scratch scratch;
  ListScratch(&scratch, n);
  return scratch.bytes();
}

int het_list(HetStore* store, const HetBatch* batch, const int32_t* slots, const HetList* misses,
             const HetList* checks, void* memory, HetStream stream) {
  const int64_t n = batch->num_ids;
  Scratch scratch(memory);
  ListScratch s(&scratch, n);
  HET_CUDA_RETURN_IF_ERROR(
      Launch(MarkListed{store->view, batch->num_keys, slots, s.is_miss, s.is_check}, n, stream));
  HET_CUDA_RETURN_IF_ERROR(
      SelectIndices(s.select, &s.select_bytes, s.is_miss, misses->index, misses->num, n, stream));
  HET_CUDA_RETURN_IF_ERROR(
      SelectIndices(s.select, &s.select_bytes, s.is_check, checks->index, checks->num, n, stream));
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
