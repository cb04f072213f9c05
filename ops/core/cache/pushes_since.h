// The own pushes that a reply does not hold, by key: its rows take them in before they are kept, so
// that every step reads its own writes.

#ifndef HET_TF_OPS_CORE_CACHE_PUSHES_SINCE_H_
#define HET_TF_OPS_CORE_CACHE_PUSHES_SINCE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/core/link/link.h"
#include "ops/core/row/clock.h"
#include "ops/core/row/optimizer.h"
#include "ops/core/wire/request.h"

namespace het_tf {

class PushesSince {
 public:
  // half: pushes hold bfloat16.
  PushesSince(const Link& link, uint64_t acknowledged, const Optimizer& optimizer, ClockRule clock,
              bool half)
      : optimizer_(optimizer), clock_(clock) {
    link.ForEachPushAfter(acknowledged, [&](const Link::Push& push) {
      PushView view;
      ReadCursor cursor(push.bytes, push.size);
      ReadPush(&cursor, {optimizer.dim(), half}, optimizer.contribution_dim(), &view);
      Add(view);
      unpacked_.push_back(std::move(view.unpacked));
    });
  }

  // One that comes after those, which must outlive this.
  void Add(const PushView& push) {
    for (int64_t r = 0; r < push.num_rows(); ++r) {
      const bool gradient = r < push.num_gradients;
      const float* floats =
          gradient ? push.gradients + r * optimizer_.dim()
                   : push.contributions + (r - push.num_gradients) * optimizer_.contribution_dim();
      rows_[push.rows[r].key].push_back({&push.rows[r], floats, gradient});
    }
  }

  bool Has(int64_t key) const { return !rows_.empty() && rows_.count(key) != 0; }

  // Has the row of a key (row_dim), at that clock, take them in. Returns the clock after them.
  int64_t MergeOnto(int64_t key, float* row, int64_t clock) const {
    const auto found = rows_.find(key);
    if (found == rows_.end()) return clock;
    for (const Row& each : found->second) {
      if (each.gradient) {
        optimizer_.Update(row, each.floats, each.row->learning_rate);
      } else {
        optimizer_.Merge(row, each.floats, each.row->updates);
      }
      switch (clock_) {
        case ClockRule::kCount:
          clock = Advance(clock, each.gradient ? 1 : each.row->updates);
          break;
        case ClockRule::kLamport:
          clock = std::max(clock, ClockNear(clock, each.row->clock));
          break;
        case ClockRule::kDrift:
          clock = Advance(clock, each.row->clock);
          break;
      }
    }
    return clock;
  }

 private:
  struct Row {
    const PushRow* row;
    const float* floats;
    bool gradient;
  };

  const Optimizer& optimizer_;
  const ClockRule clock_;
  std::unordered_map<int64_t, std::vector<Row>> rows_;
  std::vector<std::shared_ptr<const float[]>> unpacked_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_PUSHES_SINCE_H_
