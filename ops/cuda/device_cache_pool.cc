// Pool, and the update of what was pooled.

#include <memory>
#include <utility>
#include <vector>

#include "ops/cuda/device_cache.h"
#include "ops/cuda/error.h"
#include "ops/cuda/memory.h"
#include "ops/cuda/scratch.h"

namespace het_tf {
namespace cuda {
namespace {

template <typename T>
size_t BytesOf(const std::vector<T>& values) {
  return sizeof(T) * values.size();
}

}  // namespace

DeviceBags::DeviceBags(std::shared_ptr<DeviceCache> cache, std::shared_ptr<RowTicket> ticket,
                       std::shared_ptr<const Pooling> pooling)
    : cache_(std::move(cache)),
      ticket_(std::move(ticket)),
      block_(cache_->memory_.get()),
      pooling_(std::move(pooling)) {}

// num_keys: of the lookup.
Status DeviceBags::Place(int64_t num_keys, int dim, const CopyThere& copy_there) {
  const Pooling& pooling = *pooling_;
  int32_t *begin = nullptr, *bag_of = nullptr, *max_of = nullptr;
  float *scales = nullptr, *weights = nullptr;
  const auto place = [&](void* memory) {
    Scratch scratch(memory);
    begin = scratch.Take<int32_t>(pooling.num_bags() + 1);
    bag_of = scratch.Take<int32_t>(pooling.num_ids());
    scales = scratch.Take<float>(pooling.num_bags());
    pointers_ = scratch.Take<float*>(pooling.num_bags());
    if (pooling.weighted()) weights = scratch.Take<float>(pooling.num_ids());
    if (pooling.keeps_rows()) bags_.kept = scratch.Take<float>(num_keys * dim);
    if (pooling.num_max() > 0) {
      max_of = scratch.Take<int32_t>(pooling.num_bags());
      bags_.maxima = scratch.Take<float>(int64_t{pooling.num_max()} * dim);
      bags_.counts = scratch.Take<float>(int64_t{pooling.num_max()} * dim);
    }
    return scratch.bytes();
  };
  HET_RETURN_IF_ERROR(block_.ReserveExactly(place(nullptr)));
  place(block_.get());
  bags_.num_bags = pooling.num_bags();
  bags_.begin = begin;
  bags_.bag_of = bag_of;
  bags_.scales = scales;
  bags_.weights = weights;
  bags_.max_of = max_of;
  const auto copy = [&](const auto& from, auto* to) {
    return copy_there(from.data(), BytesOf(from), to);
  };
  HET_RETURN_IF_CUDA_ERROR(copy(pooling.begins(), begin));
  HET_RETURN_IF_CUDA_ERROR(copy(pooling.bags_of_ids(), bag_of));
  HET_RETURN_IF_CUDA_ERROR(copy(pooling.scales(), scales));
  if (weights != nullptr) HET_RETURN_IF_CUDA_ERROR(copy(pooling.weights(), weights));
  return ToStatus(copy(pooling.max_of(), max_of), "copying bags");
}

Status DeviceCache::Pool(const std::shared_ptr<RowTicket>& row_ticket,
                         std::shared_ptr<Pooling> pooling, const ParallelFor&,
                         const std::vector<float*>& outputs, std::shared_ptr<PooledRows>* pooled) {
  return OrOutOfMemory([&]() -> Status {
    const auto& ticket = static_cast<const DeviceTicket&>(*row_ticket);
    auto made = std::make_shared<DeviceBags>(shared_from_this(), row_ticket, std::move(pooling));
    const std::vector<float*> out = made->pooling_->OfBags(outputs, dim());
    MutexLock lock(&mutex_);
    HET_RETURN_IF_ERROR(Begin());
    if (!ticket.installed_) return FailedPrecondition("ticket was not installed before its rows");
    const Found none(nullptr);  // of a flush's ticket
    const Found& found = ticket.found_ == nullptr ? none : *ticket.found_;
    const auto copy_there = [this](const void* from, size_t bytes, void* to) {
      return ToDevice(from, bytes, to);
    };
    HET_RETURN_IF_ERROR(made->Place(found.here.keys, dim(), copy_there));
    HET_RETURN_IF_CUDA_ERROR(ToDevice(out.data(), BytesOf(out), made->pointers_));
    HET_RETURN_IF_ERROR(Wait());  // what was copied is not pinned, and may end with this call
    HET_RETURN_IF_ERROR(FindLate(found));
    HET_RETURN_IF_CUDA_ERROR(het_pool(&found.batch, &made->bags_, found.slots, info_.rows,
                                      info_.row_stride, info_.lines, info_.visitors,
                                      info_.row_stride, dim(), made->pointers_, stream_));
    *pooled = std::move(made);
    return Status();
  });
}

Status DeviceBags::Update(RowTicket* ticket, const std::vector<const float*>& gradients,
                          float learning_rate, const ParallelFor&) {
  return OrOutOfMemory([&] {
    const int dim = cache_->dim();
    const std::vector<const float*> of_bags = pooling_->OfBags(gradients, dim);
    const float** there = const_cast<const float**>(pointers_);
    const auto sum = [&](const Found& found, const DeviceCache::Summed& summed) {
      const int error = cache_->ToDevice(of_bags.data(), BytesOf(of_bags), there);
      if (error != 0) return error;
      return het_segment_sum_pooled(&found.batch, &bags_, there, dim, summed.sums, summed.squares,
                                    summed.num_nonfinite, summed.scratch, cache_->stream_);
    };
    return cache_->UpdateSummed(static_cast<DeviceTicket*>(ticket), learning_rate, sum);
  });
}

Status DeviceBags::Read(std::shared_ptr<const UniqueIds>* ids, std::vector<float>* rows) const {
  return OrOutOfMemory([&]() -> Status {
    const auto& ticket = static_cast<const DeviceTicket&>(*ticket_);
    std::vector<int64_t> read(ticket.num_ids());
    if (!read.empty()) HET_RETURN_IF_ERROR(cache_->ReadPooled(ticket, *this, &read, rows));
    *ids = std::make_shared<UniqueIds>(read.data(), static_cast<int64_t>(read.size()));
    return Status();
  });
}

// ids: (num_ids), at least one.
Status DeviceCache::ReadPooled(const DeviceTicket& ticket, const DeviceBags& bags,
                               std::vector<int64_t>* ids, std::vector<float>* rows) {
  const Found& found = *ticket.found_;
  std::vector<int64_t> keys(found.here.keys);
  std::vector<int32_t> key_of(ids->size());
  if (bags.bags_.kept != nullptr) rows->resize(keys.size() * dim());
  const auto copy_here = [&](const auto* from, auto* to) {
    return FromDevice(from, BytesOf(*to), to->data());
  };
  MutexLock lock(&mutex_);
  HET_RETURN_IF_ERROR(Begin());
  HET_RETURN_IF_CUDA_ERROR(copy_here(found.batch.keys, &keys));
  HET_RETURN_IF_CUDA_ERROR(copy_here(found.batch.key_of, &key_of));
  HET_RETURN_IF_CUDA_ERROR(copy_here(bags.bags_.kept, rows));
  HET_RETURN_IF_ERROR(Wait());
  for (size_t i = 0; i < key_of.size(); ++i) (*ids)[i] = keys[key_of[i]];
  return Status();
}

}  // namespace cuda
}  // namespace het_tf
