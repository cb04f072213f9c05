// A server's part of the dense variables: what the replicas on the workers have in common
// (docs/protocol.md, 8).
//
// Replicas send contributions: what a number of their steps added. Each is merged exactly once, and
// advances the clock by its steps. Contributions of several workers to trained floats do not count
// at once: they begin at the same values, and all of them together would go too far. A share is
// merged when it comes, the rest is owed, and a share of what is owed is merged with every push
// (shares.h). Contributions to other floats are averaged.

#ifndef HET_TF_OPS_CORE_DENSE_SHARD_H_
#define HET_TF_OPS_CORE_DENSE_SHARD_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "ops/core/dense/shares.h"
#include "ops/core/link/sessions.h"
#include "ops/core/mutex.h"
#include "ops/core/parallel.h"
#include "ops/core/shared_mutex.h"
#include "ops/core/status.h"
#include "ops/core/wire/dense.h"

namespace het_tf {

// Every public function may run concurrently with every other.
class DenseShard {
 public:
  struct State {
    std::vector<float> floats;      // the trained ones first
    std::vector<float> owed;        // (trained floats): contributions that are not in them yet
    std::vector<int64_t> counters;  // merged whole
    std::vector<char> rest;         // for replicas that start; nothing is merged into it
    int64_t clock = 0;              // steps that they hold
  };

  // Replaces everything; replicas start anew from it.
  //   num_workers: that make steps from now on. total: what a contribution to trained floats of one
  //   of several workers counts in the end; 1: in full.
  Status Set(State state, int num_workers, float total = 1);

  // Copies everything but the rest; floats with what is owed to them, and counters, each with all
  // merges of some moment of the call.
  State Get() const;

  // Answers a replica: merges what it pushes, then sends the values if it lacks more steps of
  // others than it may. allocate(bytes) provides the memory of the reply, aligned to 8, once, if
  // all is well.
  Status Sync(const char* request, size_t bytes, const ParallelFor& parallel_for,
              const std::function<char*(size_t)>& allocate);

  // Of what Set made last. 0: it was not called yet.
  uint64_t incarnation() const;
  // Steps merged, those that Set said included.
  int64_t clock() const { return clock_.load(); }
  int64_t memory_bytes() const;

 private:
  // Numbers that one lock guards.
  static constexpr int64_t kBlock = 1 << 14;

  // What a replica that speaks bfloat16 has: replies are differences to it.
  struct Sent {
    uint64_t known = 0;
    std::vector<float> values;
  };

  int64_t num_blocks() const HET_REQUIRES_SHARED(contents_);
  Status CheckShape(const DenseRequestHeader& request) const HET_REQUIRES_SHARED(contents_);
  int64_t num_trained() const HET_REQUIRES_SHARED(contents_) {
    return static_cast<int64_t>(state_.owed.size());
  }
  void Merge(const DensePushView& push, const ParallelFor& parallel_for)
      HET_REQUIRES_SHARED(contents_);
  // contributions: what has an operator [], of all floats.
  template <typename Contributions>
  void MergeBlock(const Contributions& contributions, const DenseShares& shares, int64_t b)
      HET_REQUIRES_SHARED(contents_);
  void WriteValues(const DenseReplyHeader& header, Sent* sent, const ParallelFor& parallel_for,
                   char* counters) const HET_REQUIRES_SHARED(contents_);
  Sent* SentOf(uint64_t session);

  // Held shared by what reads or merges, exclusively by what replaces everything.
  mutable SharedMutex contents_;
  uint64_t incarnation_ HET_GUARDED_BY(contents_) = 0;  // 0: nothing was set yet
  // Where contents_ is shared, each block under its own lock.
  State state_ HET_GUARDED_BY(contents_);
  int num_workers_ HET_GUARDED_BY(contents_) = 1;
  float total_ HET_GUARDED_BY(contents_) = 1;
  // Whether a push moves the values otherwise than its replica has moved, which has to hear of it.
  bool merges_apart_ HET_GUARDED_BY(contents_) = false;
  // (num_blocks() + 1), the last one of the counters.
  mutable std::unique_ptr<Mutex[]> locks_ HET_GUARDED_BY(contents_);
  std::atomic<int64_t> clock_{0};

  Sessions sessions_;
  Mutex sent_mutex_;
  std::unordered_map<uint64_t, std::unique_ptr<Sent>> sent_
      HET_GUARDED_BY(sent_mutex_);  // by session
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_DENSE_SHARD_H_
