// Kernels that read or write a table's rows in files: what those of several files share.

#ifndef HET_TF_OPS_KERNELS_FILE_KERNELS_H_
#define HET_TF_OPS_KERNELS_FILE_KERNELS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ops/core/table/snapshot.h"
#include "ops/core/table/table.h"
#include "ops/kernels/kernel_util.h"
#include "ops/kernels/resources.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/env.h"

namespace het_tf {

using TableRef = tensorflow::core::RefCountPtr<TableResource>;

struct TableSnapshot {
  static constexpr const char* kVariantName = "Het>TableSnapshot";

  TableRef resource;  // outlives the snapshot
  std::unique_ptr<Table::Snapshot> rows;
};

inline absl::Status SetScalar(tensorflow::OpKernelContext* context, int output, int64_t value) {
  tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(context->allocate_output(output, {}, &tensor));
  tensor->scalar<int64_t>()() = value;
  return absl::OkStatus();
}

// The input "snapshot", if it is of this table.
inline absl::Status GetSnapshot(tensorflow::OpKernelContext* context, const Table* table,
                                std::shared_ptr<TableSnapshot>* snapshot) {
  TF_RETURN_IF_ERROR(GetVariant(context, "snapshot", snapshot));
  if ((*snapshot)->resource->table.get() == table) return absl::OkStatus();
  return absl::InvalidArgumentError("snapshot is of another table");
}

// A kernel that reads or writes files or goes through all rows, for a long time, and so has a
// thread of its own: those of TensorFlow answer the workers.
class FileKernel : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override {
    auto resource = std::make_shared<TableRef>();
    OP_REQUIRES_OK_ASYNC(context,
                         tensorflow::LookupResource(
                             context, tensorflow::HandleFromInput(context, 0), resource.get()),
                         done);
    context->env()->SchedClosure([this, context, done, resource] {
      context->SetStatus(OrOutOfMemory(*this, [&] { return Run(context, resource->get()); }));
      resource->reset();
      done();
    });
  }

 protected:
  virtual absl::Status Run(tensorflow::OpKernelContext* context, TableResource* resource) = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_FILE_KERNELS_H_
