// A worker's cache whose rows lie in a device's memory: the store's verbs (het_cuda.h) joined to
// the link and the messages. What it promises is what Cache does (ops/core/cache/cache.h, DESIGN
// section 3), and so is the way of a step:
//   Lookup, (the runtime carries the requests), Install, Gather, Update; Flush.
// Ids, values and gradients stay on the device. To the host come the keys of a step, as messages
// name them, and what is pushed; to the device go the rows that the shards sent.
//
// Unlike Cache it has a line only for rows that are there with their slots, so a row beyond the
// read bound always comes back whole, and updates that wait in an outbox have no line.

#ifndef HET_TF_OPS_CUDA_DEVICE_CACHE_H_
#define HET_TF_OPS_CUDA_DEVICE_CACHE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ops/core/cache/admission.h"
#include "ops/core/cache/cache.h"
#include "ops/core/link/link.h"
#include "ops/core/row/row_config.h"
#include "ops/core/stats.h"
#include "ops/core/status.h"
#include "ops/core/wire/reply.h"
#include "ops/cuda/block.h"
#include "ops/cuda/het_cuda.h"
#include "ops/cuda/outbox.h"

namespace het_tf {
namespace cuda {

// Keys that were looked up together, and what was found. Their lines are pinned.
struct Found {
  // What the host reads of the device's counts.
  struct Nums {
    int32_t keys, misses, checks;
  };

  Block device{Block::kDevice}, pinned{Block::kPinned};
  // In device memory, all for at least num_ids:
  HetBatch batch = {};
  HetList misses = {}, checks = {};
  int32_t* slots = nullptr;    // (n)
  int32_t* uses = nullptr;     // (n): of misses
  int32_t* victims = nullptr;  // (n)
  Nums* nums = nullptr;        // the lists' and the batch's
  // In pinned memory:
  int64_t* miss_keys = nullptr;    // (nums.misses)
  int64_t* check_keys = nullptr;   // (nums.checks)
  int64_t* check_bases = nullptr;  // (nums.checks)
  int32_t* check_index = nullptr;  // (nums.checks): which of the batch's keys
  int32_t* miss_index = nullptr;   // (nums.misses)
  int32_t* slots_here = nullptr;   // (nums.keys)
  int32_t* uses_here = nullptr;    // (nums.misses)
  Nums here = {0, 0, 0};
  bool holds_lines = false;

  // Rows that came, for the device: first those of all misses, which visitors read until the end of
  // the step, then those of checks.
  Block rows_device{Block::kDevice}, rows_pinned{Block::kPinned};
  float* rows = nullptr;     // (rows, row_stride), device
  int64_t* bases = nullptr;  // (rows), device
  int32_t* index = nullptr;  // (rows), device
};

class DeviceCache;

// The lines of one lookup, kept in the cache while this lives. It may die on any thread.
class DeviceTicket {
 public:
  explicit DeviceTicket(std::shared_ptr<DeviceCache> cache);
  ~DeviceTicket();
  DeviceTicket(const DeviceTicket&) = delete;
  DeviceTicket& operator=(const DeviceTicket&) = delete;

  int64_t num_ids() const { return found_ == nullptr ? 0 : found_->batch.num_ids; }
  DeviceCache* cache() const { return cache_.get(); }

 private:
  friend class DeviceCache;

  // What a query is about: an entry of a list.
  struct Subject {
    enum List : int32_t { kMiss, kCheck, kForced } list;
    int32_t at;
  };
  // A request and what it asks, in the order of RequestHeader's counts.
  struct Asked {
    Link::Request request;
    int64_t num_checks = 0;
    int64_t num_full = 0;
    std::vector<Subject> subjects;  // (queries)
  };

  int64_t KeyOf(const Subject& subject) const;

  const std::shared_ptr<DeviceCache> cache_;
  std::unique_ptr<Found> found_;   // of the ids; of a flush nullptr
  std::unique_ptr<Found> forced_;  // lamport: of other keys that this pushes, or nullptr
  std::vector<Asked> asked_;       // (num_shards)
  bool installed_ = false;
};

// Every public function may run concurrently with every other: one lock orders them, and one stream
// what they have the device do. Device errors are ResourceExhausted where memory is short, else
// FailedPrecondition; where memory is short no row, update or message has changed.
class DeviceCache : public std::enable_shared_from_this<DeviceCache> {
 public:
  // config.capacity: lines, at least 1; stream: of the device whose memory it takes. It must
  // outlive the cache.
  static Status Create(const CacheConfig& config, HetStream stream,
                       std::shared_ptr<DeviceCache>* cache);
  ~DeviceCache();

  int dim() const { return kit_.optimizer->dim(); }
  int num_shards() const { return static_cast<int>(shards_.size()); }
  uint64_t id() const { return id_; }
  int64_t lines() const { return info_.lines; }  // capacity, rounded up to whole buckets

  // ids: (n), device memory, there by the stream's order. fresh, allocate: as in Cache. Waits for
  // the device: the host writes the requests.
  Status Lookup(const int64_t* ids, int64_t n, bool fresh, const Cache::AllocateRequest& allocate,
                std::shared_ptr<DeviceTicket>* ticket);

  // replies: (num_shards), empty where no request went; all are taken, or on an error none.
  // rows: how many came. Waits for the device only where a shard started again, or to get memory
  // for more rows than ever before.
  Status Install(DeviceTicket* ticket, const std::vector<Cache::Bytes>& replies, int64_t* rows);

