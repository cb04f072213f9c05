#include <memory>
#include <utility>
#include <vector>

#include "ops/core/dense/shard.h"
#include "ops/kernels/kernel_util.h"
#include "ops/kernels/process_registry.h"
#include "ops/kernels/programs.h"
#include "ops/kernels/resources.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace het_tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class DenseHandleOp : public tensorflow::ResourceOpKernel<DenseResource> {
 public:
  using ResourceOpKernel::ResourceOpKernel;

 private:
  absl::Status CreateResource(DenseResource** resource) override {
    TF_RETURN_IF_ERROR(CheckNotReplaced(cinfo_.container()));
    *resource = new DenseResource;
    ProcessRegistry<DenseResource>::Get().Add(*resource);
    return absl::OkStatus();
  }
};

// A kernel whose first input is a shard of the dense variables.
class DenseKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<DenseResource> resource;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &resource));
    OP_REQUIRES_OK(context,
                   OrOutOfMemory(*this, [&] { return Compute(context, &resource->shard); }));
  }

 protected:
  virtual absl::Status Compute(OpKernelContext* context, DenseShard* shard) = 0;
};

template <typename T>
absl::Status GetVector(OpKernelContext* context, const char* name, std::vector<T>* out) {
  const Tensor* tensor;
  TF_RETURN_IF_ERROR(context->input(name, &tensor));
  if (tensor->dims() != 1) {
    return absl::InvalidArgumentError(
        StrCat(name, " must be a vector, not of shape ", tensor->shape().DebugString()));
  }
  const auto* data = reinterpret_cast<const T*>(tensor->tensor_data().data());
  out->assign(data, data + tensor->NumElements());
  return absl::OkStatus();
}

template <typename T>
absl::Status OutputVector(OpKernelContext* context, int index, const std::vector<T>& values) {
  Tensor* out;
  TF_RETURN_IF_ERROR(context->allocate_output(index, {static_cast<int64_t>(values.size())}, &out));
  std::copy(values.begin(), values.end(), out->flat<T>().data());
  return absl::OkStatus();
}

class DenseSetOp : public DenseKernel {
 public:
  explicit DenseSetOp(OpKernelConstruction* context) : DenseKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_workers", &num_workers_));
    OP_REQUIRES_OK(context, context->GetAttr("total", &total_));
  }

  absl::Status Compute(OpKernelContext* context, DenseShard* shard) override {
    DenseShard::State state;
    TF_RETURN_IF_ERROR(GetVector(context, "floats", &state.floats));
    TF_RETURN_IF_ERROR(GetVector(context, "counters", &state.counters));
    TF_RETURN_IF_ERROR(GetVector(context, "owed", &state.owed));
    TF_RETURN_IF_ERROR(GetVector(context, "rest", &state.rest));
    const Tensor* clock;
    TF_RETURN_IF_ERROR(context->input("clock", &clock));
    if (clock->dims() != 0) {
      return absl::InvalidArgumentError(
          StrCat("clock must be a scalar, not of shape ", clock->shape().DebugString()));
    }
    state.clock = clock->scalar<int64_t>()();
    return ToTf(shard->Set(std::move(state), num_workers_, total_));
  }

 private:
  int num_workers_;
  float total_;
};

class DenseGetOp : public DenseKernel {
 public:
  using DenseKernel::DenseKernel;

  absl::Status Compute(OpKernelContext* context, DenseShard* shard) override {
    const DenseShard::State state = shard->Get();
    TF_RETURN_IF_ERROR(OutputVector(context, 0, state.floats));
    TF_RETURN_IF_ERROR(OutputVector(context, 1, state.owed));
    return OutputVector(context, 2, state.counters);
  }
};

class DenseSyncOp : public DenseKernel {
 public:
  using DenseKernel::DenseKernel;

  absl::Status Compute(OpKernelContext* context, DenseShard* shard) override {
    return OutputReply(context, shard);
  }
};

#define REGISTER_DENSE_KERNEL(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name("Het>" name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER_DENSE_KERNEL("DenseHandle", DenseHandleOp);
REGISTER_DENSE_KERNEL("DenseSet", DenseSetOp);
REGISTER_DENSE_KERNEL("DenseGet", DenseGetOp);
REGISTER_DENSE_KERNEL("DenseSync", DenseSyncOp);
#undef REGISTER_DENSE_KERNEL

}  // namespace
}  // namespace het_tf
