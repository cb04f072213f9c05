// A worker's cache of embedding rows: lookups, updates and the messages that keep rows within their
// staleness bounds (HET, VLDB 2022; the rules are docs/protocol.md).
//
// The way of a step:
//   Lookup   finds or makes a line for each key and writes one request for each shard;
//   (the runtime carries the requests to the shards: Table::Sync)
//   Install  takes the replies;
//   Gather   hands out the rows, when the step starts;
//   MakeRoom before Update, where steps overlap: writes requests if a row of the step has as many
//            updates that are not merged as write_bound says;
//   Update   applies the optimizer to the lines;
//   Flush    writes requests that only push.
// From Lookup on, a Ticket holds the step's lines. Steps may overlap in any way.
//
// Steps that count once, however often they are run (link/closures.h), lie between BeginClosure and
// EndClosure. Until CommitClosure nothing is pushed: what would be waits in the outbox, rows that
// leave the cache with it. What a run that did not end has updated is undone: the cache starts
// anew, as in a process that was just started.
//
// A row that is not worth a line comes as a value alone (a visitor), and its gradient goes up. With
// a capacity of 0 all rows do: that is training without a cache.

#ifndef HET_TF_OPS_CORE_CACHE_CACHE_H_
#define HET_TF_OPS_CORE_CACHE_CACHE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/core/cache/admission.h"
#include "ops/core/cache/own_updates.h"
#include "ops/core/cache/row_cache.h"
#include "ops/core/cache/store.h"
#include "ops/core/link/ask.h"
#include "ops/core/link/link.h"
#include "ops/core/link/watch.h"
#include "ops/core/mutex.h"
#include "ops/core/parallel.h"
#include "ops/core/pooling.h"
#include "ops/core/row/row_config.h"
#include "ops/core/stats.h"
#include "ops/core/status.h"
#include "ops/core/unique_ids.h"

namespace het_tf {

class Cache;

class Ticket : public RowTicket {
 public:
  Ticket(std::shared_ptr<Cache> cache, std::shared_ptr<const UniqueIds> ids);
  ~Ticket() override;
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  const RowCache* owner() const override;
  int64_t num_ids() const override { return ids_->num_ids(); }
  bool incomplete() const override { return incomplete_; }
  const UniqueIds& ids() const { return *ids_; }

 private:
  friend class Cache;

  struct Asked : het_tf::Asked {
    std::vector<uint32_t> slots;  // (queries)
  };

  const std::shared_ptr<Cache> cache_;
  const std::shared_ptr<const UniqueIds> ids_;
  std::vector<uint32_t> slots_;      // (ids.num_keys())
  std::vector<uint32_t> also_held_;  // lines of other keys
  std::vector<Asked> asked_;         // (num_shards)
  bool installed_ = false;
  bool incomplete_ = false;
  int asked_again_ = 0;  // times
};

// Every public function may run concurrently with every other: one lock orders them.
class Cache : public RowCache, public std::enable_shared_from_this<Cache> {
 public:
  static Status Create(const CacheConfig& config, std::shared_ptr<Cache>* cache);

  bool on_device() const override { return false; }
  int dim() const override { return kit_.optimizer->dim(); }
  int num_shards() const override { return config_.rows.num_shards; }
  uint64_t id() const override { return id_; }
  // Rows that it may keep, as things are.
  int64_t capacity() {
    MutexLock lock(&mutex_);
    return store_.capacity();
  }

  // ---- Lookup

  Status Lookup(const LookupIds& ids, bool fresh, const ParallelFor& parallel_for,
                const AllocateRequest& allocate, std::shared_ptr<RowTicket>* ticket) override;
  Status Install(RowTicket* ticket, const std::vector<ReplyBytes>& replies,
                 const ParallelFor& parallel_for, int64_t* rows) override;
  Status AskAgain(RowTicket* ticket, const AllocateRequest& allocate) override;
  Status Gather(const RowTicket& ticket, const ParallelFor& parallel_for, float* out) override;
  Status Pool(const std::shared_ptr<RowTicket>& ticket, std::shared_ptr<Pooling> pooling,
              const ParallelFor& parallel_for, const std::vector<float*>& outputs,
              std::shared_ptr<PooledRows>* pooled) override;

  // ---- Updates

  Status Update(RowTicket* ticket, const float* gradients, float learning_rate,
                const ParallelFor& parallel_for) override;
  Status MakeRoom(const RowTicket& ticket, const AllocateRequest& allocate,
                  std::shared_ptr<RowTicket>* made) override;
  Status Flush(bool all, const AllocateRequest& allocate,
               std::shared_ptr<RowTicket>* ticket) override;
  Status PushRows(const int64_t* keys, int64_t num_keys) override;
  Status KeepUpdates(bool keeps) override;

  // ---- Closures

