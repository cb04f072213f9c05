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
    OP_REQUIRES_OK(context, context->GetAttr("bag_sizes", &bag_sizes_));
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
    OP_REQUIRES(context, bag_sizes_.empty() || bag_sizes_.size() == n,
                absl::InvalidArgumentError(StrCat("bag_sizes holds ", bag_sizes_.size(),
                                                  " numbers for ", n, " features")));
    for (size_t f = 0; f < bag_sizes_.size(); ++f) {
      OP_REQUIRES(context, bag_sizes_[f] > 0,
                  absl::InvalidArgumentError(
                      StrCat("bag_sizes[", f, "] = ", bag_sizes_[f], " is not positive")));
      bags_apart_ += bag_sizes_[f];
    }
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    if (!bag_sizes_.empty()) OP_REQUIRES_OK(context, CheckNumBags(context));
    int64_t total = 0;
    for (int f = 0; f < context->num_inputs(); ++f) total += context->input(f).NumElements();
    tensorflow::Tensor* keys;
    OP_REQUIRES_OK(context, context->allocate_output(0, {total}, &keys));
    int64_t* out = keys->flat<int64_t>().data();
    for (int f = 0; f < context->num_inputs(); ++f) {
      const int64_t n = context->input(f).NumElements();
      OP_REQUIRES_OK(context, Put(context->input(f), f, out));
      out += bag_sizes_.empty() ? n : bag_sizes_[f];
    }
  }

 private:
  absl::Status CheckNumBags(tensorflow::OpKernelContext* context) const {
    const auto num_ids = [&](int f) { return context->input(f).NumElements(); };
    for (int f = 0; f < context->num_inputs(); ++f) {
      if (num_ids(f) == num_ids(0) / bag_sizes_[0] * bag_sizes_[f]) continue;
      return absl::InvalidArgumentError(StrCat("feature '", names_[f], "' has ", num_ids(f),
                                               " ids, ", bag_sizes_[f], " in a bag, and feature '",
                                               names_[0], "' ", num_ids(0), ", ", bag_sizes_[0],
                                               " in a bag: all have to have as many bags"));
    }
    return absl::OkStatus();
  }

  absl::Status Put(const tensorflow::Tensor& ids, int f, int64_t* out) const {
    switch (ids.dtype()) {
#define HET_TF_PUT(T)                      \
  case tensorflow::DataTypeToEnum<T>::v(): \
    return PutOf<T>(ids, f, out);
      TF_CALL_INTEGRAL_TYPES(HET_TF_PUT)
#undef HET_TF_PUT
      default:
        return absl::InvalidArgumentError(
            StrCat("ids of feature '", names_[f], "' are no integers"));
    }
  }

  // Bag after bag, from `out` on.
  template <typename T>
  absl::Status PutOf(const tensorflow::Tensor& tensor, int f, int64_t* out) const {
    const auto ids = tensor.flat<T>();
    const int64_t bag = bag_sizes_.empty() ? ids.size() : bag_sizes_[f];
    for (int64_t begin = 0; begin < ids.size(); begin += bag, out += bags_apart_) {
      for (int64_t i = 0; i < bag; ++i) {
        const T id = ids(begin + i);
        // A negative id is a large one, too.
        if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(sizes_[f])) {
          return absl::InvalidArgumentError(StrCat("ids of feature '", names_[f], "' hold ", +id,
                                                   ", which is not in [0, ", sizes_[f], ")"));
        }
        out[i] = static_cast<int64_t>(id) + offsets_[f];
      }
    }
    return absl::OkStatus();
  }

  std::vector<int64_t> offsets_, sizes_, bag_sizes_;
  int64_t bags_apart_ = 0;  // keys from a bag of a feature to its next one
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
