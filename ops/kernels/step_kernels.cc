#include <atomic>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "ops/core/step/barrier.h"
#include "ops/core/step/sum.h"
#include "ops/core/table/table.h"
#include "ops/core/wire/frames.h"
#include "ops/kernels/kernel_util.h"
#include "ops/kernels/programs.h"
#include "ops/kernels/resources.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace het_tf {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::CancellationManager;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::core::RefCountPtr;

class StepResource : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return "Het>Step"; }
  int64_t MemoryUsed() const override { return sum.memory_bytes(); }

  StepBarrier barrier;
  StepSum sum;
};

class StepHandleOp : public tensorflow::ResourceOpKernel<StepResource> {
 public:
  using ResourceOpKernel::ResourceOpKernel;

 private:
  absl::Status CreateResource(StepResource** resource) override {
    TF_RETURN_IF_ERROR(CheckNotReplaced(cinfo_.container()));
    *resource = new StepResource;
    return absl::OkStatus();
  }
};

// A kernel whose first input is what StepHandle made.
class StepKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    RefCountPtr<StepResource> steps;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &steps));
    OP_REQUIRES_OK(context, OrOutOfMemory(*this, [&] { return Compute(context, steps.get()); }));
  }

 protected:
  virtual absl::Status Compute(OpKernelContext* context, StepResource* steps) = 0;
};

class StepBeginOp : public StepKernel {
 public:
  using StepKernel::StepKernel;

  absl::Status Compute(OpKernelContext* context, StepResource* steps) override {
    int64_t round = 0, num_members = 0;
    TF_RETURN_IF_ERROR(GetScalar(context, "round", &round));
    TF_RETURN_IF_ERROR(GetScalar(context, "num_members", &num_members));
    constexpr int64_t kMostMembers = 1 << 16;
    if (num_members < 1 || num_members > kMostMembers) {
      return absl::InvalidArgumentError(
          StrCat("num_members = ", num_members, " must be in [1, ", kMostMembers, "]"));
    }
    steps->barrier.Begin(round, num_members);
    steps->sum.Begin(num_members);
    return absl::OkStatus();
  }
};

class StepLeaveOp : public StepKernel {
 public:
  using StepKernel::StepKernel;

  absl::Status Compute(OpKernelContext* context, StepResource* steps) override {
    int64_t round = 0;
    TF_RETURN_IF_ERROR(GetScalar(context, "round", &round));
    const Tensor* members;
    TF_RETURN_IF_ERROR(context->input("members", &members));
    const auto numbers = members->flat<int64_t>();
    for (int64_t i = 0; i < numbers.size(); ++i) steps->barrier.Leave(round, numbers(i));
    return absl::OkStatus();
  }
};

class StepJoinOp : public StepKernel {
 public:
  using StepKernel::StepKernel;

  absl::Status Compute(OpKernelContext* context, StepResource* steps) override {
    int64_t round = 0, member = 0, worker = 0;
    TF_RETURN_IF_ERROR(GetScalar(context, "round", &round));
    TF_RETURN_IF_ERROR(GetScalar(context, "member", &member));
    TF_RETURN_IF_ERROR(GetScalar(context, "worker", &worker));
    Tensor* joined;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &joined));
    joined->scalar<bool>()() = steps->barrier.Join(round, member, worker);
    return absl::OkStatus();
  }
};

class StepWaitingOp : public StepKernel {
 public:
  using StepKernel::StepKernel;

  absl::Status Compute(OpKernelContext* context, StepResource* steps) override {
    const StepBarrier::Waiting waiting = steps->barrier.waiting();
    Tensor* out;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &out));
    out->scalar<int64_t>()() = waiting.round;
    TF_RETURN_IF_ERROR(context->allocate_output(1, {}, &out));
    out->scalar<int64_t>()() = waiting.step;
    int output = 2;
    for (const auto* members : {&waiting.absent, &waiting.workers}) {
      TF_RETURN_IF_ERROR(
          context->allocate_output(output++, {static_cast<int64_t>(members->size())}, &out));
      std::copy(members->begin(), members->end(), out->flat<int64_t>().data());
    }
    return absl::OkStatus();
  }
};