  Status BeginClosure(int64_t number, std::shared_ptr<Closure>* closure) override;
  Status CommitClosure(const Closure& closure, int64_t done, const AllocateRequest& allocate,
                       std::shared_ptr<RowTicket>* ticket) override;
  Status EndClosure(const Closure& closure) override;

  // ---- Reset and end

  Status Clear() override;
  void Freeze() override;

  // ---- Statistics

  Status GetStats(Stats* stats) override;
  std::vector<uint64_t> incarnations() override;

 private:
  friend class Ticket;

  struct Shard {
    Link link;
    Watching watching;
    std::vector<uint32_t> outbox;  // lines to be pushed with the next request
  };

  // What Pool hands out.
  class Pooled;

  // What a lookup asks of a shard.
  struct Questions {
    std::vector<uint32_t> checks, value_checks, full, values;  // lines
    bool watches = false;    // lines that are watched are not checked
    int64_t num_spared = 0;  // such lines
  };

  Cache(const CacheConfig& config, RowKit kit);

  // gradients: of the ticket's ids.
  Status UpdateSummed(Ticket* ticket, const GradientSums& gradients, float learning_rate,
                      const ParallelFor& parallel_for);

  bool Due(const Line& line) const HET_REQUIRES(mutex_);
  bool HasRoom(const Line& line) const;
  void TakeReleased() HET_REQUIRES(mutex_);
  void Trim() HET_REQUIRES(mutex_);
  void Enqueue(uint32_t slot) HET_REQUIRES(mutex_);
  void Dismiss(uint32_t slot) HET_REQUIRES(mutex_);
  int64_t MakeMissing(Ticket* ticket, bool all_stay, std::vector<char>* asks_in_full)
      HET_REQUIRES(mutex_);
  bool Watches(int shard) HET_REQUIRES(mutex_);
  void Unwatch(Line* line) HET_REQUIRES(mutex_);
  void Ask(uint32_t slot, bool in_full, int64_t read_bound, Questions* questions)
      HET_REQUIRES(mutex_);
  int64_t BaseAfterCut(const Line& line) const HET_REQUIRES(mutex_);
  void ForcePushedRows(const Shard& shard, Questions* questions, Ticket* ticket)
      HET_REQUIRES(mutex_);
  PushHeader CountOutbox(const Shard& shard) const HET_REQUIRES(mutex_);
  NewPush CutPush(Shard* shard) HET_REQUIRES(mutex_);
  void WritePush(Shard* shard, const PushHeader& header, char* bytes) HET_REQUIRES(mutex_);
  void SendRequest(int shard, Link::Carry carry, int64_t read_bound, Questions questions,
                   const AllocateRequest& allocate, Ticket* ticket) HET_REQUIRES(mutex_);
  void Acknowledge(Shard* shard, uint64_t number, uint64_t sequence, bool counted)
      HET_REQUIRES(mutex_);
  void ForgetRow(uint32_t slot) HET_REQUIRES(mutex_);
  void ForgetLine(uint32_t slot, CacheCounter counter) HET_REQUIRES(mutex_);
  void ForgetShard(int shard, CacheCounter counter) HET_REQUIRES(mutex_);
  bool Travels(const Line& line) const HET_REQUIRES(mutex_) {
    return line.has(Line::kQueued) && !own_.holds_back();
  }
  void LeaveClosure() HET_REQUIRES(mutex_);
  void RestartShard(int shard, const Link::Epoch& epoch) HET_REQUIRES(mutex_);
  void InstallOld(const Ticket::Asked& asked, const ReplyView& reply) HET_REQUIRES(mutex_);
  void InstallReply(int shard, const Ticket::Asked& asked, bool watches, const ReplyView& reply,
                    const ParallelFor& parallel_for) HET_REQUIRES(mutex_);

  // Needs nothing: a ticket's end.
  void Release(const Ticket& ticket);

  const CacheConfig config_;
  const RowKit kit_;
  const uint64_t id_;
  Asker asker_;  // its cache_id changes under mutex_

  Mutex mutex_;
  Store store_ HET_GUARDED_BY(mutex_);
  Admission admission_ HET_GUARDED_BY(mutex_);
  std::vector<Shard> shards_ HET_GUARDED_BY(mutex_);  // (num_shards)
  bool keeps_updates_ HET_GUARDED_BY(mutex_) = false;
  Counters<CacheCounter> counters_;
  OwnUpdates own_ HET_GUARDED_BY(mutex_){&counters_};

  // What dead tickets held. A ticket may die on any thread, at any time, and must not wait.
  struct Released {
    std::vector<uint32_t> slots;
    std::vector<UnansweredRequest> requests;
  };
  Mutex released_mutex_;
  Released released_ HET_GUARDED_BY(released_mutex_);
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_CACHE_H_
