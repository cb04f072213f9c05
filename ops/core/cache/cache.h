// A worker's cache of embedding rows: lookups, updates and the messages that keep rows within their
// staleness bounds (HET, VLDB 2022; the rules are DESIGN section 3).
//
// The way of a step:
//   Lookup   finds or makes a line for each key and writes one request for each shard;
//   (the runtime carries the requests to the shards: Table::Sync)
//   Install  takes the replies;
//   Gather   hands out the rows, when the step starts;
//   Update   applies the optimizer to the lines;
//   Flush    writes requests that only push.
// From Lookup on, a Ticket holds the step's lines. Steps may overlap in any way.
//
// A row that is not worth a line comes as a value alone (a visitor), and its gradient goes up. With
// a capacity of 0 all rows do: that is training without a cache.

#ifndef HET_TF_OPS_CORE_CACHE_CACHE_H_
#define HET_TF_OPS_CORE_CACHE_CACHE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/core/cache/admission.h"
#include "ops/core/cache/store.h"
#include "ops/core/link/link.h"
#include "ops/core/parallel.h"
#include "ops/core/pooling.h"
#include "ops/core/row/row_config.h"
#include "ops/core/stats.h"
#include "ops/core/status.h"
#include "ops/core/unique_ids.h"

namespace het_tf {

enum class CacheCounter {
  kLookups,           // calls
  kIds,               // ids looked up
  kKeys,              // unique keys among them
  kHits,              // keys whose row was in the cache
  kHitIds,            // ids of those keys
  kStaleHits,         // hits whose row the shard sent again, since it had passed the read bound
  kMisses,            // keys whose row was not in the cache
  kInitialized,       // misses of rows that nobody had updated: computed here, not sent
  kVisitors,          // misses of rows not worth a line: their value came without slots
  kUpdates,           // one a key and step
  kNonfiniteSkipped,  // updates skipped for NaN or infinity
  kRowsPushed,
  kUpdatesPushed,  // the updates that the pushed rows carried
  kEvictions,
  kDirtyEvictions,  // evictions of rows with updates not yet sent
  kUpdatesLost,     // updates not yet merged when their shard was cleared or restored
  kMessages,
  kBytesUp,      // of requests
  kBytesUpPush,  // the part of kBytesUp that pushes take
  kBytesDown,    // of replies
  kRows,         // rows in the cache now
  kPending,      // updates not yet known to be merged, now
  kMemoryBytes,  // of rows, unsent updates and index, now
  kNumCounters
};
inline constexpr std::array<const char*, Counters<CacheCounter>::kSize> kCacheCounterNames = {
    "lookups",
    "ids",
    "keys",
    "hits",
    "hit_ids",
    "stale_hits",
    "misses",
    "initialized",
    "visitors",
    "updates",
    "nonfinite_skipped",
    "rows_pushed",
    "updates_pushed",
    "evictions",
    "dirty_evictions",
    "updates_lost",
    "messages",
    "bytes_up",
    "bytes_up_push",
    "bytes_down",
    "rows",
    "pending",
    "memory_bytes"};

struct CacheConfig {
  RowConfig rows;
  int64_t capacity = 0;  // rows; 0: no cache
  Policy policy = Policy::kLfu;
  // Both in units of the clock.
  int64_t read_bound = kUnbounded;   // updates of others that a read may miss, beyond those unsent
  int64_t write_bound = kUnbounded;  // own updates of a row that may be unsent
  Nonfinite nonfinite = Nonfinite::kError;
};

class Cache;

// The lines of one lookup, kept in the cache while this lives.
class Ticket {
 public:
  static constexpr const char* kVariantName = "Het>Ticket";

  Ticket(std::shared_ptr<Cache> cache, std::shared_ptr<const UniqueIds> ids);
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  const UniqueIds& ids() const { return *ids_; }
  const std::shared_ptr<const UniqueIds>& shared_ids() const { return ids_; }
  Cache* cache() const { return cache_.get(); }

 private:
  friend class Cache;

  // A request and what it asks, in the order of RequestHeader's counts.
  struct Asked {
    Link::Request request;
    int64_t num_checks = 0;
    int64_t num_value_checks = 0;
    int64_t num_full = 0;
    std::vector<uint32_t> slots;  // (queries)

    int64_t num_bases() const { return num_checks + num_value_checks; }
  };

  const std::shared_ptr<Cache> cache_;
  const std::shared_ptr<const UniqueIds> ids_;
  std::vector<uint32_t> slots_;      // (ids.num_keys())
  std::vector<uint32_t> also_held_;  // lines of other keys
  std::vector<Asked> asked_;         // (num_shards)
  bool installed_ = false;
};

// Every public function may run concurrently with every other: one lock orders them.
class Cache : public std::enable_shared_from_this<Cache> {
 public:
  static Status Create(const CacheConfig& config, std::shared_ptr<Cache>* cache);

