#include <functional>
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
#include "tensorflow/core/lib/strings/proto_serialization.h"

namespace het_tf {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::CancellationManager;
using tensorflow::FunctionLibraryDefinition;
using tensorflow::FunctionLibraryRuntime;
using tensorflow::NameAttrList;
using tensorflow::OpKernel;
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

// Calls of functions on other devices that have been started together.
class Calls {
 public:
  explicit Calls(size_t count) : replies_(count), under_way_(count) {}

  CancellationManager* cancellation() { return &cancellation_; }
  void Cancel() { cancellation_.StartCancel(); }
  size_t count() const { return replies_.size(); }

  // Call i has ended.
  void Return(size_t i, const absl::Status& status, const Tensor& reply) {
    std::vector<std::function<void()>> waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      status_.Update(status);
      replies_[i] = reply;
      if (--under_way_ > 0) return;
      waiting.swap(waiting_);
    }
    for (const auto& callback : waiting) callback();
  }

  // Calls back when all have ended; at once if they have.
  void WhenDone(std::function<void()> callback) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (under_way_ > 0) {
        waiting_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

  // Once all have ended.
  const absl::Status& status() const { return status_; }
  const Tensor& reply(size_t i) const { return replies_[i]; }

 private:
  // Not that of the step in which the calls were started: it may end before they do.
  CancellationManager cancellation_;
  std::mutex mutex_;
  absl::Status status_;
  std::vector<Tensor> replies_;
  size_t under_way_;
  std::vector<std::function<void()>> waiting_;
};

// What is left of the calls when nobody waits for them any more: nothing.
class CallsTicket {
 public:
  static constexpr const char* kVariantName = "Het>Calls";

  explicit CallsTicket(std::shared_ptr<Calls> calls) : calls(std::move(calls)) {}
  ~CallsTicket() { calls->Cancel(); }

