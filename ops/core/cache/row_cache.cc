#include "ops/core/cache/row_cache.h"

namespace het_tf {

Status CacheConfig::Check() const {
  if (rows.num_shards > 0xffff) {
    return InvalidArgument("num_shards = ", rows.num_shards, " must be at most 65535");
  }
  const auto check = [](const char* name, int64_t bound, const char* unbounded) {
    if (bound >= kUnbounded && bound <= kMaxBound) return Status();
    return InvalidArgument(name, " = ", bound, " must be in [0, ", kMaxBound, "] (-1: ", unbounded,
                           ")");
  };
  HET_RETURN_IF_ERROR(check("read_bound", read_bound, "unbounded"));
  HET_RETURN_IF_ERROR(check("write_bound", write_bound, "unbounded"));
  if (synchronous && (read_bound != 0 || write_bound != 0)) {
    return InvalidArgument("read_bound = ", read_bound, ", write_bound = ", write_bound,
                           " must be 0 where the steps of all workers count as one");
  }
  return check("due_bound", due_bound, "that of write_bound");
}

Status NonfiniteGradients(int64_t num_nonfinite, int64_t num_keys) {
  return InvalidArgument("gradients, or their squares, hold NaN or infinity for ", num_nonfinite,
                         " of ", num_keys, " keys; no row was updated");
}

void CountLookup(int64_t ids, int64_t keys, int64_t hits, int64_t hit_ids,
                 Counters<CacheCounter>* counters) {
  counters->Add(CacheCounter::kLookups, 1);
  counters->Add(CacheCounter::kIds, ids);
  counters->Add(CacheCounter::kKeys, keys);
  counters->Add(CacheCounter::kHits, hits);
  counters->Add(CacheCounter::kHitIds, hit_ids);
  counters->Add(CacheCounter::kMisses, keys - hits);
}

void CountRequest(const RequestBytes& bytes, int64_t num_spared, Counters<CacheCounter>* counters) {
  if (bytes.all == 0) return;
  counters->Add(CacheCounter::kChecksSpared, num_spared);
  counters->Add(CacheCounter::kMessages, 1);
  counters->Add(CacheCounter::kBytesUp, static_cast<int64_t>(bytes.all));
  counters->Add(CacheCounter::kBytesUpPush, static_cast<int64_t>(bytes.pushes));
}

}  // namespace het_tf
