#include "ops/kernels/kernel_util.h"

namespace het_tf {
namespace {

const char* ClockName(ClockRule clock) {
  switch (clock) {
    case ClockRule::kCount:
      return "count";
    case ClockRule::kLamport:
      return "lamport";
    case ClockRule::kDrift:
      return "drift";
  }
  return "";
}

}  // namespace

absl::Status GetRowConfig(tensorflow::OpKernelConstruction* context, RowConfig* config) {
  std::string clock, dtype;
  TF_RETURN_IF_ERROR(context->GetAttr("dim", &config->dim));
  TF_RETURN_IF_ERROR(context->GetAttr("optimizer", &config->optimizer));
  TF_RETURN_IF_ERROR(context->GetAttr("initializer", &config->initializer));
  TF_RETURN_IF_ERROR(context->GetAttr("seed", &config->seed));
  TF_RETURN_IF_ERROR(context->GetAttr("num_shards", &config->num_shards));
  TF_RETURN_IF_ERROR(context->GetAttr("clock", &clock));
  TF_RETURN_IF_ERROR(context->GetAttr("row_dtype", &dtype));
  config->half = dtype == kBfloat16;
  config->clock = clock == "lamport" ? ClockRule::kLamport
                  : clock == "drift" ? ClockRule::kDrift
                                     : ClockRule::kCount;
  return absl::OkStatus();
}

absl::Status GetNonfinite(tensorflow::OpKernelConstruction* context, bool* skip) {
  std::string nonfinite;
  TF_RETURN_IF_ERROR(context->GetAttr("nonfinite", &nonfinite));
  *skip = nonfinite == "skip";
  return absl::OkStatus();
}

AttributeCheck& AttributeCheck::SameRows(const RowConfig& existing, const RowConfig& wanted) {
  return Same("dim", existing.dim, wanted.dim)
      .Same("optimizer", existing.optimizer, wanted.optimizer)
      .Same("initializer", existing.initializer, wanted.initializer)
      .Same("seed", existing.seed, wanted.seed)
      .Same("num_shards", existing.num_shards, wanted.num_shards)
      .Same("clock", std::string(ClockName(existing.clock)), std::string(ClockName(wanted.clock)))
      .Same("row_dtype", NameOfDtype(existing.half), NameOfDtype(wanted.half));
}

}  // namespace het_tf
