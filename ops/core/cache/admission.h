// Which rows are worth a line of the cache, so that it never costs more bytes than none.
//
// A line costs slots on the way down that no cache would fetch, and pays only if its row comes
// again. So a row gets one if it would outlast the line that it drives out, by how often its key
// was asked for lately, and slots are paid for out of what the cache has saved: an account gets
// what every key would have cost without a cache and one in a hundred more, and pays for what came.
// (Measured: benchmarks/cache_traces.py.)

#ifndef HET_TF_OPS_CORE_CACHE_ADMISSION_H_
#define HET_TF_OPS_CORE_CACHE_ADMISSION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/core/memory/sketch.h"
#include "ops/core/wire/reply.h"

namespace het_tf {

class Admission {
 public:
  // capacity: rows; 0: nothing is ever worth a line. value_words: of 4 bytes, as values travel.
  Admission(int64_t capacity, int value_words, int slot_dim)
      : enabled_(capacity > 0),
        half_life_(kHalfLifeInCapacities * static_cast<double>(std::max<int64_t>(capacity, 1))),
        value_bytes_(static_cast<double>(sizeof(ReplyRow) + sizeof(float) * value_words)),
        slot_bytes_(static_cast<double>(sizeof(float) * slot_dim)),
        most_credit_(slot_bytes_ * static_cast<double>(capacity)),
        sketch_(capacity) {}

  void Prefetch(uint64_t hash) const {
    if (enabled_) sketch_.Prefetch(hash);
  }

  // That many keys are looked up.
  void BeginUse(int64_t keys) {
    if (!enabled_) return;
    sketch_.Age(keys);
    const double kept = std::exp2(-static_cast<double>(keys) / half_life_);
    saved_ *= kept;
    spent_ *= kept;
  }

  // A key without a full line was looked up. Returns how often it was lately.
  int Missed(uint64_t hash) { return enabled_ ? sketch_.Count(hash) : 1; }

  // A line that was used so often lately leaves.
  void Evicted(uint64_t hash, double uses) {
    sketch_.AtLeast(hash, static_cast<int>(std::min(std::round(uses), double{Sketch::kMax})));
  }

  // Whether slots cost nothing, or there is plenty saved: then a tie with a victim is enough.
  bool rich() const { return slot_bytes_ == 0 || spent_ <= kPoor * saved_; }

  // Whether a row that was asked for so often may be fetched with its slots. In a cache that has
  // room it drives nothing out.
  bool Affords(int count, bool has_room) const {
    if (!enabled_) return false;
    return slot_bytes_ == 0 || (credit_ >= slot_bytes_ && (has_room || rich() || count > 1));
  }
  // Whether a row beyond the read bound may be.
  bool AffordsRefresh() const { return slot_bytes_ == 0 || credit_ >= slot_bytes_ + value_bytes_; }

  // Slots were asked for; those that did not come are given back.
  void Ask(int64_t rows) { Pay(static_cast<double>(rows) * slot_bytes_); }
  void GiveBack(int64_t rows) { Pay(-static_cast<double>(rows) * slot_bytes_); }

  // Rows that exist and were not sent, since the cached ones are good.
  void Spared(int64_t rows) {
    Pay(-static_cast<double>(rows) * value_bytes_ * (1 + kAllowance));
    saved_ += static_cast<double>(rows) * value_bytes_;
  }
  // Rows that came, where without a cache their values would have.
  void Came(int64_t with_slots, int64_t values) {
    Pay(-static_cast<double>(with_slots + values) * value_bytes_ * kAllowance);
    spent_ += static_cast<double>(with_slots) * slot_bytes_;
  }

 private:
  static constexpr double kAllowance = 0.01;
  static constexpr double kPoor = 0.25;  // of what was saved is spent
  static constexpr double kHalfLifeInCapacities = 4;

  void Pay(double bytes) { credit_ = std::min(credit_ - bytes, most_credit_); }

  const bool enabled_;
  const double half_life_;  // of saved_ and spent_, in keys looked up
  const double value_bytes_, slot_bytes_, most_credit_;
  Sketch sketch_;
  double credit_ = 0, saved_ = 0, spent_ = 0;  // bytes
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_ADMISSION_H_
