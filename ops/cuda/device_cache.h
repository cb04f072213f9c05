// A worker's cache whose rows lie in a device's memory: the store's verbs (het_cuda.h) joined to
// the link and the messages. What it promises is what Cache does (ops/core/cache/cache.h,
// docs/protocol.md), and so is the way of a step:
//   Lookup, (the runtime carries the requests), Install, Gather, Update; Flush.
// Values and gradients stay on the device. To it go the ids and the rows that the shards sent; from
// it come the keys that messages name, and what is pushed. Rows that their shards watch are named
// in none, so a step that hits only such rows has no key come to the host.
//
// Unlike Cache it has a line only for rows that are there with their slots, so a row beyond the
// read bound always comes back whole, and updates that wait in an outbox have no line. A key that
// is not worth a line, or finds none, is a visitor (visitors.h). A row that gave way to another is
// kept on the host (host_rows.h), if there is place, and checked like a line when it comes again.

#ifndef HET_TF_OPS_CUDA_DEVICE_CACHE_H_
#define HET_TF_OPS_CUDA_DEVICE_CACHE_H_

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ops/core/cache/admission.h"
#include "ops/core/cache/own_updates.h"
#include "ops/core/cache/row_cache.h"
#include "ops/core/link/ask.h"
#include "ops/core/link/link.h"
#include "ops/core/link/watch.h"
#include "ops/core/mutex.h"
#include "ops/core/pooling.h"
#include "ops/core/row/row_config.h"
#include "ops/core/stats.h"
#include "ops/core/status.h"
#include "ops/core/wire/reply.h"
#include "ops/cuda/block.h"
#include "ops/cuda/het_cuda.h"
#include "ops/cuda/host_rows.h"
#include "ops/cuda/outbox.h"
#include "ops/cuda/visitors.h"

namespace het_tf {
namespace cuda {

// Keys that were looked up together, and what was found. Their lines are pinned.
struct Found {
  explicit Found(DeviceMemory* memory) : device(memory) {}

  // What the host reads of the device's counts.
  struct Nums {
    int32_t keys, misses, checks;
  };

  Block device, pinned{nullptr};
  Block rows{nullptr};  // pinned: rows that came, on their way to the device
  // In device memory, all for at least num_ids:
  HetBatch batch = {};
  HetList misses = {}, checks = {};
  int32_t* slots = nullptr;          // (n)
  HetNewcomer* newcomers = nullptr;  // (n): of misses
  int32_t* victims = nullptr;        // (n)
  float* evicted = nullptr;          // (n): uses of what gave way to the misses
  Nums* nums = nullptr;              // the lists' and the batch's
  // In pinned memory:
  Nums* nums_here = nullptr;              // (1)
  int64_t* miss_keys = nullptr;           // (nums.misses)
  int64_t* check_keys = nullptr;          // (nums.checks)
  int64_t* check_bases = nullptr;         // (nums.checks)
  int32_t* check_index = nullptr;         // (nums.checks): which of the batch's keys
  int64_t* miss_bases = nullptr;          // (nums.misses)
  int32_t* miss_index = nullptr;          // (nums.misses)
  int32_t* slots_here = nullptr;          // (nums.keys)
  HetNewcomer* newcomers_here = nullptr;  // (nums.misses)
  int64_t* evicted_keys = nullptr;        // (nums.misses)
  float* evicted_here = nullptr;          // (nums.misses)
  uint8_t* marked_here = nullptr;         // (num_shards): install's
  Nums here = {0, 0, 0};
  int32_t num_taken = 0;     // of the misses' visitors: those that were taken,
  int32_t num_visitors = 0;  // and those that are kept
  bool holds_lines = false;
};

class DeviceCache;

// What a ticket holds of its cache.
struct Holds {
  std::unique_ptr<Found> found, forced;
  std::vector<UnansweredRequest> requests;
};

class DeviceTicket : public RowTicket {
 public:
  explicit DeviceTicket(std::shared_ptr<DeviceCache> cache);
  ~DeviceTicket() override;
  DeviceTicket(const DeviceTicket&) = delete;
  DeviceTicket& operator=(const DeviceTicket&) = delete;

