// A pass over a shard's rows that drops those that have expired, and over the keys that are counted
// to forget those that came too rarely, a few thousand at a time.
//
// A slice is looked at while others read and update rows; what has expired is then dropped while
// nobody else is at the table, and looked at again before.

#ifndef HET_TF_OPS_CORE_TABLE_SWEEP_H_
#define HET_TF_OPS_CORE_TABLE_SWEEP_H_

#include <cstdint>

#include "ops/core/table/table.h"

namespace het_tf {

// One thread at a time; others may use the table.
class Table::Sweep {
 public:
  // table: must outlive the sweep.
  explicit Sweep(Table* table) : table_(table) {}

  // The next slice. Returns whether there was one. Throws std::bad_alloc, and then has dropped
  // nothing.
  bool Next();

  // Rows that were dropped so far.
  int64_t num_expired() const { return num_expired_; }

 private:
  void SweepCandidates(Stripe* stripe, uint32_t now);
  void SweepRows(Stripe* stripe, uint32_t now);
  int64_t Drop(Stripe* stripe, uint64_t incarnation, const std::vector<uint32_t>& slots,
               uint32_t now);

  Table* const table_;
  int stripe_ = 0;
  bool in_rows_ = false;  // of the stripe; first come its candidates
  uint32_t slot_ = 0;
  bool is_last_ = false;  // slice of the stripe's rows, or of its candidates
  int64_t num_expired_ = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_SWEEP_H_