// A member's message of a step, until it is answered.
class StepCall {
 public:
  static absl::Status Read(OpKernelContext* context, std::shared_ptr<StepCall>* call) {
    const auto made = std::make_shared<StepCall>();
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0),
                                                  &made->steps_));
    made->tables_ = std::make_shared<std::vector<RefCountPtr<TableResource>>>();
    for (int i = 1; i + 1 < context->num_inputs(); ++i) {
      made->tables_->emplace_back();
      TF_RETURN_IF_ERROR(tensorflow::LookupResource(
          context, tensorflow::HandleFromInput(context, i), &made->tables_->back()));
    }
    made->bytes_ = std::make_shared<AlignedBytes>(context->input(context->num_inputs() - 1));
    made->pool_ = PoolOf(context);
    const size_t num_tables = made->tables_->size();
    std::vector<Frame>& frames = made->frames_;
    TF_RETURN_IF_ERROR(
        ToTf(UnpackFrames(made->bytes_->data(), made->bytes_->size(), num_tables + 2, &frames)));
    int64_t header[4];
    if (frames[0].size != sizeof(header) || frames.back().size % sizeof(float) != 0) {
      return absl::InvalidArgumentError(StrCat("message of a step has a header of ", frames[0].size,
                                               " bytes, not ", sizeof(header), ", and ",
                                               frames.back().size, " bytes of floats"));
    }
    std::memcpy(header, frames[0].bytes, sizeof(header));
    made->round = header[0];
    made->member = header[1];
    made->step = header[2];
    made->is_last = header[3] != 0;
    *call = made;
    return absl::OkStatus();
  }

  StepBarrier& barrier() { return steps_->barrier; }

  // Takes what the member has sent; merges nothing.
  Status Collect() {
    HET_RETURN_IF_ERROR(barrier().Check(round, member, step));
    parts_.resize(tables_->size());
    for (size_t t = 0; t < tables_->size(); ++t) {
      const Frame& frame = frames_[1 + t];
      if (frame.size == 0) continue;
      HET_RETURN_IF_ERROR((*tables_)[t]->table->Collect(member, frame.bytes, frame.size, bytes_,
                                                        pool_, &parts_[t]));
    }
    if (num_floats() == 0) return Status();
    return steps_->sum.Collect(member, floats(), num_floats());
  }

  // Merges what all members have sent. Does not need the call.
  StepBarrier::Merge merge() const {
    return [steps = steps_.get(), tables = tables_, pool = pool_] {
      for (const auto& table : *tables) HET_RETURN_IF_ERROR(table->table->MergeStep(pool));
      return steps->sum.Merge();
    };
  }

  // Output 0: what the member gets.
  absl::Status Answer(OpKernelContext* context) const {
    std::vector<std::vector<uint64_t>> blocks(tables_->size() + 1);
    std::vector<Frame> replies(1 + tables_->size());
    const auto allocate = [&](size_t i, size_t bytes) {
      blocks[i].resize((bytes + 7) / 8);
      replies[i] = {reinterpret_cast<const char*>(blocks[i].data()), bytes};
      return reinterpret_cast<char*>(blocks[i].data());
    };
    for (size_t t = 0; t < tables_->size(); ++t) {
      if (parts_[t] == nullptr) continue;
      TF_RETURN_IF_ERROR(ToTf((*tables_)[t]->table->AnswerStep(
          *parts_[t], pool_, [&](size_t bytes) { return allocate(t, bytes); })));
    }
    if (num_floats() > 0) {
      char* mean = allocate(tables_->size(), num_floats() * sizeof(float));
      TF_RETURN_IF_ERROR(ToTf(steps_->sum.Read(num_floats(), reinterpret_cast<float*>(mean))));
    }
    absl::Status allocated;
    std::unique_ptr<char[]> discarded;
    PackFrames(replies, [&](size_t bytes) -> char* {
      Tensor* reply;
      allocated = context->allocate_output(0, {static_cast<int64_t>(bytes)}, &reply);
      if (allocated.ok()) return reinterpret_cast<char*>(reply->flat<uint8_t>().data());
      discarded.reset(new char[bytes]);
      return discarded.get();
    });
    return allocated;
  }

  int64_t round = 0, member = 0, step = 0;
  bool is_last = false;

 private:
  const float* floats() const { return reinterpret_cast<const float*>(frames_.back().bytes); }
  size_t num_floats() const { return frames_.back().size / sizeof(float); }

  RefCountPtr<StepResource> steps_;
  std::shared_ptr<std::vector<RefCountPtr<TableResource>>> tables_;
  std::shared_ptr<AlignedBytes> bytes_;
  std::vector<Frame> frames_;
  std::vector<std::shared_ptr<Table::StepPart>> parts_;
  ParallelFor pool_;
};

class ServeStepOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::shared_ptr<StepCall> call;
    OP_REQUIRES_OK_ASYNC(
        context, OrOutOfMemory(*this, [&] { return StepCall::Read(context, &call); }), done);
    OP_REQUIRES_OK_ASYNC(context, OrOutOfMemory(*this, [&] { return ToTf(call->Collect()); }),
                         done);
    CancellationManager* const cancellation = context->cancellation_manager();
    tensorflow::CancellationToken token = CancellationManager::kInvalidToken;
    bool is_cancelled = false;
    if (cancellation != nullptr) {
      token = cancellation->get_cancellation_token();
      is_cancelled = !cancellation->RegisterCallback(
          token, [call] { call->barrier().GiveUp(call->round, call->member, call->step); });
    }
    // Not in the thread of whoever came last, which would answer one after the other.
    auto* const workers = context->device()->tensorflow_cpu_worker_threads()->workers;
    call->barrier().Arrive(
        call->round, call->member, call->step, call->is_last, call->merge(),
        [this, context, call, cancellation, token, workers, done](const Status& status) {
          workers->Schedule([this, context, call, cancellation, token, done, status] {
            if (cancellation != nullptr) cancellation->TryDeregisterCallback(token);
            context->SetStatus(ToTf(status));
            if (status.ok()) {
              context->SetStatus(OrOutOfMemory(*this, [&] { return call->Answer(context); }));
            }
            done();
          });
        });
    if (is_cancelled) call->barrier().GiveUp(call->round, call->member, call->step);
  }
};

#define REGISTER_STEP_KERNEL(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name("Het>" name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER_STEP_KERNEL("StepHandle", StepHandleOp);
REGISTER_STEP_KERNEL("StepBegin", StepBeginOp);
REGISTER_STEP_KERNEL("StepLeave", StepLeaveOp);
REGISTER_STEP_KERNEL("StepJoin", StepJoinOp);
REGISTER_STEP_KERNEL("StepWaiting", StepWaitingOp);
REGISTER_STEP_KERNEL("ServeStep", ServeStepOp);
#undef REGISTER_STEP_KERNEL

}  // namespace
}  // namespace het_tf
