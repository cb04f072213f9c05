// A worker's cache of embedding rows, wherever they lie: what is one of Cache (cache.h) and of
// cuda::DeviceCache (ops/cuda/device_cache.h). What the verbs do, and in what order, Cache says.

#ifndef HET_TF_OPS_CORE_CACHE_ROW_CACHE_H_
#define HET_TF_OPS_CORE_CACHE_ROW_CACHE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/core/cache/memory_share.h"
#include "ops/core/cache/score.h"
#include "ops/core/link/ask.h"
#include "ops/core/link/closures.h"
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
  kChecksSpared,      // hits that the shard was not asked about, since it watches their rows
  kRowsUnasked,       // rows that came unasked, since they had passed the read bound
  kMisses,            // keys whose row was not in the cache
  kInitialized,       // misses of rows that nobody had updated: computed here, not sent
  kVisitors,          // misses of rows not worth a line: their value came without slots
  kUpdates,           // one a key and step
  kNonfiniteSkipped,  // updates skipped for NaN or infinity
  kRowsPushed,
  kUpdatesPushed,  // the updates that the pushed rows carried
  kEvictions,
  kRowsToHost,      // of them, where rows are on a device: rows that the host keeps
  kRowsFromHost,    // misses whose row the host had kept, and no shard sent
  kDirtyEvictions,  // evictions of rows with updates not yet sent
  kUpdatesLost,     // updates not yet merged when their shard was cleared or restored
  kUpdatesUndone,   // of closures that failed: they are made again by another run
  kMessages,
  kBytesUp,          // of requests
  kBytesUpPush,      // the part of kBytesUp that pushes take
  kBytesDown,        // of replies
  kBytesToDevice,    // where rows are on one: what the cache copies there: ids, rows that came
  kBytesFromDevice,  // the same back: keys that messages name, what is pushed
  kRows,             // rows in the cache now
  kPending,          // updates not yet known to be merged, now
  kMemoryBytes,      // of rows, unsent updates and index, now
  kNumCounters
};
inline constexpr std::array<const char*, Counters<CacheCounter>::kSize> kCacheCounterNames = {
    "lookups",
    "ids",
    "keys",
    "hits",
    "hit_ids",
    "stale_hits",
    "checks_spared",
    "rows_unasked",
    "misses",
    "initialized",
    "visitors",
    "updates",
    "nonfinite_skipped",
    "rows_pushed",
    "updates_pushed",
    "evictions",
    "rows_to_host",
    "rows_from_host",
    "dirty_evictions",
    "updates_lost",
    "updates_undone",
    "messages",
    "bytes_up",
    "bytes_up_push",
    "bytes_down",
    "bytes_to_device",
    "bytes_from_device",
    "rows",
    "pending",
    "memory_bytes"};

constexpr int64_t kMostRows = 0x7fffffff;  // of a cache
constexpr int64_t kSharedMemory = -1;      // as a capacity

struct CacheConfig {
  RowConfig rows;
  int64_t capacity = 0;  // rows; 0: no cache; kSharedMemory: what fits into its part of memory
  MemoryShare* memory = nullptr;  // with kSharedMemory; outlives the cache
  int64_t host_capacity = 0;      // rows that gave way on a device and are kept on the host
  Policy policy = Policy::kLfu;
  // Both in units of the clock.
  int64_t read_bound = kUnbounded;   // updates of others that a read may miss, beyond those unsent
  int64_t write_bound = kUnbounded;  // own updates of a row that a shard may lack
  int64_t due_bound = kUnbounded;    // at most that: with how many a row is due; unbounded: that
  Nonfinite nonfinite = Nonfinite::kError;
  bool half = false;         // values, gradients and changes of values travel as bfloat16
  bool synchronous = false;  // the steps of all workers count as one, and both bounds are 0

  // Of what is the same for both kinds of caches.
  Status Check() const;

  int64_t when_due() const { return due_bound == kUnbounded ? write_bound : due_bound; }

  // Whether steps count on the watch of shards (link/watch.h). The paper's clock has pending
  // updates in what a check says, which a shard does not know. Rows that may miss nothing would
  // come again and again, but where they change only between two steps.
  bool watches() const {
    return capacity != 0 && (read_bound >= 1 || synchronous) && rows.clock != ClockRule::kLamport;
  }

  // Whether a row that is pushed comes back: under Lamport clocks, and where the shard rounds what
  // it merges, since roundings that the worker did not hear of would add up.
  bool pushed_rows_come_back() const { return rows.clock == ClockRule::kLamport || rows.half; }
};

// What an update says that skips no gradient with NaN or infinity.
Status NonfiniteGradients(int64_t num_nonfinite, int64_t num_keys);

// Counts a lookup. hits: of the keys; hit_ids: of the ids.
void CountLookup(int64_t ids, int64_t keys, int64_t hits, int64_t hit_ids,
                 Counters<CacheCounter>* counters);
// Counts a request, if there was one. num_spared: hits that it does not ask about.
void CountRequest(const RequestBytes& bytes, int64_t num_spared, Counters<CacheCounter>* counters);

class RowCache;

// The ids of a lookup. One of the two is enough for a cache on the host, which otherwise finds the
// keys itself. A cache on a device needs the ids.
struct LookupIds {
  const int64_t* ids = nullptr;  // (num_ids), host memory
  int64_t num_ids = 0;
  std::shared_ptr<const UniqueIds> unique = nullptr;
};

// The lines of one lookup, kept in the cache while this lives. It may die on any thread.
class RowTicket {
 public:
  static constexpr const char* kVariantName = "Het>Ticket";

