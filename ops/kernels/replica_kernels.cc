#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/dense/replica.h"
#include "ops/core/memory/hash.h"
#include "ops/kernels/kernel_util.h"
#include "ops/kernels/resources.h"
#include "ops/kernels/variables.h"

namespace het_tf {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;
using Kind = ReplicaResource::Kind;

absl::Status GetReplica(OpKernelContext* context,
                        tensorflow::core::RefCountPtr<ReplicaResource>* resource) {
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), resource);
}

// A kernel whose first input is a replica.
class ReplicaKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<ReplicaResource> resource;
    OP_REQUIRES_OK(context, GetReplica(context, &resource));
    OP_REQUIRES_OK(context, OrOutOfMemory(*this, [&] { return Compute(context, resource.get()); }));
  }

 protected:
  virtual absl::Status Compute(OpKernelContext* context, ReplicaResource* resource) = 0;
};

// The container of a replica and its variables.
const std::string& ContainerOf(OpKernelContext* context) {
  return tensorflow::HandleFromInput(context, 0).container();
}

std::string NameOfVariable(const ReplicaResource& resource, size_t v) {
  return StrCat(resource.replica->id(), "/", v);
}

class ReplicaVariablesOp : public ReplicaKernel {
 public:
  using ReplicaKernel::ReplicaKernel;

  absl::Status Compute(OpKernelContext* context, ReplicaResource* resource) override {
    if (static_cast<size_t>(context->num_outputs()) != resource->variables.size()) {
      return absl::InvalidArgumentError(StrCat("n = ", context->num_outputs(),
                                               ", but the replica has ", resource->variables.size(),
                                               " variables"));
    }
    for (size_t v = 0; v < resource->variables.size(); ++v) {
      Tensor* handle;
      TF_RETURN_IF_ERROR(context->allocate_output(v, {}, &handle));
      // By name, since TensorFlow's assignments do not look into a handle that holds its resource.
      const std::string name = NameOfVariable(*resource, v);
      Var* var = nullptr;
      TF_RETURN_IF_ERROR(context->resource_manager()->LookupOrCreate<Var>(
          ContainerOf(context), name, &var, [&](Var** created) {
            *created = resource->variables[v].var.get();
            (*created)->Ref();
            return absl::OkStatus();
          }));
      var->Unref();
      handle->scalar<tensorflow::ResourceHandle>()() = tensorflow::MakeResourceHandle<Var>(
          context, ContainerOf(context), name, {{var->tensor()->dtype(), var->tensor()->shape()}});
    }
    return absl::OkStatus();
  }
};

class ReplicaDestroyOp : public ReplicaKernel {
 public:
  using ReplicaKernel::ReplicaKernel;

  absl::Status Compute(OpKernelContext* context, ReplicaResource* resource) override {
    for (size_t v = 0; v < resource->variables.size(); ++v) {
      // Those that no step has used are not there.
      (void)context->resource_manager()->Delete<Var>(ContainerOf(context),
                                                     NameOfVariable(*resource, v));
    }
    return tensorflow::DeleteResource(context, tensorflow::HandleFromInput(context, 0));
  }
};

// The memory of all variables of a replica, to be read and written while this lives.
class LockedVariables {
 public:
  explicit LockedVariables(const ReplicaResource& resource) {
    std::vector<Var*> vars;
    for (const auto& each : resource.variables) vars.push_back(each.var.get());
    locks_ = LockInOrder(std::move(vars));
    for (const auto& [kind, var] : resource.variables) {
      Tensor* tensor = var->tensor();
      char* data = WritableData(tensor);
      const int64_t size = tensor->NumElements();
      switch (kind) {
        case Kind::kFloat:
          variables_.floats.push_back({reinterpret_cast<float*>(data), size});
          break;
        case Kind::kCounter:
          for (int64_t i = 0; i < size; ++i) {
            variables_.counters.push_back(reinterpret_cast<int64_t*>(data) + i);
          }
          break;
        case Kind::kSeed:
          seeds_.push_back(tensor);
          [[fallthrough]];
        case Kind::kOwn:
          variables_.rest.push_back({data, static_cast<int64_t>(tensor->tensor_data().size())});
          break;
      }
    }
  }

