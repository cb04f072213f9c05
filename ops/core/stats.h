// Counters, read while others count.

#ifndef HET_TF_OPS_CORE_STATS_H_
#define HET_TF_OPS_CORE_STATS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace het_tf {

// Counter is an enum whose last value is kNumCounters.
template <typename Counter>
class Counters {
 public:
  static constexpr size_t kSize = static_cast<size_t>(Counter::kNumCounters);

  void Add(Counter counter, int64_t n) {
    values_[static_cast<size_t>(counter)].fetch_add(n, std::memory_order_relaxed);
  }
  void Set(Counter counter, int64_t n) {
    values_[static_cast<size_t>(counter)].store(n, std::memory_order_relaxed);
  }
  int64_t Get(Counter counter) const {
    return values_[static_cast<size_t>(counter)].load(std::memory_order_relaxed);
  }
  std::array<int64_t, kSize> Read() const {
    std::array<int64_t, kSize> values;
    for (size_t c = 0; c < kSize; ++c) values[c] = Get(static_cast<Counter>(c));
    return values;
  }

 private:
  std::array<std::atomic<int64_t>, kSize> values_{};
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_STATS_H_
