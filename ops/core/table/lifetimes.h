// Which keys of a table get a row, and when rows go (Monolith, arXiv 2209.07663, section 2.2).
//
// A key without a row gets one at its count-th update, or at each with a probability. An update
// that comes before is refused: the row stays what it is without one, its initial value. A push
// counts its updates at once, and is refused or merged as a whole.
//
// A row goes when a sweep finds that one of the expiries holds for it. Nothing is kept of it: an
// update that comes later, whatever row it was made on, is one of a key without a row.
//
// A shard must not take a cache's row of an earlier life for one of the present: see ClockOfLife.

#ifndef HET_TF_OPS_CORE_TABLE_LIFETIMES_H_
#define HET_TF_OPS_CORE_TABLE_LIFETIMES_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ops/core/row/clock.h"
#include "ops/core/status.h"

namespace het_tf {

// A row expires when all of it holds.
struct ExpiryRule {
  uint32_t age = 0;  // at least so long after its last update
  int64_t updates_below = std::numeric_limits<int64_t>::max();
  float norm_below = std::numeric_limits<float>::infinity();  // L2, of the value
};

struct LifeRules {
  int64_t count = 1;
  int64_t sketch_bytes = 0;  // 0: counted exactly
  double probability = 1;
  std::vector<ExpiryRule> expiries;

  bool admits_all() const { return count == 1 && probability == 1; }
};

class Lifetimes {
 public:
  // Rows come at once and stay.
  Lifetimes() : ranges_(1) {}

  // Clauses, separated by ';', each a Spec:
  //   admit count=N [sketch=BYTES], or admit probability=P: at most one
  //   expire age=A [updates_below=N] [norm_below=X]: as many as wanted
  //   given: ages are in the unit of Table::SetTime, not in seconds
  //   keys FIRST LAST: clauses that follow are of the keys in [FIRST, LAST], which no other clauses
  //     apply to
  // Empty: as the default.
  static Status Parse(const std::string& text, Lifetimes* lifetimes);

  // Whether there is anything but the default.
  bool any() const { return admits_some() || expires(); }
  bool admits_some() const;
  bool expires() const;
  bool time_is_given() const { return time_is_given_; }
  // Of all expiries; there is one.
  uint32_t shortest_age() const;

  int num_ranges() const { return static_cast<int>(ranges_.size()); }
  const LifeRules& range(int r) const { return ranges_[r].rules; }
  // Which range a key is in.
  int RangeOf(int64_t key) const {
    for (int r = num_ranges() - 1; r > 0; --r) {
      if (key >= ranges_[r].first && key <= ranges_[r].last) return r;
    }
    return 0;
  }

 private:
  struct Range {
    int64_t first = 0, last = 0;
    LifeRules rules;
  };

  std::vector<Range> ranges_;  // the first one is of all other keys
  bool time_is_given_ = false;
};

// Clocks in a table whose rows come and go. All clocks of the rows of one life lie in one era of so
// many units, all bases of lines that hold a row that is not there in the era before. So a base and
// a clock of different lives are further apart than any bound, and a row's updates are its clock's
// place in its era.
inline constexpr int64_t kEra = int64_t{1} << 36;

// The clocks that a shard gives.
class ClockOfLife {
 public:
  // Of a row that comes now, before its first update.
  int64_t born() const { return gone_ + kEra; }
  // Of a row that is not there, for caches that hold one: beyond all clocks of its former lives,
  // and below those of its next.
  int64_t gone() const { return gone_; }
  // A row goes. (If rows came and went in every second, clocks would last for 250 days.)
  void Ended(int64_t clock) {
    if (clock < gone_) return;
    const int64_t era = clock / kEra;
    if (era < kMaxClock / kEra - 4) gone_ = (era + 2) * kEra;
  }
  // The updates of a row, under ClockRule::kCount.
  static int64_t UpdatesOf(int64_t clock) { return clock % kEra; }

 private:
  int64_t gone_ = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_LIFETIMES_H_
