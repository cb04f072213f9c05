// The rows of a shard as they were at one moment, read while they go on being updated.
//
// The cut marks every record as not yet read. A record is read once: by the sweep, which goes from
// stripe to stripe and holds a stripe's lock for a few thousand rows at a time; or, if somebody is
// about to change it before the sweep has come to it, out of the copy that he makes first. Rows
// that come after the cut have no mark, and neither has a slot without a row. A row that expires is
// changed like any other; what drops all rows waits until the snapshot has ended. The keys that are
// counted and have no row are read in the same way. Sketches are what they are when they are read.
//
// Memory: one bit a record, and 2 * KeptRows::kMaxBytes.

#ifndef HET_TF_OPS_CORE_TABLE_SNAPSHOT_H_
#define HET_TF_OPS_CORE_TABLE_SNAPSHOT_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "ops/core/mutex.h"
#include "ops/core/status.h"
#include "ops/core/table/table.h"

namespace het_tf {

// Safe for concurrent use.
class Table::Snapshot {
 public:
  // Ends the snapshot. The table must still be there.
  ~Snapshot() { End(); }
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  int64_t num_rows() const { return num_rows_; }
  // Keys without a row that are counted exactly; -1: all keys get a row.
  int64_t num_candidates() const { return num_candidates_; }
  // The table's time at the cut, from which ages are counted.
  uint32_t time() const { return now_; }
  // Of CutChanged: keys that have lost their row and have none, and, in order, those that have
  // another one since.
  const std::vector<int64_t>& dropped() const { return dropped_; }
  const std::vector<int64_t>& returned() const { return returned_; }

  // Takes what is known of keys without a row. Errors end the reading.
  struct CountsSink {
    int64_t capacity;  // of keys, counts, ages
    int64_t *keys, *counts, *ages;
    std::function<Status(int64_t)> write;  // so many of them
    // Words of the sketches of a range, as in Piece; those of a range come in their order.
    std::function<Status(int range, int64_t first, const std::vector<int64_t>&)> write_sketch;
  };

  // Reads all rows, in no particular order, and ends the snapshot. Puts up to `capacity` rows at a
  // time into `columns` and calls write(rows) for them; its error ends the reading. May be called
  // once. counts: nullptr: only rows are wanted.
  Status Read(const Rows& columns, int64_t capacity, const std::function<Status(int64_t)>& write,
              const CountsSink* counts = nullptr);

  // Lets go of the rows, after a reading that is under way. Nobody waits for the snapshot any
  // longer.
  void End();

 private:
  friend class Table;
  explicit Snapshot(Table* table) : table_(table) {}

  class Reading;
  void EndLocked() HET_REQUIRES(mutex_);

  Table* const table_;
  int64_t num_rows_ = 0, num_candidates_ = -1;
  std::vector<int64_t> dropped_, returned_;
  uint32_t now_ = 0;  // the table's time at the cut
  Mutex mutex_;
  bool ended_ HET_GUARDED_BY(mutex_) = false;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_SNAPSHOT_H_
