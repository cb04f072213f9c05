// What the ages of a table's rows are measured by: seconds, or a number that its user sets.

#ifndef HET_TF_OPS_CORE_TABLE_TABLE_TIME_H_
#define HET_TF_OPS_CORE_TABLE_TABLE_TIME_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

#include "ops/core/status.h"

namespace het_tf {

// Seconds of a clock that never goes back, from any moment on.
using SecondsClock = std::function<int64_t()>;

inline int64_t SteadySeconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::seconds>(now).count();
}

// Time is 4 bytes of each row, and begins at kBegin, so that a row that is restored may be older
// than the table. It stands still while the table is in no process.
//
// Safe for concurrent use, but for Restart.
class TableTime {
 public:
  static constexpr uint32_t kBegin = uint32_t{1} << 31;
  static constexpr uint32_t kEnd = ~uint32_t{0} - 1;

  // seconds: nullptr: time is given.
  explicit TableTime(SecondsClock seconds)
      : seconds_(std::move(seconds)), start_(seconds_ ? seconds_() : 0) {}

  uint32_t now() const {
    if (!seconds_) return given_now_.load(std::memory_order_relaxed);
    return static_cast<uint32_t>(std::min<int64_t>(kBegin + (seconds_() - start_), kEnd));
  }

  // Of a row that is so old.
  uint32_t TimeOfAge(int64_t age) const {
    return now() - static_cast<uint32_t>(std::clamp<int64_t>(age, 0, now()));
  }

  // Time is `given` now. The first call begins to count, and so makes no row older.
  Status Set(int64_t given) {
    if (seconds_) return InvalidArgument("now = ", given, ": the table's ages are in seconds");
    const int64_t elapsed = begun_ ? given - first_ : 0;
    if (given < 0 || elapsed < static_cast<int64_t>(given_now_) - kBegin ||
        elapsed > int64_t{kEnd} - kBegin) {
      return InvalidArgument("now = ", given, " must be at least ",
                             begun_ ? first_ + given_now_ - kBegin : 0, ", what it was, and below ",
                             "that of the first call + 2^31 - 1");
    }
    if (!begun_) first_ = given;
    begun_ = true;
    given_now_ = static_cast<uint32_t>(kBegin + elapsed);
    return Status();
  }

  // All rows are replaced, by those of a table whose time was `given`; negative: not known.
  void Restart(int64_t given) {
    if (seconds_) return;
    given_now_ = kBegin;
    begun_ = given >= 0;
    first_ = given;
  }

 private:
  const SecondsClock seconds_;
  const int64_t start_;
  // Set by one thread at a time.
  bool begun_ = false;
  int64_t first_ = 0;
  std::atomic<uint32_t> given_now_{kBegin};
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_TABLE_TIME_H_