  const RowCache* owner() const override;
  int64_t num_ids() const override { return found_ == nullptr ? 0 : found_->batch.num_ids; }
  bool incomplete() const override { return lacks_rows_ || overtook_; }

 private:
  friend class DeviceCache;

  // What rows that come are of, in their order. The last kind no query is about.
  enum List : int32_t { kStep, kForced, kUnasked, kNumLists };
  // What a query is about.
  struct Subject {
    int64_t key, base;  // base: of checks
    List list;
    int32_t at;  // which of the batch's keys
  };
  struct Asked : het_tf::Asked {
    std::vector<Subject> subjects;  // (queries)
  };

  const std::shared_ptr<DeviceCache> cache_;
  std::unique_ptr<Found> found_;   // of the ids; of a flush nullptr
  std::unique_ptr<Found> forced_;  // lamport: of other keys that this pushes, or nullptr
  std::vector<Asked> asked_;       // (num_shards)
  bool taken_ = false;             // the replies: they are not taken again
  bool installed_ = false;         // their rows
  bool lacks_rows_ = false;        // of a shard that has restarted, those that were not asked about
  bool overtook_ = false;          // see Asked
  int asked_again_ = 0;            // times
  std::vector<int64_t> keys_in_;   // (num_shards): how many of its keys each has
  std::list<Holds> released_;      // (1): of its end, which gets no memory
  // Rows of misses that the host had kept, for those that no shard sends.
  std::vector<int32_t> kept_of_;  // (keys, or none): which of them a key's is, or -1
  std::vector<int64_t> kept_bases_;
  std::vector<float> kept_rows_;  // (kept_bases_, row_dim)
  int64_t num_forgets_ = 0;       // the cache's then
};

// What a pooled lookup hands to its update: the bags of its ids, on the device.
class DeviceBags : public PooledRows {
 public:
  // ticket: of the cache.
  DeviceBags(std::shared_ptr<DeviceCache> cache, std::shared_ptr<RowTicket> ticket,
             std::shared_ptr<const Pooling> pooling);

  bool IsOf(const RowTicket& ticket) const override { return &ticket == ticket_.get(); }
  Status Update(RowTicket* ticket, const std::vector<const float*>& gradients, float learning_rate,
                const ParallelFor&) override;
  // Waits for the device. The keys of ids are in the order that the rows have.
  Status Read(std::shared_ptr<const UniqueIds>* ids, std::vector<float>* rows) const override;

 private:
  friend class DeviceCache;

  // copy_there(from, bytes, to): to the device.
  using CopyThere = std::function<int(const void*, size_t, void*)>;
  Status Place(int64_t num_keys, int dim, const CopyThere& copy_there);

  const std::shared_ptr<DeviceCache> cache_;
  const std::shared_ptr<RowTicket> ticket_;
  Block block_;  // of the cache's memory
  const std::shared_ptr<const Pooling> pooling_;
  HetBags bags_ = {};
  float** pointers_ = nullptr;  // (num_bags): to outputs, then to gradients
};

// One lock orders what runs concurrently, and one stream what it has the device do. Device errors
// are ResourceExhausted where memory is short, the host's too, else FailedPrecondition; where
// memory is short no update is lost, and the call can be made again. What takes a ParallelFor does
// without.
class DeviceCache : public RowCache, public std::enable_shared_from_this<DeviceCache> {
 public:
  // config.capacity: lines, at least 1. stream: of the calling thread's device, as is the memory;
  // it must outlive the cache.
  static Status Create(const CacheConfig& config, HetStream stream,
                       std::shared_ptr<DeviceMemory> memory, std::shared_ptr<DeviceCache>* cache);
  // The most lines that take no more than so many bytes, at least 1. ResourceExhausted: they do not
  // even hold those of one bucket.
  static Status LinesWithin(const CacheConfig& config, int64_t bytes, int64_t* lines);
  ~DeviceCache() override;

  bool on_device() const override { return true; }
  int dim() const override { return kit_.optimizer->dim(); }
  int num_shards() const override { return config_.rows.num_shards; }
  uint64_t id() const override { return id_; }
  // The capacity, rounded up to whole buckets.
  int64_t lines() {
    MutexLock lock(&mutex_);
    return info_.lines;
  }