  const Replica::Variables& variables() const { return variables_; }
  std::vector<Replica::Array<char>> seeds() const {
    std::vector<Replica::Array<char>> arrays;
    for (const Tensor* seed : seeds_) {
      const auto bytes = seed->tensor_data();
      arrays.push_back({const_cast<char*>(bytes.data()), static_cast<int64_t>(bytes.size())});
    }
    return arrays;
  }

  // Gives every worker other random numbers; those of worker 0 are as without a cluster.
  void SetSeeds(int worker) {
    // 31 bits, which any integer of 4 bytes or more has room for.
    const auto change = static_cast<uint32_t>(HashKey(worker)) & 0x7fffffff;
    for (Tensor* seed : seeds_) {
      if (seed->TotalBytes() < sizeof(change)) continue;
      char* data = const_cast<char*>(seed->tensor_data().data());
      uint32_t low;
      std::memcpy(&low, data, sizeof(low));
      low ^= change;
      std::memcpy(data, &low, sizeof(low));
    }
  }

 private:
  std::vector<tensorflow::mutex_lock> locks_;
  Replica::Variables variables_;
  std::vector<Tensor*> seeds_;
};

class ReplicaSettleOp : public AsyncOpKernel {
 public:
  explicit ReplicaSettleOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("reads", &reads_));
    OP_REQUIRES_OK(context, context->GetAttr("all", &all_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto call = std::make_shared<Call>();
    call->context = context;
    call->done = std::move(done);
    absl::Status status = GetReplica(context, &call->resource);
    const Tensor* steps;
    if (status.ok()) status = context->input("steps", &steps);
    if (status.ok() && steps->dims() != 0) {
      status = absl::InvalidArgumentError(
          StrCat("steps must be a scalar, not of shape ", steps->shape().DebugString()));
    }
    if (status.ok() && process_ends && !all_) {
      status = absl::CancelledError("the replica makes no more steps: its process is about to end");
    }
    if (!status.ok()) {
      Finish(call, status);
      return;
    }
    // The steps that would receive the replies fail. A request may also have been prepared for a
    // closure that never comes.
    if (process_ends) call->resource->replica->GiveUpRequests();
    Settle(call, steps->scalar<int64_t>()(), reads_);
  }

 private:
  // Finished once: by the answer that it waits for, or by the step's cancellation.
  struct Call {
    OpKernelContext* context;
    DoneCallback done;
    tensorflow::core::RefCountPtr<ReplicaResource> resource;
    std::atomic<bool> waits{false};
    tensorflow::CancellationToken token = tensorflow::CancellationManager::kInvalidToken;
  };

  static void Finish(const std::shared_ptr<Call>& call, const absl::Status& status) {
    if (!status.ok()) call->context->SetStatus(status);
    DoneCallback done = std::move(call->done);
    call->resource.reset();
    done();
  }

  void Settle(const std::shared_ptr<Call>& call, int64_t steps, bool reads) {
    Replica::Must must = Replica::Must::kNothing;
    const absl::Status status = OrOutOfMemory(*this, [&] {
      LockedVariables locked(*call->resource);
      bool started;
      TF_RETURN_IF_ERROR(ToTf(call->resource->replica->Settle(locked.variables(), steps, reads,
                                                              all_, &must, &started)));
      if (started) locked.SetSeeds(call->context->device()->parsed_name().task);
      return absl::OkStatus();
    });
    if (status.ok() && must == Replica::Must::kWait) {
      Wait(call);
      return;
    }
    Tensor* exchange;
    absl::Status allocated = call->context->allocate_output(0, {}, &exchange);
    if (allocated.ok()) exchange->scalar<bool>()() = must == Replica::Must::kExchange;
    Finish(call, status.ok() ? allocated : status);
  }

  void Wait(const std::shared_ptr<Call>& call) {
    call->waits = true;
    std::shared_ptr<Replica> replica = call->resource->replica;  // the call may end below
    // The answer may never come: the request's own step may have failed, which waits for this op.
    tensorflow::CancellationManager* cancellation = call->context->cancellation_manager();
    if (cancellation != nullptr) {
      call->token = cancellation->get_cancellation_token();
      const bool registered = cancellation->RegisterCallback(call->token, [call] {
        if (call->waits.exchange(false)) Finish(call, absl::CancelledError("step was cancelled"));
      });
      if (!registered) {
        Finish(call, absl::CancelledError("step was cancelled"));
        return;
      }
    }
    replica->WhenIdle([this, call, cancellation] {
      if (!call->waits.exchange(false)) return;
      if (cancellation != nullptr) cancellation->TryDeregisterCallback(call->token);
      Settle(call, 0, false);
    });
  }

  bool reads_, all_;
};

class ReplicaUrgentOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    tensorflow::core::RefCountPtr<ReplicaResource> resource;
    OP_REQUIRES_OK_ASYNC(context, GetReplica(context, &resource), done);
    struct Call {
      DoneCallback done;
      std::atomic<bool> waits{true};
    };
    auto call = std::make_shared<Call>();
    call->done = std::move(done);
    tensorflow::CancellationManager* cancellation = context->cancellation_manager();
    tensorflow::CancellationToken token = tensorflow::CancellationManager::kInvalidToken;
    if (cancellation != nullptr) {
      token = cancellation->get_cancellation_token();
      const bool registered = cancellation->RegisterCallback(token, [call, context] {
        if (!call->waits.exchange(false)) return;
        context->SetStatus(absl::CancelledError("step was cancelled"));
        call->done();
      });
      if (!registered) {
        context->SetStatus(absl::CancelledError("step was cancelled"));
        call->done();
        return;
      }
    }
    resource->replica->WhenUrgent([call, context, cancellation, token](bool urgent) {
      if (!call->waits.exchange(false)) return;
      if (cancellation != nullptr) cancellation->TryDeregisterCallback(token);
      Tensor* out;
      const absl::Status allocated = context->allocate_output(0, {}, &out);
      if (allocated.ok()) {
        out->scalar<bool>()() = urgent;
      } else {
        context->SetStatus(allocated);
      }
      call->done();
    });
  }
};

class ReplicaCloseOp : public ReplicaKernel {
 public:
  explicit ReplicaCloseOp(OpKernelConstruction* context) : ReplicaKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("closed", &closed_));
  }

  absl::Status Compute(OpKernelContext*, ReplicaResource* resource) override {
    resource->replica->SetClosed(closed_);
    return absl::OkStatus();
  }

 private:
  bool closed_;
};

class ReplicaRequestOp : public ReplicaKernel {
 public:
  explicit ReplicaRequestOp(OpKernelConstruction* context) : ReplicaKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_shards", &num_shards_));
    OP_REQUIRES_OK(context, context->GetAttr("asks", &asks_));
  }

  absl::Status Compute(OpKernelContext* context, ReplicaResource* resource) override {
    const int shards = resource->replica->config().num_shards;
    if (num_shards_ != shards) {
      return absl::InvalidArgumentError(
          StrCat("num_shards = ", num_shards_, ", but the replica has ", shards, " shards"));
    }
    absl::Status allocated;
    std::vector<std::unique_ptr<char[]>> discarded;
    std::shared_ptr<ReplicaTicket> ticket;
    TF_RETURN_IF_ERROR(ToTf(resource->replica->Request(
        asks_,
        [&](int shard, size_t bytes) -> char* {
          Tensor* request;
          absl::Status status =
              context->allocate_output(1 + shard, {static_cast<int64_t>(bytes)}, &request);
          if (status.ok()) return reinterpret_cast<char*>(request->flat<uint8_t>().data());
          allocated.Update(status);
          discarded.push_back(std::make_unique<char[]>(bytes));
          return discarded.back().get();
        },
        &ticket)));
    TF_RETURN_IF_ERROR(allocated);
    return SetVariant(context, 0, std::move(ticket));
  }

 private:
  int num_shards_;
  bool asks_;
};

