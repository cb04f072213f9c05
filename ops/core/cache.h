// A worker's cache of embedding rows: lookups, updates and the messages that keep rows within their
// staleness bounds (HET, VLDB 2022; the rules are DESIGN section 3).
//
// The way of a step:
//   Lookup   finds or makes a line for each key and cuts one request for each shard;
//   (the runtime carries the requests to the shards: Table::Sync)
//   Fill     takes the replies and hands out the rows;
//   Update   applies the optimizer to the lines and keeps what changed as their delta;
//   Flush    cuts requests that only push.
// Between Lookup and Update a Ticket keeps the step's lines from being evicted.

#ifndef HET_TF_OPS_CORE_CACHE_H_
#define HET_TF_OPS_CORE_CACHE_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ops/core/arena.h"
#include "ops/core/batch.h"
#include "ops/core/eviction.h"
#include "ops/core/index.h"
#include "ops/core/message.h"
#include "ops/core/parallel.h"
#include "ops/core/row_config.h"
#include "ops/core/slab.h"
#include "ops/core/stats.h"
#include "ops/core/status.h"
#include "ops/core/table.h"

namespace het_tf {

enum class CacheCounter {
  kLookups,           // calls
  kIds,               // ids looked up
  kKeys,              // unique keys among them
  kHits,              // keys whose row was in the cache
  kStaleHits,         // hits whose row the shard sent again, since it had passed the read bound
  kMisses,            // keys whose row was not in the cache
  kInitialized,       // misses of rows that nobody had updated: computed here, not sent
  kUpdates,           // one a key and step
  kNonfiniteSkipped,  // updates skipped for NaN or infinity
  kRowsPushed,
  kUpdatesPushed,  // the updates that the pushed rows carried
  kEvictions,
  kDirtyEvictions,  // evictions of rows with updates not yet sent
  kUpdatesLost,     // updates not yet sent when their shard was cleared or restored
  kMessages,
  kBytesUp,      // of requests
  kBytesUpPush,  // the part of kBytesUp that pushes take
  kBytesDown,    // of replies
  kRows,         // rows in the cache now
  kPending,      // updates not yet known to be merged, now
  kNumCounters
};
inline constexpr std::array<const char*, Counters<CacheCounter>::kSize> kCacheCounterNames = {
    "lookups",           "ids",          "keys",           "hits",
    "stale_hits",        "misses",       "initialized",    "updates",
    "nonfinite_skipped", "rows_pushed",  "updates_pushed", "evictions",
    "dirty_evictions",   "updates_lost", "messages",       "bytes_up",
    "bytes_up_push",     "bytes_down",   "rows",           "pending"};

struct CacheConfig {
  RowConfig rows;
  int64_t capacity = 0;  // rows
  Policy policy = Policy::kLfu;
  int64_t read_bound = kUnbounded;   // updates of others that a read may miss, beyond those unsent
  int64_t write_bound = kUnbounded;  // own updates of a row that may be unsent
  Nonfinite nonfinite = Nonfinite::kError;
  // Keep no rows: fetch them for every step, push the gradients, let the shard apply the optimizer.
  bool server_applies = false;
};

class Cache;

// The lines of one lookup, kept in the cache while this lives.
class Ticket {
 public:
  static constexpr const char* kVariantName = "Het>Ticket";

  Ticket(std::shared_ptr<Cache> cache, std::shared_ptr<const Batch> batch);
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  const Batch& batch() const { return *batch_; }
  Cache* cache() const { return cache_.get(); }

 private:
  friend class Cache;

  struct Request {
    bool sent = false;
    uint64_t cut = 0;  // the last sequence cut when the request was
    int64_t num_checks = 0;
    std::vector<uint32_t> slots;  // (queries): the lines asked for
  };

  const std::shared_ptr<Cache> cache_;
  const std::shared_ptr<const Batch> batch_;
  std::vector<uint32_t> slots_;  // (batch.num_keys())
  std::vector<uint32_t> extra_;  // lines held beyond those
  std::vector<Request> requests_;
  bool filled_ = false;
};

// Every public function may run concurrently with every other; they take turns.
class Cache : public std::enable_shared_from_this<Cache> {
 public:
  static Status Create(const CacheConfig& config, std::shared_ptr<Cache>* cache);

  int dim() const { return kit_.optimizer->dim(); }
  int num_shards() const { return static_cast<int>(shards_.size()); }
  uint64_t id() const { return id_; }

  // Provides the memory of the request to a shard; 0 bytes: there is none this time.
  using AllocateRequest = std::function<char*(int shard, size_t bytes)>;

  // fresh: no cached row may have missed an update that its shard has merged, whatever the bound.
  Status Lookup(std::shared_ptr<const Batch> batch, bool fresh, const ParallelFor& parallel_for,
                const AllocateRequest& allocate, std::shared_ptr<Ticket>* ticket);

