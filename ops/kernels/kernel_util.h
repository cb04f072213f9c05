// What the kernels share: statuses, TF's thread pool as the core's ParallelFor, variants that carry
// core objects from op to op.

#ifndef HET_TF_OPS_KERNELS_KERNEL_UTIL_H_
#define HET_TF_OPS_KERNELS_KERNEL_UTIL_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/core/parallel.h"
#include "ops/core/row/row_config.h"
#include "ops/core/status.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace het_tf {

// Never Unavailable or Aborted: TensorFlow keeps those for its network. Cancelled only from a
// process that ends: tf.distribute then runs the step again on another worker.
inline absl::Status ToTf(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return absl::OkStatus();
    case Code::kInvalidArgument:
      return absl::InvalidArgumentError(status.message());
    case Code::kFailedPrecondition:
      return absl::FailedPreconditionError(status.message());
    case Code::kResourceExhausted:
      return absl::ResourceExhaustedError(status.message());
    case Code::kCancelled:
      return absl::CancelledError(status.message());
  }
  return absl::InternalError(status.message());
}

// The status of an update through the table or cache of input 0, with the name of the layer that
// has it: resources are called NAME/ID/PART.
inline absl::Status OfUpdate(tensorflow::OpKernelContext* context, const Status& status) {
  const absl::Status update = ToTf(status);
  if (update.ok()) return update;
  std::string name = tensorflow::HandleFromInput(context, 0).name();
  for (int part = 0; part < 2; ++part) name = name.substr(0, name.rfind('/'));
  return absl::Status(update.code(), StrCat(name, ": ", update.message()));
}

// What call returns; where it runs out of memory, RESOURCE_EXHAUSTED, and the process lives.
template <typename Call>
absl::Status OrOutOfMemory(const tensorflow::OpKernel& kernel, const Call& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(StrCat(kernel.type_string(), ": out of memory"));
  }
}

// Output 0: names of counters.
template <size_t n>
absl::Status OutputNames(tensorflow::OpKernelContext* context,
                         const std::array<const char*, n>& names) {
  tensorflow::Tensor* out;
  TF_RETURN_IF_ERROR(context->allocate_output(0, {static_cast<int64_t>(n)}, &out));
  for (size_t i = 0; i < n; ++i) out->flat<tensorflow::tstring>()(i) = names[i];
  return absl::OkStatus();
}

// Outputs 0 and 1: the names of counters, and what they are at.
template <size_t n>
absl::Status OutputCounters(tensorflow::OpKernelContext* context,
                            const std::array<const char*, n>& names,
                            const std::array<int64_t, n>& values) {
  TF_RETURN_IF_ERROR(OutputNames(context, names));
  tensorflow::Tensor* out;
  TF_RETURN_IF_ERROR(context->allocate_output(1, {static_cast<int64_t>(n)}, &out));
  std::copy(values.begin(), values.end(), out->flat<int64_t>().data());
  return absl::OkStatus();
}

// Output 0: this task, the id of what counts there, and what its counters are at.
template <size_t n>
absl::Status OutputReport(tensorflow::OpKernelContext* context, uint64_t id,
                          const std::array<int64_t, n>& values) {
  tensorflow::Tensor* out;
  TF_RETURN_IF_ERROR(context->allocate_output(0, {static_cast<int64_t>(2 + n)}, &out));
  auto report = out->flat<int64_t>();
  report(0) = context->device()->parsed_name().task;
  report(1) = static_cast<int64_t>(id);
  std::copy(values.begin(), values.end(), report.data() + 2);
  return absl::OkStatus();
}

inline ParallelFor PoolOf(tensorflow::OpKernelContext* context) {
  auto* workers = context->device()->tensorflow_cpu_worker_threads()->workers;
  return [workers](int64_t total, int64_t cost, const std::function<void(int64_t, int64_t)>& body) {
    using Params = tensorflow::thread::ThreadPool::SchedulingParams;
    workers->ParallelFor(total, Params::Adaptive(cost), body);
  };
}

// A core object that lives as long as some tensor holds it. It stays in its process.
template <typename T>
class SharedVariant {
 public:
  SharedVariant() = default;
  explicit SharedVariant(std::shared_ptr<T> object) : object_(std::move(object)) {}

  T* get() const { return object_.get(); }
  const std::shared_ptr<T>& shared() const { return object_; }

  std::string TypeName() const { return T::kVariantName; }
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
  std::string DebugString() const { return TypeName(); }

 private:
  std::shared_ptr<T> object_;
};

template <typename T>
absl::Status SetVariant(tensorflow::OpKernelContext* context, int output,
                        std::shared_ptr<T> object) {
  tensorflow::Tensor* tensor = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(output, {}, &tensor));
  tensor->scalar<tensorflow::Variant>()() = SharedVariant<T>(std::move(object));
  return absl::OkStatus();
}

