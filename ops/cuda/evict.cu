// Lines for misses. The misses are sorted by bucket, and one warp hands out the lines of a bucket,
// one after the other: it needs no lock, and what comes out does not depend on who was first.

#include <limits>

#include "ops/cuda/primitives.h"
#include "ops/cuda/scratch.h"
#include "ops/cuda/store.h"

namespace het_tf {
namespace cuda {
namespace {

struct EvictScratch {
  int32_t* buckets;  // (m): of the misses; beyond the last: to have no line
  int32_t* iota;     // (m)
  int32_t* sorted;   // (m)
  int32_t* order;    // (m): the misses by bucket
  size_t sort_bytes = 0;
  int bits;
  void* sort;

  EvictScratch(Scratch* scratch, const StoreView& store, int64_t m) {
    buckets = scratch->Take<int32_t>(m);
    iota = scratch->Take<int32_t>(m);
    sorted = scratch->Take<int32_t>(m);
    order = scratch->Take<int32_t>(m);
    bits = BitsBelow(int64_t{store.buckets} + 1);
    SortPairs(nullptr, &sort_bytes, buckets, sorted, iota, order, m, bits, nullptr);
    sort = scratch->Take<char>(sort_bytes);
  }
};

struct ListBuckets {
  StoreView store;
  HetList misses;
  const HetNewcomer* newcomers;
  int32_t* buckets;
  int32_t* iota;

  HET_DEVICE void operator()(int64_t j) const {
    const uint32_t bucket = BucketOfHash(HashKey(misses.keys[j]), store.buckets);
    buckets[j] = static_cast<int32_t>(newcomers[j].uses > 0 ? bucket : store.buckets);
    iota[j] = static_cast<int32_t>(j);
  }
};

struct Evict {
  StoreView store;
  HetList misses;
  const HetNewcomer* newcomers;
  const int32_t* sorted;
  const int32_t* order;
  int64_t m;
  int32_t* slots;
  int64_t* num_evicted;

  static constexpr int64_t kFree = std::numeric_limits<int64_t>::min();
  static constexpr int64_t kPinned = std::numeric_limits<int64_t>::max();

  HET_DEVICE int64_t Weight(int32_t slot, uint32_t now) const {
    const DeviceLine& line = store.lines[slot];
    if (line.pins > 0) return kPinned;
    return store.is_free(slot) ? kFree : Scoring::Weight(line.score, now);
  }

  HET_DEVICE bool GivesWay(int64_t weight, int count, uint32_t now) const {
    if (weight == kFree) return true;
    if (weight == kPinned) return false;
    if (store.scoring.policy == Policy::kLru) return true;
    const int32_t newcomer = Scoring::Weight(store.scoring.New(count, now), now);
    return newcomer >= weight;
  }

  HET_DEVICE void Pin(int32_t slot, int64_t key) const {
    DeviceLine& line = store.line(slot);
    if (store.is_line(slot)) {
      line.pins = 1;
      if (!store.is_free(slot)) AtomicAdd(num_evicted, 1);
    } else if (line.pins > 0) {
      ++line.pins;
    } else {
      line = {key, -1, {0}, 0, 0, 1, 0, 0};
      line.line = -1;
    }
  }

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t i) const {
    const int32_t bucket = sorted[i];
    const auto no_bucket = static_cast<int32_t>(store.buckets);
    if (i > 0 && sorted[i - 1] == bucket && bucket != no_bucket) return;  // a neighbour's
    const uint32_t now = store.now();
    for (int64_t next = i; next < m && sorted[next] == bucket; ++next) {
      const int32_t j = order[next];
      int32_t slot = store.num_lines + newcomers[j].visitor;
      if (bucket != no_bucket) {
        const int32_t first = bucket * store.ways;
        const int32_t candidate =
            first + lanes.LeastOf(store.ways, [&](int way) { return Weight(first + way, now); });
        if (GivesWay(Weight(candidate, now), newcomers[j].uses, now)) slot = candidate;
      }
      lanes.Once([&] {
        slots[misses.index[j]] = slot;
        Pin(slot, misses.keys[j]);
        misses.bases[j] = store.is_line(slot) ? -1 : store.CheckedBase(store.line(slot));
      });
      if (bucket == no_bucket) return;  // each of these is served by itself
    }
  }
};

struct MarkVictims {
  StoreView store;
  HetList misses;
  const int32_t* slots;
  uint8_t* is_victim;

  HET_DEVICE void operator()(int64_t j) const {
    const int32_t slot = slots[misses.index[j]];
    is_victim[j] = store.is_line(slot) && store.lines[slot].pending > 0 ? 1 : 0;
  }
};

struct FillVictims {
  HetList misses;
  const int32_t* slots;
  HetSlots victims;

  HET_DEVICE void operator()(int64_t i) const {
    if (i < *victims.num) victims.slots[i] = slots[misses.index[victims.slots[i]]];
  }
};

struct VictimScratch {
  uint8_t* is_victim;  // (m)
  size_t select_bytes = 0;
  void* select;

