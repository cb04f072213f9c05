#include "ops/core/unique_ids.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "ops/core/memory/hash.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/pooling.h"

namespace het_tf {
UniqueIds::UniqueIds(const int64_t* ids, int64_t n) : key_of(n), positions(n) {
  size_t capacity = 16;
  while (capacity < 2 * static_cast<size_t>(n)) capacity *= 2;
  const size_t mask = capacity - 1;
  constexpr int32_t kEmpty = -1;
  keys.reserve(n);
  hashes.reserve(n);
  begin.reserve(n + 1);
  std::vector<int32_t> table(capacity, kEmpty);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = HashKey(ids[i]);
    size_t at = hash & mask;
    while (table[at] != kEmpty && hashes[table[at]] != hash) at = (at + 1) & mask;
    if (table[at] == kEmpty) {
      table[at] = static_cast<int32_t>(keys.size());
      keys.push_back(ids[i]);
      hashes.push_back(hash);
      begin.push_back(0);
    }
    key_of[i] = table[at];
    ++begin[table[at]];
  }
  // begin holds counts; make each the end of its key's places, then fill from behind.
  int32_t total = 0;
  for (int32_t& count : begin) count = total += count;
  begin.push_back(total);
  for (int64_t i = n; i-- > 0;) positions[--begin[key_of[i]]] = static_cast<int32_t>(i);
}

void UniqueIds::Gather(const float* const* rows, int dim, const ParallelFor& parallel_for,
                       float* out) const {
  const size_t row_bytes = sizeof(float) * dim;
  parallel_for(num_ids(), dim, [&](int64_t first, int64_t last) {
    constexpr int64_t kAhead = 12;
    for (int64_t i = first; i < last; ++i) {
      if (i + kAhead < last) Prefetch(rows[key_of[i + kAhead]], row_bytes);
      std::memcpy(out + i * dim, rows[key_of[i]], row_bytes);
    }
  });
}

namespace {

// As PooledGradients, of ids that each have a row of their own.
struct RowGradients {
  const float* rows;  // (num_ids, dim)
  int dim;

  const float* Whole(int32_t place) const { return rows + int64_t{place} * dim; }
  void Prefetch(int32_t place) const { het_tf::Prefetch(Whole(place), sizeof(float) * dim); }
  void Put(int32_t place, float* sum) const { std::memcpy(sum, Whole(place), sizeof(float) * dim); }
  void Add(int32_t place, float* __restrict sum) const {
    const float* gradient = Whole(place);
    for (int i = 0; i < dim; ++i) sum[i] += gradient[i];
  }
};

}  // namespace

GradientSums::GradientSums(const UniqueIds& ids, const float* gradients, int dim,
                           const ParallelFor& parallel_for)
    : dim_(dim), sums_(ids.num_keys()) {
  Sum(ids, RowGradients{gradients, dim}, parallel_for);
}

GradientSums::GradientSums(const UniqueIds& ids, const PooledGradients& gradients, int dim,
                           const ParallelFor& parallel_for)
    : dim_(dim), sums_(ids.num_keys()) {
  Sum(ids, gradients, parallel_for);
}

template <typename Gradients>
void GradientSums::Sum(const UniqueIds& ids, const Gradients& gradients,
                       const ParallelFor& parallel_for) {
  std::vector<int64_t> scratch_row(ids.num_keys());
  int64_t summed = 0;
  for (int64_t u = 0; u < ids.num_keys(); ++u) {
    scratch_row[u] = summed;
    const int32_t first = ids.positions[ids.begin[u]];
    summed += ids.begin[u + 1] - ids.begin[u] > 1 || gradients.Whole(first) == nullptr;
  }
  scratch_.reset(new float[summed * dim_]);
  std::atomic<int64_t> num_nonfinite{0};
  parallel_for(ids.num_keys(), 10 * dim_, [&](int64_t first, int64_t last) {
    const int32_t* last_place = ids.positions.data() + ids.begin[last] - 1;
    const auto prefetch_after = [&](const int32_t* place) {
      // Of each occurrence: those of a frequent key are far apart.
      constexpr int64_t kAhead = 8;
      gradients.Prefetch(place[std::min<int64_t>(kAhead, last_place - place)]);
    };
    for (int64_t u = first; u < last; ++u) {
      const int32_t* place = &ids.positions[ids.begin[u]];
      const int32_t* end = ids.positions.data() + ids.begin[u + 1];
      prefetch_after(place);
      const float* sum = end - place > 1 ? nullptr : gradients.Whole(*place);
      if (sum == nullptr) {
        float* out = scratch_.get() + scratch_row[u] * dim_;
        gradients.Put(*place, out);
        while (++place != end) {
          prefetch_after(place);
          gradients.Add(*place, out);
        }
        sum = out;
      }
      sums_[u] = Gradient::Of(sum, dim_);
      // The squares, too: an optimizer's accumulator that overflows turns rows into NaN later.
      if (!std::isfinite(sums_[u].squares)) {
        sums_[u].values = nullptr;
        num_nonfinite.fetch_add(1, std::memory_order_relaxed);
      }
    }
  });
  num_nonfinite_ = num_nonfinite.load();
}

}  // namespace het_tf