// input: a scalar that SetVariant made.
template <typename T>
absl::Status GetVariant(tensorflow::OpKernelContext* context, const char* name,
                        std::shared_ptr<T>* object) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(context->input(name, &tensor));
  const SharedVariant<T>* variant = nullptr;
  if (tensor->dims() == 0) {
    variant = tensor->scalar<tensorflow::Variant>()().get<SharedVariant<T>>();
  }
  if (variant == nullptr || variant->get() == nullptr) {
    return absl::InvalidArgumentError(StrCat(name, " does not hold a ", T::kVariantName,
                                             " of this process, but ", tensor->DebugString()));
  }
  *object = variant->shared();
  return absl::OkStatus();
}

// T: of the tensor; std::string for DT_STRING.
template <typename T>
absl::Status GetScalar(tensorflow::OpKernelContext* context, const char* name, T* value) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(context->input(name, &tensor));
  if (tensor->dims() != 0) {
    return absl::InvalidArgumentError(
        StrCat(name, " must be a scalar, not of shape ", tensor->shape().DebugString()));
  }
  using Held = std::conditional_t<std::is_same_v<T, std::string>, tensorflow::tstring, T>;
  *value = tensor->scalar<Held>()();
  return absl::OkStatus();
}

// Whether there are so few ids that an int32 counts them.
inline absl::Status CheckNumIds(const tensorflow::Tensor& ids) {
  if (ids.NumElements() <= std::numeric_limits<int32_t>::max()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      StrCat("ids holds ", ids.NumElements(), " ids, more than 2147483647"));
}

// A matrix input with that many rows and columns.
inline absl::Status GetMatrix(tensorflow::OpKernelContext* context, const char* name, int64_t rows,
                              int64_t columns, const tensorflow::Tensor** matrix) {
  TF_RETURN_IF_ERROR(context->input(name, matrix));
  const tensorflow::TensorShape& shape = (*matrix)->shape();
  if (shape.dims() != 2 || shape.dim_size(0) != rows || shape.dim_size(1) != columns) {
    return absl::InvalidArgumentError(
        StrCat(name, " has shape ", shape.DebugString(), ", expected [", rows, ",", columns, "]"));
  }
  return absl::OkStatus();
}

// Bytes of a message tensor, where the core's readers want them: aligned to 8.
class AlignedBytes {
 public:
  explicit AlignedBytes(const tensorflow::Tensor& tensor)
      : tensor_(tensor), size_(tensor.NumElements()) {
    data_ = reinterpret_cast<const char*>(tensor.flat<uint8_t>().data());
    if (reinterpret_cast<uintptr_t>(data_) % 8 != 0) {
      copy_.resize((size_ + 7) / 8);
      std::memcpy(copy_.data(), data_, size_);
      data_ = reinterpret_cast<const char*>(copy_.data());
    }
  }

  const char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  const tensorflow::Tensor tensor_;  // shares the buffer, so that it lives as long
  const char* data_;
  size_t size_;
  std::vector<uint64_t> copy_;
};

// Output 0: the shard's reply to the request of input 1; none to none.
template <typename Shard>
absl::Status OutputReply(tensorflow::OpKernelContext* context, Shard* shard) {
  const AlignedBytes request(context->input(1));
  absl::Status allocated;
  std::unique_ptr<char[]> discarded;
  const auto allocate = [&](size_t bytes) -> char* {
    tensorflow::Tensor* reply;
    allocated = context->allocate_output(0, {static_cast<int64_t>(bytes)}, &reply);
    if (allocated.ok()) return reinterpret_cast<char*>(reply->flat<uint8_t>().data());
    discarded.reset(new char[bytes]);
    return discarded.get();
  };
  if (request.size() == 0) {
    allocate(0);
    return allocated;
  }
  TF_RETURN_IF_ERROR(ToTf(shard->Sync(request.data(), request.size(), PoolOf(context), allocate)));
  return allocated;
}

// Attributes that name a dtype: "float32", or this.
inline constexpr char kBfloat16[] = "bfloat16";
inline std::string NameOfDtype(bool half) { return half ? kBfloat16 : "float32"; }

// The attributes that tables and caches have in common.
absl::Status GetRowConfig(tensorflow::OpKernelConstruction* context, RowConfig* config);
absl::Status GetNonfinite(tensorflow::OpKernelConstruction* context, bool* skip);

// Says which attribute of a handle differs from that of the existing resource, if one does.
class AttributeCheck {
 public:
  AttributeCheck(const std::string& what, const std::string& name) : what_(what), name_(name) {}

  template <typename T>
  AttributeCheck& Same(const char* attribute, const T& existing, const T& wanted) {
    if (status_.ok() && existing != wanted) {
      status_ = absl::InvalidArgumentError(StrCat(what_, " '", name_, "' exists with ", attribute,
                                                  " = ", existing, "; this handle has ", attribute,
                                                  " = ", wanted));
    }
    return *this;
  }
  AttributeCheck& SameRows(const RowConfig& existing, const RowConfig& wanted);

  const absl::Status& status() const { return status_; }

 private:
  const std::string what_, name_;
  absl::Status status_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_KERNEL_UTIL_H_
