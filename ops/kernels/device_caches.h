// Caches with their rows on the device of a kernel, and in TensorFlow's memory there: TensorFlow
// takes all of a GPU's for itself.

#ifndef HET_TF_OPS_KERNELS_DEVICE_CACHES_H_
#define HET_TF_OPS_KERNELS_DEVICE_CACHES_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "ops/core/cache/row_cache.h"
#include "tensorflow/core/framework/device_base.h"

namespace het_tf {

// capacity: rows; kAsMemoryAllows: as many as three quarters of the memory hold that TensorFlow has
// not handed out on the device.
inline constexpr int64_t kAsMemoryAllows = -1;
absl::Status NewDeviceCache(const CacheConfig& config, int64_t capacity,
                            tensorflow::DeviceBase* device, std::shared_ptr<RowCache>* cache);

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_DEVICE_CACHES_H_
