// Rows that gave way to others on the device, in the host's memory: as their lines had them, so
// that one which comes again is checked and not fetched.

#ifndef HET_TF_OPS_CUDA_HOST_ROWS_H_
#define HET_TF_OPS_CUDA_HOST_ROWS_H_

#include <cstdint>

#include "ops/core/memory/arena.h"
#include "ops/core/memory/index.h"
#include "ops/core/memory/slab.h"

namespace het_tf {
namespace cuda {

// Not safe for concurrent use.
class HostRows {
 public:
  // capacity: rows; 0: none is kept. row_dim: floats of a row.
  HostRows(int64_t capacity, int row_dim);
  HostRows(const HostRows&) = delete;
  HostRows& operator=(const HostRows&) = delete;

  bool is_enabled() const { return capacity_ > 0; }
  int64_t size() const { return index_.size(); }
  int64_t memory_bytes() const { return slab_.bytes() + index_.bytes(); }

  // key: one that is not there. row: (row_dim). Where it is full, the row that came first gives
  // way. Throws std::bad_alloc, and nothing has changed.
  void Put(int64_t key, int64_t base, const float* row);

  // If the key's row is there, it is handed over, and there no more. row: (row_dim), out.
  bool Take(int64_t key, int64_t* base, float* row);
  void Drop(int64_t key);
  // Of a shard.
  void DropAll(int shard, int num_shards);

 private:
  static constexpr uint32_t kNone = Index::kNone;

  struct Record {
    int64_t key, base;
    uint32_t older, newer;  // slots, in the order in which rows came; kNone: there is none

    float* row() { return reinterpret_cast<float*>(this + 1); }  // (row_dim)
  };

  Record& record(uint32_t slot) const { return *reinterpret_cast<Record*>(slab_[slot]); }
  uint32_t Find(int64_t key) const;
  void Remove(uint32_t slot);

  const int64_t capacity_;
  const int row_dim_;
  Arena arena_;
  Slab slab_;
  Index index_;
  uint32_t oldest_ = kNone, newest_ = kNone;
};

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_HOST_ROWS_H_
