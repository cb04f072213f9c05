#include <vector>

#include "ops/core/wire/frames.h"
#include "ops/kernels/kernel_util.h"

namespace het_tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class PackFramesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    std::vector<Frame> frames;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const auto bytes = context->input(i).flat<uint8_t>();
      frames.push_back(
          {reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(bytes.size())});
    }
    absl::Status allocated;
    std::unique_ptr<char[]> discarded;
    PackFrames(frames, [&](size_t bytes) -> char* {
      Tensor* message;
      allocated = context->allocate_output(0, {static_cast<int64_t>(bytes)}, &message);
      if (allocated.ok()) return reinterpret_cast<char*>(message->flat<uint8_t>().data());
      discarded.reset(new char[bytes]);
      return discarded.get();
    });
    OP_REQUIRES_OK(context, allocated);
  }
};

class UnpackFramesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const AlignedBytes message(context->input(0));
    std::vector<Frame> frames;
    OP_REQUIRES_OK(context, ToTf(UnpackFrames(message.data(), message.size(),
                                              context->num_outputs(), &frames)));
    for (size_t f = 0; f < frames.size(); ++f) {
      Tensor* frame;
      OP_REQUIRES_OK(context,
                     context->allocate_output(f, {static_cast<int64_t>(frames[f].size)}, &frame));
      if (frames[f].size == 0) continue;
      std::memcpy(frame->flat<uint8_t>().data(), frames[f].bytes, frames[f].size);
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("Het>PackFrames").Device(tensorflow::DEVICE_CPU), PackFramesOp);
REGISTER_KERNEL_BUILDER(Name("Het>UnpackFrames").Device(tensorflow::DEVICE_CPU), UnpackFramesOp);

}  // namespace
}  // namespace het_tf
