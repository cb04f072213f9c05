// The optimizer on a step's lines.

#include <cmath>
#include <limits>
#include <type_traits>

#include "ops/cuda/scratch.h"
#include "ops/cuda/store.h"

namespace het_tf {
namespace cuda {
namespace {

template <typename RuleType>
struct Update {
  StoreView store;
  RuleType rule;
  const int32_t* num_keys;
  const int32_t* slots;
  const float* sums;
  const float* squares;
  float learning_rate;
  const int64_t* refuse_if;
  float* before;  // (n, dim) where the clock drifts

  template <typename LanesType>
  HET_DEVICE void operator()(const LanesType& lanes, int64_t u) const {
    if (u >= *num_keys || (refuse_if != nullptr && *refuse_if != 0)) return;
    const int32_t slot = slots[u];
    DeviceLine& line = store.line(slot);
    if (!line.full || !(squares[u] <= std::numeric_limits<float>::max())) return;
    const int dim = rule.dim(), pending = line.pending;
    const bool drifts = store.clock == ClockRule::kDrift;
    float* row = store.row(slot);
    float* old_value = before + u * dim;
    if (drifts) lanes.ForEach(dim, [&](int i) { old_value[i] = row[i]; });
    float* record = store.record(slot);
    if (pending == 0 && record != nullptr) rule.algorithm.BeginRecord(lanes, row, record);
    rule.Update(lanes, row, {sums + u * dim, squares[u]}, learning_rate, record);
    uint32_t units = 1;
    if (drifts) {
      const float square = lanes.SumOfSquares(dim, [&](int i) { return row[i] - old_value[i]; });
      units = DriftUnits(std::sqrt(square));
    }
    constexpr int32_t kMostPending = 1 << 30;  // at which it is due, whatever the bound
    constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
    lanes.Once([&] {
      line.pending = pending < kMostPending ? pending + 1 : kMostPending;
      line.units = units < kMost - line.units ? line.units + units : kMost;
    });
  }
};

}  // namespace

extern "C" {

size_t het_update_scratch_bytes(const HetStore* store, int64_t n) {
  Scratch scratch;
  if (store->view.clock == ClockRule::kDrift) scratch.Take<float>(n * store->dim);
  return scratch.bytes();
}

int het_update(HetStore* store, const HetBatch* batch, const int32_t* slots, const float* sums,
               const float* squares, float learning_rate, const int64_t* refuse_if, void* memory,
               HetStream stream) {
  return std::visit(
      [&](const auto& rule) {
        const Update<std::decay_t<decltype(rule)>> update = {
            store->view,   rule,      batch->num_keys,
            slots,         sums,      squares,
            learning_rate, refuse_if, static_cast<float*>(memory)};
        return LaunchRows(update, store->dim, batch->num_ids, stream);
      },
      store->rule);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
