// Ids of any numeric type brought to int64 keys, exactly.

#include <cmath>
#include <limits>
#include <string>
#include <type_traits>

#include "ops/kernels/kernel_util.h"
#include "tensorflow/core/framework/types.h"

namespace het_tf {
namespace {

using tensorflow::DataType;

// What an integer type holds, as far as keys go. high: inclusive.
struct Range {
  int64_t low, high;

  template <typename T>
  static Range Of() {
    constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
    constexpr uint64_t kHigh = std::numeric_limits<T>::max();
    return {static_cast<int64_t>(std::numeric_limits<T>::min()),
            static_cast<int64_t>(kHigh < kMost ? kHigh : kMost)};
  }

  static Range Of(DataType type) {
    switch (type) {
      case tensorflow::DT_INT8:
        return Of<int8_t>();
      case tensorflow::DT_UINT8:
        return Of<uint8_t>();
      case tensorflow::DT_INT16:
        return Of<int16_t>();
      case tensorflow::DT_UINT16:
        return Of<uint16_t>();
      case tensorflow::DT_INT32:
        return Of<int32_t>();
      case tensorflow::DT_UINT32:
        return Of<uint32_t>();
      case tensorflow::DT_UINT64:
        return Of<uint64_t>();
      default:
        return Of<int64_t>();
    }
  }
};

template <typename T>
class KeysOp : public tensorflow::OpKernel {
 public:
  explicit KeysOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("cast_to", &cast_to_));
    OP_REQUIRES_OK(context, context->GetAttr("input_dim", &input_dim_));
    OP_REQUIRES_OK(context, context->GetAttr("name_of_ids", &name_));
    held_ = Range::Of(cast_to_);
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& ids = context->input(0);
    tensorflow::Tensor* keys;
    OP_REQUIRES_OK(context, context->allocate_output(0, ids.shape(), &keys));
    const T* in = ids.flat<T>().data();
    int64_t* out = keys->flat<int64_t>().data();
    for (int64_t i = 0; i < ids.NumElements(); ++i) {
      const bool exact = Convert(in[i], &out[i]);
      OP_REQUIRES(context, exact && Fits(out[i]), Refused(in[i], exact, out[i]));
    }
  }

 private:
  static constexpr bool kIsInteger = std::is_integral_v<T>;

  // The first whole number that is not told from its neighbour.
  static double Gapless() {
    if constexpr (kIsInteger) {
      return 0;
    } else {
      return std::ldexp(1.0, std::numeric_limits<T>::digits);
    }
  }

  static bool Convert(T id, int64_t* key) {
    if constexpr (kIsInteger) {
      *key = static_cast<int64_t>(id);
      return !std::is_same_v<T, uint64_t> || *key >= 0;
    } else {
      const auto number = static_cast<double>(id);
      const bool exact = std::fabs(number) < Gapless() && number == std::floor(number);
      *key = exact ? static_cast<int64_t>(number) : 0;
      return exact;
    }
  }

  bool Fits(int64_t key) const {
    return key >= held_.low && key <= held_.high &&
           (input_dim_ == 0 || (key >= 0 && key < input_dim_));
  }

  absl::Status Refused(T id, bool exact, int64_t key) const {
    const std::string type = tensorflow::DataTypeString(tensorflow::DataTypeToEnum<T>::value);
    if (exact && (key < held_.low || key > held_.high)) {
      return absl::InvalidArgumentError(
          StrCat(name_, " were cast to ", tensorflow::DataTypeString(cast_to_),
                 ", which does not hold ", key, ": make them int64 where they come from, as with ",
                 "keras.Input(..., dtype=\"int64\")"));
    }
    if (exact) {
      return absl::InvalidArgumentError(
          StrCat(name_, " must be in [0, input_dim = ", input_dim_, "), not ", key));
    }
    if constexpr (kIsInteger) {
      return absl::InvalidArgumentError(StrCat(name_, " must be at most 2**63 - 1, not ", id));
    } else {
      const auto number = static_cast<double>(id);
      if (std::isfinite(number) && number == std::floor(number)) {
        const bool countable = std::fabs(number) < 0x1p63;
        return absl::InvalidArgumentError(StrCat(
            name_, " are ", type, ", which tells whole numbers apart below 2**",
            std::numeric_limits<T>::digits, " only, not ",
            countable ? std::to_string(static_cast<int64_t>(number)) : std::to_string(number),
            ": pass integers, as with keras.Input(..., dtype=\"int64\")"));
      }
      return absl::InvalidArgumentError(
          StrCat(name_, " must be whole numbers, not ", number, " (", type, ")"));
    }
  }

  DataType cast_to_;
  int64_t input_dim_;
  std::string name_;
  Range held_;
};

#define REGISTER_KEYS(type) \
  REGISTER_KERNEL_BUILDER(  \
      Name("Het>Keys").Device(tensorflow::DEVICE_CPU).TypeConstraint<type>("T"), KeysOp<type>)
REGISTER_KEYS(int8_t);
REGISTER_KEYS(uint8_t);
REGISTER_KEYS(int16_t);
REGISTER_KEYS(uint16_t);
REGISTER_KEYS(int32_t);
REGISTER_KEYS(uint32_t);
REGISTER_KEYS(int64_t);
REGISTER_KEYS(uint64_t);
REGISTER_KEYS(Eigen::half);
REGISTER_KEYS(Eigen::bfloat16);
REGISTER_KEYS(float);
REGISTER_KEYS(double);
#undef REGISTER_KEYS

}  // namespace
}  // namespace het_tf
