#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/plan/planner.h"
#include "ops/kernels/kernel_util.h"

namespace het_tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

struct PlannerState {
  static constexpr const char* kVariantName = "Het>Planner";

  explicit PlannerState(const PlanConfig& config) : planner(config) {}

  Planner planner;
};

// Of all plans in this process.
std::atomic<int64_t> planned_keys{0}, planned_hits{0};

class PlanOp : public OpKernel {
 public:
  explicit PlanOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_workers", &config_.num_workers));
    OP_REQUIRES_OK(context, context->GetAttr("worker", &worker_));
    OP_REQUIRES_OK(context, context->GetAttr("capacity", &config_.capacity));
    OP_REQUIRES_OK(context, context->GetAttr("synchronous", &config_.synchronous));
    OP_REQUIRES_OK(context, context->GetAttr("tables", &tables_));
    OP_REQUIRES_OK(context, context->GetAttr("scored", &scored_));
    OP_REQUIRES_OK(context, ToTf(Planner::Check(config_)));
    OP_REQUIRES(context, worker_ < config_.num_workers,
                absl::InvalidArgumentError(
                    StrCat("worker = ", worker_, " of ", config_.num_workers, " workers")));
    for (const int32_t column : scored_) {
      OP_REQUIRES(context, column >= 0 && column < static_cast<int32_t>(tables_.size()),
                  absl::InvalidArgumentError(
                      StrCat("scored holds column ", column, " of ", tables_.size(), " columns")));
    }
  }

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, OrOutOfMemory(*this, [&] { return Plan(context); }));
  }

 private:
  absl::Status Plan(OpKernelContext* context) const {
    const Tensor& keys = context->input(1);
    const auto columns = static_cast<int64_t>(tables_.size());
    if (keys.dims() != 2 || keys.dim_size(1) != columns) {
      return absl::InvalidArgumentError(StrCat("keys has shape ", keys.shape().DebugString(),
                                               ", expected [examples,", columns, "]"));
    }
    std::shared_ptr<PlannerState> state;
    if (!GetVariant(context, "planner", &state).ok()) {
      state = std::make_shared<PlannerState>(config_);
    }
    Planner::Step step;
    state->planner.Plan({keys.flat<int64_t>().data(), keys.dim_size(0), tables_, scored_},
                        PoolOf(context), &step);
    TF_RETURN_IF_ERROR(SetVariant(context, 0, std::move(state)));
    Tensor* out;
    TF_RETURN_IF_ERROR(context->allocate_output(1, {keys.dim_size(0)}, &out));
    std::copy(step.worker_of.begin(), step.worker_of.end(), out->flat<int32_t>().data());
    const auto& due = step.due[worker_];
    Tensor* due_keys;
    TF_RETURN_IF_ERROR(context->allocate_output(2, {static_cast<int64_t>(due.size())}, &out));
    TF_RETURN_IF_ERROR(context->allocate_output(3, {static_cast<int64_t>(due.size())}, &due_keys));
    for (size_t i = 0; i < due.size(); ++i) {
      out->flat<int32_t>()(i) = due[i].table;
      due_keys->flat<int64_t>()(i) = due[i].key;
    }
    TF_RETURN_IF_ERROR(context->allocate_output(4, {2}, &out));
    out->flat<int64_t>()(0) = step.num_keys;
    out->flat<int64_t>()(1) = step.num_hits;
    planned_keys += step.num_keys;
    planned_hits += step.num_hits;
    return absl::OkStatus();
  }

  PlanConfig config_;
  int worker_ = 0;
  std::vector<int32_t> tables_, scored_;
};

class PlanCountsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Tensor* counts;
    OP_REQUIRES_OK(context, context->allocate_output(0, {2}, &counts));
    counts->flat<int64_t>()(0) = planned_keys;
    counts->flat<int64_t>()(1) = planned_hits;
  }
};

REGISTER_KERNEL_BUILDER(Name("Het>PlanCounts").Device(tensorflow::DEVICE_CPU), PlanCountsOp);
REGISTER_KERNEL_BUILDER(Name("Het>Plan").Device(tensorflow::DEVICE_CPU), PlanOp);

}  // namespace
}  // namespace het_tf