  int dim() const { return kit_.optimizer->dim(); }
  int num_shards() const { return static_cast<int>(shards_.size()); }
  uint64_t id() const { return id_; }

  // Provides the memory of the request to a shard, aligned to 8; 0 bytes: there is none this time.
  // The cache keeps it until what it pushes is merged.
  using AllocateRequest = std::function<std::shared_ptr<char>(int shard, size_t bytes)>;

  // fresh: no cached row may have missed an update that its shard has merged, whatever the bound.
  Status Lookup(std::shared_ptr<const UniqueIds> ids, bool fresh, const ParallelFor& parallel_for,
                const AllocateRequest& allocate, std::shared_ptr<Ticket>* ticket);

  struct Bytes {
    const char* data;  // aligned to 8
    size_t size;
  };
  // replies: (num_shards), empty where no request went; all are taken, or on an error none.
  // rows: how many came.
  Status Install(Ticket* ticket, const std::vector<Bytes>& replies, const ParallelFor& parallel_for,
                 int64_t* rows);

  // The rows as they are now. ticket: installed. out: (ids.num_ids(), dim).
  Status Gather(const Ticket& ticket, const ParallelFor& parallel_for, float* out);

  // The rows as they are now, pooled. pooling: of the ids of the ticket. outputs: as Pooling::Pool.
  Status Pool(const Ticket& ticket, Pooling* pooling, const ParallelFor& parallel_for,
              const std::vector<float*>& outputs);

  // One update of each key of the ticket. gradients: of its ids.
  Status Update(Ticket* ticket, const GradientSums& gradients, float learning_rate,
                const ParallelFor& parallel_for);
  // gradients: (ids.num_ids(), dim).
  Status Update(Ticket* ticket, const float* gradients, float learning_rate,
                const ParallelFor& parallel_for) {
    return Update(ticket, GradientSums(ticket->ids(), gradients, dim(), parallel_for),
                  learning_rate, parallel_for);
  }

  // Requests that push what is due, or (all) everything not yet sent, and what is under way once
  // more: when the replies were taken, the shards have it.
  Status Flush(bool all, const AllocateRequest& allocate, std::shared_ptr<Ticket>* ticket);

  // Forgets all rows, and with them what was not sent.
  void Clear();

  // Has every later lookup and update fail: the process is about to end, and what is made after its
  // last flush would be lost.
  void Freeze();

  // All counters, as of one moment.
  using Stats = std::array<int64_t, Counters<CacheCounter>::kSize>;
  Stats stats();

  // (num_shards): of the table, as each shard last said; 0: never heard.
  std::vector<uint64_t> incarnations();

 private:
  friend class Ticket;

  struct Shard {
    Link link;
    std::vector<uint32_t> outbox;  // lines to be pushed with the next request
  };

  // What a lookup asks of a shard.
  struct Questions {
    std::vector<uint32_t> checks, value_checks, full, values;  // lines

    bool empty() const {
      return checks.empty() && value_checks.empty() && full.empty() && values.empty();
    }
  };

  Cache(const CacheConfig& config, RowKit kit);

  // All of these need mutex_.
  Status CheckNotFrozen() const;
  void TakeReleased();
  void Trim();
  void Enqueue(uint32_t slot);
  void Dismiss(uint32_t slot);
  bool Due(const Line& line) const;
  int64_t MakeMissing(Ticket* ticket);
  void Ask(uint32_t slot, int64_t read_bound, Questions* questions);
  int64_t BaseAfterCut(const Line& line) const;
  void ForcePushedRows(const Shard& shard, Questions* questions, Ticket* ticket);
  PushHeader CountOutbox(const Shard& shard) const;
  void WritePush(Shard* shard, const PushHeader& header, char* bytes);
  void SendRequest(int shard, bool everything, int64_t read_bound, Questions questions,
                   const AllocateRequest& allocate, Ticket* ticket);
  void Acknowledge(Shard* shard, uint64_t number, uint64_t sequence);
  void ForgetLine(uint32_t slot);
  void RestartShard(int shard, const Link::Epoch& epoch);
  void InstallOld(const Ticket::Asked& asked, const ReplyView& reply);
  void InstallReply(int shard, const Ticket::Asked& asked, const ReplyView& reply,
                    const ParallelFor& parallel_for);

  // Needs nothing: a ticket's end.
  void Release(const Ticket& ticket);

  const CacheConfig config_;
  const RowKit kit_;
  const uint64_t id_;

  std::mutex mutex_;
  Store store_;
  Admission admission_;
  std::vector<Shard> shards_;
  bool frozen_ = false;
  int64_t num_pending_ = 0;  // updates not pushed, and those in pushes not acknowledged
  Counters<CacheCounter> counters_;

  // What dead tickets held. A ticket may die on any thread, at any time, and must not wait.
  struct Released {
    std::vector<uint32_t> slots;
    std::vector<std::pair<int, uint64_t>> requests;  // shard, number
  };
  std::mutex released_mutex_;
  Released released_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_CACHE_H_
