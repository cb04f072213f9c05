// Which rows are due, and their updates in the form in which they travel.

#include <limits>
#include <type_traits>

#include "ops/cuda/flag_scratch.h"
#include "ops/cuda/primitives.h"
#include "ops/cuda/scratch.h"
#include "ops/cuda/store.h"

namespace het_tf {
namespace cuda {
namespace {

struct MarkDue {
  StoreView store;
  const int32_t* num_keys;
  const int32_t* slots;
  const float* squares;
  int64_t write_bound;
  uint8_t* is_gradient;
  uint8_t* is_line;

  HET_DEVICE bool Due(const DeviceLine& line) const {
    constexpr int32_t kMostPending = 1 << 30;  // of 32 bits in a message
    if (line.pending == 0) return false;
    if (line.pending >= kMostPending) return true;
    if (write_bound == kUnbounded) return false;
    const int64_t unsent = store.clock == ClockRule::kDrift ? line.units : line.pending;
    return unsent >= (write_bound > 1 ? write_bound : 1);
  }

  HET_DEVICE void operator()(int64_t u) const {
    is_gradient[u] = is_line[u] = 0;
    if (u >= *num_keys || !(squares[u] <= std::numeric_limits<float>::max())) return;
    const DeviceLine& line = store.line(slots[u]);
    if (!line.full || !store.is_line(slots[u])) {
      is_gradient[u] = 1;
      return;
    }
    if (Due(line)) (line.pending == 1 ? is_gradient : is_line)[u] = 1;
  }
};

struct FillSlots {
  const int32_t* slots;
  HetSlots list;  // of keys, of which it makes their slots

  HET_DEVICE void operator()(int64_t i) const {
    if (i < *list.num) list.slots[i] = slots[list.slots[i]];
  }
};

struct MarkDirty {
  StoreView store;
  uint8_t* is_dirty;

  HET_DEVICE void operator()(int64_t slot) const {
    is_dirty[slot] = store.lines[slot].pending > 0 ? 1 : 0;
  }
};

template <typename RuleType>
struct Collect {
  StoreView store;
  RuleType rule;
  HetSlots list;
  HetPush push;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t i) const {
    if (i >= *list.num) return;
    const int32_t slot = list.slots[i];
    const DeviceLine& line = store.lines[slot];
    float* contribution = push.floats + i * rule.algorithm.contribution_dim();
    rule.algorithm.Contribute(lanes, store.row(slot), store.record(slot), contribution);
    lanes.Once([&] {
      push.keys[i] = line.key;
      push.updates[i] = line.pending;
      push.clocks[i] = store.PushedClock(store.BaseAfterPush(line), line.units);
    });
  }
};

struct CollectGradients {
  StoreView store;
  const int64_t* keys;
  const int32_t* slots;
  const float* sums;
  HetSlots list;
  HetPush push;
  int32_t dim;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t i) const {
    if (i >= *list.num) return;
    const int32_t u = list.slots[i], slot = slots[u];
    const float* gradient = sums + int64_t{u} * dim;
    float* out = push.floats + i * dim;
    lanes.Transform(out, dim, [&](int c) { return gradient[c]; });
    lanes.Once([&] {
      push.keys[i] = keys[u];
      push.updates[i] = 1;
      const DeviceLine& line = store.line(slot);
      push.clocks[i] = line.full ? store.PushedClock(store.BaseAfterPush(line), line.units)
                                 : store.PushedClock(Advance(line.base, 1), 1);
    });
  }
};

struct Clean {
  StoreView store;
  HetSlots some;
  const int32_t* slots;

  HET_DEVICE void operator()(int64_t i) const {
    if (i >= *some.num) return;
    const int32_t slot = slots == nullptr ? some.slots[i] : slots[some.slots[i]];
    DeviceLine& line = store.line(slot);
    if (line.full) store.MakeClean(&line);
  }
};

}  // namespace

extern "C" {

size_t het_list_due_scratch_bytes(int64_t n) {
  Scratch scratch;
  FlagScratch(&scratch, n);
  return scratch.bytes();
}

int het_list_due(HetStore* store, const HetBatch* batch, const int32_t* slots, const float* squares,
                 int64_t write_bound, const HetSlots* gradients, const HetSlots* lines,
                 void* memory, HetStream stream) {
  const int64_t n = batch->num_ids;
  Scratch scratch(memory);
  FlagScratch s(&scratch, n);
  HET_CUDA_RETURN_IF_ERROR(
      Launch(MarkDue{store->view, batch->num_keys, slots, squares, write_bound, s.first, s.second},
             n, stream));
  HET_CUDA_RETURN_IF_ERROR(SelectIndices(s.select, &s.select_bytes, s.first, gradients->slots,
                                         gradients->num, n, stream));
  HET_CUDA_RETURN_IF_ERROR(
      SelectIndices(s.select, &s.select_bytes, s.second, lines->slots, lines->num, n, stream));
  return Launch(FillSlots{slots, *lines}, n, stream);
}

size_t het_list_dirty_scratch_bytes(const HetStore* store) {
  Scratch scratch;
  FlagScratch(&scratch, store->view.num_lines);
  return scratch.bytes();
}

int het_list_dirty(HetStore* store, const HetSlots* lines, void* memory, HetStream stream) {
  const int64_t n = store->view.num_lines;
  Scratch scratch(memory);
  FlagScratch s(&scratch, n);
  HET_CUDA_RETURN_IF_ERROR(Launch(MarkDirty{store->view, s.first}, n, stream));
  return SelectIndices(s.select, &s.select_bytes, s.first, lines->slots, lines->num, n, stream);
}

int het_collect(HetStore* store, const HetSlots* lines, int64_t most, const HetPush* push,
                HetStream stream) {
  return std::visit(
      [&](const auto& rule) {
        const Collect<std::decay_t<decltype(rule)>> collect = {store->view, rule, *lines, *push};
        return LaunchRows(collect, store->dim, most, stream);
      },
      store->rule);
}

int het_collect_gradients(HetStore* store, const HetBatch* batch, const int32_t* slots,
                          const float* sums, const HetSlots* keys, int64_t most,
                          const HetPush* push, HetStream stream) {
  const CollectGradients collect = {store->view, batch->keys, slots,     sums,
                                    *keys,       *push,       store->dim};
  return LaunchRows(collect, store->dim, most, stream);
}

int het_clean(HetStore* store, const HetSlots* some, const int32_t* slots, int64_t most,
              HetStream stream) {
  return Launch(Clean{store->view, *some, slots}, most, stream);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
