// Closures: steps that count once, however often they are run.

#include "ops/core/cache/cache.h"
#include "ops/core/memory/hash.h"

namespace het_tf {

// Nobody hears any more of what was not merged.
void Cache::StartAnew() {
  asker_.cache_id = RandomId();
  for (int s = 0; s < num_shards(); ++s) {
    shards_[s].link.StartAnew();
    ForgetShard(s, CacheCounter::kUpdatesUndone);
  }
  counters_.Add(CacheCounter::kUpdatesUndone, num_pending_);  // of pushes
  num_pending_ = 0;
  closure_ = nullptr;
}

// Undoes a closure whose run is over without having ended.
void Cache::LeaveClosure() {
  if (closure_ != nullptr && closure_.use_count() == 1) StartAnew();
}

Status Cache::CheckClosure(const Closure& closure) const {
  if (closure_.get() == &closure) return CheckNotFrozen();
  return Cancelled("closure ", closure.number, " was given up");
}

Status Cache::BeginClosure(uint64_t number, std::shared_ptr<Closure>* closure) {
  if (number == 0) return InvalidArgument("number = 0 must be positive");
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_ERROR(CheckNotFrozen());
  TakeReleased();
  LeaveClosure();
  if (closure_ != nullptr) {
    return Cancelled("closure ", closure_->number, " is still being run here");
  }
  if (num_pending_ > 0) {
    return FailedPrecondition(num_pending_, " updates made before closure ", number,
                              " are not merged: flush before");
  }
  *closure = closure_ = std::make_shared<Closure>(number);
  committed_ = closure_lost_ = false;
  return Status();
}

Status Cache::CommitClosure(const Closure& closure, uint64_t done, const AllocateRequest& allocate,
                            std::shared_ptr<RowTicket>* ticket) {
  if (done >= closure.number) {
    return InvalidArgument("done = ", done, " must be below the closure's number, ",
                           closure.number);
  }
  const auto made =
      std::make_shared<Ticket>(shared_from_this(), std::make_shared<UniqueIds>(nullptr, 0));
  *ticket = made;
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_ERROR(CheckClosure(closure));
  if (committed_) return FailedPrecondition("closure ", closure.number, " was committed before");
  TakeReleased();
  Trim();
  for (const uint32_t slot : store_.dirty()) Enqueue(slot);
  closures_done_ = done;
  struct Commits {
    explicit Commits(bool* commits) : commits(commits) { *commits = true; }
    ~Commits() { *commits = false; }
    bool* const commits;
  };
  {
    const Commits here(&commits_);
    for (int s = 0; s < num_shards(); ++s) {
      SendRequest(s, true, config_.read_bound, Questions(), allocate, made.get());
    }
  }
  committed_ = true;
  return Status();
}

Status Cache::EndClosure(const Closure& closure) {
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_ERROR(CheckClosure(closure));
  if (!committed_) return FailedPrecondition("closure ", closure.number, " was not committed");
  if (closure_lost_ || num_pending_ > 0) {
    return Cancelled("closure ", closure.number, " must be run again: a shard was replaced");
  }
  closure_ = nullptr;
  return Status();
}

}  // namespace het_tf
