#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "ops/core/dense/step.h"
#include "ops/kernels/kernel_util.h"
#include "ops/kernels/variables.h"

namespace het_tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

// Steps of a variable, the first input; its slots follow.
template <typename Algorithm>
class DenseStepOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, OrOutOfMemory(*this, [&] { return Step(context); }));
  }

 protected:
  virtual absl::Status GetAlgorithm(OpKernelContext* context, Algorithm* algorithm) = 0;

 private:
  static constexpr int kNumVars = 1 + Algorithm::kNumSlots;

  absl::Status Step(OpKernelContext* context) {
    Algorithm algorithm;
    TF_RETURN_IF_ERROR(GetAlgorithm(context, &algorithm));
    const Tensor* gradient;
    TF_RETURN_IF_ERROR(context->input("gradient", &gradient));
    std::array<tensorflow::core::RefCountPtr<Var>, kNumVars> vars;
    std::vector<Var*> all;
    for (int v = 0; v < kNumVars; ++v) {
      TF_RETURN_IF_ERROR(
          tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, v), &vars[v]));
      all.push_back(vars[v].get());
    }
    if (std::set<Var*>(all.begin(), all.end()).size() != all.size()) {
      return absl::InvalidArgumentError("the variable and its slots are not different ones");
    }
    const std::vector<tensorflow::mutex_lock> locks = LockInOrder(all);
    std::array<float*, kNumVars> data;
    for (int v = 0; v < kNumVars; ++v) {
      TF_RETURN_IF_ERROR(Prepare(v, *gradient, vars[v]->tensor(), &data[v]));
    }
    const float* g = gradient->flat<float>().data();
    PoolOf(context)(gradient->NumElements(), kCyclesPerElement, [&](int64_t first, int64_t last) {
      std::array<float*, Algorithm::kNumSlots> slots;
      for (int s = 0; s < Algorithm::kNumSlots; ++s) slots[s] = data[1 + s] + first;
      algorithm.Step(data[0] + first, slots.data(), g + first, last - first);
    });
    return absl::OkStatus();
  }

  // Checks a variable, and gives it memory that nobody else reads.
  absl::Status Prepare(int v, const Tensor& gradient, Tensor* tensor, float** data) const {
    const std::string name = v == 0 ? "variable" : StrCat("slot ", v - 1);
    if (tensor->dtype() != tensorflow::DT_FLOAT || tensor->shape() != gradient.shape()) {
      return absl::InvalidArgumentError(
          StrCat(name, " is ", tensorflow::DataTypeString(tensor->dtype()), " of shape ",
                 tensor->shape().DebugString(), ", gradient is float of shape ",
                 gradient.shape().DebugString()));
    }
    *data = reinterpret_cast<float*>(WritableData(tensor));
    return absl::OkStatus();
  }

  // 0.4 to 0.6 ms for 930,000 elements at 2.7 GHz, with vectors of 8.
  static constexpr int64_t kCyclesPerElement = 2;
};

class ApplyAdagradOp : public DenseStepOp<DenseAdagrad> {
 public:
  explicit ApplyAdagradOp(OpKernelConstruction* context) : DenseStepOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("epsilon", &epsilon_));
  }

 private:
  absl::Status GetAlgorithm(OpKernelContext* context, DenseAdagrad* algorithm) override {
    algorithm->epsilon = epsilon_;
    return GetScalar(context, "learning_rate", &algorithm->learning_rate);
  }

  float epsilon_;
};

class ApplyAdamOp : public DenseStepOp<DenseAdam> {
 public:
  explicit ApplyAdamOp(OpKernelConstruction* context) : DenseStepOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("one_minus_beta_1", &one_minus_beta_1_));
    OP_REQUIRES_OK(context, context->GetAttr("one_minus_beta_2", &one_minus_beta_2_));
    OP_REQUIRES_OK(context, context->GetAttr("epsilon", &epsilon_));
  }

 private:
  absl::Status GetAlgorithm(OpKernelContext* context, DenseAdam* algorithm) override {
    algorithm->one_minus_beta_1 = one_minus_beta_1_;
    algorithm->one_minus_beta_2 = one_minus_beta_2_;
    algorithm->epsilon = epsilon_;
    return GetScalar(context, "rate", &algorithm->rate);
  }

  float one_minus_beta_1_, one_minus_beta_2_, epsilon_;
};

REGISTER_KERNEL_BUILDER(Name("Het>ApplyAdagrad").Device(tensorflow::DEVICE_CPU), ApplyAdagradOp);
REGISTER_KERNEL_BUILDER(Name("Het>ApplyAdam").Device(tensorflow::DEVICE_CPU), ApplyAdamOp);

}  // namespace
}  // namespace het_tf
