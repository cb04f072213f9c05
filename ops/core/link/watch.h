// Hits without a check. The answer to a check is nearly always "nothing", so a check that gets it
// begins a watch: the shard remembers the row and the clock that the cache has of it, and the cache
// need not check it again. Once the row is beyond the cache's read bound, the shard sends it with
// the next reply, whether it is asked for or not, and the watch is over. So a read misses what it
// would miss with a check (docs/protocol.md, 2), and a step of hits says nothing but that it is
// there.
//
// Messages may be lost, come twice and overtake each other. A row that ended its watch goes with
// every reply until a request says that the cache has taken the first that had it: a step that was
// cut before needs it, too. Replies are numbered for that. Should a number never come, because its
// step failed, the cache begins anew: it checks every hit until no request is open that counts on
// the watch, and then names the next epoch, with which the shard forgets the last one. A shard that
// has restarted watches nothing, nor does one that has not heard of the cache for long
// (sessions.h). It says so: a step that counts on the watch asks again, for rows, and the next
// epoch begins.

#ifndef HET_TF_OPS_CORE_LINK_WATCH_H_
#define HET_TF_OPS_CORE_LINK_WATCH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/memory/index.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/row/clock.h"

namespace het_tf {

// The keys of rows that were changed last, in order. Written by who has the rows locked, read by
// who shares the lock.
class ChangeLog {
 public:
  void Start() { keys_.resize(kLength); }
  void Add(int64_t key) {
    if (!keys_.empty()) keys_[end_++ % kLength] = key;
  }

  // All that were ever added.
  uint64_t end() const { return end_; }
  // Calls visit(key) for each from a place on. False if some of them are gone.
  template <typename Visit>
  bool ForEachFrom(uint64_t place, const Visit& visit) const {
    if (end_ - place > keys_.size()) return false;
    for (; place != end_; ++place) visit(keys_[place % kLength]);
    return true;
  }

 private:
  // 32 KB for each of 16 stripes: the rows that 24 workers of benchmarks/netns_cluster.py's steps
  // push in ten steps at staleness 100.
  static constexpr uint64_t kLength = 4096;

  std::vector<int64_t> keys_;  // (kLength), once somebody watches
  uint64_t end_ = 0;
};

// What a shard watches for a cache, of one stripe of its rows. Not safe for concurrent use.
class WatchedRows {
 public:
  struct Row {
    int64_t key;
    int64_t base;   // as a check would say it
    uint64_t sent;  // the first reply that has the row; 0: it is watched
  };

  int64_t size() const { return index_.size(); }
  int64_t bytes() const {
    const size_t lists = (free_.capacity() + sent_.capacity()) * sizeof(uint32_t);
    return index_.bytes() + static_cast<int64_t>(rows_.capacity() * sizeof(Row) + lists);
  }
  // The row of a key, valid until the next call of another function, or nullptr.
  Row* Find(uint64_t hash, int64_t key) {
    const uint32_t slot = index_.Find(hash, [&](uint32_t s) { return rows_[s].key == key; });
    return slot == Index::kNone ? nullptr : &rows_[slot];
  }
  // Calls visit(i, row) for those of n keys that have a row, in order: as Find, with the memory's
  // latency hidden. hash_of(i), key_of(i): of a key. visit may not end a watch.
  template <typename HashOf, typename KeyOf, typename Visit>
  void ForEachFound(int64_t n, const HashOf& hash_of, const KeyOf& key_of, const Visit& visit) {
    VisitInBlocks(
        n, [&](int64_t i) { return IndexedHash{&index_, hash_of(i)}; },
        [&](int64_t, uint32_t slot) { PrefetchToWrite(&rows_[slot]); },
        [&](int64_t i, uint32_t guess) {
          const uint32_t slot =
              index_.Find(hash_of(i), guess, [&](uint32_t s) { return rows_[s].key == key_of(i); });
          if (slot != Index::kNone) visit(i, &rows_[slot]);
        });
  }
  // Begins a watch, or begins it anew.
  void Watch(uint64_t hash, int64_t key, int64_t base);
  // The watch of a row of these is over: this reply has it.
  void Send(Row* row, uint64_t reply);
  // The cache has taken all replies up to this one.
  void Seen(uint64_t reply);

