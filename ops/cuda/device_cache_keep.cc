// Rows that give way on the device: to the host, and back.

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "ops/cuda/device_cache.h"
#include "ops/cuda/error.h"
#include "ops/cuda/memory.h"

namespace het_tf {
namespace cuda {

// Of evicted rows, what their lines have.
Status DeviceCache::KeepEvicted(const Found& found) {
  if (!host_rows_.is_enabled()) return Status();
  // A row that comes back after its push would find no line to be merged with here.
  std::unordered_set<int64_t> left_out;
  if (config_.pushed_rows_come_back()) {
    const std::vector<int64_t> waiting = WaitingKeys();
    left_out.insert(waiting.begin(), waiting.end());
  }
  // A lookup that failed may have kept them as they were then.
  for (int32_t j = 0; j < found.here.misses; ++j) {
    if (found.evicted_here[j] > 0) host_rows_.Drop(found.evicted_keys[j]);
  }
  const Leaving &here = leaving_here_, &there = leaving_there_;
  int64_t n = 0;
  std::vector<int64_t> keys(std::min<int64_t>(kPushRows, found.here.misses));
  for (int32_t j = 0; j < found.here.misses; ++j) {
    if (found.evicted_here[j] > 0 && left_out.count(found.evicted_keys[j]) == 0) {
      here.slots[n] = found.slots_here[found.miss_index[j]];
      keys[n++] = found.evicted_keys[j];
    }
    if (n == 0 || (n < kPushRows && j + 1 < found.here.misses)) continue;
    HET_RETURN_IF_CUDA_ERROR(ToDevice(here.slots, sizeof(int32_t) * n, there.slots));
    HET_RETURN_IF_CUDA_ERROR(
        het_read_lines(store_, there.slots, n, there.rows, there.bases, stream_));
    HET_RETURN_IF_CUDA_ERROR(FromDevice(there.bases, sizeof(int64_t) * n, here.bases));
    HET_RETURN_IF_CUDA_ERROR(
        FromDevice(there.rows, sizeof(float) * info_.row_stride * n, here.rows));
    HET_RETURN_IF_ERROR(Wait());
    for (int64_t i = 0; i < n; ++i) {
      host_rows_.Put(keys[i], here.bases[i], here.rows + i * info_.row_stride);
    }
    counters_.Add(CacheCounter::kRowsToHost, n);
    n = 0;
  }
  return Status();
}

// If the host has kept the row of a miss with a line, the ticket gets it, with its clock.
bool DeviceCache::TakeKept(const Subject& miss, DeviceTicket* ticket, int64_t* base) {
  const auto at = static_cast<int32_t>(ticket->kept_bases_.size());
  const size_t row_dim = kit_.optimizer->row_dim();
  ticket->num_forgets_ = num_forgets_;
  ticket->kept_rows_.resize((at + 1) * row_dim);
  ticket->kept_of_.resize(ticket->found_->here.keys, -1);
  if (!host_rows_.Take(miss.key, base, ticket->kept_rows_.data() + at * row_dim)) return false;
  ticket->kept_bases_.push_back(*base);
  ticket->kept_of_[miss.at] = at;
  return true;
}

}  // namespace cuda
}  // namespace het_tf
