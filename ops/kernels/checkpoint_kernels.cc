// Tables in checkpoints: every shard writes and reads its own part.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/table/snapshot.h"
#include "ops/core/table/table.h"
#include "ops/kernels/file_kernels.h"
#include "ops/kernels/kernel_util.h"
#include "ops/kernels/resource_kernels.h"
#include "ops/kernels/resources.h"
#include "ops/kernels/table_bundle.h"
#include "tensorflow/core/platform/env.h"

namespace het_tf {
namespace {

using tensorflow::BundleReader;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class TableCutOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    auto snapshot = std::make_shared<TableSnapshot>();
    OP_REQUIRES_OK(context,
                   tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0),
                                              &snapshot->resource));
    OP_REQUIRES_OK(context, ToTf(snapshot->resource->table->Cut(&snapshot->rows)));
    OP_REQUIRES_OK(context, SetScalar(context, 1, snapshot->rows->num_rows()));
    OP_REQUIRES_OK(context, SetScalar(context, 2, snapshot->rows->num_candidates()));
    OP_REQUIRES_OK(context, SetVariant(context, 0, std::move(snapshot)));
  }
};

class TableCutChangedOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    auto snapshot = std::make_shared<TableSnapshot>();
    OP_REQUIRES_OK(context,
                   tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0),
                                              &snapshot->resource));
    std::string reader;
    OP_REQUIRES_OK(context, GetScalar(context, "reader", &reader));
    const Tensor& since = context->input(2);
    OP_REQUIRES(context, since.dims() == 0,
                absl::InvalidArgumentError(
                    StrCat("since must be a scalar, not of shape ", since.shape().DebugString())));
    uint64_t number = 0;
    bool whole = false;
    OP_REQUIRES_OK(context, ToTf(snapshot->resource->table->CutChanged(
                                reader, static_cast<uint64_t>(since.scalar<int64_t>()()),
                                &snapshot->rows, &number, &whole)));
    OP_REQUIRES_OK(context, SetScalar(context, 1, snapshot->rows->num_rows()));
    OP_REQUIRES_OK(context, SetScalar(context, 2, static_cast<int64_t>(number)));
    Tensor* is_whole;
    OP_REQUIRES_OK(context, context->allocate_output(3, {}, &is_whole));
    is_whole->scalar<bool>()() = whole;
    OP_REQUIRES_OK(context, SetScalar(context, 4, snapshot->rows->dropped().size()));
    OP_REQUIRES_OK(context, SetScalar(context, 5, snapshot->rows->time()));
    OP_REQUIRES_OK(context, SetScalar(context, 6, snapshot->rows->num_candidates()));
    OP_REQUIRES_OK(context, SetVariant(context, 0, std::move(snapshot)));
  }
};

class TableForgetReaderOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

  absl::Status Compute(OpKernelContext* context, Table* table) override {
    std::string reader;
    TF_RETURN_IF_ERROR(GetScalar(context, "reader", &reader));
    table->Forget(reader);
    return absl::OkStatus();
  }
};

class TableCutEndOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<TableSnapshot> snapshot;
    OP_REQUIRES_OK(context, GetVariant(context, "snapshot", &snapshot));
    snapshot->rows->End();
  }
};

class TableSaveOp : public FileKernel {
 public:
  using FileKernel::FileKernel;

 private:
  absl::Status Run(OpKernelContext* context, TableResource* resource) override {
    Table* table = resource->table.get();
    std::shared_ptr<TableSnapshot> snapshot;
    TF_RETURN_IF_ERROR(GetSnapshot(context, table, &snapshot));
    std::string prefix, name, config;
    TF_RETURN_IF_ERROR(GetScalar(context, "prefix", &prefix));
    TF_RETURN_IF_ERROR(GetScalar(context, "part", &name));
    TF_RETURN_IF_ERROR(GetScalar(context, "config", &config));
    TF_RETURN_IF_ERROR(WriteBundle(prefix, name, config, *table, snapshot->rows.get()));
    return SetScalar(context, 0, snapshot->rows->num_rows());
  }
};

