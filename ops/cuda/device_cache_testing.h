// The clusters of ops/core/cache/cache_testing.h with their caches' rows on a device.

#ifndef HET_TF_OPS_CUDA_DEVICE_CACHE_TESTING_H_
#define HET_TF_OPS_CUDA_DEVICE_CACHE_TESTING_H_

#include <memory>

#include "ops/core/cache/cache_testing.h"
#include "ops/cuda/device_cache.h"
#include "ops/cuda/testing.h"

namespace het_tf {
namespace testing {

struct DeviceSide {
  using CacheType = cuda::DeviceCache;
  using Array = DeviceArray<float>;
  static inline const int kFewer = testing::kFewer;
  static constexpr bool kHasCache = true;

  static Status Create(const CacheConfig& config, std::shared_ptr<cuda::DeviceCache>* cache) {
    return cuda::DeviceCache::Create(config, kStream, cuda::DriverMemory(), cache);
  }
};
using DeviceCluster = ClusterOf<DeviceSide>;

// The same with rows that gave way kept on the host, a few of them.
struct KeepingSide : DeviceSide {
  static constexpr int64_t kHostRows = 12;

  static Status Create(const CacheConfig& config, std::shared_ptr<cuda::DeviceCache>* cache) {
    CacheConfig keeping = config;
    keeping.host_capacity = kHostRows;
    return DeviceSide::Create(keeping, cache);
  }
};
using KeepingCluster = ClusterOf<KeepingSide>;

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_DEVICE_CACHE_TESTING_H_
