#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include "ops/kernels/kernel_util.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_handle.h"

namespace het_tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::ResourceBase;
using tensorflow::ResourceHandle;

constexpr auto kPoll = std::chrono::milliseconds(100);

// Resources that a thread of their own destroys once nobody else has them.
class Held {
 public:
  static Held& Get() {
    static Held* held = new Held;
    return *held;
  }

  void Add(ResourceBase* resource) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!held_.insert(resource).second) return;
    resource->Ref();
    std::thread([this, resource] { Destroy(resource); }).detach();
  }

 private:
  void Destroy(ResourceBase* resource) {
    // Who has the only reference is alone: references are copies of others.
    while (!resource->RefCountIsOne()) std::this_thread::sleep_for(kPoll);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      held_.erase(resource);
    }
    resource->Unref();
  }

  std::mutex mutex_;
  std::set<ResourceBase*> held_;
};

class DestroyLaterOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const auto& shape = context->input(0).shape();
    OP_REQUIRES(context, tensorflow::TensorShapeUtils::IsScalar(shape),
                absl::InvalidArgumentError(
                    StrCat("resource must be a scalar, not of shape ", shape.DebugString())));
    const ResourceHandle& handle = context->input(0).scalar<ResourceHandle>()();
    if (handle.IsRefCounting()) Held::Get().Add(handle.resource().get());
  }
};

REGISTER_KERNEL_BUILDER(Name("Het>DestroyLater").Device(tensorflow::DEVICE_CPU), DestroyLaterOp);

}  // namespace
}  // namespace het_tf
