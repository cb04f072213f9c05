// Which keys come into a stripe of a table: what is known of those that have no row yet.
//
// Not safe for concurrent use; the stripe's lock guards it.

#ifndef HET_TF_OPS_CORE_TABLE_GATE_H_
#define HET_TF_OPS_CORE_TABLE_GATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/core/memory/arena.h"
#include "ops/core/memory/index.h"
#include "ops/core/memory/sketch.h"
#include "ops/core/memory/slab.h"
#include "ops/core/status.h"
#include "ops/core/table/kept_rows.h"
#include "ops/core/table/lifetimes.h"
#include "ops/core/table/unread.h"

namespace het_tf {

class Gate {
 public:
  // A key that is counted exactly.
  struct Candidate {
    int64_t key;
    uint32_t count;  // 0: the slot is free
    uint32_t updated;
  };

  // lifetimes: must outlive the gate. share: of a sketch's bytes that are this stripe's. seed: of
  // what is left to chance. kept: takes what a snapshot has not read; nullptr: there are none.
  Gate(const Lifetimes& lifetimes, double share, uint64_t seed, Arena* arena,
       KeptRows* kept = nullptr);

  // Has memory for that many keys, so that calls of Admits with as many do not throw.
  void Reserve(size_t keys);

  // A key without a row is updated so many times. Whether it gets a row.
  bool Admits(uint64_t hash, int64_t key, uint32_t updates, uint32_t now);

  // Forgets the key: it has a row.
  void Forget(uint64_t hash, int64_t key);

  // To be followed by clearing the arena.
  void Clear();

  // Keys that are counted exactly.
  int64_t num_candidates() const { return index_.size(); }
  int64_t bytes() const;

  // Forgets those of the candidates in the slots [first, last) for which is_expired(key, time of
  // the last update) holds. Slots lie in [0, end()). Throws std::bad_alloc, and then has forgotten
  // none.
  uint32_t end() const { return candidates_.end(); }
  template <typename IsExpired>
  void Sweep(uint32_t first, uint32_t last, const IsExpired& is_expired) {
    candidates_.ReserveFree(last - first);
    for (uint32_t slot = first; slot < last; ++slot) {
      const Candidate& each = *At(slot);
      if (each.count == 0 || !is_expired(each.key, each.updated)) continue;
      Erase(HashKey(each.key), slot);
    }
  }

  // Saving. A snapshot reads every candidate there is now once, unless it finds it in `kept`.
  // Throws std::bad_alloc.
  void BeginSnapshot() { unread_.Begin(Unread::AllOf(candidates_.end()), candidates_.free()); }
  void EndSnapshot() { unread_.End(); }
  template <typename Visit>
  bool ReadNext(uint32_t* slot, int64_t most, const Visit& visit) {
    return unread_.TakeNext(slot, most, [&](uint32_t s) { visit(*At(s)); });
  }
  // A range's sketch in words, as Sketch::Read; 0: it has none.
  int64_t sketch_words(int range) const {
    return sketches_[range] == nullptr ? 0 : sketches_[range]->state_words();
  }
  const Sketch& sketch(int range) const { return *sketches_[range]; }

  // Restoring. What is known of a key without a row, by rules that may be other ones than those
  // that it was counted by. Throws std::bad_alloc.
  void Restore(uint64_t hash, const Candidate& candidate);
  void MergeSketch(int range, int64_t first, int64_t num_words, const int64_t* words) {
    sketches_[range]->Merge(first, num_words, words);
  }

 private:
  Candidate* At(uint32_t slot) const { return reinterpret_cast<Candidate*>(candidates_[slot]); }
  uint32_t Find(uint64_t hash, int64_t key) const;
  void Erase(uint64_t hash, uint32_t slot);
  // The candidate is about to change.
  void Keep(uint32_t slot);
  void Set(uint64_t hash, uint32_t slot, const Candidate& candidate);
  bool Count(const LifeRules& rules, uint64_t hash, int64_t key, uint32_t updates, uint32_t now);

  const Lifetimes& lifetimes_;
  const double share_;
  const uint64_t seed_;
  uint64_t draws_ = 0;
  Index index_;
  Slab candidates_;
  KeptRows* const kept_;
  Unread unread_;
  std::vector<std::unique_ptr<Sketch>> sketches_;  // (ranges)
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_GATE_H_
