// Which rows are worth a line of the cache, so that it never costs more bytes than none.
//
// A line costs slots on the way down that no cache would fetch, and pays only if its row comes
// again. So once the cache is full, a row gets one when its key is asked for a second time, and
// slots are paid for out of what the cache has saved: an account gets what every key would have
// cost without a cache and one in a hundred more, and pays for what came. Without the first rule
// nearly every row of skewed data drives out one that was used as little, at a few cache misses
// each, and hit rates are lower. (Measured: benchmarks/cache_traces.py.) LRU admits every row.

#ifndef HET_TF_OPS_CORE_CACHE_ADMISSION_H_
#define HET_TF_OPS_CORE_CACHE_ADMISSION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "ops/core/cache/score.h"
#include "ops/core/memory/sketch.h"
#include "ops/core/wire/reply.h"

namespace het_tf {

class Admission {
 public:
  // capacity: rows; 0: nothing is ever worth a line. value_words: of 4 bytes, as values travel.
  Admission(Policy policy, int64_t capacity, int value_words, int slot_dim)
      : enabled_(capacity > 0),
        admits_all_(policy == Policy::kLru),
        value_bytes_(static_cast<double>(sizeof(ReplyRow) + sizeof(float) * value_words)),
        slot_bytes_(static_cast<double>(sizeof(float) * slot_dim)),
        most_credit_(slot_bytes_ * static_cast<double>(capacity)) {}

  // The cache is full, and holds that many rows. Until then every key is worth a line, and none is
  // counted. Where every row is admitted, counts are of no use: to clear the memory for those of 10
  // million rows takes a tenth of a second.
  void Fill(int64_t capacity) {
    if (enabled_ && !admits_all_ && sketch_ == nullptr) {
      sketch_ = std::make_unique<Sketch>(capacity);
    }
  }

  void Prefetch(uint64_t hash) const {
    if (sketch_ != nullptr) sketch_->Prefetch(hash);
  }

  // That many keys are looked up.
  void BeginUse(int64_t keys) {
    if (sketch_ != nullptr) sketch_->Age(keys);
  }

  // A key without a full line was looked up. Returns how often it was lately.
  int Missed(uint64_t hash) { return sketch_ == nullptr ? 1 : sketch_->Count(hash); }

  // A line that was used so often lately leaves.
  void Evicted(uint64_t hash, double uses) {
    if (sketch_ == nullptr) return;
    sketch_->AtLeast(hash, static_cast<int>(std::min(std::round(uses), double{Sketch::kMax})));
  }

  // Whether a row that was asked for so often lately gets a line. has_room: it drives nothing out.
  bool Admits(int count, bool has_room) const {
    return enabled_ && (admits_all_ || has_room || count > 1);
  }

  // Whether a row may be fetched with its slots.
  bool Affords() const { return slot_bytes_ == 0 || credit_ >= slot_bytes_; }
  // Whether a row beyond the read bound may be.
  bool AffordsRefresh() const { return slot_bytes_ == 0 || credit_ >= slot_bytes_ + value_bytes_; }

  // Slots were asked for; those that did not come are given back.
  void Ask(int64_t rows) { Pay(static_cast<double>(rows) * slot_bytes_); }
  void GiveBack(int64_t rows) { Pay(-static_cast<double>(rows) * slot_bytes_); }

  // Rows that exist and were not sent, since the cached ones are good.
  void Spared(int64_t rows) { Pay(-static_cast<double>(rows) * value_bytes_ * (1 + kAllowance)); }
  // Rows that came, where without a cache their values would have.
  void Came(int64_t with_slots, int64_t values) {
    Pay(-static_cast<double>(with_slots + values) * value_bytes_ * kAllowance);
  }

 private:
  static constexpr double kAllowance = 0.01;

  void Pay(double bytes) { credit_ = std::min(credit_ - bytes, most_credit_); }

  const bool enabled_, admits_all_;
  const double value_bytes_, slot_bytes_, most_credit_;
  std::unique_ptr<Sketch> sketch_;  // nullptr: the cache was never full, or admits every row
  double credit_ = 0;               // bytes
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_ADMISSION_H_
