#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "ops/kernels/kernel_util.h"
#include "ops/kernels/process_registry.h"
#include "ops/kernels/programs.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace het_tf {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// The containers of programs that were replaced.
class ReplacedPrograms {
 public:
  static ReplacedPrograms& Get() {
    static auto* const replaced = new ReplacedPrograms;  // kernels may run while statics die
    return *replaced;
  }

  void Add(const std::string& container) {
    std::lock_guard<std::mutex> lock(mutex_);
    containers_.insert(container);
  }
  bool Has(const std::string& container) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return containers_.count(container) > 0;
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::string> containers_;
};

// What one program has by name on one device of this process.
//
// When TensorFlow forgets a program it drops the tensors that the program held here, and leaves
// what has a name, for nobody to reach again. So one of those tensors is a handle that owns this.
class ProgramResource : public tensorflow::ResourceBase {
 public:
  // resources: the device's, which live as long as the process.
  ProgramResource(std::string container, std::string address, tensorflow::ResourceMgr* resources)
      : container(std::move(container)), address(std::move(address)), resources_(resources) {}

  ~ProgramResource() override {
    // A program that connects again has another one.
    for (const auto& other : ProcessRegistry<ProgramResource>::Get().All()) {
      if (other->container == container && other->resources_ == resources_) return;
    }
    DestroyAll();
  }

  void Replace() {
    ReplacedPrograms::Get().Add(container);
    DestroyAll();
  }

  std::string DebugString() const override { return StrCat("Het>Program ", container); }

  const std::string container, address;

 private:
  void DestroyAll() {
    (void)resources_->Cleanup(container);  // An error: there is no such container.
  }

  tensorflow::ResourceMgr* const resources_;
};

class ProgramHandleOp : public tensorflow::OpKernel {
 public:
  explicit ProgramHandleOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("container", &container_));
    OP_REQUIRES_OK(context, context->GetAttr("address", &address_));
  }

  void Compute(OpKernelContext* context) override {
    auto& registry = ProcessRegistry<ProgramResource>::Get();
    for (const auto& other : registry.All()) {
      const bool there = !address_.empty() && other->address == address_;
      if (there && other->container != container_) other->Replace();
    }
    Tensor* handle;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &handle));
    auto* program = new ProgramResource(container_, address_, context->resource_manager());
    registry.Add(program);
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(program, context->device()->name());
  }

 private:
  std::string container_, address_;
};

REGISTER_KERNEL_BUILDER(
    Name("Het>ProgramHandle").Device(tensorflow::DEVICE_DEFAULT).HostMemory("program"),
    ProgramHandleOp);

}  // namespace

absl::Status CheckNotReplaced(const std::string& container) {
  if (!ReplacedPrograms::Get().Has(container)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "what this program had here is gone: another one was started at its address");
}

}  // namespace het_tf
