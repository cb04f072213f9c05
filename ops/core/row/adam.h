// slots: m[dim], v[dim], t; contribution: value[dim], m[dim], v[dim], learning rate of the last
// update, with m and v from zero. Row-wise has one v.
//
// The m that was there when the updates were made moves the value too, by a tail that fades. Every
// worker would add such a tail of the same m, and the row would run away. So a record keeps the sum
// of the m that were not its own (tail[dim]); its contribution is the value without that tail, and
// merging adds the tail of the m that it finds. For one worker the two are the same number.

#ifndef HET_TF_OPS_CORE_ROW_ADAM_H_
#define HET_TF_OPS_CORE_ROW_ADAM_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/core/host_device.h"
#include "ops/core/row/algorithm.h"

namespace het_tf {

template <bool kRowWise>
struct Adam {
  static constexpr bool kUpdatesRecord = true;
  static constexpr bool kKeepsRate = true;
  static constexpr bool kHasTable = true;

  int dim = 0;
  float beta_1 = 0, beta_2 = 0, epsilon = 0;
  double exact_beta_1 = 0, exact_beta_2 = 0;
  const float* table = nullptr;  // bias corrections, powers of beta_1, powers of beta_2

  std::vector<float> MakeTable() const {
    std::vector<float> made = {0};
    for (int t = 1; t < kKnownCorrections; ++t) made.push_back(ComputeCorrection(t));
    Powers{exact_beta_1}.AppendTable(&made);
    Powers{exact_beta_2}.AppendTable(&made);
    return made;
  }

  HET_HD int slot_dim() const { return dim + v_dim() + 1; }
  HET_HD int contribution_dim() const { return 2 * dim + v_dim() + 1; }
  HET_HD int record_dim() const { return contribution_dim() + dim; }
  HET_HD float InitialSlot(int) const { return 0; }
  HET_HD float* ValueOf(float* record) const { return record; }

  template <typename Lanes, typename G>
  HET_HD void Step(const Lanes& lanes, float* row, const G& g, float learning_rate,
                   float* record) const {
    float* m = row + dim;
    float* v = m + dim;
    const float mean_square = g.squares / static_cast<float>(dim);
    const float t = std::max(v[v_dim()], 0.0f) + 1;
    lanes.Store(&v[v_dim()], t);
    Moments(lanes, m, g, mean_square);
    const float rate = learning_rate * Correction(t);
    if (record != nullptr) {
      float* own = record + dim;
      float* tail = record + contribution_dim();
      Moments(lanes, own, g, mean_square);
      lanes.ForEach(dim, [&](int i) { tail[i] = Clamped(tail[i] + (m[i] - own[i])); });
      Move(lanes, m, v, -rate, record);
      lanes.Store(&record[contribution_dim() - 1], learning_rate);
    }
    Move(lanes, m, v, -rate, row);
  }

  template <typename Lanes>
  HET_HD void BeginRecord(const Lanes& lanes, const float*, float* record) const {
    lanes.ForEach(record_dim(), [&](int i) { record[i] = 0; });
  }

  template <typename Lanes>
  HET_HD void Contribute(const Lanes& lanes, const float* row, const float* record,
                         float* contribution) const {
    lanes.Transform(contribution, contribution_dim(), [&](int i) { return record[i]; });
    AddTail(lanes, row, record + contribution_dim(), record[contribution_dim() - 1], contribution);
  }

  template <typename Lanes>
  HET_HD void Merge(const Lanes& lanes, float* row, const float* contribution,
                    int64_t updates) const {
    MergeValueAndSlots(lanes, row, contribution, updates,
                       [&](int i, float) { return contribution[i]; });
  }

  // What the record's value was is merged; in its place goes the new one, until FinishMove.
  template <typename Lanes>
  HET_HD void MoveOnto(const Lanes& lanes, const float* old_row, float* row, float* record,
                       int64_t updates) const {
    float* tail = record + contribution_dim();
    AddTail(lanes, old_row, tail, record[contribution_dim() - 1], record);
    const float tail_weight = TailWeight(updates);
    MergeValueAndSlots(lanes, row, record, updates, [&](int i, float m_before) {
      const float value = record[i];
      record[i] = row[i];
      tail[i] = Clamped(tail_weight * m_before);
      return value;
    });
  }
  template <typename Lanes>
  HET_HD void FinishMove(const Lanes& lanes, const float* row, float* record) const {
    lanes.ForEach(dim, [&](int i) { record[i] = Clamped(row[i] - record[i]); });
  }

 private:
  static constexpr int kKnownCorrections = 1024;

  HET_HD int v_dim() const { return kRowWise ? 1 : dim; }

