// Variants of objects on the host, on their way through steps that run on a GPU.

#ifndef HET_TF_OPS_KERNELS_STAYS_ON_HOST_H_
#define HET_TF_OPS_KERNELS_STAYS_ON_HOST_H_

#include "ops/kernels/kernel_util.h"
#include "tensorflow/core/framework/variant_op_registry.h"

namespace het_tf {

// Has TensorFlow take a SharedVariant<T> for one that is on whatever device it likes, and leaves it
// where it is. For a static object.
template <typename T>
class StaysOnHost {
 public:
  StaysOnHost() {
    using tensorflow::VariantDeviceCopyDirection;
    for (const auto direction :
         {VariantDeviceCopyDirection::HOST_TO_DEVICE, VariantDeviceCopyDirection::DEVICE_TO_HOST,
          VariantDeviceCopyDirection::DEVICE_TO_DEVICE}) {
      using Variant = SharedVariant<T>;
      tensorflow::variant_op_registry_fn_registration::UnaryVariantDeviceCopyRegistration<Variant>(
          direction, tensorflow::TypeIndex::Make<Variant>(), Keep);
    }
  }

 private:
  static absl::Status Keep(const SharedVariant<T>& from, SharedVariant<T>* to,
                           tensorflow::UnaryVariantOpRegistry::AsyncTensorDeviceCopyFn) {
    *to = from;
    return absl::OkStatus();
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_STAYS_ON_HOST_H_
