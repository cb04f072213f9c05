// slots: v[dim], with `centered` average[dim], with a momentum velocity[dim]; contribution:
// value[dim] and the slots, from zero.
//
// v and the average decay, so they merge as Adam's moments do, and the velocity rolls on as
// Momentum's. What an update adds to the value is divided by the v that its worker had.

#ifndef HET_TF_OPS_CORE_ROW_RMSPROP_H_
#define HET_TF_OPS_CORE_ROW_RMSPROP_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/core/host_device.h"
#include "ops/core/row/algorithm.h"

namespace het_tf {

struct Rmsprop : Growing<Rmsprop> {
  static constexpr bool kKeepsRate = false;
  static constexpr bool kHasTable = false;

  int dim = 0;
  bool centered = false;
  float rho = 0, momentum = 0, epsilon = 0;
  double exact_rho = 0, exact_momentum = 0;

  HET_HD int slot_dim() const { return (1 + centered + rolls()) * dim; }
  HET_HD int contribution_dim() const { return dim + slot_dim(); }
  HET_HD int record_dim() const { return contribution_dim(); }
  HET_HD float InitialSlot(int) const { return 0; }
  HET_HD float* ValueOf(float* record) const { return record; }

  template <typename Lanes, typename G>
  HET_HD void Step(const Lanes& lanes, float* row, const G& g, float learning_rate,
                   float* record) const {
    const float rest = static_cast<float>(1 - exact_rho), decay = momentum, small = epsilon;
    const bool center = centered, roll = rolls();
    const int average = 2 * dim, velocity = (2 + centered) * dim;
    lanes.ForEach(dim, [&](int i) {
      const float gradient = g[i], square = gradient * gradient;
      const auto follow = [&](float* x, float to) { *x = Clamped(*x + (to - *x) * rest); };
      follow(&row[dim + i], square);
      float variance = row[dim + i];
      if (center) {
        follow(&row[average + i], gradient);
        variance = std::max(variance - row[average + i] * row[average + i], 0.0f);
      }
      const float step = learning_rate * gradient / std::sqrt(variance + small);
      const auto move = [&](float* to) {
        float way = step;
        if (roll) way = to[velocity + i] = Clamped(decay * to[velocity + i] + step);
        to[i] = Clamped(to[i] - way);
      };
      move(row);
      if (record == nullptr) return;
      follow(&record[dim + i], square);
      if (center) follow(&record[average + i], gradient);
      move(record);
    });
  }

  template <typename Lanes>
  HET_HD void Merge(const Lanes& lanes, float* row, const float* contribution,
                    int64_t updates) const {
    const auto left = static_cast<float>(Power(exact_rho, updates));
    const double rolled = Power(exact_momentum, updates);
    const auto rolling = static_cast<float>(rolled);
    // The velocity that was there goes on through all the updates: a + ... + a^k of it.
    const auto way =
        static_cast<float>(exact_momentum < 1 ? exact_momentum * (1 - rolled) / (1 - exact_momentum)
                                              : static_cast<double>(updates));
    const bool center = centered, roll = rolls();
    const int average = 2 * dim, velocity = (2 + centered) * dim;
    lanes.ForEach(dim, [&](int i) {
      const auto decayed = [&](int at, float by) {
        return Clamped(by * row[at] + contribution[at]);
      };
      row[i] = Clamped(row[i] + (contribution[i] - (roll ? way * row[velocity + i] : 0.0f)));
      row[dim + i] = std::max(decayed(dim + i, left), 0.0f);
      if (center) row[average + i] = decayed(average + i, left);
      if (roll) row[velocity + i] = decayed(velocity + i, rolling);
    });
  }

 private:
  HET_HD bool rolls() const { return exact_momentum > 0; }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_RMSPROP_H_
