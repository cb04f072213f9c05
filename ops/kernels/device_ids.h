// Ids on their way to a cache on a device, which finds their unique keys itself.

#ifndef HET_TF_OPS_KERNELS_DEVICE_IDS_H_
#define HET_TF_OPS_KERNELS_DEVICE_IDS_H_

#include <cstdint>

#include "tensorflow/core/framework/tensor.h"

namespace het_tf {

struct DeviceIds {
  static constexpr const char* kVariantName = "Het>DeviceIds";

  const int64_t* data() const { return tensor.flat<int64_t>().data(); }
  int64_t num_ids() const { return tensor.NumElements(); }

  const tensorflow::Tensor tensor;  // in host memory
};

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_DEVICE_IDS_H_
