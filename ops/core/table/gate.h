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
#include "ops/core/table/lifetimes.h"

namespace het_tf {

class Gate {
 public:
  // lifetimes: must outlive the gate. share: of a sketch's bytes that are this stripe's. seed: of
  // what is left to chance.
  Gate(const Lifetimes& lifetimes, double share, uint64_t seed, Arena* arena);

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

 private:
  struct Candidate {
    int64_t key;
    uint32_t count;  // 0: the slot is free
    uint32_t updated;
  };

  Candidate* At(uint32_t slot) const { return reinterpret_cast<Candidate*>(candidates_[slot]); }
  uint32_t Find(uint64_t hash, int64_t key) const;
  void Erase(uint64_t hash, uint32_t slot);
  bool Count(const LifeRules& rules, uint64_t hash, int64_t key, uint32_t updates, uint32_t now);

  const Lifetimes& lifetimes_;
  const double share_;
  const uint64_t seed_;
  uint64_t draws_ = 0;
  Index index_;
  Slab candidates_;
  std::vector<std::unique_ptr<Sketch>> sketches_;  // (ranges)
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_GATE_H_
