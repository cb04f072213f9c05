// A worker's replica of the dense variables: they are stepped on here, and exchanged with the
// servers as contributions, under a bound (docs/protocol.md, 8). A link with a flat store.
//
// The way of a step:
//   Settle   between two steps: takes over what came, and sets aside what is due to be sent;
//   Request  writes one request for each shard, to travel with whatever the worker sends;
//   (the runtime carries them: DenseShard::Sync)
//   Receive  takes the replies, while a step may be under way: the variables change at the next
//            Settle.
// WhenUrgent says that something should not wait for another message any longer.
//
// The variables belong to the caller, who shows them to Settle. Here are, of each float, the value
// that the servers are known to have, and so what own steps added to it since.

#ifndef HET_TF_OPS_CORE_DENSE_REPLICA_H_
#define HET_TF_OPS_CORE_DENSE_REPLICA_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ops/core/link/link.h"
#include "ops/core/mutex.h"
#include "ops/core/stats.h"
#include "ops/core/status.h"
#include "ops/core/wire/dense.h"
#include "ops/core/wire/frames.h"

namespace het_tf {

enum class ReplicaCounter {
  kSteps,      // made here
  kStepsSent,  // known to be merged
  kStepsLost,  // made here, and void since the servers started anew
  kPushes,     // one a shard
  kValues,     // times that values came, one a shard
  kBytesUp,    // of requests
  kBytesDown,  // of replies
  kPending,    // steps not yet known to be merged, now
  kNumCounters
};
inline constexpr std::array<const char*, Counters<ReplicaCounter>::kSize> kReplicaCounterNames = {
    "steps", "steps_sent", "steps_lost", "pushes", "values", "bytes_up", "bytes_down", "pending"};

struct ReplicaConfig {
  int64_t num_floats = 0;    // exchanged; how they are merged is the servers' affair
  int64_t num_counters = 0;  // exchanged, added
  int64_t rest_bytes = 0;    // of what every worker has for itself
  int num_shards = 1;        // each a part of the numbers, with a link of its own
  // A server may have several shards, so that what is sent is spread over the steps: shards s and
  // s + num_phases are due at the same ones, those between them at others.
  int num_phases = 1;
  int num_workers = 1;
  int64_t staleness = 0;  // own steps that may be unsent, and steps of others that may be missing
  // Send bfloat16. What rounding takes off is sent later, at the latest when everything is.
  bool half = false;
};

// Shard `shard` has elements [first(shard), first(shard + 1)) of n.
inline int64_t FirstOfShard(int64_t n, int shard, int num_shards) {
  return n / num_shards * shard + n % num_shards * shard / num_shards;
}

class Replica;

// A request to each shard that may be answered. To one shard there is one at a time, but for those
// that only ask.
class ReplicaTicket {
 public:
  static constexpr const char* kVariantName = "Het>ReplicaTicket";

  explicit ReplicaTicket(std::shared_ptr<Replica> replica) : replica_(std::move(replica)) {}
  ~ReplicaTicket();
  ReplicaTicket(const ReplicaTicket&) = delete;
  ReplicaTicket& operator=(const ReplicaTicket&) = delete;

  Replica* replica() const { return replica_.get(); }

 private:
  friend class Replica;

  const std::shared_ptr<Replica> replica_;
  // (num_shards); number 0: nothing that has to be answered
  std::vector<Link::Request> requests_;
  std::vector<bool> asks_;  // (num_shards)
};

class Replica : public std::enable_shared_from_this<Replica> {
 public:
  template <typename T>
  struct Array {
    T* data;
    int64_t size;
  };
  // Memory of the variables, in the order of the replica's numbers.
  struct Variables {
    std::vector<Array<float>> floats;  // num_floats in all
    std::vector<int64_t*> counters;    // (num_counters)
    std::vector<Array<char>> rest;     // rest_bytes in all
  };

  static Status Create(const ReplicaConfig& config, std::shared_ptr<Replica>* replica);

  // Names this replica to the servers.
  uint64_t id() const { return id_; }
  const ReplicaConfig& config() const { return config_; }
  Counters<ReplicaCounter>& counters() { return counters_; }
  // (num_shards): of what is on the servers, as far as known; 0: nothing is.
  std::vector<uint64_t> incarnations();
  // Whether there is something here, as of the last Settle, that the servers may not have.
  bool holds_back();

  // What the caller of Settle has to do.
  enum class Must {
    kNothing,
    kExchange,  // Request, Receive and Settle again (without reads), before the next step
    kWait,      // the same, once no request is open any more
  };

  // No step is under way; the caller sees to that.
  //   steps: made since the last call.
  //   reads: a step is about to begin; with a staleness of 0 it wants to know what the servers
  //   have. all: everything is to be sent. started: set if the variables were replaced by the
  //   servers' state.
  Status Settle(const Variables& variables, int64_t steps, bool reads, bool all, Must* must,
                bool* started);

  // Writes what there is to say; allocate(shard, bytes) provides the memory, aligned to 8, of
  // 0 bytes where there is nothing, as while another request to that shard is open. asks: then how
  // much is missed here, which may be asked at any time.
  using AllocateRequest = std::function<char*(int shard, size_t bytes)>;
  Status Request(bool asks, const AllocateRequest& allocate,
                 std::shared_ptr<ReplicaTicket>* ticket);

