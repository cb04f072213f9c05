// Ids brought to their unique keys, and back: what a step does once for all that follows.

#ifndef HET_TF_OPS_CORE_UNIQUE_IDS_H_
#define HET_TF_OPS_CORE_UNIQUE_IDS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/core/memory/prefetch.h"
#include "ops/core/parallel.h"
#include "ops/core/row/gradient.h"

namespace het_tf {

// Items 0..n-1 sorted by group, each group in ascending order.
struct Groups {
  std::vector<int32_t> begin;  // (groups + 1)
  std::vector<int32_t> order;  // (n)

  template <typename GroupOf>
  Groups(int64_t n, int32_t groups, const GroupOf& group_of) : begin(groups + 1), order(n) {
    for (int64_t i = 0; i < n; ++i) ++begin[group_of(i) + 1];
    for (int32_t g = 0; g < groups; ++g) begin[g + 1] += begin[g];
    std::vector<int32_t> next(begin.begin(), begin.end() - 1);
    for (int64_t i = 0; i < n; ++i) order[next[group_of(i)]++] = static_cast<int32_t>(i);
  }

  int32_t size(int32_t group) const { return begin[group + 1] - begin[group]; }
};

struct UniqueIds {
  static constexpr const char* kVariantName = "Het>UniqueIds";

  // ids: (n); n below 2^31. Unique keys keep the order of their first occurrence.
  UniqueIds(const int64_t* ids, int64_t n);

  int64_t num_ids() const { return static_cast<int64_t>(positions.size()); }
  int64_t num_keys() const { return static_cast<int64_t>(keys.size()); }

  // How often key u occurs.
  int32_t count(int64_t u) const { return begin[u + 1] - begin[u]; }

  // Copies each id's row, in the order of the ids, so that `out` is written from front to back.
  // rows: (num_keys) pointers to (dim), out: (num_ids, dim).
  void Gather(const float* const* rows, int dim, const ParallelFor& parallel_for, float* out) const;

  std::vector<int64_t> keys;       // (num_keys)
  std::vector<uint64_t> hashes;    // (num_keys)
  std::vector<int32_t> key_of;     // (num_ids): which of the keys
  std::vector<int32_t> begin;      // (num_keys + 1)
  std::vector<int32_t> positions;  // (num_ids): where key u occurs, from begin[u] to begin[u + 1]
};

class PooledGradients;

// The gradient of each unique key: its occurrences' sum, in their order.
class GradientSums {
 public:
  // gradients: (num_ids, dim), which must outlive this.
  GradientSums(const UniqueIds& ids, const float* gradients, int dim,
               const ParallelFor& parallel_for);
  // gradients: of ids that were pooled; they must outlive this.
  GradientSums(const UniqueIds& ids, const PooledGradients& gradients, int dim,
               const ParallelFor& parallel_for);

  // Where the sum or its squares are not finite, for num_nonfinite() keys, values is nullptr.
  const Gradient& operator[](int64_t u) const { return sums_[u]; }
  bool finite(int64_t u) const { return sums_[u].values != nullptr; }
  void Prefetch(int64_t u) const { het_tf::Prefetch(sums_[u].values, sizeof(float) * dim_); }
  int64_t num_nonfinite() const { return num_nonfinite_; }

 private:
  template <typename Gradients>
  void Sum(const UniqueIds& ids, const Gradients& gradients, const ParallelFor& parallel_for);

  const int dim_;
  std::vector<Gradient> sums_;        // a key that occurs once needs no copy
  std::unique_ptr<float[]> scratch_;  // not a vector, which would fill it with zeros first
  int64_t num_nonfinite_ = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_UNIQUE_IDS_H_