  // Calls visit(row) for those that are watched.
  template <typename Visit>
  void ForEachWatched(const Visit& visit) {
    index_.ForEach([&](uint32_t slot) {
      if (!IsSent(rows_[slot])) visit(&rows_[slot]);
    });
  }
  // Calls visit(row) for those that were sent and perhaps not taken.
  template <typename Visit>
  void ForEachSent(const Visit& visit) {
    for (const uint32_t slot : sent_) {
      if (IsSent(rows_[slot])) visit(rows_[slot]);
    }
  }

  uint64_t place = 0;  // in the stripe's ChangeLog, up to which rows were looked at

 private:
  static constexpr uint64_t kWatchedAgain = ~uint64_t{0};  // as sent: still listed in sent_

  static bool IsSent(const Row& row) { return row.sent != 0 && row.sent != kWatchedAgain; }

  Index index_;
  std::vector<Row> rows_;
  std::vector<uint32_t> free_, sent_;
};

// What a shard watches for a cache.
class Watch {
 public:
  // A request of an epoch is answered. Returns the reply's number; 0: the epoch is over.
  // begins: out, whether it is a new one, of which nothing is watched.
  uint64_t BeginReply(uint64_t epoch, size_t num_stripes, bool* begins);
  // Watches nothing any longer; the epoch is over.
  void Drop() {
    std::vector<WatchedRows>().swap(stripes_);
    is_over_ = true;
  }
  int64_t size() const {
    int64_t size = 0;
    for (const WatchedRows& rows : stripes_) size += rows.size();
    return size;
  }
  int64_t bytes() const {
    int64_t bytes = 0;
    for (const WatchedRows& rows : stripes_) bytes += rows.bytes();
    return bytes;
  }
  // Of a stripe; nullptr where nothing is watched.
  WatchedRows* stripe(size_t s) { return stripes_.empty() ? nullptr : &stripes_[s]; }

 private:
  uint64_t epoch_ = 0;
  bool is_over_ = false;
  uint64_t replies_ = 0;
  std::vector<WatchedRows> stripes_;
};

// A cache's side: which replies of a shard it has taken. Not safe for concurrent use.
class Watching {
 public:
  uint64_t epoch() const { return epoch_; }
  // Whether hits that are watched need no check. If not, requests name no epoch.
  bool counts() const { return !over_; }
  // Whether the next epoch may begin: nothing that is open counts on this one.
  bool may_begin() const { return over_ && open_ == 0; }
  // All flags of lines are void.
  void Begin();

  // A request goes out that names the epoch.
  void Open() { ++open_; }
  // All replies up to this number were taken.
  uint64_t seen() const { return seen_; }
  // Takes the reply of an open request. Returns whether it is the latest: one that is not may say
  // that a row is watched of which a later reply said more. Takes no memory.
  bool Take(uint64_t reply);
  // A request of an epoch was given up.
  void GiveUp(uint64_t epoch);

  // So many lines of rows that the shard may watch are no more. capacity: lines that there is room
  // for; once it may watch many more than those, it is time for a new epoch.
  void Left(int64_t lines, int64_t capacity);

 private:
  // A reply that so many overtook was lost.
  static constexpr uint64_t kMostAhead = 64;

  uint64_t epoch_ = 1;
  bool over_ = false;
  int64_t open_ = 0;
  uint64_t seen_ = 0, last_ = 0;
  uint64_t ahead_ = 0;  // bit i: reply seen_ + 1 + i was taken
  int64_t num_left_ = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_LINK_WATCH_H_
