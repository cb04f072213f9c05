// Update: the optimizer on cached rows. Flush: requests that only push.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "ops/core/cache.h"
#include "ops/core/prefetch.h"

namespace het_tf {
Status Cache::Update(Ticket* ticket, const float* gradients, float learning_rate,
                     const ParallelFor& parallel_for) {
  HET_RETURN_IF_ERROR(kit_.optimizer->CheckLearningRate(learning_rate));
  const Batch& batch = ticket->batch();
  const GradientSums sums(batch, gradients, dim(), parallel_for);
  if (sums.num_nonfinite() > 0 && config_.nonfinite == Nonfinite::kError) {
    return InvalidArgument("gradients, or their squares, hold NaN or infinity for ",
                           sums.num_nonfinite(), " of ", batch.num_keys(),
                           " keys; no row was updated");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_ERROR(CheckNotFrozen());
  TakeReleased();
  if (!ticket->filled_) return FailedPrecondition("ticket was not filled before its update");
  const int32_t due =
      config_.server_applies ? 1
      : config_.write_bound == kUnbounded
          ? INT32_MAX
          : static_cast<int32_t>(std::clamp<int64_t>(config_.write_bound, 1, INT32_MAX));
  std::atomic<int64_t> updates{0}, lost{0}, num_due{0};
  parallel_for(batch.num_keys(), kKeyCycles + 4 * row_dim_, [&](int64_t first, int64_t last) {
    constexpr int64_t kAhead = 3;
    std::vector<float> old(row_dim_);
    int64_t my_updates = 0, my_lost = 0, my_due = 0;
    for (int64_t u = first; u < last; ++u) {
      if (u + kAhead < last) {
        Prefetch(lines_[ticket->slots_[u + kAhead]], lines_.record_bytes());
      }
      const float* gradient = sums[u];
      if (gradient == nullptr) continue;
      const uint32_t slot = ticket->slots_[u];
      Line* line = LineAt(slot);
      if (!(line->flags & kFilled)) {  // its shard was cleared or restored since the lookup
        ++my_lost;
        continue;
      }
      float* row = RowAt(slot);
      float* delta = DeltaAt(slot);
      if (config_.server_applies) {
        for (int i = 0; i < dim(); ++i) delta[i] += gradient[i];
      } else {
        std::memcpy(old.data(), row, sizeof(float) * row_dim_);
        kit_.optimizer->Update(row, gradient, learning_rate);
        for (int i = 0; i < row_dim_; ++i) delta[i] += row[i] - old[i];
      }
      line->learning_rate = learning_rate;
      my_due += ++line->pending >= due;
      ++my_updates;
    }
    updates.fetch_add(my_updates, std::memory_order_relaxed);
    lost.fetch_add(my_lost, std::memory_order_relaxed);
    num_due.fetch_add(my_due, std::memory_order_relaxed);
  });
  if (num_due > 0) {
    for (const uint32_t slot : ticket->slots_) {
      if (LineAt(slot)->pending >= due) Enqueue(slot);
    }
  }
  num_pending_ += updates;
  counters_.Add(CacheCounter::kUpdates, updates);
  counters_.Add(CacheCounter::kUpdatesLost, lost);
  counters_.Add(CacheCounter::kNonfiniteSkipped, sums.num_nonfinite());
  return Status();
}

Status Cache::Flush(bool all, const AllocateRequest& allocate, std::shared_ptr<Ticket>* ticket) {
  *ticket = std::make_shared<Ticket>(shared_from_this(), std::make_shared<Batch>(nullptr, 0));
  std::lock_guard<std::mutex> lock(mutex_);
  TakeReleased();
  Trim();
  if (all) {
    for (uint32_t slot = 0; slot < lines_.end(); ++slot) {
      const Line& line = *LineAt(slot);
      if ((line.flags & kResident) && line.pending > 0) Enqueue(slot);
    }
  }
  for (int s = 0; s < num_shards(); ++s)
    CutRequest(s, ticket->get(), {}, config_.read_bound, allocate);
  return Status();
}

}  // namespace het_tf
