// What both caches know of the updates that they have made: how many are not merged, in which
// closure they are made (link/closures.h, and cache.h's BeginClosure to EndClosure), and whether
// more may be made.

#ifndef HET_TF_OPS_CORE_CACHE_OWN_UPDATES_H_
#define HET_TF_OPS_CORE_CACHE_OWN_UPDATES_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "ops/core/cache/row_cache.h"
#include "ops/core/link/closures.h"
#include "ops/core/stats.h"
#include "ops/core/status.h"
#include "ops/core/thread_annotations.h"
#include "ops/core/wire/request.h"

namespace het_tf {

// Its owner has a lock.
class OwnUpdates {
 public:
  // counters: the cache's; they must outlive this.
  explicit OwnUpdates(Counters<CacheCounter>* counters) : counters_(*counters) {}

  void Freeze() { frozen_ = true; }
  Status CheckNotFrozen() const {
    if (!frozen_) return Status();
    return Cancelled("the cache is frozen: its process is about to end");
  }

  // Those in no push yet, and those in pushes that are not acknowledged.
  int64_t num_pending() const { return num_pending_; }
  // Updates were made, and others skipped for NaN or infinity.
  void Add(int64_t updates, int64_t skipped) {
    num_pending_ += updates;
    counters_.Add(CacheCounter::kUpdates, updates);
    counters_.Add(CacheCounter::kNonfiniteSkipped, skipped);
  }
  void Merge(int64_t updates) { num_pending_ -= updates; }
  // No shard will merge them, so their closure cannot end.
  void Lose(int64_t updates, CacheCounter counter = CacheCounter::kUpdatesLost) {
    num_pending_ -= updates;
    counters_.Add(counter, updates);
    lost_ |= updates > 0;
  }

  bool in_closure() const { return closure_ != nullptr; }
  // The closure's run is over without having ended: what it updated is to be undone.
  bool closure_is_abandoned() const { return in_closure() && closure_.use_count() == 1; }
  // Whether nothing may be pushed.
  bool holds_back() const { return in_closure() && !commits_; }

  Status BeginClosure(int64_t number, std::shared_ptr<Closure>* closure) {
    if (number <= 0) return InvalidArgument("number = ", number, " must be positive");
    if (in_closure()) {
      return Cancelled("closure ", closure_->number, " is still being run here");
    }
    if (num_pending_ > 0) {
      return FailedPrecondition(num_pending_, " updates made before closure ", number,
                                " are not merged: flush before");
    }
    *closure = closure_ = std::make_shared<Closure>(number);
    committed_ = lost_ = false;
    return Status();
  }

  // Whether updates are still made in that one.
  Status CheckClosure(const Closure& closure) const {
    if (closure_.get() == &closure) return Status();
    return Cancelled("closure ", closure.number, " was given up");
  }

  // Calls push(), which writes all requests that push what there is; their pushes are stamped.
  template <typename Push>
  Status CommitClosure(const Closure& closure, int64_t done,
                       const Push& push) HET_NO_THREAD_SAFETY_ANALYSIS {
    if (done < 0 || done >= closure.number) {
      return InvalidArgument(
          "done = ", done, " must be at least 0 and below the closure's number, ", closure.number);
    }
    HET_RETURN_IF_ERROR(CheckClosure(closure));
    if (committed_) {
      return FailedPrecondition("closure ", closure.number, " was committed before");
    }
    done_ = done;
    const struct Commits {
      explicit Commits(bool* commits) : commits(commits) { *commits = true; }
      ~Commits() { *commits = false; }
      bool* const commits;
    } here(&commits_);
    HET_RETURN_IF_ERROR(push());
    committed_ = true;
    return Status();
  }

  // Says in a push that is cut whose it is.
  void Stamp(PushHeader* push) const {
    if (!in_closure()) return;
    push->closure = closure_->number;
    push->closures_done = done_;
  }

  Status EndClosure(const Closure& closure) {
    HET_RETURN_IF_ERROR(CheckClosure(closure));
    HET_RETURN_IF_ERROR(CheckNotFrozen());
    if (!committed_) return FailedPrecondition("closure ", closure.number, " was not committed");
    if (lost_ || num_pending_ > 0) {
      return Cancelled("closure ", closure.number, " must be run again: a shard was replaced");
    }
    closure_ = nullptr;
    return Status();
  }

  // Nobody hears any more of what is not merged.
  void UndoClosure() {
    counters_.Add(CacheCounter::kUpdatesUndone, num_pending_);
    num_pending_ = 0;
    closure_ = nullptr;
  }

 private:
  Counters<CacheCounter>& counters_;
  bool frozen_ = false;
  int64_t num_pending_ = 0;
  std::shared_ptr<Closure> closure_;  // nullptr: updates are made in none
  bool commits_ = false;              // its requests are being written
  bool committed_ = false;            // they were
  bool lost_ = false;                 // updates of it
  int64_t done_ = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_OWN_UPDATES_H_
