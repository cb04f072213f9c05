// A shard of an embedding table: rows with their optimizer slots and clocks, merged into by many
// caches at once.
//
// Rows are spread over stripes, each with its own lock, index and storage. A call groups its keys
// by stripe, so that it takes each lock once, not once a row. Every public function may run
// concurrently with every other.

#ifndef HET_TF_OPS_CORE_TABLE_H_
#define HET_TF_OPS_CORE_TABLE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "ops/core/arena.h"
#include "ops/core/batch.h"
#include "ops/core/index.h"
#include "ops/core/message.h"
#include "ops/core/parallel.h"
#include "ops/core/row_config.h"
#include "ops/core/shared_mutex.h"
#include "ops/core/slab.h"
#include "ops/core/stats.h"
#include "ops/core/status.h"

namespace het_tf {

enum class TableCounter {
  kRequests,
  kBytesReceived,
  kBytesSent,
  kPushesMerged,
  kPushesRepeated,  // arrived again after an answer was lost, and were not merged again
  kRowsMerged,
  kRowsChecked,
  kRowsSent,
  kNonfiniteSkipped,
  kNumCounters
};
inline constexpr std::array<const char*, Counters<TableCounter>::kSize> kTableCounterNames = {
    "requests",    "bytes_received", "bytes_sent", "pushes_merged",    "pushes_repeated",
    "rows_merged", "rows_checked",   "rows_sent",  "nonfinite_skipped"};

// What to do with a gradient that holds NaN or infinity.
enum class Nonfinite { kError, kSkip };

class Table {
 public:
  static constexpr int kNumStripes = 32;

  static Status Create(const RowConfig& config, int shard, std::unique_ptr<Table>* table);

  int dim() const { return kit_.optimizer->dim(); }
  int slot_dim() const { return kit_.optimizer->slot_dim(); }
  int num_shards() const { return config_.num_shards; }
  // Names the rows since the table was made, imported or cleared.
  uint64_t incarnation() const;

  // Rows that have been updated or imported.
  int64_t size() const;
  // Bytes of rows and index.
  int64_t memory_bytes() const;
  int64_t counter(TableCounter counter) const { return counters_.Get(counter); }

  // Reads rows; unknown keys read as their initial value and do not enter the table.
  // out: (batch.num_ids(), dim).
  Status Lookup(const Batch& batch, const ParallelFor& parallel_for, float* out) const;

  // One update of each key. gradients: (batch.num_ids(), dim).
  Status Apply(const Batch& batch, const float* gradients, float learning_rate, Nonfinite nonfinite,
               const ParallelFor& parallel_for);

  // Answers a cache: merges what it pushes, then sends the rows it lacks (message.h).
  // allocate(bytes) provides the memory of the reply, once, if all is well.
  Status Sync(const char* request, size_t bytes, const ParallelFor& parallel_for,
              const std::function<char*(size_t)>& allocate);

  // Rows of the stripes [first, last), in no particular order. allocate(rows) says how many come
  // and returns where to put them.
  template <typename Integer, typename Float>
  struct RowArrays {
    Integer* keys;    // (rows)
    Float* values;    // (rows, dim)
    Float* slots;     // (rows, slot_dim)
    Integer* clocks;  // (rows)
  };
  using Rows = RowArrays<int64_t, float>;
  using ConstRows = RowArrays<const int64_t, const float>;
  Status Export(int first, int last, const std::function<Rows(int64_t)>& allocate) const;

  // Sets rows, replacing those that exist, all or none. Starts a new incarnation.
  Status Import(const ConstRows& rows, int64_t num_rows);

  // Drops all rows. Starts a new incarnation.
  void Clear();

 private:
  struct Stripe {
    Stripe(size_t record_bytes, Arena* arena) : records(record_bytes, arena) {}

    mutable SharedMutex mutex;
    Index index;
    Slab records;
  };

  // The last push merged for one cache.
  struct Session {
    std::mutex mutex;
    uint64_t sequence = 0;
  };

  Table(const RowConfig& config, int shard, RowKit kit);

  // A record is key, clock, row[row_dim], without padding.
  uint32_t Find(const Stripe& stripe, uint64_t hash, int64_t key) const;
  char* FindOrInsert(Stripe* stripe, uint64_t hash, int64_t key);

  Status CheckRequest(const RequestView& request) const;
  Status CheckOwned(const char* what, int64_t key, uint64_t hash) const;
  Session* SessionOf(uint64_t cache_id);
  void Merge(const PushView& push, bool server_applies, const ParallelFor& parallel_for);
  void Answer(const RequestView& request, bool restarted, uint64_t acknowledged,
              const ParallelFor& parallel_for, const std::function<char*(size_t)>& allocate);
  void NewIncarnation();

  const RowConfig config_;
  const int shard_;
  const RowKit kit_;
  const int row_dim_;
  const size_t record_bytes_;

  // Held shared by what reads or writes rows, exclusively by what replaces them all.
  mutable SharedMutex contents_;
  uint64_t incarnation_ = 0;
  Arena arena_;
  std::vector<std::unique_ptr<Stripe>> stripes_;

  std::mutex sessions_mutex_;
  std::unordered_map<uint64_t, std::unique_ptr<Session>> sessions_;

  mutable Counters<TableCounter> counters_;
};

// A random number that is not 0: names incarnations and caches.
uint64_t RandomId();

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_H_
