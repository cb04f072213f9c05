#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/shared_mutex.h"
#include "ops/kernels/kernel_util.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/function.h"

namespace het_tf {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::CancellationManager;
using tensorflow::FunctionLibraryRuntime;
using tensorflow::NameAttrList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Keeps the registration of functions apart from calls of them. TensorFlow 2.21 needs it: to send a
// call it points into a vector that grows when another function is registered
// (EagerClusterFunctionLibraryRuntime), seen as "Unable to parse request".
SharedMutex& Registration() {
  static SharedMutex* mutex = new SharedMutex;
  return *mutex;
}

class CallServersOp : public AsyncOpKernel {
 public:
  explicit CallServersOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("devices", &devices_));
    OP_REQUIRES_OK(context, context->GetAttr("functions", &functions_));
    const size_t n = context->num_inputs();
    OP_REQUIRES(
        context, devices_.size() == n && functions_.size() == n,
        absl::InvalidArgumentError(StrCat("n = ", n, " requests are for ", devices_.size(),
                                          " devices and ", functions_.size(), " functions")));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    FunctionLibraryRuntime* library = context->function_library();
    OP_REQUIRES_ASYNC(context, library != nullptr,
                      absl::InternalError("no function library is there"), done);
    std::vector<size_t> asked;
    for (size_t i = 0; i < functions_.size(); ++i) {
      if (context->input(i).NumElements() != 0) {
        asked.push_back(i);
        continue;
      }
      Tensor* reply;
      OP_REQUIRES_OK_ASYNC(context, context->allocate_output(i, {0}, &reply), done);
    }
    if (asked.empty()) return done();
    std::vector<FunctionLibraryRuntime::Handle> handles(asked.size());
    for (size_t c = 0; c < asked.size(); ++c) {
      OP_REQUIRES_OK_ASYNC(context, Register(library, asked[c], &handles[c]), done);
    }
    // One more than there are, so that the step does not go on in a callback, under that lock.
    const auto calls = std::make_shared<Calls>(context, std::move(done), asked.size() + 1);
    for (size_t c = 0; c < asked.size(); ++c) Call(library, asked[c], handles[c], calls);
    calls->Return(absl::OkStatus());
  }

 private:
  // The calls of one step; the last that returns ends the step.
  struct Calls {
    Calls(OpKernelContext* context, DoneCallback done, size_t count)
        : context(context),
          cancellation(std::make_unique<CancellationManager>(context->cancellation_manager())),
          done(std::move(done)),
          under_way(count) {}

    void Return(const absl::Status& status) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        context->SetStatus(status);
        if (--under_way > 0) return;
      }
      cancellation.reset();  // The context's does not outlive the step.
      done();
    }

    OpKernelContext* const context;
    std::unique_ptr<CancellationManager> cancellation;
    const DoneCallback done;
    std::mutex mutex;
    size_t under_way;
  };

  absl::Status Register(FunctionLibraryRuntime* library, size_t i,
                        FunctionLibraryRuntime::Handle* handle) {
    const auto key = std::make_pair(library, i);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = handles_.find(key);
      if (found != handles_.end()) {
        *handle = found->second;
        return absl::OkStatus();
      }
    }
    FunctionLibraryRuntime::InstantiateOptions options;
    if (library->config_proto() != nullptr) options.config_proto = *library->config_proto();
    options.target = devices_[i];
    {
      UniqueLock lock(Registration());
      TF_RETURN_IF_ERROR(library->Instantiate(
          functions_[i].name(), tensorflow::AttrSlice(&functions_[i].attr()), options, handle));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    handles_[key] = *handle;
    return absl::OkStatus();
  }

  void Call(FunctionLibraryRuntime* library, size_t i, FunctionLibraryRuntime::Handle handle,
            const std::shared_ptr<Calls>& calls) {
    OpKernelContext* context = calls->context;
    FunctionLibraryRuntime::Options options;
    options.source_device = library->device()->name();
    options.remote_execution = options.source_device != devices_[i];
    options.create_rendezvous = true;
    options.cancellation_manager = calls->cancellation.get();
    options.collective_executor = context->collective_executor();
    options.args_alloc_attrs.resize(1);
    options.rets_alloc_attrs.resize(1);
    options.args_alloc_attrs[0].set_on_host(true);
    options.rets_alloc_attrs[0].set_on_host(true);
    const auto reply = std::make_shared<std::vector<Tensor>>();
    const Tensor request = context->input(i);
    SharedLock lock(Registration());
    library->Run(options, handle, {request}, reply.get(),
                 [calls, reply, i](const absl::Status& status) {
                   if (status.ok()) calls->context->set_output(i, reply->at(0));
                   calls->Return(status);
                 });
  }

  std::vector<std::string> devices_;
  std::vector<NameAttrList> functions_;
  std::mutex mutex_;
  std::map<std::pair<FunctionLibraryRuntime*, size_t>, FunctionLibraryRuntime::Handle> handles_;
};

REGISTER_KERNEL_BUILDER(Name("Het>CallServers").Device(tensorflow::DEVICE_CPU), CallServersOp);

}  // namespace
}  // namespace het_tf
