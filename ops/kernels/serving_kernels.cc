#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops/kernels/kernel_util.h"
#include "ops/kernels/served_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/path.h"

namespace het_tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using ServedRef = tensorflow::core::RefCountPtr<ServedResource>;

// The kernel has the model, and not a name: a program that loads a SavedModel twice has two, and
// each goes with what it was loaded for, a session or an object in Python.
class ServedHandleOp : public OpKernel {
 public:
  explicit ServedHandleOp(OpKernelConstruction* context) : OpKernel(context) {
    std::vector<int> dims;
    std::vector<int64_t> seeds;
    std::vector<std::string> initializers;
    OP_REQUIRES_OK(context, context->GetAttr("dims", &dims));
    OP_REQUIRES_OK(context, context->GetAttr("seeds", &seeds));
    OP_REQUIRES_OK(context, context->GetAttr("initializers", &initializers));
    OP_REQUIRES_OK(context, context->GetAttr("poll_seconds", &poll_seconds_));
    OP_REQUIRES(context, dims.size() == seeds.size() && dims.size() == initializers.size(),
                absl::InvalidArgumentError(
                    StrCat("dims, initializers and seeds must be of one length, not ", dims.size(),
                           ", ", initializers.size(), " and ", seeds.size())));
    OP_REQUIRES(context, poll_seconds_ >= 0,
                absl::InvalidArgumentError(
                    StrCat("poll_seconds must not be negative, but is ", poll_seconds_)));
    for (size_t t = 0; t < dims.size(); ++t) {
      ServedTable table;
      table.dim = dims[t];
      OP_REQUIRES(context, dims[t] >= 1,
                  absl::InvalidArgumentError(StrCat("dims holds ", dims[t])));
      OP_REQUIRES_OK(context,
                     ToTf(Initializer::Parse(initializers[t], seeds[t], &table.initializer)));
      tables_.push_back(std::move(table));
    }
  }

  void Compute(OpKernelContext* context) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (resource_ == nullptr) resource_.reset(new ServedResource(tables_, poll_seconds_));
    }
    resource_->Ref();
    Tensor* handle;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &handle));
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(resource_.get(),
                                                          context->device()->name());
  }

 private:
  std::vector<ServedTable> tables_;
  float poll_seconds_;
  std::mutex mutex_;
  ServedRef resource_;
};

class ServedOpenOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    ServedRef served;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &served));
    const Tensor& asset = context->input(1);
    OP_REQUIRES(context, asset.dims() == 0,
                absl::InvalidArgumentError(
                    StrCat("asset must be a scalar, not of shape ", asset.shape().DebugString())));
    std::string path = asset.scalar<tensorflow::tstring>()();
    // The program may go to another folder.
    std::error_code error;
    const auto absolute = std::filesystem::absolute(path, error);
    if (!error && path.find("://") == std::string::npos) path = absolute.string();
    const std::string model(tensorflow::io::Dirname(std::string(tensorflow::io::Dirname(path))));
    OP_REQUIRES_OK(context, OrOutOfMemory(*this, [&] {
                     return served->Open(tensorflow::io::JoinPath(model, "assets.extra", "het_tf"));
                   }));
  }
};

class ServedPinOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    auto view = std::make_shared<ServedView>();
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &view->resource));
    OP_REQUIRES_OK(context, ToTf(view->resource->served().Pin(&view->view)));
    Tensor* version;
    OP_REQUIRES_OK(context, context->allocate_output(1, {}, &version));
    version->scalar<int64_t>()() = view->view.version();
    OP_REQUIRES_OK(context, SetVariant(context, 0, std::move(view)));
  }
};

class ServedLookupOp : public OpKernel {
 public:
  explicit ServedLookupOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("table", &table_));
    OP_REQUIRES_OK(context, context->GetAttr("dim", &dim_));
  }

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<ServedView> view;
    OP_REQUIRES_OK(context, GetVariant(context, "view", &view));
    const auto tables = static_cast<int>(view->resource->num_tables());
    OP_REQUIRES(context, table_ < tables,
                absl::InvalidArgumentError(
                    StrCat("table = ", table_, ", the model has ", tables, " tables")));
    OP_REQUIRES(context, dim_ == view->view.dim(table_),
                absl::InvalidArgumentError(StrCat("dim = ", dim_, ", the table has ",
                                                  view->view.dim(table_), " columns")));
    const Tensor& ids = context->input(1);
    Tensor* rows;
    OP_REQUIRES_OK(context, context->allocate_output(0, {ids.NumElements(), dim_}, &rows));
    view->view.Lookup(table_, ids.flat<int64_t>().data(), ids.NumElements(), PoolOf(context),
                      rows->flat<float>().data());
  }

 private:
  int table_, dim_;
};

class ServedVariablesOp : public OpKernel {
 public:
  explicit ServedVariablesOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
  }

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<ServedView> view;
    OP_REQUIRES_OK(context, GetVariant(context, "view", &view));
    const auto& variables = *static_cast<const ServedVariables*>(view->view.others());
    OP_REQUIRES(context, static_cast<int>(variables.size()) == num_outputs(),
                absl::InvalidArgumentError(StrCat("version ", view->view.version(), " has ",
                                                  variables.size(), " variables, the model ",
                                                  num_outputs())));
    for (int i = 0; i < num_outputs(); ++i) {
      OP_REQUIRES(context,
                  variables[i].dtype() == output_type(i) &&
                      shapes_[i].IsCompatibleWith(variables[i].shape()),
                  absl::InvalidArgumentError(StrCat(
                      "variable ", i, " of version ", view->view.version(), " is ",
                      tensorflow::DataTypeString(variables[i].dtype()), " ",
                      variables[i].shape().DebugString(), ", expected ",
                      tensorflow::DataTypeString(output_type(i)), " ", shapes_[i].DebugString())));
      context->set_output(i, variables[i]);
    }
  }

 private:
  std::vector<tensorflow::PartialTensorShape> shapes_;
};

class ServedStatusOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    ServedRef resource;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &resource));
    Served::View view;
    OP_REQUIRES_OK(context, ToTf(resource->served().Pin(&view)));
    std::vector<Tensor*> out(num_outputs());
    for (int i = 0; i < num_outputs(); ++i) {
      OP_REQUIRES_OK(context, context->allocate_output(i, {}, &out[i]));
    }
    using std::chrono::system_clock;
    const double now =
        std::chrono::duration<double>(system_clock::now().time_since_epoch()).count();
    const double written = static_cast<double>(view.written_micros()) * 1e-6;
    out[0]->scalar<int64_t>()() = view.version();
    out[1]->scalar<double>()() = written;
    out[2]->scalar<double>()() = now - written;
    out[3]->scalar<int64_t>()() = view.num_changed();
    out[4]->scalar<tensorflow::tstring>()() = resource->trouble();
  }
};

#define REGISTER_SERVED_KERNEL(name) \
  REGISTER_KERNEL_BUILDER(Name("Het>" #name).Device(tensorflow::DEVICE_CPU), name##Op)
REGISTER_SERVED_KERNEL(ServedHandle);
REGISTER_SERVED_KERNEL(ServedOpen);
REGISTER_SERVED_KERNEL(ServedPin);
REGISTER_SERVED_KERNEL(ServedLookup);
REGISTER_SERVED_KERNEL(ServedVariables);
REGISTER_SERVED_KERNEL(ServedStatus);
#undef REGISTER_SERVED_KERNEL

}  // namespace
}  // namespace het_tf
