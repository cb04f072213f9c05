#include "ops/kernels/device_caches.h"

#include <optional>

#include "ops/cuda/device_cache.h"
#include "ops/cuda/memory.h"
#include "ops/kernels/kernel_util.h"
#include "tensorflow/core/framework/allocator.h"
#include "xla/stream_executor/stream.h"

namespace het_tf {
namespace {

class AllocatorMemory : public cuda::DeviceMemory {
 public:
  explicit AllocatorMemory(tensorflow::Allocator* allocator) : allocator_(allocator) {}

  void* Allocate(size_t bytes) override {
    constexpr size_t kAlignment = 256;
    // Retries would take 10 s, in which the cache's lock keeps everybody from freeing anything.
    const tensorflow::AllocationAttributes at_once(/*retry_on_failure=*/false,
                                                   /*allocation_will_be_logged=*/false,
                                                   /*freed_by_func=*/nullptr);
    return allocator_->AllocateRaw(kAlignment, bytes, at_once);
  }
  void Free(void* memory) override { allocator_->DeallocateRaw(memory); }
  int64_t available() override {
    const auto stats = allocator_->GetStats();
    if (!stats.has_value() || !stats->bytes_limit.has_value()) return -1;
    return *stats->bytes_limit - stats->bytes_in_use;
  }

 private:
  tensorflow::Allocator* const allocator_;  // the device's, which outlives its resources
};

HetStream StreamOf(const tensorflow::DeviceBase& device) {
  const auto* info = device.tensorflow_accelerator_device_info();
  if (info == nullptr || info->stream == nullptr) return nullptr;
  return info->stream->platform_specific_handle().stream;
}

}  // namespace

absl::Status NewDeviceCache(const CacheConfig& config, int64_t capacity,
                            tensorflow::DeviceBase* device, std::shared_ptr<RowCache>* cache) {
  const HetStream stream = StreamOf(*device);
  if ((stream == nullptr) != cuda::IsHostBuild()) {
    return absl::InvalidArgumentError(StrCat(
        "device_capacity = ", capacity, " on ", device->name(), ": these ops are built ",
        cuda::IsHostBuild() ? "without CUDA" : "with CUDA, and keep rows in a GPU's memory alone"));
  }
  auto memory = std::make_shared<AllocatorMemory>(device->GetAllocator({}));
  CacheConfig sized = config;
  sized.host_capacity = config.capacity;
  sized.capacity = capacity;
  if (capacity == kAsMemoryAllows) {
    const int64_t available = memory->available();
    if (stream == nullptr || available < 0) {  // the host's memory is others', too
      return absl::InvalidArgumentError(
          StrCat("device_capacity = \"auto\": ", device->name(),
                 " does not say how much memory it has; give a number of rows"));
    }
    TF_RETURN_IF_ERROR(
        ToTf(cuda::DeviceCache::LinesWithin(config, available / 4 * 3, &sized.capacity)));
  }
  std::shared_ptr<cuda::DeviceCache> made;
  TF_RETURN_IF_ERROR(ToTf(cuda::DeviceCache::Create(sized, stream, std::move(memory), &made)));
  *cache = std::move(made);
  return absl::OkStatus();
}

}  // namespace het_tf