  virtual ~RowTicket() = default;
  virtual const RowCache* owner() const = 0;
  virtual int64_t num_ids() const = 0;
  // Installed, and yet not done: AskAgain.
  virtual bool incomplete() const = 0;
};

// The rows of a ticket as they were pooled, kept for their update and for the gradients of weights.
class PooledRows {
 public:
  virtual ~PooledRows() = default;

  // Whether these are the rows of a ticket.
  virtual bool IsOf(const RowTicket& ticket) const = 0;

  // One update of each key of the ticket. ticket: the one whose rows these are. gradients: of the
  // outputs, where the cache has its rows.
  virtual Status Update(RowTicket* ticket, const std::vector<const float*>& gradients,
                        float learning_rate, const ParallelFor& parallel_for) = 0;

  // What PooledGradients takes on the host. rows: stays empty where the pooling has the rows, or no
  // gradient depends on them.
  virtual Status Read(std::shared_ptr<const UniqueIds>* ids, std::vector<float>* rows) const = 0;
};

// Every function may run concurrently with every other. Tickets: of this cache.
class RowCache {
 public:
  using Stats = std::array<int64_t, Counters<CacheCounter>::kSize>;

  virtual ~RowCache() = default;

  // Whether Lookup needs ids as they are, and values and gradients are in a device's memory.
  virtual bool on_device() const = 0;
  virtual int dim() const = 0;
  virtual int num_shards() const = 0;
  virtual uint64_t id() const = 0;

  // ---- Lookup

  // Requests for what the cache lacks of the ids. fresh: no cached row may have missed an update
  // that its shard has merged, whatever the bound.
  virtual Status Lookup(const LookupIds& ids, bool fresh, const ParallelFor& parallel_for,
                        const AllocateRequest& allocate, std::shared_ptr<RowTicket>* ticket) = 0;

  // replies: (num_shards), empty where no request went; all are taken, or on an error none.
  // rows: how many came.
  virtual Status Install(RowTicket* ticket, const std::vector<ReplyBytes>& replies,
                         const ParallelFor& parallel_for, int64_t* rows) = 0;

  // Requests for the rows that an installed ticket lacks, or with the pushes that it waited for in
  // vain. Their replies are installed like the first, and may say again that it is incomplete.
  virtual Status AskAgain(RowTicket* ticket, const AllocateRequest& allocate) = 0;

  // The rows as they are now. ticket: installed. out: (num_ids, dim).
  virtual Status Gather(const RowTicket& ticket, const ParallelFor& parallel_for, float* out) = 0;

  // The rows as they are now, pooled. ticket: installed. pooling: of its ids. outputs: as of
  // Pooling::Pool, where the cache has its rows.
  virtual Status Pool(const std::shared_ptr<RowTicket>& ticket, std::shared_ptr<Pooling> pooling,
                      const ParallelFor& parallel_for, const std::vector<float*>& outputs,
                      std::shared_ptr<PooledRows>* pooled) = 0;

  // ---- Updates

  // One update of each key of the ticket. gradients: (num_ids, dim).
  virtual Status Update(RowTicket* ticket, const float* gradients, float learning_rate,
                        const ParallelFor& parallel_for) = 0;

  // Requests that push what keeps rows of the ticket from another update: write_bound of theirs are
  // not known to be merged. When the ticket that is made is complete, there is room.
  virtual Status MakeRoom(const RowTicket& ticket, const AllocateRequest& allocate,
                          std::shared_ptr<RowTicket>* made) = 0;

  // Requests that push what is due, and wait for what is under way; or (all) that push everything
  // not yet sent, and what is under way once more. When the ticket is complete, the shards have it.
  virtual Status Flush(bool all, const AllocateRequest& allocate,
                       std::shared_ptr<RowTicket>* ticket) = 0;

  // The unsent updates of those of the keys that have some travel with the next request. keys:
  // (num_keys). Of a cache on the host.
  virtual Status PushRows(const int64_t* keys, int64_t num_keys) {
    (void)keys;
    return FailedPrecondition("rows on a device are not pushed by key: ", num_keys, " keys");
  }
  // keeps: updates from now on stay here, whatever the write bound, until their row leaves the
  // cache, PushRows, or a flush of everything. Rows that are here are read whatever they miss,
  // unless steps are synchronous. When this ends, all unsent updates travel with the next request,
  // and from then on the bounds hold. Of a cache on the host.
  virtual Status KeepUpdates(bool keeps) {
    return FailedPrecondition("rows on a device do not keep their updates: keeps = ", keeps);
  }

  // ---- Closures

  // closure: a run of that number, until nobody holds it any more. Cancelled while another one is.
  virtual Status BeginClosure(int64_t number, std::shared_ptr<Closure>* closure) = 0;
  // Requests that push everything, with the closure's number. done: no closure up to this number
  // will be run again.
  virtual Status CommitClosure(const Closure& closure, int64_t done,
                               const AllocateRequest& allocate,
                               std::shared_ptr<RowTicket>* ticket) = 0;
  // All replies to them were installed. Cancelled: some shard has lost what it should have merged,
  // so the closure must be run again.
  virtual Status EndClosure(const Closure& closure) = 0;

  // ---- Reset and end

  // Forgets all rows, and with them what was not sent.
  virtual Status Clear() = 0;

  // Has every later lookup and update fail: the process is about to end, and what is made after its
  // last flush would be lost.
  virtual void Freeze() = 0;

  // ---- Statistics

  // All counters, as of one moment.
  virtual Status GetStats(Stats* stats) = 0;

  // (num_shards): of the table, as each shard last said; 0: never heard.
  virtual std::vector<uint64_t> incarnations() = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_ROW_CACHE_H_