// Reads the parts of a table that inputs name, one after the other.
class PartsKernel : public FileKernel {
 public:
  explicit PartsKernel(OpKernelConstruction* context) : FileKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("slots", &slots_));
    OP_REQUIRES_OK(context, context->GetAttr("ages", &ages_));
    OP_REQUIRES_OK(context, context->GetAttr("sketches", &sketches_));
  }

 protected:
  using Next = std::function<absl::Status(Table::Piece*)>;
  // next: gives block after block, then one of size 0.
  virtual absl::Status Use(Table* table, const Next& next, const ParallelFor& parallel_for,
                           int64_t* owned) = 0;

 private:
  // Of the inputs, each of them (parts).
  static absl::Status CheckShapes(OpKernelContext* context) {
    const Tensor& first = context->input(1);
    for (int i = 1; i < context->num_inputs(); ++i) {
      const Tensor& input = context->input(i);
      if (input.dims() != 1 || input.shape() != first.shape()) {
        return absl::InvalidArgumentError(
            StrCat("prefixes, parts, rows, dropped, elapsed and candidates must be vectors of one "
                   "length, not of shapes ",
                   first.shape().DebugString(), " and ", input.shape().DebugString()));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Run(OpKernelContext* context, TableResource* resource) override {
    Table* table = resource->table.get();
    TF_RETURN_IF_ERROR(CheckShapes(context));
    const auto prefixes = context->input(1).vec<tensorflow::tstring>();
    const auto names = context->input(2).vec<tensorflow::tstring>();
    const auto rows = context->input(3).vec<int64_t>();
    const auto dropped = context->input(4).vec<int64_t>();
    const auto elapsed = context->input(5).vec<int64_t>();
    const auto candidates = context->input(6).vec<int64_t>();
    std::unique_ptr<BundleReader> bundle;
    std::unique_ptr<PartReader> part;
    int64_t p = 0;
    const auto of_part = [&](const absl::Status& status, int64_t p) {
      return absl::Status(status.code(), StrCat("checkpoint ", prefixes(p), ", part ", names(p),
                                                ": ", status.message()));
    };
    const Next next = [&](Table::Piece* piece) -> absl::Status {
      while (true) {
        if (part != nullptr) TF_RETURN_IF_ERROR(part->Next(piece));
        if (piece->size > 0 || p == names.size()) return absl::OkStatus();
        part.reset();
        if (p == 0 || prefixes(p) != prefixes(p - 1)) {
          bundle = std::make_unique<BundleReader>(context->env(), prefixes(p));
        }
        ++p;
        TF_RETURN_IF_ERROR(bundle->status());
        part = std::make_unique<PartReader>(bundle.get(), names(p - 1), *table);
        TF_RETURN_IF_ERROR(part->Open({rows(p - 1), dropped(p - 1), candidates(p - 1),
                                       elapsed(p - 1), slots_, ages_, sketches_}));
      }
    };
    int64_t owned = 0;
    const absl::Status used = Use(table, next, PoolOf(context), &owned);
    if (!used.ok() && p > 0) return of_part(used, p - 1);
    TF_RETURN_IF_ERROR(used);
    return SetScalar(context, 0, owned);
  }

  bool slots_, ages_, sketches_;
};

class TableCheckOp : public PartsKernel {
 public:
  using PartsKernel::PartsKernel;

 private:
  absl::Status Use(Table* table, const Next& next, const ParallelFor& parallel_for,
                   int64_t* owned) override {
    while (true) {
      Table::Piece piece;
      int64_t of_piece = 0;
      TF_RETURN_IF_ERROR(next(&piece));
      if (piece.size == 0) return absl::OkStatus();
      TF_RETURN_IF_ERROR(ToTf(table->CheckPiece(piece, parallel_for, &of_piece)));
      *owned += of_piece;
    }
  }
};

class TableRestoreOp : public PartsKernel {
 public:
  explicit TableRestoreOp(OpKernelConstruction* context) : PartsKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("time", &time_));
  }

 private:
  absl::Status Use(Table* table, const Next& next, const ParallelFor& parallel_for,
                   int64_t* owned) override {
    absl::Status read;
    const Status replaced = table->Replace(
        [&](Table::Piece* piece) {
          read = next(piece);
          return read.ok() ? Status() : FailedPrecondition("not read");
        },
        parallel_for, time_);
    if (replaced.ok()) {
      *owned = table->size();
      return absl::OkStatus();
    }
    const absl::Status status = read.ok() ? ToTf(replaced) : read;
    return absl::Status(status.code(),
                        StrCat(status.message(), "; the shard has no rows now: restore it again"));
  }

  int64_t time_;
};

#define REGISTER_CHECKPOINT_KERNEL(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name("Het>" name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER_CHECKPOINT_KERNEL("TableCut", TableCutOp);
REGISTER_CHECKPOINT_KERNEL("TableCutChanged", TableCutChangedOp);
REGISTER_CHECKPOINT_KERNEL("TableCutEnd", TableCutEndOp);
REGISTER_CHECKPOINT_KERNEL("TableForgetReader", TableForgetReaderOp);
REGISTER_CHECKPOINT_KERNEL("TableSave", TableSaveOp);
REGISTER_CHECKPOINT_KERNEL("TableCheck", TableCheckOp);
REGISTER_CHECKPOINT_KERNEL("TableRestore", TableRestoreOp);
#undef REGISTER_CHECKPOINT_KERNEL

}  // namespace
}  // namespace het_tf