  // ---- Lookup

  // Waits for the device: the host writes the requests. Once where there is nothing to ask.
  Status Lookup(const LookupIds& ids, bool fresh, const ParallelFor&,
                const AllocateRequest& allocate, std::shared_ptr<RowTicket>* ticket) override;

  // Waits for the device only where a shard started again, or to get pinned memory for more rows
  // than ever before.
  Status Install(RowTicket* ticket, const std::vector<ReplyBytes>& replies, const ParallelFor&,
                 int64_t* rows) override;

  // Waits for the device if rows are missing. Its requests push nothing new.
  Status AskAgain(RowTicket* ticket, const AllocateRequest& allocate) override;

  // out: device memory, written in the stream's order.
  Status Gather(const RowTicket& ticket, const ParallelFor&, float* out) override;

  // outputs: device memory, written in the stream's order. Waits for the device.
  Status Pool(const std::shared_ptr<RowTicket>& ticket, std::shared_ptr<Pooling> pooling,
              const ParallelFor&, const std::vector<float*>& outputs,
              std::shared_ptr<PooledRows>* pooled) override;

  // ---- Updates

  // gradients: device memory, there by the stream's order. Waits for the device: what is due goes
  // to the outboxes.
  Status Update(RowTicket* ticket, const float* gradients, float learning_rate,
                const ParallelFor&) override;

  // Nothing to say: it is not kept which of a row's updates are merged.
  Status MakeRoom(const RowTicket& ticket, const AllocateRequest& allocate,
                  std::shared_ptr<RowTicket>* made) override;
  Status Flush(bool all, const AllocateRequest& allocate,
               std::shared_ptr<RowTicket>* ticket) override;

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
  friend class DeviceBags;
  friend class DeviceTicket;

  struct Shard {
    Link link;
    Watching watching;
    Outbox outbox;
    int64_t num_open = 0;  // requests whose tickets live and have no reply yet
  };
  using List = DeviceTicket::List;
  using Subject = DeviceTicket::Subject;
  using Asked = DeviceTicket::Asked;

  // Rows that come to the host at a time, when they are collected for a push. (Not measured: enough
  // that the device is not idle for long between two of them, and 4 MB at d=64.)
  static constexpr int64_t kPushRows = 16384;

  // What a lookup asks of a shard.
  struct Questions {
    std::vector<Subject> checks, full, values;
    bool watches = false;    // rows that are watched are not checked
    int64_t num_spared = 0;  // such rows
    bool pushes = true;      // what waits in the outbox
  };

  // Where the gradients of a step's keys go: as of het_segment_sum.
  struct Summed {
    float* sums;
    float* squares;
    int64_t* num_nonfinite;
    void* scratch;
  };

  // Numbers that verbs leave on the device for the host.
  struct Counts {
    int64_t lines, missed_ids, evicted, nonfinite, updates_lost;
    int64_t unasked;                    // rows of use, in all
    int32_t first_slots, second_slots;  // of a HetSlots each
  };

  // What a reply brought.
  struct Came {
    int64_t refreshed, initialized, kept;
    int64_t unused;  // slots that were asked for, of rows that nobody has updated
  };

  // Rows that came, on their way to the device.
  struct Arriving {
    // In a block of memory, the same pinned and on the device:
    struct Arrays {
      float* rows;           // (rows, row_stride)
      int64_t* bases;        // (rows)
      int32_t* index;        // (rows): which of the batch's keys; of those unasked for their slots
      int64_t* keys;         // (rows that nobody asked for)
      float* values;         // (values, dim)
      int64_t* value_bases;  // (values)
      int32_t* value_index;  // (values)
    } here = {}, there = {};
    size_t bytes = 0;                            // 0: none came
    int64_t first[DeviceTicket::kNumLists + 1];  // by list; the last: all rows
    int64_t next[DeviceTicket::kNumLists];
    int64_t num_values = 0, next_value = 0;

    int64_t count(List list) const { return first[list + 1] - first[list]; }
  };

  // Rows that are evicted, on their way to the host.
  struct Leaving {
    int32_t* slots;  // (kPushRows)
    int64_t* bases;  // (kPushRows)
    float* rows;     // (kPushRows, row_stride)
  };

