// Rows that came from a shard.

#include <type_traits>

#include "ops/cuda/store.h"

namespace het_tf {
namespace cuda {
namespace {

// A line that was forgotten since its step began: another step may have made one for the key, and
// then that is the line of both.
struct FindMoved {
  StoreView store;
  const int32_t* index;
  int32_t* slots;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t r) const {
    const int32_t old = slots[index[r]];
    if (old < 0 || old >= store.num_lines || store.live(old)) return;
    const int32_t slot = store.Find(lanes, store.lines[old].key);
    if (slot < 0) return;
    lanes.Once([&] { store.MovePin(&slots[index[r]], slot); });
  }
};

struct CountNew {
  StoreView store;
  const int32_t* index;
  const int32_t* slots;
  const int64_t* bases;

  HET_DEVICE void operator()(int64_t r) const {
    const int32_t slot = slots[index == nullptr ? r : index[r]];
    if (slot < 0 || slot >= store.num_lines || bases[r] < 0) return;
    const bool has_row = store.live(slot) && store.lines[slot].base >= 0;
    if (!has_row) AtomicAddEach(store.num_rows, 1);
  }
};

template <typename RuleType>
struct Install {
  StoreView store;
  RuleType rule;
  const int32_t* index;
  const int32_t* slots;
  float* rows;
  const int64_t* bases;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t r) const {
    const int32_t slot = slots[index == nullptr ? r : index[r]];
    if (slot < 0 || slot >= store.num_lines) return;
    DeviceLine& line = store.lines[slot];
    const int64_t known = line.base, base = bases[r];
    const bool live = store.live(slot), old = base < 0;
    lanes.Once([&] { line.watched = 0; });
    // A later request was answered earlier; or the row is of those that are no more, and serves
    // only steps that have seen none.
    if (old ? live || known >= 0 : live && base < known) return;
    float* mine = store.row(slot);
    float* row = rows + r * store.row_stride;
    if (line.pending > 0) rule.MoveOnto(lanes, mine, row, store.record(slot), line.pending);
    lanes.ForEach(rule.row_dim(), [&](int i) { mine[i] = row[i]; });
    lanes.Once([&] {
      line.base = old ? 0 : base;
      if (!live && !old) store.tag(slot) = TagOfHash(HashKey(line.key));
    });
  }
};

}  // namespace

extern "C" {

int het_install(HetStore* store, const int32_t* index, int32_t* slots, float* rows,
                const int64_t* bases, int64_t n, int32_t any_forgotten, HetStream stream) {
  if (any_forgotten) {
    HET_CUDA_RETURN_IF_ERROR(LaunchLanes<32>(FindMoved{store->view, index, slots}, n, stream));
  }
  HET_CUDA_RETURN_IF_ERROR(Launch(CountNew{store->view, index, slots, bases}, n, stream));
  return std::visit(
      [&](const auto& rule) {
        const Install<std::decay_t<decltype(rule)>> install = {store->view, rule, index,
                                                               slots,       rows, bases};
        return LaunchRows(install, store->dim, n, stream);
      },
      store->rule);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
