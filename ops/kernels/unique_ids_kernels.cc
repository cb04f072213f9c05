#include "ops/core/memory/hash.h"
#include "ops/core/unique_ids.h"
#include "ops/kernels/device_ids.h"
#include "ops/kernels/kernel_util.h"

namespace het_tf {
namespace {

class UniqueIdsOp : public tensorflow::OpKernel {
 public:
  explicit UniqueIdsOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("on_device", &on_device_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& ids = context->input(0);
    OP_REQUIRES_OK(context, CheckNumIds(ids));
    if (on_device_) {
      const DeviceIds same = {ids};
      OP_REQUIRES_OK(context, SetVariant(context, 0, std::make_shared<DeviceIds>(same)));
      return;
    }
    OP_REQUIRES_OK(context, OrOutOfMemory(*this, [&] {
                     return SetVariant(context, 0,
                                       std::make_shared<UniqueIds>(ids.flat<int64_t>().data(),
                                                                   ids.NumElements()));
                   }));
  }

 private:
  bool on_device_;
};

class CheckIdsOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    std::shared_ptr<DeviceIds> on_device;
    if (GetVariant(context, "unique_ids", &on_device).ok()) {
      OP_REQUIRES_OK(context, Check(context->input(1), on_device->num_ids(),
                                    [&](int64_t i) { return on_device->data()[i]; }));
      return;
    }
    std::shared_ptr<UniqueIds> unique_ids;
    OP_REQUIRES_OK(context, GetVariant(context, "unique_ids", &unique_ids));
    OP_REQUIRES_OK(context, Check(context->input(1), unique_ids->num_ids(), [&](int64_t i) {
                     return unique_ids->keys[unique_ids->key_of[i]];
                   }));
  }

 private:
  template <typename IdAt>
  static absl::Status Check(const tensorflow::Tensor& tensor, int64_t num_ids, const IdAt& id_at) {
    if (tensor.NumElements() != num_ids) {
      return absl::InvalidArgumentError(
          StrCat("ids holds ", tensor.NumElements(), " ids, looked ahead for were ", num_ids));
    }
    const auto ids = tensor.flat<int64_t>();
    for (int64_t i = 0; i < ids.size(); ++i) {
      const int64_t ahead = id_at(i);
      if (ids(i) == ahead) continue;
      return absl::InvalidArgumentError(
          StrCat("ids[", i, "] = ", ids(i), ", looked ahead for was ", ahead));
    }
    return absl::OkStatus();
  }
};

class ShardOfOp : public tensorflow::OpKernel {
 public:
  explicit ShardOfOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_shards", &num_shards_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& keys = context->input(0);
    tensorflow::Tensor* shards;
    OP_REQUIRES_OK(context, context->allocate_output(0, keys.shape(), &shards));
    const auto in = keys.flat<int64_t>();
    auto out = shards->flat<int32_t>();
    for (int64_t i = 0; i < keys.NumElements(); ++i) {
      out(i) = ShardOfHash(HashKey(in(i)), num_shards_);
    }
  }

 private:
  int num_shards_;
};

REGISTER_KERNEL_BUILDER(Name("Het>CheckIds").Device(tensorflow::DEVICE_CPU), CheckIdsOp);
REGISTER_KERNEL_BUILDER(Name("Het>ShardOf").Device(tensorflow::DEVICE_CPU), ShardOfOp);
REGISTER_KERNEL_BUILDER(Name("Het>UniqueIds").Device(tensorflow::DEVICE_CPU), UniqueIdsOp);

}  // namespace
}  // namespace het_tf
