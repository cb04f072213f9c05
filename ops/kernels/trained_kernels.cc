// The op between rows and what uses them, to which their gradient belongs.

#include "tensorflow/core/framework/op_kernel.h"

namespace het_tf {
namespace {

class TrainedOp : public tensorflow::OpKernel {
 public:
  explicit TrainedOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(tensorflow::OpKernelContext* context) override {
    for (int i = 0; i < num_outputs(); ++i) context->set_output(i, context->input(i));
  }

  bool IsExpensive() override { return false; }
};

REGISTER_KERNEL_BUILDER(Name("Het>Trained").Device(tensorflow::DEVICE_CPU), TrainedOp);
#ifdef HET_TF_CUDA
REGISTER_KERNEL_BUILDER(Name("Het>Trained").Device(tensorflow::DEVICE_GPU), TrainedOp);
#endif

}  // namespace
}  // namespace het_tf
