// slots: velocity[dim]; contribution: value[dim], velocity[dim], a row that starts from zero:
// momentum is linear.

#ifndef HET_TF_OPS_CORE_ROW_MOMENTUM_H_
#define HET_TF_OPS_CORE_ROW_MOMENTUM_H_

#include <cstdint>
#include <vector>

#include "ops/core/host_device.h"
#include "ops/core/row/algorithm.h"

namespace het_tf {

struct Momentum : Growing<Momentum> {
  static constexpr bool kKeepsRate = false;
  static constexpr bool kHasTable = true;

  int dim = 0;
  float momentum = 0;
  bool nesterov = false;
  Powers powers = {0};
  const float* table = nullptr;

  std::vector<float> MakeTable() const {
    std::vector<float> made;
    powers.AppendTable(&made);
    return made;
  }

  HET_HD int slot_dim() const { return dim; }
  HET_HD int contribution_dim() const { return 2 * dim; }
  HET_HD int record_dim() const { return 2 * dim; }
  HET_HD float InitialSlot(int) const { return 0; }
  HET_HD float* ValueOf(float* record) const { return record; }

  template <typename Lanes, typename G>
  HET_HD void Step(const Lanes& lanes, float* row, const G& g, float learning_rate,
                   float* contribution) const {
    // The row last: g may depend on it.
    if (contribution != nullptr) Roll(lanes, contribution, g, learning_rate);
    Roll(lanes, row, g, learning_rate);
  }

  // The velocity that was there rolls on through all the updates.
  template <typename Lanes>
  HET_HD void Merge(const Lanes& lanes, float* row, const float* contribution,
                    int64_t updates) const {
    const float left = powers(table, updates);
    const double decay = momentum;
    const double all = decay < 1 ? decay * (1 - left) / (1 - decay) : static_cast<double>(updates);
    const auto way = static_cast<float>(nesterov ? decay * all : all);
    float* velocity = row + dim;
    const float* own = contribution + dim;
    lanes.ForEach(dim, [&](int i) {
      row[i] = Clamped(row[i] + (way * velocity[i] + contribution[i]));
      velocity[i] = Clamped(left * velocity[i] + own[i]);
    });
  }

 private:
  template <typename Lanes, typename G>
  HET_HD void Roll(const Lanes& lanes, float* row, const G& g, float learning_rate) const {
    float* velocity = row + dim;
    const float decay = momentum;
    const bool ahead = nesterov;
    lanes.ForEach(dim, [&](int i) {
      const float step = learning_rate * g[i];
      velocity[i] = Clamped(decay * velocity[i] - step);
      row[i] = Clamped(row[i] + (ahead ? decay * velocity[i] - step : velocity[i]));
    });
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_MOMENTUM_H_
