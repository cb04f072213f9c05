#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/dense/replica.h"
#include "ops/kernels/kernel_util.h"
#include "ops/kernels/process_registry.h"
#include "ops/kernels/programs.h"
#include "ops/kernels/resources.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace het_tf {
namespace {

using tensorflow::DataType;
using tensorflow::OpKernelConstruction;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;
using Kind = ReplicaResource::Kind;

class ReplicaHandleOp : public tensorflow::ResourceOpKernel<ReplicaResource> {
 public:
  explicit ReplicaHandleOp(OpKernelConstruction* context) : ResourceOpKernel(context) {
    std::vector<std::string> kinds;
    OP_REQUIRES_OK(context, context->GetAttr("dtypes", &dtypes_));
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
    OP_REQUIRES_OK(context, context->GetAttr("kinds", &kinds));
    OP_REQUIRES_OK(context, context->GetAttr("num_shards", &config_.num_shards));
    OP_REQUIRES_OK(context, context->GetAttr("num_phases", &config_.num_phases));
    OP_REQUIRES_OK(context, context->GetAttr("num_workers", &config_.num_workers));
    OP_REQUIRES_OK(context, context->GetAttr("staleness", &config_.staleness));
    std::string wire;
    OP_REQUIRES_OK(context, context->GetAttr("wire", &wire));
    config_.half = wire == "bfloat16";
    OP_REQUIRES(
        context, dtypes_.size() == shapes_.size() && kinds.size() == shapes_.size(),
        absl::InvalidArgumentError(StrCat("there are ", dtypes_.size(), " dtypes, ", shapes_.size(),
                                          " shapes and ", kinds.size(), " kinds")));
    for (size_t v = 0; v < kinds.size(); ++v) {
      OP_REQUIRES_OK(context, AddVariable(kinds[v], dtypes_[v], shapes_[v]));
    }
  }

 private:
  absl::Status AddVariable(const std::string& kind, DataType dtype, const TensorShape& shape) {
    const int64_t size = shape.num_elements();
    if (kind == "float" && dtype == tensorflow::DT_FLOAT) {
      kinds_.push_back(Kind::kFloat);
      config_.num_floats += size;
    } else if (kind == "counter" && dtype == tensorflow::DT_INT64) {
      kinds_.push_back(Kind::kCounter);
      config_.num_counters += size;
    } else if (kind == "own" || (kind == "seed" && tensorflow::DataTypeIsInteger(dtype))) {
      kinds_.push_back(kind == "own" ? Kind::kOwn : Kind::kSeed);
      config_.rest_bytes += size * tensorflow::DataTypeSize(dtype);
    } else {
      return absl::InvalidArgumentError(StrCat("a variable of ", tensorflow::DataTypeString(dtype),
                                               " cannot be of the kind '", kind, "'"));
    }
    return absl::OkStatus();
  }

  absl::Status CreateResource(ReplicaResource** resource) override {
    TF_RETURN_IF_ERROR(CheckNotReplaced(cinfo_.container()));
    std::shared_ptr<Replica> replica;
    TF_RETURN_IF_ERROR(ToTf(Replica::Create(config_, &replica)));
    std::vector<ReplicaResource::Variable> variables;
    for (size_t v = 0; v < kinds_.size(); ++v) {
      tensorflow::core::RefCountPtr<Var> var(new Var(dtypes_[v]));
      *var->tensor() = Tensor(dtypes_[v], shapes_[v]);
      const auto bytes = var->tensor()->tensor_data();
      std::memset(const_cast<char*>(bytes.data()), 0, bytes.size());
      var->is_initialized = true;
      variables.push_back({kinds_[v], std::move(var)});
    }
    *resource = new ReplicaResource(std::move(variables), std::move(replica));
    ProcessRegistry<ReplicaResource>::Get().Add(*resource);
    return absl::OkStatus();
  }

  absl::Status VerifyResource(ReplicaResource* resource) override {
    const ReplicaConfig& existing = resource->replica->config();
    return AttributeCheck("replica", cinfo_.name())
        .Same("num_shards", existing.num_shards, config_.num_shards)
        .Same("num_phases", existing.num_phases, config_.num_phases)
        .Same("num_workers", existing.num_workers, config_.num_workers)
        .Same("staleness", existing.staleness, config_.staleness)
        .Same("bfloat16", existing.half, config_.half)
        .Same("floats", existing.num_floats, config_.num_floats)
        .Same("counters", existing.num_counters, config_.num_counters)
        .Same("rest", existing.rest_bytes, config_.rest_bytes)
        .status();
  }

  ReplicaConfig config_;
  std::vector<DataType> dtypes_;
  std::vector<TensorShape> shapes_;
  std::vector<Kind> kinds_;
};

REGISTER_KERNEL_BUILDER(Name("Het>ReplicaHandle").Device(tensorflow::DEVICE_CPU), ReplicaHandleOp);

}  // namespace
}  // namespace het_tf
