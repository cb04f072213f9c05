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

class DenseSetOp : public DenseKernel {
 public:
  explicit DenseSetOp(OpKernelConstruction* context) : DenseKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_first", &num_first_));
    OP_REQUIRES_OK(context, context->GetAttr("first_weight", &first_weight_));
    OP_REQUIRES_OK(context, context->GetAttr("second_weight", &second_weight_));
  }

  absl::Status Compute(OpKernelContext* context, DenseShard* shard) override {
    DenseShard::State state;
    TF_RETURN_IF_ERROR(GetVector(context, "floats", &state.floats));
    TF_RETURN_IF_ERROR(GetVector(context, "counters", &state.counters));
    TF_RETURN_IF_ERROR(GetVector(context, "rest", &state.rest));
    return ToTf(shard->Set(std::move(state), num_first_, first_weight_, second_weight_));
  }

 private:
  int64_t num_first_;
  float first_weight_, second_weight_;
};

class DenseGetOp : public DenseKernel {
 public:
  using DenseKernel::DenseKernel;

  absl::Status Compute(OpKernelContext* context, DenseShard* shard) override {
    std::vector<float> floats;
    std::vector<int64_t> counters;
    shard->Get(&floats, &counters);
    Tensor *float_out, *counter_out;
    TF_RETURN_IF_ERROR(
        context->allocate_output(0, {static_cast<int64_t>(floats.size())}, &float_out));
    TF_RETURN_IF_ERROR(
        context->allocate_output(1, {static_cast<int64_t>(counters.size())}, &counter_out));
    std::copy(floats.begin(), floats.end(), float_out->flat<float>().data());
    std::copy(counters.begin(), counters.end(), counter_out->flat<int64_t>().data());
    return absl::OkStatus();
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