  DeviceCache(const CacheConfig& config, RowKit kit, HetStream stream,
              std::shared_ptr<DeviceMemory> memory);

  // Copies in the stream's order, which are counted.
  int ToDevice(const void* from, size_t bytes, void* to);
  int FromDevice(const void* from, size_t bytes, void* to);

  uint32_t ShardOf(int64_t key) const;
  Status UpdateSummed(DeviceTicket* ticket, float learning_rate,
                      const std::function<int(const Found&, const Summed&)>& sum);
  Status ReadPooled(const DeviceTicket& ticket, const DeviceBags& bags, std::vector<int64_t>* ids,
                    std::vector<float>* rows);

  // Nobody else has the cache yet.
  Status Allocate() HET_NO_THREAD_SAFETY_ANALYSIS;
  Status Begin();
  Status Wait();
  Status ReadCounts() HET_REQUIRES(mutex_);
  Status TakeReleased() HET_REQUIRES(mutex_);
  Status LeaveClosure() HET_REQUIRES(mutex_);
  Status ForgetShard(int shard, int num_shards, int64_t* updates_lost) HET_REQUIRES(mutex_);
  Status NewFound(int64_t n, std::unique_ptr<Found>* found) HET_REQUIRES(mutex_);
  Status MarkShards(const uint8_t* marked) HET_REQUIRES(mutex_);
  Status BeginWatches(std::vector<Questions>* questions) HET_REQUIRES(mutex_);
  Status Find(const int64_t* ids, bool spares, Found* found) HET_REQUIRES(mutex_);
  Status TakeVisitors(Found* found) HET_REQUIRES(mutex_);
  Status MakeLines(DeviceTicket* ticket, std::vector<char>* has_line) HET_REQUIRES(mutex_);
  Status FindLate(const Found& found) HET_REQUIRES(mutex_);
  Status KeepEvicted(const Found& found) HET_REQUIRES(mutex_);
  bool TakeKept(const Subject& miss, DeviceTicket* ticket, int64_t* base) HET_REQUIRES(mutex_);
  bool FillsIn(const DeviceTicket& ticket, const Asked& asked, const ReplyView& reply, int64_t q,
               int64_t full) const;
  std::vector<int64_t> WaitingKeys() const HET_REQUIRES(mutex_);
  std::vector<int64_t> KeysToForce() const HET_REQUIRES(mutex_);
  static int64_t AskInFull(const std::unordered_set<int64_t>& keys, std::vector<Subject>* subjects,
                           std::vector<Subject>* full);
  void AskForWaiting(std::vector<Questions>* questions) HET_REQUIRES(mutex_);
  Status AskForLacking(const DeviceTicket& ticket, std::vector<Questions>* questions)
      HET_REQUIRES(mutex_);
  Status WriteFlush(bool all, const AllocateRequest& allocate, DeviceTicket* ticket)
      HET_REQUIRES(mutex_);
  Status Force(const std::vector<int64_t>& keys, DeviceTicket* ticket,
               std::vector<Questions>* questions) HET_REQUIRES(mutex_);
  void Ask(const std::vector<char>& has_line, int64_t read_bound, DeviceTicket* ticket,
           std::vector<Questions>* questions) HET_REQUIRES(mutex_);
  void SendRequest(int shard, Link::Carry carry, int64_t read_bound, Questions questions,
                   const AllocateRequest& allocate, DeviceTicket* ticket) HET_REQUIRES(mutex_);
  Status CollectLines(const int32_t* slots, int64_t n) HET_REQUIRES(mutex_);
  Status CollectGradients(const Found& found, const int32_t* keys, int64_t n, const float* sums,
                          float learning_rate) HET_REQUIRES(mutex_);
  // The rows in push_there_, to the outboxes; where memory is short, none of them.
  Status TakePushed(int64_t n, bool gradients, float learning_rate) HET_REQUIRES(mutex_);

