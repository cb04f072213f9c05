#include "ops/cuda/tiered.h"

#include <algorithm>

#include "ops/cuda/error.h"

namespace het_tf {
namespace cuda {

Buffers::~Buffers() {
  for (void* memory : device_) Free(memory);
  for (void* memory : pinned_) FreePinned(memory);
}

Status Buffers::New(bool pinned, size_t bytes, void** memory) {
  const int error = pinned ? AllocatePinned(bytes, memory) : Allocate(bytes, memory);
  if (error != 0) {
    return ResourceExhausted(bytes, " bytes of ", pinned ? "pinned" : "device",
                             " memory: ", ErrorString(error));
  }
  (pinned ? pinned_ : device_).push_back(*memory);
  return Status();
}

Status TieredTable::Create(const TieredConfig& config, HostRows* rows, Stream stream, Stream copies,
                           std::unique_ptr<TieredTable>* table) {
  if (config.max_ids < 1) {
    return InvalidArgument("max_ids = ", config.max_ids, " must be at least 1");
  }
  std::unique_ptr<TieredTable> made(new TieredTable(config, rows, stream, copies));
  const HetStoreConfig store = {config.dim,    config.optimizer.c_str(), config.lines,
                                config.policy, HET_CLOCK_COUNT,          0};
  char message[200] = "";
  int64_t bytes = 0;
  if (het_store_bytes(&store, &bytes, message, sizeof(message)) != 0) {
    return InvalidArgument(message);
  }
  char* memory = nullptr;
  HET_RETURN_IF_ERROR(made->buffers_.NewDevice(bytes, &memory));
  HET_RETURN_IF_CUDA_ERROR(
      het_store_create(&store, memory, &made->store_, message, sizeof(message), stream));
  het_store_info(made->store_, &made->info_);
  const int64_t n = config.max_ids, floats = n * made->info_.row_stride;
  const size_t scratch =
      std::max({het_unique_scratch_bytes(n), het_list_scratch_bytes(n),
                het_evict_scratch_bytes(made->store_, n), het_list_victims_scratch_bytes(n),
                het_list_dirty_scratch_bytes(made->store_)});
  Buffers& buffers = made->buffers_;
  HET_RETURN_IF_ERROR(buffers.NewDevice(static_cast<int64_t>(scratch), &made->scratch_));
  HET_RETURN_IF_ERROR(
      buffers.NewDevice(std::max(n, made->info_.lines), &made->leaving_slots_.slots));
  HET_RETURN_IF_ERROR(buffers.NewDevice(1, &made->leaving_slots_.num));
  HET_RETURN_IF_ERROR(buffers.NewDevice(n, &made->leaving_keys_));
  HET_RETURN_IF_ERROR(buffers.NewDevice(floats, &made->leaving_));
  HET_RETURN_IF_ERROR(buffers.NewDevice(n, &made->ones_));
  HET_RETURN_IF_ERROR(buffers.NewPinned(n, &made->keys_host_));
  HET_RETURN_IF_ERROR(buffers.NewPinned(floats, &made->leaving_host_));
  HET_RETURN_IF_ERROR(buffers.NewDevice(1, &made->num_visitors_));
  HET_RETURN_IF_ERROR(buffers.NewDevice(1, &made->num_evicted_));
  HET_RETURN_IF_ERROR(buffers.NewPinned(2, &made->counts_host_));
  HET_RETURN_IF_ERROR(buffers.NewPinned(1, &made->visitors_host_));
  const std::vector<int32_t> ones(n, 1);
  HET_RETURN_IF_CUDA_ERROR(Copy(ones.data(), sizeof(int32_t) * n, made->ones_, stream));
  HET_RETURN_IF_CUDA_ERROR(Synchronize(stream));
  *table = std::move(made);
  return Status();
}

TieredTable::~TieredTable() { het_store_destroy(store_); }

Status TieredTable::NewStep(std::unique_ptr<Step>* step) {
  auto made = std::make_unique<Step>();
  Buffers& buffers = made->buffers_;
  const int64_t n = config_.max_ids, floats = n * info_.row_stride;
  HET_RETURN_IF_ERROR(buffers.NewDevice(n, &made->ids_));
  HET_RETURN_IF_ERROR(buffers.NewDevice(n, &made->slots_));
  HetBatch& batch = made->batch_;
  HET_RETURN_IF_ERROR(buffers.NewDevice(n, &batch.keys));
  HET_RETURN_IF_ERROR(buffers.NewDevice(n, &batch.key_of));
  HET_RETURN_IF_ERROR(buffers.NewDevice(n + 1, &batch.begin));
  HET_RETURN_IF_ERROR(buffers.NewDevice(n, &batch.positions));
  HET_RETURN_IF_ERROR(buffers.NewDevice(1, &batch.num_keys));
  for (HetList* list : {&made->misses_, &made->checks_}) {
    HET_RETURN_IF_ERROR(buffers.NewDevice(n, &list->index));
    HET_RETURN_IF_ERROR(buffers.NewDevice(n, &list->keys));
    HET_RETURN_IF_ERROR(buffers.NewDevice(n, &list->bases));
    HET_RETURN_IF_ERROR(buffers.NewDevice(1, &list->num));
  }
  HET_RETURN_IF_ERROR(buffers.NewDevice(floats, &made->arriving_));
  HET_RETURN_IF_ERROR(buffers.NewDevice(n, &made->bases_));
  HET_RETURN_IF_ERROR(buffers.NewDevice(n * config_.dim, &made->sums_));
  HET_RETURN_IF_ERROR(buffers.NewDevice(n, &made->squares_));
  HET_RETURN_IF_ERROR(buffers.NewDevice(1, &made->nonfinite_));
  const size_t scratch =
      std::max(het_segment_sum_scratch_bytes(n, config_.dim), het_update_scratch_bytes(store_, n));
  HET_RETURN_IF_ERROR(buffers.NewDevice(static_cast<int64_t>(scratch), &made->scratch_));
  HET_RETURN_IF_ERROR(buffers.NewPinned(floats, &made->arriving_host_));
  HET_RETURN_IF_CUDA_ERROR(Fill(0, sizeof(int64_t) * n, made->bases_, stream_));
  *step = std::move(made);
  return Status();
}

// Lines for the step. The rows that leave are in leaving_ after this, so their lines may be
// written.
Status TieredTable::Plan(const int64_t* ids, int64_t n, Step* step, int64_t* num_victims) {
  HetBatch& batch = step->batch_;
  batch.num_ids = n;
  HET_RETURN_IF_CUDA_ERROR(Copy(ids, sizeof(int64_t) * n, step->ids_, stream_));
  HET_RETURN_IF_CUDA_ERROR(het_unique(step->ids_, &batch, scratch_, stream_));
  HET_RETURN_IF_CUDA_ERROR(het_find(store_, &batch, step->slots_, stream_));
  HET_RETURN_IF_CUDA_ERROR(
      het_list(store_, &batch, step->slots_, &step->misses_, &step->checks_, scratch_, stream_));
  int32_t* num_misses = &counts_host_[0];
  HET_RETURN_IF_CUDA_ERROR(Copy(step->misses_.num, sizeof(int32_t), num_misses, stream_));
  HET_RETURN_IF_CUDA_ERROR(Synchronize(stream_));
  const int64_t m = step->num_misses_ = *num_misses;
  HET_RETURN_IF_CUDA_ERROR(het_evict(store_, &step->misses_, m, ones_, HET_ADMIT_ALWAYS,
                                     step->slots_, num_visitors_, num_evicted_, scratch_, stream_));
  HET_RETURN_IF_CUDA_ERROR(het_list_victims(store_, &step->misses_, m, step->slots_,
                                            &leaving_slots_, scratch_, stream_));
  HET_RETURN_IF_CUDA_ERROR(
      het_collect_rows(store_, &leaving_slots_, m, leaving_keys_, leaving_, stream_));
  HET_RETURN_IF_CUDA_ERROR(het_make(store_, &step->misses_, m, ones_, step->slots_, stream_));
  HET_RETURN_IF_CUDA_ERROR(Copy(leaving_slots_.num, sizeof(int32_t), &counts_host_[1], stream_));
  HET_RETURN_IF_CUDA_ERROR(Copy(num_visitors_, sizeof(int64_t), visitors_host_, stream_));
  HET_RETURN_IF_CUDA_ERROR(Synchronize(stream_));
  *num_victims = counts_host_[1];
  return Status();
}

// The first rows of leaving_ are the host's again.
Status TieredTable::WriteBack(int64_t num_victims) {
  HET_RETURN_IF_CUDA_ERROR(Copy(leaving_keys_, sizeof(int64_t) * num_victims, keys_host_, copies_));
  HET_RETURN_IF_ERROR(CopyRows(leaving_, num_victims, leaving_host_));
  host_rows_->Write(keys_host_, num_victims, leaving_host_, info_.row_stride);
  rows_down_ += num_victims;
  return Status();
}

// Returns when they are there.
Status TieredTable::CopyRows(const float* from, int64_t n, float* to) {
  HET_RETURN_IF_CUDA_ERROR(Copy(from, sizeof(float) * n * info_.row_stride, to, copies_));
  HET_RETURN_IF_CUDA_ERROR(Synchronize(copies_));
  return Status();
}

Status TieredTable::Fetch(const int64_t* ids, int64_t n, Step* step) {
  if (n > config_.max_ids) {
    return InvalidArgument("a step of ", n, " ids, max_ids = ", config_.max_ids);
  }
  int64_t num_victims = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    HET_RETURN_IF_ERROR(Plan(ids, n, step, &num_victims));
  }
  HET_RETURN_IF_ERROR(WriteBack(num_victims));
  if (*visitors_host_ > 0) {
    HET_RETURN_IF_ERROR(Release(step));
    return ResourceExhausted("lines = ", info_.lines, ": ", *visitors_host_,
                             " keys found no line that no step under way needs");
  }
  const int64_t m = step->num_misses_;
  HET_RETURN_IF_CUDA_ERROR(Copy(step->misses_.keys, sizeof(int64_t) * m, keys_host_, copies_));
  HET_RETURN_IF_CUDA_ERROR(Synchronize(copies_));
  host_rows_->Read(keys_host_, m, step->arriving_host_, info_.row_stride);
  return Status();
}

Status TieredTable::Install(Step* step) {
  const int64_t m = step->num_misses_;
  HET_RETURN_IF_ERROR(CopyRows(step->arriving_host_, m, step->arriving_));
  rows_up_ += m;
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_CUDA_ERROR(het_install(store_, step->misses_.index, step->slots_, step->arriving_,
                                       step->bases_, m, stream_));
  return Status();
}

Status TieredTable::Gather(Step* step, float* out) {
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_CUDA_ERROR(het_gather(&step->batch_, step->slots_, info_.rows, info_.row_stride,
                                      info_.lines, step->arriving_, info_.row_stride, config_.dim,
                                      out, stream_));
  HET_RETURN_IF_CUDA_ERROR(Synchronize(stream_));
  return Status();
}

Status TieredTable::Update(Step* step, const float* gradients, float learning_rate) {
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_CUDA_ERROR(het_segment_sum(&step->batch_, gradients, config_.dim, step->sums_,
                                           step->squares_, step->nonfinite_, step->scratch_,
                                           stream_));
  HET_RETURN_IF_CUDA_ERROR(het_update(store_, &step->batch_, step->slots_, step->sums_,
                                      step->squares_, learning_rate, nullptr, step->scratch_,
                                      stream_));
  return Status();
}

Status TieredTable::Release(Step* step) {
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_CUDA_ERROR(het_unpin(store_, &step->batch_, step->slots_, stream_));
  HET_RETURN_IF_CUDA_ERROR(Synchronize(stream_));
  return Status();
}

Status TieredTable::Flush() {
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_CUDA_ERROR(het_list_dirty(store_, &leaving_slots_, scratch_, stream_));
  HET_RETURN_IF_CUDA_ERROR(Copy(leaving_slots_.num, sizeof(int32_t), &counts_host_[0], stream_));
  HET_RETURN_IF_CUDA_ERROR(Synchronize(stream_));
  // As many at a time as there is room for.
  const int64_t n = counts_host_[0];
  for (int64_t first = 0; first < n; first += config_.max_ids) {
    const int64_t some = std::min(config_.max_ids, n - first);
    const HetSlots slots = {leaving_slots_.slots + first, leaving_slots_.num};
    HET_RETURN_IF_CUDA_ERROR(
        het_collect_rows(store_, &slots, some, leaving_keys_, leaving_, stream_));
    HET_RETURN_IF_CUDA_ERROR(Synchronize(stream_));
    HET_RETURN_IF_ERROR(WriteBack(some));
  }
  return Status();
}

TieredTable::Counters TieredTable::counters() const {
  const int64_t bytes = int64_t{sizeof(float)} * info_.row_stride;
  return {rows_up_, rows_down_, rows_up_ * bytes, rows_down_ * bytes};
}

}  // namespace cuda
}  // namespace het_tf
