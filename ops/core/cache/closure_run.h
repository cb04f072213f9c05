// The closure in which a cache's updates are made, for both caches (link/closures.h, and cache.h's
// BeginClosure to EndClosure).

#ifndef HET_TF_OPS_CORE_CACHE_CLOSURE_RUN_H_
#define HET_TF_OPS_CORE_CACHE_CLOSURE_RUN_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "ops/core/link/closures.h"
#include "ops/core/status.h"
#include "ops/core/thread_annotations.h"
#include "ops/core/wire/request.h"

namespace het_tf {

// Its owner has a lock.
class ClosureRun {
 public:
  bool is_open() const { return closure_ != nullptr; }
  // Its run is over without having ended: what it updated is to be undone.
  bool is_abandoned() const { return closure_ != nullptr && closure_.use_count() == 1; }
  // Whether nothing may be pushed.
  bool holds_back() const { return closure_ != nullptr && !commits_; }

  // pending: the cache's updates not known to be merged.
  Status Begin(int64_t number, int64_t pending, std::shared_ptr<Closure>* closure) {
    if (number <= 0) return InvalidArgument("number = ", number, " must be positive");
    if (closure_ != nullptr) {
      return Cancelled("closure ", closure_->number, " is still being run here");
    }
    if (pending > 0) {
      return FailedPrecondition(pending, " updates made before closure ", number,
                                " are not merged: flush before");
    }
    *closure = closure_ = std::make_shared<Closure>(number);
    committed_ = lost_ = false;
    return Status();
  }

  // Whether the cache's updates are still made in that one.
  Status Check(const Closure& closure) const {
    if (closure_.get() == &closure) return Status();
    return Cancelled("closure ", closure.number, " was given up");
  }

  // Calls push(), which writes all requests that push what there is; their pushes are stamped.
  template <typename Push>
  Status Commit(const Closure& closure, int64_t done,
                const Push& push) HET_NO_THREAD_SAFETY_ANALYSIS {
    if (done < 0 || done >= closure.number) {
      return InvalidArgument(
          "done = ", done, " must be at least 0 and below the closure's number, ", closure.number);
    }
    HET_RETURN_IF_ERROR(Check(closure));
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
    if (closure_ == nullptr) return;
    push->closure = closure_->number;
    push->closures_done = done_;
  }

  // A shard has lost updates of it, so it cannot end.
  void Lose() { lost_ = true; }

  // pending: as of Begin.
  Status End(const Closure& closure, int64_t pending) {
    HET_RETURN_IF_ERROR(Check(closure));
    if (!committed_) return FailedPrecondition("closure ", closure.number, " was not committed");
    if (lost_ || pending > 0) {
      return Cancelled("closure ", closure.number, " must be run again: a shard was replaced");
    }
    closure_ = nullptr;
    return Status();
  }

  void GiveUp() { closure_ = nullptr; }

 private:
  std::shared_ptr<Closure> closure_;  // nullptr: updates are made in none
  bool commits_ = false;              // its requests are being written
  bool committed_ = false;            // they were
  bool lost_ = false;
  int64_t done_ = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_CLOSURE_RUN_H_
