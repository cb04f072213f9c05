#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "ops/kernels/kernel_util.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace het_tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceBase;
using tensorflow::ResourceHandle;

constexpr auto kPoll = std::chrono::milliseconds(100);

// Resources that threads destroy after their last handles. Belongs to a program: a resource must
// not outlive the program's devices, so that the destructor destroys all of them.
class PendingDestructions : public ResourceBase {
 public:
  ~PendingDestructions() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return threads_ == 0; });
  }

  std::string DebugString() const override { return "het_tf pending destructions"; }

  void Add(ResourceBase* resource) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ends_ || !pending_.insert(resource).second) return;
    try {
      std::thread([this, resource] { Destroy(resource); }).detach();
    } catch (const std::system_error&) {  // There are no more threads: as without this op.
      pending_.erase(resource);
      return;
    }
    resource->Ref();
    ++threads_;
  }

 private:
  void Destroy(ResourceBase* resource) {
    std::unique_lock<std::mutex> lock(mutex_);
    // A thread that has the only reference is alone: a reference is a copy of another one.
    while (!ends_ && !resource->RefCountIsOne()) wake_.wait_for(lock, kPoll);
    pending_.erase(resource);
    lock.unlock();
    resource->Unref();
    lock.lock();
    if (--threads_ == 0) wake_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::set<ResourceBase*> pending_;
  int threads_ = 0;
  bool ends_ = false;
};

class DestroyLaterOp : public OpKernel {
 public:
  explicit DestroyLaterOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("container", &container_));
  }

  void Compute(OpKernelContext* context) override {
    const auto& shape = context->input(0).shape();
    OP_REQUIRES(context, tensorflow::TensorShapeUtils::IsScalar(shape),
                absl::InvalidArgumentError(
                    StrCat("resource must be a scalar, not of shape ", shape.DebugString())));
    const ResourceHandle& handle = context->input(0).scalar<ResourceHandle>()();
    if (!handle.IsRefCounting()) return;
    PendingDestructions* pending = nullptr;
    OP_REQUIRES_OK(context, context->resource_manager()->LookupOrCreate<PendingDestructions>(
                                container_, "pending_destructions", &pending,
                                [](PendingDestructions** created) {
                                  *created = new PendingDestructions;
                                  return absl::OkStatus();
                                }));
    tensorflow::core::ScopedUnref unref(pending);
    pending->Add(handle.resource().get());
  }

 private:
  std::string container_;
};

REGISTER_KERNEL_BUILDER(Name("Het>DestroyLater").Device(tensorflow::DEVICE_CPU), DestroyLaterOp);

}  // namespace
}  // namespace het_tf