  VictimScratch(Scratch* scratch, int64_t m) {
    is_victim = scratch->Take<uint8_t>(m);
    SelectIndices(nullptr, &select_bytes, is_victim, nullptr, nullptr, m, nullptr);
    select = scratch->Take<char>(select_bytes);
  }
};

struct ListEvicted {
  StoreView store;
  HetList misses;
  const int32_t* slots;
  int64_t* keys;
  float* uses;

  HET_DEVICE void operator()(int64_t j) const {
    const int32_t slot = slots[misses.index[j]];
    keys[j] = 0;
    uses[j] = 0;
    if (!store.is_line(slot) || store.is_free(slot)) return;
    keys[j] = store.lines[slot].key;
    uses[j] = static_cast<float>(store.scoring.Uses(store.lines[slot].score, store.now()));
  }
};

struct ReadLines {
  StoreView store;
  int32_t row_dim;
  const int32_t* slots;
  float* rows;
  int64_t* bases;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t r) const {
    const float* row = store.row(slots[r]);
    float* out = rows + r * store.row_stride;
    lanes.Transform(out, store.row_stride, [&](int i) { return i < row_dim ? row[i] : 0.0f; });
    lanes.Once([&] { bases[r] = store.lines[slots[r]].base; });
  }
};

struct Make {
  StoreView store;
  HetList misses;
  const HetNewcomer* newcomers;
  const int32_t* slots;

  HET_DEVICE void operator()(int64_t j) const {
    const int32_t slot = slots[misses.index[j]];
    if (!store.is_line(slot)) return;
    const int64_t key = misses.keys[j];
    if (!store.is_free(slot)) AtomicAddEach(store.num_rows, -1);  // nobody pins it: it has a row
    DeviceLine& line = store.lines[slot];
    line = {key, -1, {store.scoring.New(newcomers[j].uses, store.now())}, 0, 0, 1, 0, 0};
    store.tag(slot) = TagOfHash(HashKey(key));
    // Steps that hold the key's visitor may yet read it: until then the line must not leave.
    DeviceLine& visitor = store.visitors[newcomers[j].visitor];
    if (visitor.pins == 0) return;
    ++line.pins;
    visitor.line = slot;
  }
};

}  // namespace

extern "C" {

size_t het_evict_scratch_bytes(const HetStore* store, int64_t num_misses) {
  Scratch scratch;
  EvictScratch(&scratch, store->view, num_misses);
  return scratch.bytes();
}

int het_evict(HetStore* store, const HetList* misses, int64_t num_misses,
              const HetNewcomer* newcomers, int32_t* slots, int64_t* num_evicted, void* memory,
              HetStream stream) {
  const StoreView& view = store->view;
  Scratch scratch(memory);
  EvictScratch s(&scratch, view, num_misses);
  HET_CUDA_RETURN_IF_ERROR(Fill(0, sizeof(int64_t), num_evicted, stream));
  if (num_misses == 0) return 0;
  HET_CUDA_RETURN_IF_ERROR(
      Launch(ListBuckets{view, *misses, newcomers, s.buckets, s.iota}, num_misses, stream));
  HET_CUDA_RETURN_IF_ERROR(SortPairs(s.sort, &s.sort_bytes, s.buckets, s.sorted, s.iota, s.order,
                                     num_misses, s.bits, stream));
  const Evict evict = {view, *misses, newcomers, s.sorted, s.order, num_misses, slots, num_evicted};
  return LaunchLanes<32>(evict, num_misses, stream);
}

int het_list_evicted(HetStore* store, const HetList* misses, int64_t num_misses,
                     const int32_t* slots, int64_t* keys, float* uses, HetStream stream) {
  return Launch(ListEvicted{store->view, *misses, slots, keys, uses}, num_misses, stream);
}

size_t het_list_victims_scratch_bytes(int64_t num_misses) {
  Scratch scratch;
  VictimScratch(&scratch, num_misses);
  return scratch.bytes();
}

int het_list_victims(HetStore* store, const HetList* misses, int64_t num_misses,
                     const int32_t* slots, const HetSlots* victims, void* memory,
                     HetStream stream) {
  if (num_misses == 0) return Fill(0, sizeof(int32_t), victims->num, stream);
  Scratch scratch(memory);
  VictimScratch s(&scratch, num_misses);
  HET_CUDA_RETURN_IF_ERROR(
      Launch(MarkVictims{store->view, *misses, slots, s.is_victim}, num_misses, stream));
  HET_CUDA_RETURN_IF_ERROR(SelectIndices(s.select, &s.select_bytes, s.is_victim, victims->slots,
                                         victims->num, num_misses, stream));
  return Launch(FillVictims{*misses, slots, *victims}, num_misses, stream);
}

int het_read_lines(HetStore* store, const int32_t* slots, int64_t n, float* rows, int64_t* bases,
                   HetStream stream) {
  const ReadLines read = {store->view, store->row_dim, slots, rows, bases};
  return LaunchRows(read, store->dim, n, stream);
}

int het_make(HetStore* store, const HetList* misses, int64_t num_misses,
             const HetNewcomer* newcomers, const int32_t* slots, HetStream stream) {
  return Launch(Make{store->view, *misses, newcomers, slots}, num_misses, stream);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
