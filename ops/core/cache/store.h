// A worker's rows: a line for each key that is cached, looked at, or has updates under way.
//
// The verbs of a step: find (or make), install, gather, update, evict. Each can be called alone;
// what a row may miss and when it travels is Cache's business. Lines are known by slots, which a
// line keeps for as long as it lives: while a ticket holds it, while it has updates that no shard
// is known to have merged, and while it is resident.
//
// Not safe for concurrent use, except where a function says so.

#ifndef HET_TF_OPS_CORE_CACHE_STORE_H_
#define HET_TF_OPS_CORE_CACHE_STORE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "ops/core/cache/eviction.h"
#include "ops/core/cache/line.h"
#include "ops/core/cache/memory_share.h"
#include "ops/core/cache/row_cache.h"
#include "ops/core/cache/unsent.h"
#include "ops/core/memory/arena.h"
#include "ops/core/memory/index.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/memory/slab.h"
#include "ops/core/parallel.h"
#include "ops/core/row/row_config.h"
#include "ops/core/thread_annotations.h"
#include "ops/core/unique_ids.h"

namespace het_tf {

class Store {
 public:
  // wire: how values travel.
  Store(const RowKit& kit, const CacheConfig& config, const RowFormat& wire);

  Line* line(uint32_t slot) const { return reinterpret_cast<Line*>(lines_[slot]); }
  float* row(uint32_t slot) const {  // (row_dim)
    return reinterpret_cast<float*>(lines_[slot] + sizeof(Line));
  }
  void Prefetch(uint32_t slot) const;
  // Calls visit(slot) for each, in order, with its line fetched to be written. (After a parallel
  // step half of the lines are in another core's cache, which costs as much as memory.)
  template <typename Visit>
  void ForEachAhead(const std::vector<uint32_t>& slots,
                    const Visit& visit) const HET_NO_THREAD_SAFETY_ANALYSIS {
    constexpr size_t kAhead = 12;
    for (size_t i = 0; i < slots.size(); ++i) {
      if (i + kAhead < slots.size()) PrefetchToWrite(line(slots[i + kAhead]));
      visit(slots[i]);
    }
  }
  // Every line lies in [0, end()); a slot without one has no flag and no holder.
  uint32_t end() const { return lines_.end(); }
  bool exists(uint32_t slot) const { return line(slot)->dirty_at != kNoLine; }

  // ---- find

  struct Found {
    int64_t lines = 0;
    int64_t full = 0;
  };
  // slots: (num_keys), the line of each key, held, or Line::kNone. The line counts as used.
  Found Find(const UniqueIds& ids, const ParallelFor& parallel_for, std::vector<uint32_t>* slots);

  // The line of a key, or Line::kNone.
  uint32_t Find(uint64_t hash, int64_t key) const {
    return index_.Find(hash, [&](uint32_t slot) { return line(slot)->key == key; });
  }

  // A line for a key that has none, held once, of which nothing is known yet. uses: how often the
  // key was asked for lately, this time included.
  uint32_t Make(int64_t key, uint64_t hash, int uses);

  // A ticket lets go of a line. Returns whether the line is to be dismissed: nobody holds it, and
  // it does not stay.
  bool Unhold(uint32_t slot);

  void SetResident(uint32_t slot) {
    Line* set = line(slot);
    if (set->has(Line::kResident)) return;
    ++num_resident_;
    set->set(Line::kResident);
    known_scores_[slot] = KnownScore(*set);
    if (set->holds == 0) eviction_.LineMayGo();
  }
  void ClearResident(uint32_t slot) {
    Line* cleared = line(slot);
    if (!cleared->has(Line::kResident)) return;
    --num_resident_;
    cleared->clear(Line::kResident);
    known_scores_[slot] = kNotResident;
  }
  int64_t num_resident() const { return num_resident_; }
  // How many may be. Where it is what fits into memory, Find looks what that is.
  int64_t capacity() const { return capacity_; }
  bool has_room() const { return num_resident_ < capacity_; }

  // The line is clean, nobody holds it, nothing of it is under way.
  void Free(uint32_t slot);

  // ---- install. May be called concurrently for different lines, unless they have own updates
  // without a record.