  struct Bytes {
    const char* data;  // aligned to 8
    size_t size;
  };
  // replies: (num_shards), empty where no request went. out: (batch.num_ids(), dim).
  Status Fill(Ticket* ticket, const std::vector<Bytes>& replies, const ParallelFor& parallel_for,
              float* out);

  // One update of each key of the ticket. gradients: (batch.num_ids(), dim).
  Status Update(Ticket* ticket, const float* gradients, float learning_rate,
                const ParallelFor& parallel_for);

  // Requests that push what is due, or (all) everything not yet sent. The replies go to Fill, with
  // an out of no rows.
  Status Flush(bool all, const AllocateRequest& allocate, std::shared_ptr<Ticket>* ticket);

  // Forgets all rows, and with them what was not sent.
  void Clear();

  // Has every later lookup and update fail: the process is about to end, and what is made after its
  // last flush would be lost.
  void Freeze();

  int64_t counter(CacheCounter counter);

  // (num_shards): of the table, as each shard last said; 0: never heard.
  std::vector<uint64_t> incarnations();

 private:
  friend class Ticket;

  // Cycles a key costs, for splitting work; measured as kProbeCycles in table_record.h.
  static constexpr int64_t kKeyCycles = 150;

  // Followed by row[row_dim] (value and slots, with own updates) and delta[row_dim] (what own
  // updates since the last push changed; gradients where the server applies them).
  struct Line {
    int64_t key;
    int64_t base;     // the row's clock when last refreshed, moved by own merged updates
    double score;     // Eviction's
    uint64_t pushed;  // sequence of the line's last push
    int32_t pending;  // own updates in delta
    int32_t sent;     // own updates in pushes not yet acknowledged
    int32_t holds;    // tickets that hold the line
    uint16_t shard;
    uint16_t flags;
    float learning_rate;  // of the last own update
  };
  enum Flags : uint16_t {
    kFilled = 1,    // row is valid
    kResident = 2,  // in the index
    kQueued = 4,    // in the outbox
    kForced = 8,    // pushed in the request being cut: its row must come back (lamport)
  };

  // A push that its shard has not acknowledged; it goes with every request until then.
  struct Push {
    uint64_t sequence;
    std::vector<char> bytes;        // as in the request
    std::vector<uint32_t> slots;    // (rows)
    std::vector<int64_t> keys;      // (rows)
    std::vector<int32_t> pendings;  // (rows)
  };

  struct Shard {
    uint64_t incarnation = 0;
    std::vector<uint64_t> past;  // incarnations before that
    uint64_t cut = 0;            // the last sequence used
    std::vector<uint32_t> outbox;
    std::deque<Push> unacknowledged;
  };

  Cache(const CacheConfig& config, RowKit kit);

  Line* LineAt(uint32_t slot) const { return reinterpret_cast<Line*>(lines_[slot]); }
  float* RowAt(uint32_t slot) const {
    return reinterpret_cast<float*>(lines_[slot] + sizeof(Line));
  }
  float* DeltaAt(uint32_t slot) const { return RowAt(slot) + row_dim_; }

  // All of these need mutex_.
  Status CheckNotFrozen() const;
  void TakeReleased();
  uint32_t MakeLine(int64_t key, uint64_t hash);
  void Hold(uint32_t slot) { ++LineAt(slot)->holds; }
  void Unhold(uint32_t slot);
  void RemoveFromIndex(uint32_t slot);
  void Evict(uint32_t slot);
  void Trim();
  void Enqueue(uint32_t slot);
  void FindLines(Ticket* ticket, const ParallelFor& parallel_for);
  bool PushHasOneRate() const;
  void CutPush(int shard, std::vector<uint32_t>* forced);
  void CutRequest(int shard, Ticket* ticket, const std::vector<uint32_t>& asked, int64_t read_bound,
                  const AllocateRequest& allocate);
  void Acknowledge(Shard* shard, uint64_t sequence);
  void Reset(uint32_t slot);
  void ForgetShard(int shard);
  int64_t CheckBase(const Line& line) const;
  bool Install(uint32_t slot, int64_t clock, const float* row, uint64_t cut);
  void Initialize(uint32_t slot);

  // Needs nothing: a ticket's end.
  void Release(const std::vector<uint32_t>& slots);

  const CacheConfig config_;
  const RowKit kit_;
  const int row_dim_;
  const int wire_width_;
  const uint64_t id_;

  std::mutex mutex_;
  Index index_;
  Arena arena_;
  Slab lines_;
  Eviction eviction_;
  std::vector<Shard> shards_;
  bool frozen_ = false;
  int64_t num_pending_ = 0;  // updates in deltas and in unacknowledged pushes
  Counters<CacheCounter> counters_;

  // Slots that dead tickets held. A ticket may die on any thread, at any time, and must not wait.
  std::mutex released_mutex_;
  std::vector<uint32_t> released_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_H_