  // The rows as they are now. ticket: installed. out: (num_ids, dim), device memory, written in the
  // stream's order.
  Status Gather(const DeviceTicket& ticket, float* out);

  // One update of each key of the ticket. gradients: (num_ids, dim), device memory, there by the
  // stream's order. Waits for the device: what is due goes to the outboxes.
  Status Update(DeviceTicket* ticket, const float* gradients, float learning_rate);

  // Requests that push what is due, or (all) everything not yet sent, and what is under way once
  // more: when the replies were taken, the shards have it.
  Status Flush(bool all, const Cache::AllocateRequest& allocate,
               std::shared_ptr<DeviceTicket>* ticket);

  // Forgets all rows, and with them what was not sent.
  Status Clear();

  // Has every later lookup and update fail, as Cache's.
  void Freeze();

  // All counters, as of one moment.
  Status stats(Cache::Stats* stats);

  // (num_shards): of the table, as each shard last said; 0: never heard.
  std::vector<uint64_t> incarnations();

 private:
  friend class DeviceTicket;

  struct Shard {
    Link link;
    Outbox outbox;
    int64_t num_open = 0;  // requests whose tickets live and have no reply yet
  };
  using Subject = DeviceTicket::Subject;
  using Asked = DeviceTicket::Asked;

  // Rows that come to the host at a time, when they are collected for a push. (Not measured: enough
  // that the device is not idle for long between two of them, and 4 MB at d=64.)
  static constexpr int64_t kPushRows = 16384;

  // What a lookup asks of a shard.
  struct Questions {
    std::vector<Subject> checks, full, values;

    bool empty() const { return checks.empty() && full.empty() && values.empty(); }
  };

  // Numbers that verbs leave on the device for the host.
  struct Counts {
    int64_t lines, visitors, evicted, nonfinite, updates_lost;
    int32_t first_slots, second_slots;  // of a HetSlots each
  };

  // A step's rows on their way to the device: those of misses, then those of checks, then forced.
  struct Arriving {
    float* rows;                        // (rows, row_stride), pinned
    int64_t* bases;                     // (rows), pinned
    int32_t* index;                     // (rows), pinned: which of the keys; of misses not used
    int64_t first[3], next[3], end[3];  // by list
  };

  DeviceCache(const CacheConfig& config, RowKit kit, HetStream stream);

  uint32_t ShardOf(int64_t key) const;

  // All of these need mutex_.
  Status Allocate();
  Status CheckNotFrozen() const;
  Status Wait();
  Status ReadCounts();
  Status TakeReleased();
  Status NewFound(int64_t n, std::unique_ptr<Found>* found);
  Status Find(const int64_t* ids, Found* found);
  Status MakeLines(DeviceTicket* ticket, std::vector<char>* has_line);
  std::vector<int64_t> KeysToForce() const;
  Status Force(const std::vector<int64_t>& keys, DeviceTicket* ticket,
               std::vector<Questions>* questions);
  void Ask(const DeviceTicket& ticket, const std::vector<char>& has_line, int64_t read_bound,
           std::vector<Questions>* questions);
  void SendRequest(int shard, bool everything, int64_t read_bound, Questions questions,
                   const Cache::AllocateRequest& allocate, DeviceTicket* ticket);
  Status CollectLines(const int32_t* slots, int64_t n);
  Status CollectGradients(const Found& found, const int32_t* keys, int64_t n, const float* sums,
                          float learning_rate);
  // The rows in push_there_, to the outboxes.
  Status TakePushed(int64_t n, bool gradients, float learning_rate);

  Status RestartShard(int shard, const Link::Epoch& epoch);
  Status Reserve(DeviceTicket* ticket, const std::vector<ReplyView>& replies, Arriving* arriving);
  void InstallReply(int shard, const DeviceTicket& ticket, const ReplyView& reply, bool old,
                    Arriving* arriving);
  Status Upload(const DeviceTicket& ticket, const Arriving& arriving);

  // Needs nothing: a ticket's end.
  void Release(DeviceTicket* ticket);

  const CacheConfig config_;
  const RowKit kit_;
  const uint64_t id_;
  const HetStream stream_;

  std::mutex mutex_;
  HetStore* store_ = nullptr;
  HetStoreInfo info_ = {};
  Block scratch_{Block::kDevice};  // of one call, and its arrays that the next does not read
  Block counts_device_{Block::kDevice}, counts_pinned_{Block::kPinned};
  Block push_device_{Block::kDevice}, push_pinned_{Block::kPinned};  // (kPushRows)
  HetPush push_there_ = {}, push_here_ = {};
  Admission admission_;
  std::vector<Shard> shards_;
  std::vector<std::unique_ptr<Found>> spare_;  // of steps that are over
  bool frozen_ = false;
  int64_t num_pending_ = 0;  // updates not pushed, and those in pushes not acknowledged
  Counters<CacheCounter> counters_;

  // What dead tickets held. A ticket may die on any thread, at any time, and must not wait.
  struct Released {
    std::vector<std::unique_ptr<Found>> found;
    std::vector<std::pair<int, uint64_t>> requests;  // shard, number
  };
  std::mutex released_mutex_;
  Released released_;
};

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_DEVICE_CACHE_H_
