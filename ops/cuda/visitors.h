// Which visitor of a store (het_cuda.h) each key without a line has: one for all steps under way
// that look it up, so that each sees what the others update.

#ifndef HET_TF_OPS_CUDA_VISITORS_H_
#define HET_TF_OPS_CUDA_VISITORS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/memory/index.h"

namespace het_tf {
namespace cuda {

class Visitors {
 public:
  // Visitors are numbered from 0 to this, less one.
  int64_t end() const { return static_cast<int64_t>(all_.size()); }

  // Room for so many more: Take and Keep get no memory. Throws std::bad_alloc, with nothing
  // changed.
  void Reserve(int64_t more) {
    const auto needed = static_cast<size_t>(index_.size() + more);
    index_.Reserve(static_cast<int64_t>(needed), [&](uint32_t v) { return HashKey(all_[v].key); });
    if (needed <= all_.size()) return;
    free_.reserve(std::max(needed, 2 * free_.capacity()));
    if (needed > all_.capacity()) all_.reserve(2 * needed);
    while (all_.size() < needed) {
      free_.push_back(static_cast<int32_t>(all_.size()));
      all_.emplace_back();
    }
  }

  // The visitor of a key, or one that is free, which is the key's once it is kept. No other may be
  // taken for the key before that is so, or it is let go.
  int32_t Take(int64_t key) {
    const uint32_t found =
        index_.Find(HashKey(key), [&](uint32_t v) { return all_[v].key == key; });
    if (found != Index::kNone) {
      ++all_[found].holds;
      return static_cast<int32_t>(found);
    }
    const int32_t taken = free_.back();
    free_.pop_back();
    all_[taken] = {key, 0};
    return taken;
  }
  void Keep(int32_t visitor) {
    Visitor& kept = all_[visitor];
    if (kept.holds > 0) return;
    kept.holds = 1;
    index_.Insert(HashKey(kept.key), static_cast<uint32_t>(visitor),
                  [&](uint32_t v) { return HashKey(all_[v].key); });
  }
  // What was taken, once.
  void LetGo(int32_t visitor) {
    Visitor& held = all_[visitor];
    if (held.holds > 0) {
      if (--held.holds > 0) return;
      index_.Erase(HashKey(held.key), static_cast<uint32_t>(visitor));
    }
    free_.push_back(visitor);
  }

  // Whether a step that keeps it is not the only one.
  bool shared(int32_t visitor) const { return all_[visitor].holds > 1; }

 private:
  struct Visitor {
    int64_t key = 0;
    int64_t holds = 0;  // 0: taken, or free
  };

  Index index_;
  std::vector<Visitor> all_;
  std::vector<int32_t> free_;
};

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_VISITORS_H_
