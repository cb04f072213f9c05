// slots: n[dim], z[dim]; contribution: n[dim], z[dim], learning rate of the last update. The weight
// follows from n and z, so merging adds to these and recomputes it.

#ifndef HET_TF_OPS_CORE_ROW_FTRL_H_
#define HET_TF_OPS_CORE_ROW_FTRL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/core/host_device.h"
#include "ops/core/row/algorithm.h"

namespace het_tf {

struct Ftrl : Growing<Ftrl> {
  static constexpr bool kKeepsRate = true;
  static constexpr bool kHasTable = false;

  int dim = 0;
  float initial = 0, l1 = 0, l2 = 0, l2_shrinkage = 0, beta = 0;

  HET_HD int slot_dim() const { return 2 * dim; }
  HET_HD int contribution_dim() const { return 2 * dim + 1; }
  HET_HD int record_dim() const { return 2 * dim + 1; }
  HET_HD float InitialSlot(int i) const { return i < dim ? initial : 0.0f; }
  HET_HD float* ValueOf(float*) const { return nullptr; }

  template <typename Lanes, typename G>
  HET_HD void Step(const Lanes& lanes, float* row, const G& g, float learning_rate,
                   float* contribution) const {
    float* n = row + dim;
    float* z = n + dim;
    lanes.ForEach(dim, [&](int i) {
      const float square = g[i] * g[i];
      const float next = Clamped(n[i] + square);
      const float change = g[i] + 2 * l2_shrinkage * row[i] -
                           (std::sqrt(next) - std::sqrt(n[i])) / learning_rate * row[i];
      z[i] = Clamped(z[i] + change);
      n[i] = next;
      row[i] = Weight(n[i], z[i], learning_rate);
      if (contribution == nullptr) return;
      contribution[i] = Clamped(contribution[i] + square);
      contribution[dim + i] = Clamped(contribution[dim + i] + change);
    });
    if (contribution != nullptr) lanes.Store(&contribution[2 * dim], learning_rate);
  }

  template <typename Lanes>
  HET_HD void Merge(const Lanes& lanes, float* row, const float* contribution, int64_t) const {
    float* n = row + dim;
    float* z = n + dim;
    const float learning_rate = contribution[2 * dim];
    lanes.ForEach(dim, [&](int i) { n[i] = Clamped(n[i] + contribution[i]); });
    lanes.ForEach(dim, [&](int i) { z[i] = Clamped(z[i] + contribution[dim + i]); });
    lanes.ForEach(dim, [&](int i) { row[i] = Weight(n[i], z[i], learning_rate); });
  }

 private:
  HET_HD float Weight(float n, float z, float learning_rate) const {
    const float quadratic = std::sqrt(n) / learning_rate + 2 * (l2 + beta / (2 * learning_rate));
    return quadratic > 0 ? Clamped((std::clamp(z, -l1, l1) - z) / quadratic) : 0.0f;
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_FTRL_H_