  // row: (row_dim), with all own updates that were pushed. Those that were not are merged onto it.
  void InstallFull(uint32_t slot, const float* row, int64_t base);
  // value: (dim), with all own updates.
  void InstallValue(uint32_t slot, const float* value, int64_t base);

  // ---- gather

  // Of the lines, in order.
  std::vector<const float*> RowsOf(const std::vector<uint32_t>& slots) const;
  // Copies each id's value. slots: (ids.num_keys()), out: (ids.num_ids(), dim).
  void Gather(const UniqueIds& ids, const std::vector<uint32_t>& slots,
              const ParallelFor& parallel_for, float* out) const;

  // ---- update

  // One update of each line whose gradient is finite. slots and gradients: of the ids' keys. due:
  // those of the lines for which is_due(line) then; is_due may run concurrently. Returns the number
  // of updates. Throws OutOfMemory before any line is touched.
  int64_t Update(const UniqueIds& ids, const std::vector<uint32_t>& slots,
                 const GradientSums& gradients, float learning_rate,
                 const ParallelFor& parallel_for, const std::function<bool(const Line&)>& is_due,
                 std::vector<uint32_t>* due);

  // Lines with own updates in no push yet, in no particular order.
  const std::vector<uint32_t>& dirty() const { return dirty_; }
  // The line's updates are in a push now, or forgotten.
  void MakeClean(uint32_t slot);
  const Unsent& unsent() const { return unsent_; }

  // ---- evict

  // Calls evict(slot) for lines that nobody holds until no more than the capacity are resident, or
  // no other may go. evict must make the line not resident.
  template <typename Evict>
  void Trim(const Evict& evict) {
    eviction_.Run(num_resident_ - capacity_, Evictable{this}, evict);
  }
  int64_t lines_passed() const { return eviction_.passed(); }
  double Uses(const Line& line) const { return eviction_.Uses(line.score); }

  // Bytes of lines, rows, unsent updates and index.
  int64_t memory_bytes() const {
    return lines_.bytes() + unsent_.bytes() + index_.bytes() +
           known_scores_.size() * sizeof(uint32_t);
  }

 private:
  static constexpr uint32_t kNoLine = 0xfffffffe;  // as dirty_at

  // Cycles that a key costs, for splitting work: perf on benchmarks/local_step.py, two to three
  // cache misses a key, in part hidden.
  static constexpr int64_t kKeyCycles = 150;

  int64_t CapacityNow();
  void MakeDirty(uint32_t slot);
  void UpdateLine(uint32_t slot, const Gradient& gradient, float learning_rate, float* before);

  static constexpr uint32_t kNotResident = 0;  // or held and passed by
  // Another one for kNotResident, which looks as if the line had been used since.
  static uint32_t KnownScore(const Line& line) {
    return line.score == kNotResident ? kNotResident - 1 : line.score;
  }

  // The lines as Eviction sees them.
  struct Evictable {
    Store* store;

    uint32_t end() const { return store->end(); }
    void Prefetch(uint32_t slot) const { het_tf::Prefetch(&store->known_scores_[slot]); }
    void PrefetchLine(uint32_t slot) const { het_tf::Prefetch(store->line(slot)); }
    bool Known(uint32_t slot, uint32_t* score) const {
      *score = store->known_scores_[slot];
      return *score != kNotResident;
    }
    bool MayGo(uint32_t slot, uint32_t* score) const {
      Line& candidate = *store->line(slot);
      if (!candidate.has(Line::kResident)) return false;
      const bool may_go = candidate.holds == 0;
      if (!may_go) candidate.set(Line::kPassedBy);
      store->known_scores_[slot] = *score = may_go ? KnownScore(candidate) : kNotResident;
      return may_go;
    }
  };

  const RowKit& kit_;
  const int dim_, row_dim_, num_shards_;
  const bool drift_;
  Arena arena_;
  Index index_;
  Slab lines_;
  Unsent unsent_;
  Eviction eviction_;
  int64_t num_resident_ = 0;
  MemoryShare::Part memory_;
  int64_t capacity_;                    // after what CapacityNow reads
  std::vector<uint32_t> known_scores_;  // (end()), or older: what Eviction knows
  std::vector<uint32_t> dirty_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_STORE_H_
