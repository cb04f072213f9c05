#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/unique_ids.h"
#include "ops/kernels/device_ids.h"
#include "ops/kernels/kernel_util.h"
#include "tensorflow/core/framework/register_types.h"

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

class StackIdsOp : public tensorflow::OpKernel {
 public:
  explicit StackIdsOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("offsets", &offsets_));
    OP_REQUIRES_OK(context, context->GetAttr("sizes", &sizes_));
    OP_REQUIRES_OK(context, context->GetAttr("names", &names_));
    const size_t n = static_cast<size_t>(context->num_inputs());
    OP_REQUIRES(context, offsets_.size() == n && sizes_.size() == n && names_.size() == n,
                absl::InvalidArgumentError(StrCat("offsets holds ", offsets_.size(),
                                                  " numbers, sizes ", sizes_.size(), " and names ",
                                                  names_.size(), " for ", n, " features")));
    for (size_t f = 0; f < n; ++f) {
      constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
      OP_REQUIRES(context, sizes_[f] >= 0 && offsets_[f] <= kMost - sizes_[f],
                  absl::InvalidArgumentError(StrCat("sizes[", f, "] = ", sizes_[f], " at offsets[",
                                                    f, "] = ", offsets_[f], " is out of range")));
    }
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    int64_t total = 0;
    for (int f = 0; f < context->num_inputs(); ++f) total += context->input(f).NumElements();
    tensorflow::Tensor* keys;
    OP_REQUIRES_OK(context, context->allocate_output(0, {total}, &keys));
    int64_t* out = keys->flat<int64_t>().data();
    for (int f = 0; f < context->num_inputs(); ++f) {
      OP_REQUIRES_OK(context, Append(context->input(f), f, out));
      out += context->input(f).NumElements();
    }
  }

 private:
  absl::Status Append(const tensorflow::Tensor& ids, int f, int64_t* out) const {
    switch (ids.dtype()) {
#define HET_TF_APPEND(T)                   \
  case tensorflow::DataTypeToEnum<T>::v(): \
    return AppendOf<T>(ids, f, out);
      TF_CALL_INTEGRAL_TYPES(HET_TF_APPEND)
#undef HET_TF_APPEND
      default:
        return absl::InvalidArgumentError(
            StrCat("ids of feature '", names_[f], "' are no integers"));
    }
  }

  template <typename T>
  absl::Status AppendOf(const tensorflow::Tensor& tensor, int f, int64_t* out) const {
    const auto ids = tensor.flat<T>();
    for (int64_t i = 0; i < ids.size(); ++i) {
      // A negative id is a large one, too.
      if (static_cast<uint64_t>(ids(i)) >= static_cast<uint64_t>(sizes_[f])) {
        return absl::InvalidArgumentError(StrCat("ids of feature '", names_[f], "' hold ", +ids(i),
                                                 ", which is not in [0, ", sizes_[f], ")"));
      }
      out[i] = static_cast<int64_t>(ids(i)) + offsets_[f];
    }
    return absl::OkStatus();
  }

  std::vector<int64_t> offsets_, sizes_;
  std::vector<std::string> names_;
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
REGISTER_KERNEL_BUILDER(Name("Het>StackIds").Device(tensorflow::DEVICE_CPU), StackIdsOp);
REGISTER_KERNEL_BUILDER(Name("Het>ShardOf").Device(tensorflow::DEVICE_CPU), ShardOfOp);
REGISTER_KERNEL_BUILDER(Name("Het>UniqueIds").Device(tensorflow::DEVICE_CPU), UniqueIdsOp);

}  // namespace
}  // namespace het_tf
