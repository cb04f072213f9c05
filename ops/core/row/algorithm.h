// What the optimizers' algorithms have in common. An algorithm is a plain struct that may be copied
// to a device as it is, and one definition for both: its functions take the lanes (lanes.h) that
// work on a row. See Optimizer for what rows, records and contributions are.
//
//   dim, slot_dim(), contribution_dim(), record_dim()
//   InitialSlot(i)                           of slots[slot_dim], before a row's first update
//   Step(lanes, row, gradient, learning_rate, record)    one update; record may be nullptr
//   BeginRecord, Contribute, Merge           as Optimizer's
//   MoveOnto(lanes, old_row, row, record, updates) and, once the new row is within max_norm,
//   FinishMove(lanes, row, record)           together Optimizer's MoveOnto
//   ValueOf(record)                          what of a record is added to the value, or nullptr
//   kUpdatesRecord                           Step writes to its record
//   kKeepsRate                               a contribution ends with the last learning rate
//   kHasTable, MakeTable()                   the member `table` has to point to what this returns

#ifndef HET_TF_OPS_CORE_ROW_ALGORITHM_H_
#define HET_TF_OPS_CORE_ROW_ALGORITHM_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "ops/core/host_device.h"

namespace het_tf {

HET_HD inline float Clamped(float x) {
  constexpr float kMax = std::numeric_limits<float>::max();
  x = x < kMax ? x : kMax;
  return x > -kMax ? x : -kMax;
}

// By squaring: std::pow is a call on a device, for which kernels would keep their registers in
// memory. k: at least 0.
HET_HD inline double Power(double factor, int64_t k) {
  double power = 1;
  for (; k > 0; k >>= 1) {
    if (k & 1) power *= factor;
    factor *= factor;
  }
  return power;
}

// factor^k for whole k, the first ones from a table.
struct Powers {
  static constexpr int kKnown = 256;

  double factor;

  // table: (kKnown); k: at least 0.
  HET_HD float operator()(const float* table, int64_t k) const {
    return k < kKnown ? table[k] : static_cast<float>(Power(factor, k));
  }

  void AppendTable(std::vector<float>* table) const {
    for (int k = 0; k < kKnown; ++k) table->push_back(static_cast<float>(Power(factor, k)));
  }
};

// Algorithms whose record is their contribution.
template <typename Algorithm>
struct Growing {
  static constexpr bool kUpdatesRecord = true;

  template <typename Lanes>
  HET_HD void BeginRecord(const Lanes& lanes, const float*, float* record) const {
    lanes.ForEach(self().record_dim(), [&](int i) { record[i] = 0; });
  }
  template <typename Lanes>
  HET_HD void Contribute(const Lanes& lanes, const float*, const float* record,
                         float* contribution) const {
    lanes.Transform(contribution, self().record_dim(), [&](int i) { return record[i]; });
  }
  template <typename Lanes>
  HET_HD void MoveOnto(const Lanes& lanes, const float*, float* row, const float* record,
                       int64_t updates) const {
    self().Merge(lanes, row, record, updates);
  }
  template <typename Lanes>
  HET_HD void FinishMove(const Lanes&, const float*, float*) const {}

 private:
  HET_HD const Algorithm& self() const { return static_cast<const Algorithm&>(*this); }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_ALGORITHM_H_
