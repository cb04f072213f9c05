// What a shard remembers of the caches that write to it: the last push merged of each, and the rows
// that it watches for it.

#ifndef HET_TF_OPS_CORE_LINK_SESSIONS_H_
#define HET_TF_OPS_CORE_LINK_SESSIONS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "ops/core/link/watch.h"
#include "ops/core/mutex.h"

namespace het_tf {

// Safe for concurrent use.
class Sessions {
 public:
  // A day of requests at a hundred a second.
  static constexpr int64_t kLifetime = int64_t{24} * 3600 * 100;
  // Minutes of them. A cache that is slower than that asks for its rows once more.
  static constexpr int64_t kWatchLifetime = 16384;

  struct Session {
    explicit Session(uint64_t number) : number(number) {}

    const uint64_t number;  // from 1 on, in the order of their making; never used again
    // Held over merging and answering a request, so that the rows of the answer hold what it
    // acknowledges, and a repeat is not answered before the first was merged.
    Mutex mutex;
    uint64_t sequence HET_GUARDED_BY(mutex) = 0;  // the last push merged
    Watch watch HET_GUARDED_BY(mutex);
    uint64_t counted HET_GUARDED_BY(mutex) = 0;  // the last that was not, as another run's was
    std::atomic<int64_t> num_watched{0};         // watch.size()
    std::atomic<int64_t> watch_bytes{0};         // watch.bytes()

    // After a change of watch.
    void CountWatched() HET_REQUIRES(mutex) {
      num_watched = watch.size();
      watch_bytes = watch.bytes();
    }
  };

  // Caches that were silent while the shard heard this many requests are forgotten. Should one
  // speak again, it gets a new session, and what it pushes in the old one is not merged. After
  // watch_lifetime requests nothing is watched for it any longer: nearly always it is gone.
  explicit Sessions(int64_t lifetime = kLifetime, int64_t watch_lifetime = kWatchLifetime)
      : lifetime_(lifetime), watch_lifetime_(watch_lifetime) {}

  // The session of a cache that sent a request now; made at its first.
  std::shared_ptr<Session> Of(uint64_t cache_id) {
    MutexLock lock(&mutex_);
    ++now_;
    Entry& entry = sessions_[cache_id];
    if (entry.session == nullptr) entry.session = std::make_shared<Session>(++last_number_);
    entry.heard = now_;
    std::shared_ptr<Session> session = entry.session;
    if (now_ >= next_look_) {
      next_look_ = now_ + std::min(lifetime_, watch_lifetime_) / 16 + 1;
      ForgetSilent();
    }
    return session;
  }

  void Clear() {
    MutexLock lock(&mutex_);
    sessions_.clear();
  }

  // Rows that are watched, those of every cache counted.
  int64_t num_watched() const {
    MutexLock lock(&mutex_);
    int64_t watched = 0;
    for (const auto& entry : sessions_) watched += entry.second.session->num_watched;
    return watched;
  }
  int64_t watch_bytes() const {
    MutexLock lock(&mutex_);
    int64_t bytes = 0;
    for (const auto& entry : sessions_) bytes += entry.second.session->watch_bytes;
    return bytes;
  }
  int64_t size() const {
    MutexLock lock(&mutex_);
    return static_cast<int64_t>(sessions_.size());
  }

 private:
  struct Entry {
    std::shared_ptr<Session> session;
    int64_t heard = 0;
  };

  void ForgetSilent() HET_REQUIRES(mutex_) {
    for (auto entry = sessions_.begin(); entry != sessions_.end();) {
      Session& session = *entry->second.session;
      if (entry->second.heard + watch_lifetime_ < now_ && session.watch_bytes > 0) {
        // Not while it is answered, which takes long where memory is short.
        if (session.mutex.try_lock()) {
          MutexLock lock(&session.mutex, std::adopt_lock);
          session.watch.Drop();
          session.CountWatched();
        }
      }
      entry = entry->second.heard + lifetime_ < now_ ? sessions_.erase(entry) : std::next(entry);
    }
  }

  const int64_t lifetime_, watch_lifetime_;
  mutable Mutex mutex_;
  std::unordered_map<uint64_t, Entry> sessions_ HET_GUARDED_BY(mutex_);
  uint64_t last_number_ HET_GUARDED_BY(mutex_) = 0;
  int64_t now_ HET_GUARDED_BY(mutex_) = 0;  // requests heard
  int64_t next_look_ HET_GUARDED_BY(mutex_) = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_LINK_SESSIONS_H_
