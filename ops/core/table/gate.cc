#include "ops/core/table/gate.h"

#include <algorithm>
#include <cmath>

#include "ops/core/memory/hash.h"

namespace het_tf {

Gate::Gate(const Lifetimes& lifetimes, double share, uint64_t seed, Arena* arena, KeptRows* kept)
    : lifetimes_(lifetimes),
      share_(share),
      seed_(seed),
      candidates_(sizeof(Candidate), arena),
      kept_(kept) {
  Clear();
}

void Gate::Clear() {
  index_.Clear();
  candidates_.Clear();
  sketches_.clear();
  sketches_.resize(lifetimes_.num_ranges());
  for (int r = 0; r < lifetimes_.num_ranges(); ++r) {
    const double bytes = share_ * static_cast<double>(lifetimes_.range(r).sketch_bytes);
    if (bytes > 0) sketches_[r] = std::make_unique<Sketch>(Sketch::CapacityOf(bytes));
  }
}

void Gate::Reserve(size_t keys) {
  candidates_.Reserve(keys);
  candidates_.ReserveFree(keys);
  index_.Reserve(index_.size() + static_cast<int64_t>(keys),
                 [&](uint32_t slot) { return HashKey(At(slot)->key); });
}

int64_t Gate::bytes() const {
  int64_t bytes = index_.bytes() + candidates_.bytes();
  for (const auto& sketch : sketches_) bytes += sketch == nullptr ? 0 : sketch->bytes();
  return bytes;
}

uint32_t Gate::Find(uint64_t hash, int64_t key) const {
  return index_.Find(hash, [&](uint32_t slot) { return At(slot)->key == key; });
}

void Gate::Keep(uint32_t slot) {
  if (unread_.Take(slot)) kept_->Keep(KeptRows::kCandidates, At(slot), sizeof(Candidate));
}

void Gate::Erase(uint64_t hash, uint32_t slot) {
  Keep(slot);
  index_.Erase(hash, slot);
  At(slot)->count = 0;
  candidates_.Free(slot);
}

void Gate::Forget(uint64_t hash, int64_t key) {
  const uint32_t slot = Find(hash, key);
  if (slot == Index::kNone) return;
  candidates_.ReserveFree(1);
  Erase(hash, slot);
}

bool Gate::Admits(uint64_t hash, int64_t key, uint32_t updates, uint32_t now) {
  const int r = lifetimes_.RangeOf(key);
  const LifeRules& rules = lifetimes_.range(r);
  if (rules.probability < 1) {
    const uint64_t drawn = HashKey(static_cast<int64_t>(HashKey(key) + seed_ + ++draws_));
    // Of all its updates, each with a chance of its own.
    const double none = std::pow(1 - rules.probability, static_cast<double>(updates));
    return static_cast<double>(drawn >> 11) * 0x1p-53 >= none;
  }
  if (updates >= rules.count && sketches_[r] == nullptr && index_.size() == 0) return true;
  if (sketches_[r] == nullptr) return Count(rules, hash, key, updates, now);
  Sketch& sketch = *sketches_[r];
  sketch.Age(1);
  const int64_t count = std::min<int64_t>(int64_t{sketch.Get(hash)} + updates, Sketch::kMax);
  sketch.AtLeast(hash, static_cast<int>(count));
  return count >= rules.count;
}

bool Gate::Count(const LifeRules& rules, uint64_t hash, int64_t key, uint32_t updates,
                 uint32_t now) {
  uint32_t slot = Find(hash, key);
  const uint32_t before = slot == Index::kNone ? 0 : At(slot)->count;
  if (int64_t{before} + updates >= rules.count) {
    if (slot != Index::kNone) Erase(hash, slot);
    return true;
  }
  Set(hash, slot, {key, static_cast<uint32_t>(before + updates), now});
  return false;
}

void Gate::Set(uint64_t hash, uint32_t slot, const Candidate& candidate) {
  if (slot == Index::kNone) {
    slot = candidates_.Allocate();
    index_.Insert(hash, slot, [&](uint32_t s) { return HashKey(At(s)->key); });
  } else {
    Keep(slot);
  }
  *At(slot) = candidate;
}

void Gate::Restore(uint64_t hash, const Candidate& candidate) {
  const int r = lifetimes_.RangeOf(candidate.key);
  const LifeRules& rules = lifetimes_.range(r);
  if (rules.admits_all() || rules.probability < 1) return;
  if (sketches_[r] != nullptr) {
    const int most = std::min<int64_t>(candidate.count, Sketch::kMax);
    sketches_[r]->AtLeast(hash, most);
    return;
  }
  Set(hash, Find(hash, candidate.key), candidate);
}

}  // namespace het_tf
