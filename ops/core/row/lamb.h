// slots: m[dim], v[dim], t; contribution: value[dim], m[dim], v[dim], the norm of the row on which
// the updates began; m and v from zero.
//
// m and v merge as Adam's do. An update moves the row by the learning rate times the row's own
// norm. So what updates did is merged in proportion to the norm of the row that takes it: as if
// they had been made on that one. Added as it is, it would be as long as the row once was, for each
// of the workers: a row that shrinks meanwhile would be thrown to the other side, further each
// time.

#ifndef HET_TF_OPS_CORE_ROW_LAMB_H_
#define HET_TF_OPS_CORE_ROW_LAMB_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/core/host_device.h"
#include "ops/core/row/algorithm.h"

namespace het_tf {

struct Lamb : Growing<Lamb> {
  static constexpr bool kKeepsRate = false;
  static constexpr bool kHasTable = false;

  int dim = 0;
  float beta_1 = 0, beta_2 = 0, epsilon = 0;
  double exact_beta_1 = 0, exact_beta_2 = 0;

  HET_HD int slot_dim() const { return 2 * dim + 1; }
  HET_HD int contribution_dim() const { return 3 * dim + 1; }
  HET_HD int record_dim() const { return contribution_dim(); }
  HET_HD float InitialSlot(int) const { return 0; }
  HET_HD float* ValueOf(float* record) const { return record; }

  template <typename Lanes>
  HET_HD void BeginRecord(const Lanes& lanes, const float* row, float* record) const {
    lanes.ForEach(3 * dim, [&](int i) { record[i] = 0; });
    lanes.Store(&record[3 * dim], Norm(lanes, [&](int i) { return row[i]; }));
  }

  template <typename Lanes, typename G>
  HET_HD void Step(const Lanes& lanes, float* row, const G& g, float learning_rate,
                   float* record) const {
    float* m = row + dim;
    float* v = m + dim;
    const float t = std::max(v[dim], 0.0f) + 1;
    lanes.Store(&v[dim], t);
    Moments(lanes, m, g);
    if (record != nullptr) Moments(lanes, record + dim, g);
    const float m_scale = Correction(beta_1, t), v_scale = Correction(beta_2, t);
    const float small = epsilon;
    const auto direction = [&](int i) {
      return Clamped(m[i] * m_scale) / (std::sqrt(Clamped(v[i] * v_scale)) + small);
    };
    const float norm = Norm(lanes, [&](int i) { return row[i]; });
    const float length = Norm(lanes, direction);
    const float rate = Clamped(learning_rate * Ratio(norm, length));
    lanes.ForEach(dim, [&](int i) {
      const float step = rate * direction(i);
      row[i] = Clamped(row[i] - step);
      if (record != nullptr) record[i] = Clamped(record[i] - step);
    });
  }

  template <typename Lanes>
  HET_HD void Merge(const Lanes& lanes, float* row, const float* contribution,
                    int64_t updates) const {
    MergeScaled(lanes, row, contribution, updates,
                Ratio(Norm(lanes, [&](int i) { return row[i]; }), contribution[3 * dim]));
  }

  template <typename Lanes>
  HET_HD void MoveOnto(const Lanes& lanes, const float*, float* row, float* record,
                       int64_t updates) const {
    const float norm = Norm(lanes, [&](int i) { return row[i]; });
    const float scale = Ratio(norm, record[3 * dim]);
    MergeScaled(lanes, row, record, updates, scale);
    lanes.ForEach(dim, [&](int i) { record[i] = Clamped(record[i] * scale); });
    lanes.Store(&record[3 * dim], norm);
  }

 private:
  template <typename Lanes, typename At>
  HET_HD float Norm(const Lanes& lanes, const At& at) const {
    return Clamped(std::sqrt(lanes.SumOfSquares(dim, at)));
  }

  HET_HD static float Ratio(float a, float b) { return a > 0 && b > 0 ? Clamped(a / b) : 1.0f; }

  // 1 / (1 - beta^t), of the beta as a float, as Keras has it
  HET_HD static float Correction(float beta, float t) {
    constexpr int64_t kMost = int64_t{1} << 62;  // t may be anything, as it came from elsewhere
    const int64_t steps = t < static_cast<float>(kMost) ? static_cast<int64_t>(t) : kMost;
    return static_cast<float>(1 / (1 - Power(beta, steps)));
  }

  template <typename Lanes, typename G>
  HET_HD void Moments(const Lanes& lanes, float* m, const G& g) const {
    const auto rest_1 = static_cast<float>(1 - exact_beta_1);
    const auto rest_2 = static_cast<float>(1 - exact_beta_2);
    float* v = m + dim;
    lanes.ForEach(dim, [&](int i) {
      m[i] = Clamped(m[i] + (g[i] - m[i]) * rest_1);
      v[i] = Clamped(v[i] + (g[i] * g[i] - v[i]) * rest_2);
    });
  }

  template <typename Lanes>
  HET_HD void MergeScaled(const Lanes& lanes, float* row, const float* own, int64_t updates,
                          float scale) const {
    const auto left = static_cast<float>(Power(exact_beta_1, updates));
    const auto v_left = static_cast<float>(Power(exact_beta_2, updates));
    float* m = row + dim;
    float* v = m + dim;
    lanes.ForEach(dim, [&](int i) {
      row[i] = Clamped(row[i] + own[i] * scale);
      m[i] = Clamped(left * m[i] + own[dim + i]);
      v[i] = std::max(Clamped(v_left * v[i] + own[2 * dim + i]), 0.0f);
    });
    lanes.Store(&v[dim], std::max(v[dim], 0.0f) + static_cast<float>(updates));
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_LAMB_H_
