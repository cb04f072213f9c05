// Rows that came from a shard.

#include <type_traits>

#include "ops/cuda/store.h"

namespace het_tf {
namespace cuda {
namespace {

struct CountNew {
  StoreView store;
  const int32_t* index;
  const int32_t* slots;
  const int64_t* bases;

  HET_DEVICE void operator()(int64_t r) const {
    const int32_t slot = slots[index == nullptr ? r : index[r]];
    if (slot < 0 || !store.is_line(slot) || bases[r] < 0) return;
    if (!store.lines[slot].full) AtomicAddEach(store.num_rows, 1);
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
    if (slot < 0) return;
    DeviceLine& line = store.line(slot);
    const int64_t known = line.base, base = bases[r];
    const bool full = line.full, old = base < 0;
    lanes.Once([&] { line.watched = 0; });
    // A later request was answered earlier; or the row is of those that are no more, and serves
    // only steps that have seen none.
    if (old ? known >= 0 : full && base < known) return;
    float* mine = store.row(slot);
    float* row = rows + r * store.row_stride;
    if (line.pending > 0) rule.MoveOnto(lanes, mine, row, store.record(slot), line.pending);
    lanes.Transform(mine, rule.row_dim(), [&](int i) { return row[i]; });
    lanes.Once([&] {
      line.base = old ? 0 : base;
      line.full = !old;
    });
  }
};

struct InstallValues {
  StoreView store;
  int32_t dim;
  const int32_t* index;
  const int32_t* slots;
  const float* values;
  const int64_t* bases;

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t r) const {
    const int32_t slot = slots[index[r]];
    DeviceLine& line = store.line(slot);
    const int64_t known = line.base, base = bases[r];
    // A step that came later has brought the row, asked for later; or as above.
    if (line.full || (base < 0 && known >= 0)) return;
    float* mine = store.row(slot);
    const float* value = values + r * dim;
    lanes.Transform(mine, dim, [&](int i) { return value[i]; });
    lanes.Once([&] { line.base = base < 0 ? 0 : base; });
  }
};

}  // namespace

extern "C" {

int het_install(HetStore* store, const int32_t* index, const int32_t* slots, float* rows,
                const int64_t* bases, int64_t n, HetStream stream) {
  HET_CUDA_RETURN_IF_ERROR(Launch(CountNew{store->view, index, slots, bases}, n, stream));
  return std::visit(
      [&](const auto& rule) {
        const Install<std::decay_t<decltype(rule)>> install = {store->view, rule, index,
                                                               slots,       rows, bases};
        return LaunchRows(install, store->dim, n, stream);
      },
      store->rule);
}

int het_install_values(HetStore* store, const int32_t* index, const int32_t* slots,
                       const float* values, const int64_t* bases, int64_t n, HetStream stream) {
  const InstallValues install = {store->view, store->dim, index, slots, values, bases};
  return LaunchRows(install, store->dim, n, stream);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