  // Takes the replies; all or, on an error, none.
  Status Receive(ReplicaTicket* ticket, const std::vector<Frame>& replies);

  // Waits for no request that is open: what it carries is carried again, by the next one. (Its
  // reply may still come.) For a process that is about to end, whose steps fail.
  void GiveUpRequests();

  // Calls back as soon as no request is open; at once if none is.
  void WhenIdle(std::function<void()> callback);

  // Calls back with true as soon as half of the time is over that something due has until steps
  // must wait for it, and with false as soon as this is closed, as it is at first.
  void WhenUrgent(std::function<void(bool)> callback);
  void SetClosed(bool closed);

 private:
  friend class ReplicaTicket;

  // What is known of a shard on a server.
  struct Shard {
    Link link;
    int64_t pending = 0;          // own steps not in a push yet
    int64_t due = 1;              // how many of them become a push
    int64_t first = 0, last = 0;  // its floats
    int64_t first_counter = 0, last_counter = 0;
    int64_t first_byte = 0, last_byte = 0;  // of the rest
    int64_t clock = 0;                      // steps that base_ holds of it
    int64_t own = 0;                        // of them, those made here in this epoch
    int64_t unacknowledged = 0;             // own steps in pushes
    int64_t seen = 0;                       // steps of others that it had when it last answered
    int64_t seen_since = 0;  // the same, of answers since the request that is open was cut
    uint64_t known = 0;
    bool starts = false;     // base_ and rest_ are to replace the variables
    bool has_shift = false;  // shift_ is to be added to them
    bool replaced = false;   // it answered from another epoch
    bool open = false;       // a request to it may be answered
    bool started = false;
    bool rounded = false;  // the last push was: what that took off is not in a push yet

    int64_t unmerged() const { return pending + unacknowledged; }
    bool holds_back() const { return unmerged() > 0 || rounded || !all_merged(); }
    // A push may hold no steps, and only what rounding took off.
    bool all_merged() const { return link.cut() == link.acknowledged(); }
    int64_t num_floats() const { return last - first; }
    int64_t num_counters() const { return last_counter - first_counter; }
  };

  explicit Replica(const ReplicaConfig& config);

  Status CheckVariables(const Variables& variables) const;
  void TakeOver(const Variables& variables, Shard* shard) HET_REQUIRES(mutex_);
  // Steps between two pushes to a shard. With other workers it grows with the steps that were made.
  int64_t Interval(const Shard& shard) const;
  // How many steps a shard's next push is to hold: fewer after it has been in step with the others
  // (aligned), so that it gets out of it.
  int64_t DueSteps(const Shard& shard, bool aligned) const HET_REQUIRES(mutex_);
  void Cut(const Variables& variables, bool whole, Shard* shard) HET_REQUIRES(mutex_);
  Status CheckReply(const Shard& shard, const Link::Request& request,
                    const DenseReplyView& reply) const;
  // Takes what a reply to a request says. Returns whether the shard has started anew.
  bool Install(Shard* shard, uint64_t request, const DenseReplyView& reply) HET_REQUIRES(mutex_);
  int64_t Unmerged() const HET_REQUIRES(mutex_);
  bool started() const HET_REQUIRES(mutex_);
  void CloseRequests(ReplicaTicket* ticket) HET_REQUIRES(mutex_);
  Status ReceiveAll(ReplicaTicket* ticket, const std::vector<Frame>& replies) HET_REQUIRES(mutex_);
  // The same of a request that only asked.
  static Status CheckAnswer(const DenseReplyView& reply);
  void TakeAnswer(Shard* shard, const DenseReplyHeader& reply);
  // Whether more is missed here than may be, of what a shard is known to have.
  bool IsStale(const Shard& shard) const;
  // Whether there is something to send to a shard, or to fetch from it.
  bool IsDue(const Shard& shard) const;
  bool AnyIsUrgent() const HET_REQUIRES(mutex_);
  bool AnyIsOpen() const HET_REQUIRES(mutex_);
  // Those that wait for what is the case now; to be called without the lock.
  std::vector<std::function<void()>> TakeWaiting() HET_REQUIRES(mutex_);

  const ReplicaConfig config_;
  const uint64_t id_;
  Counters<ReplicaCounter> counters_;

  Mutex mutex_;
  std::vector<Shard> shards_ HET_GUARDED_BY(mutex_);
  // (num_floats): what the variables were before own steps that are not in a push yet.
  std::vector<float> base_ HET_GUARDED_BY(mutex_);
  std::vector<int64_t> counter_base_ HET_GUARDED_BY(mutex_);  // (num_counters)
  // (num_floats): by how much base_ has moved since the last Settle.
  std::vector<float> shift_ HET_GUARDED_BY(mutex_);
  std::vector<int64_t> counter_shift_ HET_GUARDED_BY(mutex_);
  // (num_floats), if half: what the servers know is here.
  std::vector<float> known_ HET_GUARDED_BY(mutex_);
  // (rest_bytes) while it is on its way to the variables.
  std::vector<char> rest_ HET_GUARDED_BY(mutex_);
  bool closed_ HET_GUARDED_BY(mutex_) = true;
  std::vector<std::function<void()>> waiting_ HET_GUARDED_BY(mutex_);
  std::vector<std::function<void(bool)>> waiting_for_urgent_ HET_GUARDED_BY(mutex_);
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_DENSE_REPLICA_H_
