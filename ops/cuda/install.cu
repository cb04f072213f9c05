// Rows that came from a shard.

#include <type_traits>

#include "ops/cuda/store.h"

namespace het_tf {
namespace cuda {
namespace {

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
    const int32_t slot = slots[index[r]];
    if (slot < 0 || slot >= store.num_lines) return;
    DeviceLine& line = store.lines[slot];
    const int64_t known = line.base, base = bases[r];
    // A later request was answered earlier; or the line was forgotten, and then the row serves only
    // steps that have seen none.
    if (store.live(slot) ? base < known : known >= 0) return;
    float* mine = store.row(slot);
    float* row = rows + r * store.row_stride;
    if (line.pending > 0) rule.MoveOnto(lanes, mine, row, store.record(slot), line.pending);
    lanes.ForEach(rule.row_dim(), [&](int i) { mine[i] = row[i]; });
    lanes.Once([&] { line.base = base; });
  }
};

}  // namespace

extern "C" {

int het_install(HetStore* store, const int32_t* index, const int32_t* slots, float* rows,
                const int64_t* bases, int64_t n, HetStream stream) {
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
