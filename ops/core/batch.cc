#include "ops/core/batch.h"

#include <atomic>
#include <cstring>

#include "ops/core/hash.h"

namespace het_tf {
namespace {

bool AllFinite(const float* x, int n) {
  float lanes[8] = {0};  // x * 0 is NaN exactly for infinities and NaN
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) lanes[j] += x[i + j] * 0.0f;
  }
  float rest = 0;
  for (; i < n; ++i) rest += x[i] * 0.0f;
  for (int j = 0; j < 8; ++j) rest += lanes[j];
  return rest == 0;
}

}  // namespace

Batch::Batch(const int64_t* ids, int64_t n) : positions(n) {
  size_t capacity = 16;
  while (capacity < 2 * static_cast<size_t>(n)) capacity *= 2;
  const size_t mask = capacity - 1;
  constexpr int32_t kEmpty = -1;
  std::vector<int32_t> table(capacity, kEmpty);
  std::vector<int32_t> unique_of(n);
  std::vector<int32_t> count;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = HashKey(ids[i]);
    size_t at = hash & mask;
    while (table[at] != kEmpty && hashes[table[at]] != hash) at = (at + 1) & mask;
    if (table[at] == kEmpty) {
      table[at] = static_cast<int32_t>(keys.size());
      keys.push_back(ids[i]);
      hashes.push_back(hash);
      count.push_back(0);
    }
    unique_of[i] = table[at];
    ++count[table[at]];
  }
  begin.resize(keys.size() + 1);
  int32_t total = 0;
  for (size_t u = 0; u < keys.size(); ++u) {
    begin[u] = total;
    total += count[u];
    count[u] = begin[u];
  }
  begin[keys.size()] = total;
  for (int64_t i = 0; i < n; ++i) positions[count[unique_of[i]]++] = static_cast<int32_t>(i);
}

void Batch::Scatter(int64_t u, const float* row, int dim, float* out) const {
  for (int32_t p = begin[u]; p < begin[u + 1]; ++p) {
    std::memcpy(out + static_cast<int64_t>(positions[p]) * dim, row, sizeof(float) * dim);
  }
}

GradientSums::GradientSums(const Batch& batch, const float* gradients, int dim,
                           const ParallelFor& parallel_for)
    : sums_(batch.num_keys()) {
  std::vector<int64_t> scratch_row(batch.num_keys());
  int64_t repeated = 0;
  for (int64_t u = 0; u < batch.num_keys(); ++u) {
    scratch_row[u] = repeated;
    repeated += batch.begin[u + 1] - batch.begin[u] > 1;
  }
  scratch_.resize(repeated * dim);
  std::atomic<int64_t> num_nonfinite{0};
  parallel_for(batch.num_keys(), 10 * dim, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; ++u) {
      const int32_t* place = &batch.positions[batch.begin[u]];
      const int32_t* end = batch.positions.data() + batch.begin[u + 1];
      const float* sum = gradients + static_cast<int64_t>(*place) * dim;
      if (end - place > 1) {
        float* out = &scratch_[scratch_row[u] * dim];
        std::memcpy(out, sum, sizeof(float) * dim);
        while (++place != end) {
          const float* gradient = gradients + static_cast<int64_t>(*place) * dim;
          for (int i = 0; i < dim; ++i) out[i] += gradient[i];
        }
        sum = out;
      }
      if (!AllFinite(sum, dim)) {
        sum = nullptr;
        num_nonfinite.fetch_add(1, std::memory_order_relaxed);
      }
      sums_[u] = sum;
    }
  });
  num_nonfinite_ = num_nonfinite.load();
}

}  // namespace het_tf
