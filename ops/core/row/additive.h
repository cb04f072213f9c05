// SGD, Adagrad, row-wise Adagrad: what only adds. Merging adds to value and slots what the updates
// did, the difference of two rows. So the record is the row before the first update, and no later
// one touches it.

#ifndef HET_TF_OPS_CORE_ROW_ADDITIVE_H_
#define HET_TF_OPS_CORE_ROW_ADDITIVE_H_

#include <cmath>
#include <cstdint>

#include "ops/core/host_device.h"
#include "ops/core/row/algorithm.h"

namespace het_tf {

template <typename Algorithm>
struct Additive {
  static constexpr bool kUpdatesRecord = false;
  static constexpr bool kKeepsRate = false;
  static constexpr bool kHasTable = false;

  HET_HD int contribution_dim() const { return self().dim + self().slot_dim(); }
  HET_HD int record_dim() const { return contribution_dim(); }
  HET_HD float* ValueOf(float*) const { return nullptr; }

  template <typename Lanes>
  HET_HD void BeginRecord(const Lanes& lanes, const float* row, float* record) const {
    lanes.Transform(record, record_dim(), [&](int i) { return row[i]; });
  }
  template <typename Lanes>
  HET_HD void Contribute(const Lanes& lanes, const float* row, const float* record,
                         float* contribution) const {
    lanes.Transform(contribution, record_dim(), [&](int i) { return Clamped(row[i] - record[i]); });
  }
  template <typename Lanes>
  HET_HD void Merge(const Lanes& lanes, float* row, const float* contribution, int64_t) const {
    lanes.Transform(row, record_dim(), [&](int i) { return Clamped(row[i] + contribution[i]); });
  }
  template <typename Lanes>
  HET_HD void MoveOnto(const Lanes& lanes, const float* old_row, float* row, float* record,
                       int64_t) const {
    lanes.ForEach(record_dim(), [&](int i) {
      const float before = row[i];
      row[i] = Clamped(before + Clamped(old_row[i] - record[i]));
      record[i] = before;
    });
  }
  template <typename Lanes>
  HET_HD void FinishMove(const Lanes&, const float*, float*) const {}

 private:
  HET_HD const Algorithm& self() const { return static_cast<const Algorithm&>(*this); }
};

// No slots.
struct Sgd : Additive<Sgd> {
  int dim = 0;

  HET_HD int slot_dim() const { return 0; }
  HET_HD float InitialSlot(int) const { return 0; }

  template <typename Lanes, typename G>
  HET_HD void Step(const Lanes& lanes, float* row, const G& g, float learning_rate, float*) const {
    lanes.Transform(row, dim, [&](int i) { return Clamped(row[i] - learning_rate * g[i]); });
  }
};

// slots: accumulator[dim]
struct Adagrad : Additive<Adagrad> {
  int dim = 0;
  float initial = 0, epsilon = 0;

  HET_HD int slot_dim() const { return dim; }
  HET_HD float InitialSlot(int) const { return initial; }

  template <typename Lanes, typename G>
  HET_HD void Step(const Lanes& lanes, float* row, const G& g, float learning_rate, float*) const {
    float* accumulator = row + dim;
    const float small = epsilon;
    lanes.ForEach(dim, [&](int i) {
      accumulator[i] = Clamped(accumulator[i] + g[i] * g[i]);
      row[i] = Clamped(row[i] - learning_rate * g[i] / std::sqrt(accumulator[i] + small));
    });
  }
};

// slots: accumulator
struct RowWiseAdagrad : Additive<RowWiseAdagrad> {
  int dim = 0;
  float initial = 0, epsilon = 0;

  HET_HD int slot_dim() const { return 1; }
  HET_HD float InitialSlot(int) const { return initial; }

  template <typename Lanes, typename G>
  HET_HD void Step(const Lanes& lanes, float* row, const G& g, float learning_rate, float*) const {
    const float accumulator = Clamped(row[dim] + g.squares / static_cast<float>(dim));
    lanes.Store(&row[dim], accumulator);
    const float rate = learning_rate / std::sqrt(accumulator + epsilon);
    lanes.Transform(row, dim, [&](int i) { return Clamped(row[i] - rate * g[i]); });
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_ADDITIVE_H_