  const std::shared_ptr<Calls> calls;
};

class CallServersOp : public OpKernel {
 public:
  explicit CallServersOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("devices", &devices_));
    OP_REQUIRES_OK(context, context->GetAttr("functions", &functions_));
    const size_t n = context->num_inputs();
    OP_REQUIRES(
        context, devices_.size() == n && functions_.size() == n,
        absl::InvalidArgumentError(StrCat("n = ", n, " requests are for ", devices_.size(),
                                          " devices and ", functions_.size(), " functions")));
    FunctionLibraryRuntime* library = context->function_library();
    if (library == nullptr) return;
    for (size_t i = 0; i < n; ++i) {
      // Now, while no step that this kernel is in can have calls of TensorFlow's own under way.
      // What fails is tried again, and reported, where there is a request: a server may be down,
      // and a worker that was started anew may lack functions of a model that is gone.
      FunctionLibraryRuntime::Handle handle;
      Register(library, i, &handle).IgnoreError();
    }
  }

  void Compute(OpKernelContext* context) override {
    FunctionLibraryRuntime* library = context->function_library();
    OP_REQUIRES(context, library != nullptr, absl::InternalError("no function library is there"));
    const size_t n = functions_.size();
    std::vector<FunctionLibraryRuntime::Handle> handles(n);
    for (size_t i = 0; i < n; ++i) {
      if (context->input(i).NumElements() == 0) continue;
      OP_REQUIRES_OK(context, Register(library, i, &handles[i]));
    }
    const auto calls = std::make_shared<Calls>(n);
    OP_REQUIRES_OK(context, SetVariant(context, 0, std::make_shared<CallsTicket>(calls)));
    for (size_t i = 0; i < n; ++i) {
      if (context->input(i).NumElements() == 0) {
        calls->Return(i, absl::OkStatus(), Tensor(tensorflow::DT_UINT8, {0}));
      } else {
        Call(library, i, handles[i], context->input(i), calls);
      }
    }
  }

 private:
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
    // A task refuses two functions of one name, and a dataset has other copies of functions than
    // the program: without attributes that say nothing. So what is in a function is in its name.
    const FunctionLibraryDefinition& known = *library->GetFunctionLibraryDefinition();
    const tensorflow::FunctionDef* const found = known.Find(functions_[i].name());
    if (found == nullptr) {
      return absl::NotFoundError(StrCat("there is no function ", functions_[i].name()));
    }
    tensorflow::FunctionDef function = *found;
    function.mutable_signature()->set_name(
        StrCat(functions_[i].name(), "_", tensorflow::DeterministicProtoHash64(*found)));
    FunctionLibraryDefinition named(known.ReachableDefinitions(*found));
    TF_RETURN_IF_ERROR(named.AddFunctionDef(function));
    FunctionLibraryRuntime::InstantiateOptions options;
    if (library->config_proto() != nullptr) options.config_proto = *library->config_proto();
    options.target = devices_[i];
    options.lib_def = &named;
    {
      UniqueLock lock(Registration());
      TF_RETURN_IF_ERROR(library->Instantiate(function.signature().name(),
                                              tensorflow::AttrSlice(&functions_[i].attr()), options,
                                              handle));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    handles_[key] = *handle;
    return absl::OkStatus();
  }

  void Call(FunctionLibraryRuntime* library, size_t i, FunctionLibraryRuntime::Handle handle,
            const Tensor& request, const std::shared_ptr<Calls>& calls) {
    FunctionLibraryRuntime::Options options;
    options.source_device = library->device()->name();
    options.remote_execution = options.source_device != devices_[i];
    options.create_rendezvous = true;
    options.cancellation_manager = calls->cancellation();
    options.args_alloc_attrs.resize(1);
    options.rets_alloc_attrs.resize(1);
    options.args_alloc_attrs[0].set_on_host(true);
    options.rets_alloc_attrs[0].set_on_host(true);
    const auto reply = std::make_shared<std::vector<Tensor>>();
    // Nobody waits for the calls before this op has ended, so no step goes on under this lock.
    SharedLock lock(Registration());
    library->Run(options, handle, {request}, reply.get(),
                 [calls, reply, i](const absl::Status& status) {
                   calls->Return(i, status, status.ok() ? reply->at(0) : Tensor());
                 });
  }

  std::vector<std::string> devices_;
  std::vector<NameAttrList> functions_;
  std::mutex mutex_;
  std::map<std::pair<FunctionLibraryRuntime*, size_t>, FunctionLibraryRuntime::Handle> handles_;
};

class AwaitRepliesOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::shared_ptr<CallsTicket> ticket;
    OP_REQUIRES_OK_ASYNC(context, GetVariant(context, "calls", &ticket), done);
    Calls* const calls = ticket->calls.get();
    OP_REQUIRES_ASYNC(
        context, static_cast<size_t>(context->num_outputs()) == calls->count(),
        absl::InvalidArgumentError(
            StrCat("n = ", context->num_outputs(), ", but there are ", calls->count(), " calls")),
        done);
    CancellationManager* const cancellation = context->cancellation_manager();
    tensorflow::CancellationToken token = CancellationManager::kInvalidToken;
    if (cancellation != nullptr) {
      token = cancellation->get_cancellation_token();
      const bool registered =
          cancellation->RegisterCallback(token, [calls = ticket->calls] { calls->Cancel(); });
      if (!registered) calls->Cancel();
    }
    calls->WhenDone([context, ticket, cancellation, token, done = std::move(done)] {
      if (cancellation != nullptr) cancellation->TryDeregisterCallback(token);
      const Calls& calls = *ticket->calls;
      context->SetStatus(calls.status());
      for (size_t i = 0; calls.status().ok() && i < calls.count(); ++i) {
        context->set_output(i, calls.reply(i));
      }
      done();
    });
  }
};

REGISTER_KERNEL_BUILDER(Name("Het>CallServers").Device(tensorflow::DEVICE_CPU), CallServersOp);
REGISTER_KERNEL_BUILDER(Name("Het>AwaitReplies").Device(tensorflow::DEVICE_CPU), AwaitRepliesOp);

}  // namespace
}  // namespace het_tf
