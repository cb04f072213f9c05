// Update: the optimizer on a step's lines, and what is due.

#include <algorithm>

#include "ops/cuda/device_cache.h"
#include "ops/cuda/error.h"
#include "ops/cuda/memory.h"
#include "ops/cuda/scratch.h"

namespace het_tf {
namespace cuda {
namespace {

struct UpdateArrays {
  float* sums;         // (n, dim)
  float* squares;      // (n)
  int32_t* gradients;  // (n)
  int32_t* lines;      // (n)
  char* scratch;
};

size_t PlaceUpdate(void* memory, int64_t n, int64_t dim, size_t scratch_bytes,
                   UpdateArrays* arrays) {
  Scratch scratch(memory);
  arrays->sums = scratch.Take<float>(n * dim);
  arrays->squares = scratch.Take<float>(n);
  arrays->gradients = scratch.Take<int32_t>(n);
  arrays->lines = scratch.Take<int32_t>(n);
  arrays->scratch = scratch.Take<char>(static_cast<int64_t>(scratch_bytes));
  return scratch.bytes();
}

}  // namespace

Status DeviceCache::TakePushed(int64_t n, bool gradients, float learning_rate) {
  const int64_t width = gradients ? dim() : info_.contribution_dim;
  const auto copy = [&](const auto* from, int64_t count, auto* to) {
    return FromDevice(from, sizeof(*from) * count, to);
  };
  HET_RETURN_IF_CUDA_ERROR(copy(push_there_.keys, n, push_here_.keys));
  HET_RETURN_IF_CUDA_ERROR(copy(push_there_.updates, n, push_here_.updates));
  HET_RETURN_IF_CUDA_ERROR(copy(push_there_.clocks, n, push_here_.clocks));
  HET_RETURN_IF_CUDA_ERROR(copy(push_there_.floats, n * width, push_here_.floats));
  HET_RETURN_IF_ERROR(Wait());
  std::fill(rows_in_.begin(), rows_in_.end(), 0);
  for (int64_t i = 0; i < n; ++i) ++rows_in_[ShardOf(push_here_.keys[i])];
  for (int s = 0; s < num_shards(); ++s) {
    shards_[s].outbox.Reserve(gradients ? rows_in_[s] : 0, gradients ? 0 : rows_in_[s]);
  }
  for (int64_t i = 0; i < n; ++i) {
    Outbox& outbox = shards_[ShardOf(push_here_.keys[i])].outbox;
    const float* floats = push_here_.floats + i * width;
    if (gradients) {
      outbox.AddGradient(push_here_.keys[i], learning_rate, push_here_.clocks[i], floats);
    } else {
      outbox.AddContribution(push_here_.keys[i], static_cast<uint32_t>(push_here_.updates[i]),
                             push_here_.clocks[i], floats);
    }
  }
  return Status();
}

// slots: (n), device memory.
Status DeviceCache::CollectLines(const int32_t* slots, int64_t n) {
  auto* num = &reinterpret_cast<Counts*>(counts_device_.get())->first_slots;
  for (int64_t first = 0; first < n; first += kPushRows) {
    const int64_t some = std::min(kPushRows, n - first);
    const HetSlots lines = {const_cast<int32_t*>(slots) + first, num};
    HET_RETURN_IF_CUDA_ERROR(het_collect(store_, &lines, some, &push_there_, stream_));
    HET_RETURN_IF_ERROR(TakePushed(some, false, 0));
    HET_RETURN_IF_CUDA_ERROR(het_clean(store_, &lines, nullptr, some, stream_));
  }
  return Status();
}

// keys: (n), device memory: which of those found.
Status DeviceCache::CollectGradients(const Found& found, const int32_t* keys, int64_t n,
                                     const float* sums, float learning_rate) {
  auto* num = &reinterpret_cast<Counts*>(counts_device_.get())->second_slots;
  for (int64_t first = 0; first < n; first += kPushRows) {
    const int64_t some = std::min(kPushRows, n - first);
    const HetSlots slots = {const_cast<int32_t*>(keys) + first, num};
    HET_RETURN_IF_CUDA_ERROR(het_collect_gradients(store_, &found.batch, found.slots, sums, &slots,
                                                   some, &push_there_, stream_));
    HET_RETURN_IF_ERROR(TakePushed(some, true, learning_rate));
    HET_RETURN_IF_CUDA_ERROR(het_clean(store_, &slots, found.slots, some, stream_));
  }
  return Status();
}

Status DeviceCache::Update(RowTicket* ticket, const float* gradients, float learning_rate,
                           const ParallelFor&) {
  return OrOutOfMemory([&] {
    const auto sum = [&](const Found& found, const Summed& summed) {
      return het_segment_sum(&found.batch, gradients, dim(), summed.sums, summed.squares,
                             summed.num_nonfinite, summed.scratch, stream_);
    };
    return UpdateSummed(static_cast<DeviceTicket*>(ticket), learning_rate, sum);
  });
}

// sum: puts the sums of the keys' gradients on the stream.
Status DeviceCache::UpdateSummed(DeviceTicket* ticket, float learning_rate,
                                 const std::function<int(const Found&, const Summed&)>& sum) {
  HET_RETURN_IF_ERROR(kit_.optimizer->CheckLearningRate(learning_rate));
  MutexLock lock(&mutex_);
  HET_RETURN_IF_ERROR(own_.CheckNotFrozen());
  HET_RETURN_IF_ERROR(Begin());
  HET_RETURN_IF_ERROR(TakeReleased());
  if (!ticket->installed_) return FailedPrecondition("ticket was not installed before its update");
  const int64_t n = ticket->num_ids();
  if (n == 0) return Status();
  Found& found = *ticket->found_;
  const size_t scratch_bytes =
      std::max({het_segment_sum_scratch_bytes(n, dim()), het_update_scratch_bytes(store_, n),
                het_list_due_scratch_bytes(n)});
  UpdateArrays arrays;
  HET_RETURN_IF_ERROR(scratch_.Reserve(PlaceUpdate(nullptr, n, dim(), scratch_bytes, &arrays)));
  PlaceUpdate(scratch_.get(), n, dim(), scratch_bytes, &arrays);
  // Whatever of it is due, the outboxes have room: an update that was made is not lost.
  for (int s = 0; s < num_shards(); ++s) {
    shards_[s].outbox.Reserve(ticket->keys_in_[s], ticket->keys_in_[s]);
  }
  auto* counts = reinterpret_cast<Counts*>(counts_device_.get());
  // What a closure holds back stays on its line, so that checks say what the shard has heard of.
  const int64_t due_bound = own_.holds_back() ? kUnbounded : config_.when_due();
  const bool refuses = config_.nonfinite == Nonfinite::kError;
  const HetSlots due_lines = {arrays.lines, &counts->first_slots};
  const HetSlots due_gradients = {arrays.gradients, &counts->second_slots};
  HET_RETURN_IF_ERROR(FindLate(found));
  HET_RETURN_IF_CUDA_ERROR(
      sum(found, {arrays.sums, arrays.squares, &counts->nonfinite, arrays.scratch}));
  HET_RETURN_IF_CUDA_ERROR(
      het_update(store_, &found.batch, found.slots, arrays.sums, arrays.squares, learning_rate,
                 refuses ? &counts->nonfinite : nullptr, arrays.scratch, stream_));
  HET_RETURN_IF_CUDA_ERROR(het_list_due(store_, &found.batch, found.slots, arrays.squares,
                                        due_bound, &due_gradients, &due_lines, arrays.scratch,
                                        stream_));
  HET_RETURN_IF_ERROR(ReadCounts());
  const Counts read = *reinterpret_cast<const Counts*>(counts_pinned_.get());
  if (refuses && read.nonfinite > 0) return NonfiniteGradients(read.nonfinite, found.here.keys);
  own_.Add(found.here.keys - read.nonfinite, read.nonfinite);
  HET_RETURN_IF_ERROR(
      CollectGradients(found, arrays.gradients, read.second_slots, arrays.sums, learning_rate));
  return CollectLines(arrays.lines, read.first_slots);
}

}  // namespace cuda
}  // namespace het_tf