  Status RestartShard(int shard, const Link::Epoch& epoch) HET_REQUIRES(mutex_);
  Status Reserve(DeviceTicket* ticket, const std::vector<ReplyView>& replies, Arriving* arriving)
      HET_REQUIRES(mutex_);
  Came FillRows(int shard, const DeviceTicket& ticket, const ReplyView& reply,
                Link::Standing standing, Arriving* arriving) const HET_REQUIRES(mutex_);
  Status TakeReply(int shard, DeviceTicket* ticket, const ReplyView& reply, const Came& came)
      HET_REQUIRES(mutex_);
  void GiveUpWatches() HET_REQUIRES(mutex_);
  Status WatchChecked(const DeviceTicket& ticket) HET_REQUIRES(mutex_);
  Status Upload(const DeviceTicket& ticket, const Arriving& arriving) HET_REQUIRES(mutex_);

  // Needs nothing: a ticket's end.
  void Release(DeviceTicket* ticket);

  const CacheConfig config_;
  const RowKit kit_;
  const uint64_t id_;
  Asker asker_;  // its cache_id changes under mutex_
  const HetStream stream_;
  const std::shared_ptr<DeviceMemory> memory_;
  int device_ = 0;

  Mutex mutex_;
  HetStore* store_ HET_GUARDED_BY(mutex_) = nullptr;
  HetStoreInfo info_ HET_GUARDED_BY(mutex_) = {};
  Block store_block_ HET_GUARDED_BY(mutex_);  // the store's
  std::unique_ptr<Block> visitors_block_ HET_GUARDED_BY(mutex_);
  // Of one call, and its arrays that the next does not read.
  Block scratch_ HET_GUARDED_BY(mutex_);
  Block counts_device_ HET_GUARDED_BY(mutex_);
  Block counts_pinned_ HET_GUARDED_BY(mutex_){nullptr};
  std::vector<uint8_t> marked_ HET_GUARDED_BY(mutex_);  // (num_shards): the next MarkShards'
  Block shards_device_ HET_GUARDED_BY(mutex_);
  Block shards_pinned_ HET_GUARDED_BY(mutex_){nullptr};
  HetShards shards_there_ HET_GUARDED_BY(mutex_) = {};      // as MarkShards marked them
  int32_t* spared_there_ HET_GUARDED_BY(mutex_) = nullptr;  // (num_shards, HET_SPREAD): het_list's
  Block push_device_ HET_GUARDED_BY(mutex_);                // (kPushRows)
  Block push_pinned_ HET_GUARDED_BY(mutex_){nullptr};
  HetPush push_there_ HET_GUARDED_BY(mutex_) = {};
  HetPush push_here_ HET_GUARDED_BY(mutex_) = {};
  Block arriving_ HET_GUARDED_BY(mutex_);  // of one install
  HostRows host_rows_ HET_GUARDED_BY(mutex_);
  // How often rows were forgotten: those that tickets hold are old then.
  int64_t num_forgets_ HET_GUARDED_BY(mutex_) = 0;
  Block leaving_device_ HET_GUARDED_BY(mutex_);  // (kPushRows), where host_rows_ is enabled
  Block leaving_pinned_ HET_GUARDED_BY(mutex_){nullptr};
  Leaving leaving_there_ HET_GUARDED_BY(mutex_);
  Leaving leaving_here_ HET_GUARDED_BY(mutex_);
  std::vector<int64_t> rows_in_ HET_GUARDED_BY(mutex_);  // (num_shards): TakePushed's
  Admission admission_ HET_GUARDED_BY(mutex_);
  Visitors visitors_ HET_GUARDED_BY(mutex_);
  int64_t visitors_there_ HET_GUARDED_BY(mutex_) = 0;  // that there is device memory for
  std::vector<Shard> shards_ HET_GUARDED_BY(mutex_);   // (num_shards)
  // Of steps that are over, with room for all; how many those and the steps' are.
  std::vector<std::unique_ptr<Found>> spare_ HET_GUARDED_BY(mutex_);
  size_t num_found_ HET_GUARDED_BY(mutex_) = 0;
  Counters<CacheCounter> counters_;
  OwnUpdates own_ HET_GUARDED_BY(mutex_){&counters_};

  // What dead tickets held. A ticket may die on any thread, at any time, and must not wait.
  Mutex released_mutex_;
  std::list<Holds> released_ HET_GUARDED_BY(released_mutex_);
};

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_DEVICE_CACHE_H_