  // sqrt(1 - beta_2^t) / (1 - beta_1^t). t: at least 1. Of the betas as floats, as Keras has them
  // (in its float64 variables, too): of 0.999 that is another 3e-6 of the value in 100 steps.
  HET_HD float Correction(float t) const {
    if (t < static_cast<float>(kKnownCorrections)) return table[static_cast<int>(t)];
    constexpr int64_t kMost = int64_t{1} << 62;  // t may be anything, as it came from elsewhere
    return ComputeCorrection(t < static_cast<float>(kMost) ? static_cast<int64_t>(t) : kMost);
  }
  HET_HD float ComputeCorrection(int64_t t) const {
    return static_cast<float>(std::sqrt(1 - Power(beta_2, t)) / (1 - Power(beta_1, t)));
  }
  HET_HD float Left1(int64_t updates) const {
    return Powers{exact_beta_1}(table + kKnownCorrections, updates);
  }
  HET_HD float Left2(int64_t updates) const {
    return Powers{exact_beta_2}(table + kKnownCorrections + Powers::kKnown, updates);
  }
  HET_HD float TailWeight(int64_t updates) const {
    return beta_1 * (1 - Left1(updates)) / (1 - beta_1);
  }

  // own: a contribution, of which value_of(i, m) gives what is added to value i, m being the row's
  // as it was before.
  template <typename Lanes, typename ValueOf>
  HET_HD void MergeValueAndSlots(const Lanes& lanes, float* row, const float* own, int64_t updates,
                                 const ValueOf& value_of) const {
    const float left = Left1(updates), v_left = Left2(updates), tail_weight = TailWeight(updates);
    float* m = row + dim;
    float* v = m + dim;
    const float* own_m = own + dim;
    const float* own_v = own_m + dim;
    const float t = std::max(v[v_dim()], 0.0f) + static_cast<float>(updates);
    const float rate = own[contribution_dim() - 1] * Correction(std::max(t, 1.0f));
    const float small = epsilon;
    lanes.Store(&v[v_dim()], t);
    if constexpr (kRowWise) {
      const float merged_v = std::max(Clamped(v_left * v[0] + own_v[0]), 0.0f);
      lanes.Store(&v[0], merged_v);
      const float row_rate = rate / (std::sqrt(merged_v) + small);
      lanes.ForEach(dim, [&](int i) {
        const float value = Clamped(row[i] + value_of(i, m[i]));
        row[i] = Clamped(value + row_rate * (-tail_weight * m[i]));
      });
    } else {
      lanes.ForEach(dim, [&](int i) { v[i] = std::max(Clamped(v_left * v[i] + own_v[i]), 0.0f); });
      lanes.ForEach(dim, [&](int i) {
        const float value = Clamped(row[i] + value_of(i, m[i]));
        row[i] = Clamped(value + rate * (-tail_weight * m[i]) / (std::sqrt(v[i]) + small));
      });
    }
    lanes.ForEach(dim, [&](int i) { m[i] = Clamped(left * m[i] + own_m[i]); });
  }

  // value += direction / (sqrt(v) + epsilon) * rate
  template <typename Lanes>
  HET_HD void Move(const Lanes& lanes, const float* direction, const float* v, float rate,
                   float* value) const {
    const float small = epsilon;
    if constexpr (kRowWise) {
      const float row_rate = rate / (std::sqrt(v[0]) + small);
      lanes.ForEach(dim, [&](int i) { value[i] = Clamped(value[i] + row_rate * direction[i]); });
    } else {
      lanes.ForEach(dim, [&](int i) {
        value[i] = Clamped(value[i] + rate * direction[i] / (std::sqrt(v[i]) + small));
      });
    }
  }

  // What a tail moves, by the rate and the v that a row has now. tail, value: (dim).
  template <typename Lanes>
  HET_HD void AddTail(const Lanes& lanes, const float* row, const float* tail, float learning_rate,
                      float* value) const {
    const float* v = row + 2 * dim;
    Move(lanes, tail, v, learning_rate * Correction(std::max(v[v_dim()], 1.0f)), value);
  }

  // moments: m[dim], v[v_dim]
  template <typename Lanes, typename G>
  HET_HD void Moments(const Lanes& lanes, float* moments, const G& g, float mean_square) const {
    float* v = moments + dim;
    // Of 0.999 as a float it would be off by 5e-5 of itself.
    const auto rest_1 = static_cast<float>(1 - exact_beta_1);
    const auto rest_2 = static_cast<float>(1 - exact_beta_2);
    lanes.ForEach(dim,
                  [&](int i) { moments[i] = Clamped(moments[i] + (g[i] - moments[i]) * rest_1); });
    if constexpr (kRowWise) {
      lanes.Store(&v[0], Clamped(v[0] + (mean_square - v[0]) * rest_2));
    } else {
      lanes.ForEach(dim, [&](int i) { v[i] = Clamped(v[i] + (g[i] * g[i] - v[i]) * rest_2); });
    }
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_ADAM_H_
