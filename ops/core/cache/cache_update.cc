// Update: the optimizer on cached rows.

#include <algorithm>
#include <vector>

#include "ops/core/cache/cache.h"
#include "ops/core/memory/hash.h"

namespace het_tf {

// Whether the line's updates may wait no longer.
bool Cache::Due(const Line& line) const {
  if (line.pending == 0) return false;
  if (!line.has(Line::kFull)) return true;
  constexpr int64_t kMostPending = 1 << 30;  // of 32 bits in a message
  if (line.pending >= kMostPending) return true;
  if (config_.write_bound == kUnbounded || keeps_updates_) return false;
  const int64_t unsent = config_.rows.clock == ClockRule::kDrift ? line.units : line.pending;
  return unsent >= std::max<int64_t>(config_.when_due(), 1);
}

// Whether its shard has enough of the line's updates for another one.
bool Cache::HasRoom(const Line& line) const {
  const bool drifts = config_.rows.clock == ClockRule::kDrift;
  const int64_t unsent = drifts ? line.units : line.pending;
  const int64_t unmerged = unsent + (drifts ? line.units_in_flight : line.in_flight);
  return unmerged < std::max<int64_t>(config_.write_bound, 1);
}

Status Cache::Update(RowTicket* row_ticket, const float* gradients, float learning_rate,
                     const ParallelFor& parallel_for) {
  auto* ticket = static_cast<Ticket*>(row_ticket);
  return UpdateSummed(ticket, GradientSums(ticket->ids(), gradients, dim(), parallel_for),
                      learning_rate, parallel_for);
}

Status Cache::UpdateSummed(Ticket* ticket, const GradientSums& sums, float learning_rate,
                           const ParallelFor& parallel_for) {
  HET_RETURN_IF_ERROR(kit_.optimizer->CheckLearningRate(learning_rate));
  if (sums.num_nonfinite() > 0 && config_.nonfinite == Nonfinite::kError) {
    return NonfiniteGradients(sums.num_nonfinite(), ticket->ids().num_keys());
  }
  MutexLock lock(&mutex_);
  HET_RETURN_IF_ERROR(own_.CheckNotFrozen());
  TakeReleased();
  if (!ticket->installed_) return FailedPrecondition("ticket was not installed before its update");
  std::vector<uint32_t> due;
  const int64_t updates = store_.Update(
      ticket->ids(), ticket->slots_, sums, learning_rate, parallel_for,
      [this](const Line& line) HET_REQUIRES(mutex_) { return Due(line); }, &due);
  for (const uint32_t slot : due) Enqueue(slot);
  own_.Add(updates, sums.num_nonfinite());
  return Status();
}

Status Cache::KeepUpdates(bool keeps) {
  MutexLock lock(&mutex_);
  TakeReleased();
  const bool ends = keeps_updates_ && !keeps;
  keeps_updates_ = keeps;
  if (ends) {
    for (const uint32_t slot : store_.dirty()) Enqueue(slot);
  }
  return Status();
}

Status Cache::PushRows(const int64_t* keys, int64_t num_keys) {
  MutexLock lock(&mutex_);
  TakeReleased();
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t slot = store_.Find(HashKey(keys[i]), keys[i]);
    if (slot != Line::kNone && store_.line(slot)->pending > 0) Enqueue(slot);
  }
  return Status();
}

}  // namespace het_tf