class ReplicaReceiveOp : public ReplicaKernel {
 public:
  using ReplicaKernel::ReplicaKernel;

  absl::Status Compute(OpKernelContext* context, ReplicaResource* resource) override {
    std::shared_ptr<ReplicaTicket> ticket;
    TF_RETURN_IF_ERROR(GetVariant(context, "ticket", &ticket));
    if (ticket->replica() != resource->replica.get()) {
      return absl::InvalidArgumentError("ticket was given out by another replica");
    }
    tensorflow::OpInputList replies;
    TF_RETURN_IF_ERROR(context->input_list("replies", &replies));
    std::vector<AlignedBytes> aligned;
    aligned.reserve(replies.size());
    std::vector<Frame> frames;
    for (int s = 0; s < replies.size(); ++s) {
      aligned.emplace_back(replies[s]);
      frames.push_back({aligned[s].data(), aligned[s].size()});
    }
    return ToTf(resource->replica->Receive(ticket.get(), frames));
  }
};

class ReplicaOwnOp : public ReplicaKernel {
 public:
  explicit ReplicaOwnOp(OpKernelConstruction* context) : ReplicaKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("seeds_only", &seeds_only_));
  }

  absl::Status Compute(OpKernelContext* context, ReplicaResource* resource) override {
    const LockedVariables locked(*resource);
    const std::vector<Replica::Array<char>> arrays =
        seeds_only_ ? locked.seeds() : locked.variables().rest;
    int64_t bytes = 0;
    for (const auto& array : arrays) bytes += array.size;
    Tensor *own, *steps;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {bytes}, &own));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {}, &steps));
    auto* out = reinterpret_cast<char*>(own->flat<uint8_t>().data());
    for (const auto& array : arrays) {
      std::memcpy(out, array.data, array.size);
      out += array.size;
    }
    steps->scalar<int64_t>()() = resource->replica->counters().Get(ReplicaCounter::kSteps);
    return absl::OkStatus();
  }

 private:
  bool seeds_only_;
};

class ReplicaStatsOp : public ReplicaKernel {
 public:
  using ReplicaKernel::ReplicaKernel;

  absl::Status Compute(OpKernelContext* context, ReplicaResource* resource) override {
    return OutputCounters(context, kReplicaCounterNames, resource->replica->counters().Read());
  }
};

class ReplicaReportOp : public ReplicaKernel {
 public:
  using ReplicaKernel::ReplicaKernel;

  absl::Status Compute(OpKernelContext* context, ReplicaResource* resource) override {
    return OutputReport(context, resource->replica->id(), resource->replica->counters().Read());
  }
};

class ReplicaCounterNamesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, OutputNames(context, kReplicaCounterNames));
  }
};

#define REGISTER_REPLICA_KERNEL(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name("Het>" name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER_REPLICA_KERNEL("ReplicaVariables", ReplicaVariablesOp);
REGISTER_REPLICA_KERNEL("ReplicaDestroy", ReplicaDestroyOp);
REGISTER_REPLICA_KERNEL("ReplicaSettle", ReplicaSettleOp);
REGISTER_REPLICA_KERNEL("ReplicaUrgent", ReplicaUrgentOp);
REGISTER_REPLICA_KERNEL("ReplicaClose", ReplicaCloseOp);
REGISTER_REPLICA_KERNEL("ReplicaRequest", ReplicaRequestOp);
REGISTER_REPLICA_KERNEL("ReplicaReceive", ReplicaReceiveOp);
REGISTER_REPLICA_KERNEL("ReplicaOwn", ReplicaOwnOp);
REGISTER_REPLICA_KERNEL("ReplicaStats", ReplicaStatsOp);
REGISTER_REPLICA_KERNEL("ReplicaReport", ReplicaReportOp);
REGISTER_REPLICA_KERNEL("ReplicaCounterNames", ReplicaCounterNamesOp);
#undef REGISTER_REPLICA_KERNEL

}  // namespace
}  // namespace het_tf
