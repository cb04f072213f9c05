// Pool, and the update of what was pooled.

#include <vector>

#include "ops/cuda/device_cache.h"
#include "ops/cuda/error.h"
#include "ops/cuda/memory.h"
#include "ops/cuda/scratch.h"

namespace het_tf {
namespace cuda {
namespace {

template <typename T>
int CopyThere(const std::vector<T>& from, T* to, HetStream stream) {
  return Copy(from.data(), sizeof(T) * from.size(), to, stream);
}

}  // namespace

Status DeviceBags::CheckPools(const Pooling& pooling) {
  for (int f = 0; f < pooling.num_features(); ++f) {
    if (pooling.combiner(f) != Combiner::kMax && !pooling.weighted(f)) continue;
    return InvalidArgument("feature ", f, " has ",
                           pooling.weighted(f) ? "weights" : "combiner = 'max'",
                           ": rows on a device are pooled without weights, and not by their"
                           " maximum; gather them");
  }
  return Status();
}

Status DeviceBags::Place(HetStream stream) {
  int32_t *begin = nullptr, *bag_of = nullptr;
  float* scales = nullptr;
  const auto place = [&](void* memory) {
    Scratch scratch(memory);
    begin = scratch.Take<int32_t>(pooling_->num_bags() + 1);
    bag_of = scratch.Take<int32_t>(pooling_->num_ids());
    scales = scratch.Take<float>(pooling_->num_bags());
    pointers_ = scratch.Take<float*>(pooling_->num_bags());
    return scratch.bytes();
  };
  HET_RETURN_IF_ERROR(block_.ReserveExactly(place(nullptr)));
  place(block_.get());
  bags_ = {pooling_->num_bags(), begin, bag_of, scales};
  HET_RETURN_IF_CUDA_ERROR(CopyThere(pooling_->begins(), begin, stream));
  HET_RETURN_IF_CUDA_ERROR(CopyThere(pooling_->bags_of_ids(), bag_of, stream));
  return ToStatus(CopyThere(pooling_->scales(), scales, stream), "CopyThere");
}

Status DeviceCache::Pool(const RowTicket& row_ticket, std::shared_ptr<const Pooling> pooling,
                         const std::vector<float*>& outputs, std::shared_ptr<DeviceBags>* bags) {
  HET_RETURN_IF_ERROR(DeviceBags::CheckPools(*pooling));
  return OrOutOfMemory([&]() -> Status {
    const auto& ticket = static_cast<const DeviceTicket&>(row_ticket);
    auto made = std::make_shared<DeviceBags>(memory_, std::move(pooling));
    const std::vector<float*> out = made->pooling_->OfBags(outputs, dim());
    std::lock_guard<std::mutex> lock(mutex_);
    HET_RETURN_IF_ERROR(Begin());
    if (!ticket.installed_) return FailedPrecondition("ticket was not installed before its rows");
    HET_RETURN_IF_ERROR(made->Place(stream_));
    HET_RETURN_IF_CUDA_ERROR(CopyThere(out, made->pointers_, stream_));
    const Found& found = *ticket.found_;
    HET_RETURN_IF_CUDA_ERROR(het_pool(&found.batch, &made->bags_, found.slots, info_.rows,
                                      info_.row_stride, info_.lines, found.rows, info_.row_stride,
                                      dim(), made->pointers_, stream_));
    *bags = std::move(made);
    return Status();
  });
}

Status DeviceCache::Update(RowTicket* ticket, DeviceBags* bags,
                           const std::vector<const float*>& gradients, float learning_rate) {
  return OrOutOfMemory([&] {
    const std::vector<const float*> of_bags = bags->pooling_->OfBags(gradients, dim());
    const float** there = const_cast<const float**>(bags->pointers_);
    const auto sum = [&](const Found& found, const Summed& summed) {
      const int error = CopyThere(of_bags, there, stream_);
      if (error != 0) return error;
      return het_segment_sum_pooled(&found.batch, &bags->bags_, there, dim(), summed.sums,
                                    summed.squares, summed.num_nonfinite, summed.scratch, stream_);
    };
    return UpdateSummed(static_cast<DeviceTicket*>(ticket), learning_rate, sum);
  });
}

Status DeviceCache::ReadIds(const RowTicket& row_ticket, std::vector<int64_t>* ids) {
  return OrOutOfMemory([&]() -> Status {
    const auto& ticket = static_cast<const DeviceTicket&>(row_ticket);
    if (ticket.num_ids() == 0) return Status();
    const Found& found = *ticket.found_;
    std::vector<int64_t> keys(found.here.keys);
    std::vector<int32_t> key_of(ticket.num_ids());
    ids->resize(key_of.size());
    std::lock_guard<std::mutex> lock(mutex_);
    HET_RETURN_IF_ERROR(Begin());
    HET_RETURN_IF_CUDA_ERROR(
        Copy(found.batch.keys, sizeof(int64_t) * keys.size(), keys.data(), stream_));
    HET_RETURN_IF_CUDA_ERROR(
        Copy(found.batch.key_of, sizeof(int32_t) * key_of.size(), key_of.data(), stream_));
    HET_RETURN_IF_ERROR(Wait());
    for (size_t i = 0; i < key_of.size(); ++i) (*ids)[i] = keys[key_of[i]];
    return Status();
  });
}

}  // namespace cuda
}  // namespace het_tf
