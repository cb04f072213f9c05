// Closures: steps that count once, however often they are run.

#include "ops/core/cache/cache.h"
#include "ops/core/memory/hash.h"

namespace het_tf {

// Undoes a closure whose run is over without having ended. Nobody hears any more of what was not
// merged.
void Cache::LeaveClosure() {
  if (!own_.closure_is_abandoned()) return;
  asker_.cache_id = RandomId();
  for (int s = 0; s < num_shards(); ++s) {
    shards_[s].link.StartAnew();
    ForgetShard(s, CacheCounter::kUpdatesUndone);
  }
  own_.UndoClosure();
}

Status Cache::BeginClosure(int64_t number, std::shared_ptr<Closure>* closure) {
  MutexLock lock(&mutex_);
  HET_RETURN_IF_ERROR(own_.CheckNotFrozen());
  TakeReleased();
  LeaveClosure();
  return own_.BeginClosure(number, closure);
}

Status Cache::CommitClosure(const Closure& closure, int64_t done, const AllocateRequest& allocate,
                            std::shared_ptr<RowTicket>* ticket) {
  const auto made =
      std::make_shared<Ticket>(shared_from_this(), std::make_shared<UniqueIds>(nullptr, 0));
  *ticket = made;
  MutexLock lock(&mutex_);
  HET_RETURN_IF_ERROR(own_.CheckClosure(closure));
  HET_RETURN_IF_ERROR(own_.CheckNotFrozen());
  return own_.CommitClosure(closure, done, [&]() HET_REQUIRES(mutex_) {
    TakeReleased();
    Trim();
    for (const uint32_t slot : store_.dirty()) Enqueue(slot);
    for (int s = 0; s < num_shards(); ++s) {
      SendRequest(s, Link::Carry::kAll, config_.read_bound, Questions(), allocate, made.get());
    }
    return Status();
  });
}

Status Cache::EndClosure(const Closure& closure) {
  MutexLock lock(&mutex_);
  return own_.EndClosure(closure);
}

}  // namespace het_tf
