// slots: m[dim]; contribution: value[dim], m[dim], from zero.
//
// m decays, so it merges as Adam's does. An update moves every column by the learning rate or not
// at all, whatever m is: so what many workers' updates do to the value adds up, to no more than as
// many updates one after another do.

#ifndef HET_TF_OPS_CORE_ROW_LION_H_
#define HET_TF_OPS_CORE_ROW_LION_H_

#include <cstdint>

#include "ops/core/host_device.h"
#include "ops/core/row/algorithm.h"

namespace het_tf {

struct Lion : Growing<Lion> {
  static constexpr bool kKeepsRate = false;
  static constexpr bool kHasTable = false;

  int dim = 0;
  float beta_1 = 0, beta_2 = 0;
  double exact_beta_2 = 0;

  HET_HD int slot_dim() const { return dim; }
  HET_HD int contribution_dim() const { return 2 * dim; }
  HET_HD int record_dim() const { return 2 * dim; }
  HET_HD float InitialSlot(int) const { return 0; }
  HET_HD float* ValueOf(float* record) const { return record; }

  template <typename Lanes, typename G>
  HET_HD void Step(const Lanes& lanes, float* row, const G& g, float learning_rate,
                   float* record) const {
    const float old = beta_1, old_rest = 1 - beta_1, decay = beta_2,
                rest = static_cast<float>(1 - exact_beta_2);
    float* m = row + dim;
    lanes.ForEach(dim, [&](int i) {
      const float gradient = g[i];
      const float direction = m[i] * old + gradient * old_rest;
      const float step = direction > 0 ? learning_rate : direction < 0 ? -learning_rate : 0.0f;
      m[i] = Clamped(m[i] * decay + gradient * rest);
      row[i] = Clamped(row[i] - step);
      if (record == nullptr) return;
      record[dim + i] = Clamped(record[dim + i] * decay + gradient * rest);
      record[i] = Clamped(record[i] - step);
    });
  }

  template <typename Lanes>
  HET_HD void Merge(const Lanes& lanes, float* row, const float* contribution,
                    int64_t updates) const {
    const auto left = static_cast<float>(Power(exact_beta_2, updates));
    lanes.ForEach(dim, [&](int i) {
      row[i] = Clamped(row[i] + contribution[i]);
      row[dim + i] = Clamped(left * row[dim + i] + contribution[dim + i]);
    });
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_LION_H_
