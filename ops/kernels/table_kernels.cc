#include <array>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "ops/core/table/sweep.h"
#include "ops/core/table/table.h"
#include "ops/kernels/file_kernels.h"
#include "ops/kernels/kernel_util.h"
#include "ops/kernels/process_registry.h"
#include "ops/kernels/programs.h"
#include "ops/kernels/resource_kernels.h"
#include "ops/kernels/resources.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace het_tf {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class TableHandleOp : public tensorflow::ResourceOpKernel<TableResource> {
 public:
  explicit TableHandleOp(OpKernelConstruction* context) : ResourceOpKernel(context) {
    OP_REQUIRES_OK(context, GetRowConfig(context, &config_));
    OP_REQUIRES_OK(context, context->GetAttr("shard", &shard_));
    OP_REQUIRES_OK(context, context->GetAttr("lifetimes", &lifetimes_));
    OP_REQUIRES_OK(context, context->GetAttr("storage", &storage_));
  }

 private:
  absl::Status CreateResource(TableResource** resource) override {
    TF_RETURN_IF_ERROR(CheckNotReplaced(cinfo_.container()));
    std::unique_ptr<Table> table;
    Lifetimes lifetimes;
    TF_RETURN_IF_ERROR(ToTf(Lifetimes::Parse(lifetimes_, &lifetimes)));
    Storage storage;
    TF_RETURN_IF_ERROR(ToTf(Storage::Parse(storage_, &storage)));
    TF_RETURN_IF_ERROR(
        ToTf(Table::Create(config_, shard_, &table, lifetimes, SteadySeconds, storage)));
    *resource = new TableResource(config_, shard_, lifetimes_, storage_, std::move(table));
    ProcessRegistry<TableResource>::Get().Add(*resource);
    return absl::OkStatus();
  }

  absl::Status VerifyResource(TableResource* resource) override {
    return AttributeCheck("table", cinfo_.name())
        .SameRows(resource->config, config_)
        .Same("shard", resource->shard, shard_)
        .Same("lifetimes", resource->lifetimes, lifetimes_)
        .Same("storage", resource->storage, storage_)
        .status();
  }

  RowConfig config_;
  int shard_;
  std::string lifetimes_, storage_;
};

class TableLookupOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

  absl::Status Compute(OpKernelContext* context, Table* table) override {
    TF_RETURN_IF_ERROR(CheckWhole(*table));
    const Tensor& ids = context->input(1);
    TF_RETURN_IF_ERROR(CheckNumIds(ids));
    Tensor* rows;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {ids.NumElements(), table->dim()}, &rows));
    auto found = std::make_shared<Found>(
        Found{UniqueIds(ids.flat<int64_t>().data(), ids.NumElements()), FoundRows()});
    TF_RETURN_IF_ERROR(
        ToTf(table->Lookup(found->ids, PoolOf(context), rows->flat<float>().data(), &found->rows)));
    return SetVariant(context, 1, std::move(found));
  }
};

class TableApplyOp : public TableKernel {
 public:
  explicit TableApplyOp(OpKernelConstruction* context) : TableKernel(context) {
    OP_REQUIRES_OK(context, GetNonfinite(context, &skip_));
  }

  absl::Status Compute(OpKernelContext* context, Table* table) override {
    TF_RETURN_IF_ERROR(CheckWhole(*table));
    std::shared_ptr<Found> found;
    if (GetVariant(context, "found", &found).ok()) {
      return Apply(context, table, found->ids, found->rows);
    }
    std::shared_ptr<UniqueIds> unique_ids;
    TF_RETURN_IF_ERROR(GetVariant(context, "found", &unique_ids));
    return Apply(context, table, *unique_ids, FoundRows());
  }

 private:
  absl::Status Apply(OpKernelContext* context, Table* table, const UniqueIds& ids,
                     const FoundRows& found) const {
    const Tensor* gradients;
    TF_RETURN_IF_ERROR(GetMatrix(context, "gradients", ids.num_ids(), table->dim(), &gradients));
    float learning_rate = 0;
    TF_RETURN_IF_ERROR(GetScalar(context, "learning_rate", &learning_rate));
    return OfUpdate(context,
                    table->Apply(ids, found, gradients->flat<float>().data(), learning_rate,
                                 skip_ ? Nonfinite::kSkip : Nonfinite::kError, PoolOf(context)));
  }

  bool skip_;
};

class TableSyncOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

  absl::Status Compute(OpKernelContext* context, Table* table) override {
    return OutputReply(context, table);
  }
};

class TableSizeOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

  absl::Status Compute(OpKernelContext* context, Table* table) override {
    Tensor* size;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &size));
    size->scalar<int64_t>()() = table->size();
    return absl::OkStatus();
  }
};

class TableStatsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

  absl::Status Compute(OpKernelContext* context, Table* table) override {
    constexpr int64_t kCounters = Counters<TableCounter>::kSize;
    constexpr int64_t kOthers = 7;
    constexpr int64_t kAll = kCounters + kOthers + Table::kMissedBuckets;
    Tensor* names;
    Tensor* values;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {kAll}, &names));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {kAll}, &values));
    auto name = names->flat<tensorflow::tstring>();
    auto value = values->flat<int64_t>();
    for (int64_t c = 0; c < kCounters; ++c) {
      name(c) = kTableCounterNames[c];
      value(c) = table->counter(static_cast<TableCounter>(c));
    }
    const FileArena* file = table->file();
    const std::array<std::pair<const char*, int64_t>, kOthers> others = {{
        {"rows", table->size()},
        {"memory_bytes", table->memory_bytes()},
        {"candidates", table->num_candidates()},
        {"rows_watched", table->num_watched()},
        {"disk_bytes", file == nullptr ? 0 : file->file_bytes()},
        {"pages_read", file == nullptr ? 0 : file->pages_read()},
        {"pages_let_go", file == nullptr ? 0 : file->pages_let_go()},
    }};
    for (int64_t i = 0; i < kOthers; ++i) {
      name(kCounters + i) = others[i].first;
      value(kCounters + i) = others[i].second;
    }
    for (int b = 0; b < Table::kMissedBuckets; ++b) {
      const int64_t at = kCounters + kOthers + b;
      name(at) = StrCat("reads_missing_", b == 0 ? 0 : int64_t{1} << (b - 1));
      value(at) = table->reads_that_missed(b);
    }
    return absl::OkStatus();
  }
};

class TableClearOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

  absl::Status Compute(OpKernelContext*, Table* table) override {
    table->Clear();
    return absl::OkStatus();
  }
};

class TableExpireOp : public FileKernel {
 public:
  using FileKernel::FileKernel;

  absl::Status Run(OpKernelContext* context, TableResource* resource) override {
    Table* table = resource->table.get();
    const Tensor& now = context->input(1);
    if (now.dims() != 0) return absl::InvalidArgumentError("now must be a scalar");
    if (!table->lifetimes().expires()) {
      return absl::FailedPreconditionError("the table has no expiry");
    }
    if (now.scalar<int64_t>()() >= 0) {
      TF_RETURN_IF_ERROR(ToTf(table->SetTime(now.scalar<int64_t>()())));
    }
    Table::Sweep sweep(table);
    while (sweep.Next()) {
    }
    return SetScalar(context, 0, sweep.num_expired());
  }
};

class TableExportOp : public TableKernel {
 public:
  explicit TableExportOp(tensorflow::OpKernelConstruction* context) : TableKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("max_age", &max_age_));
  }

  absl::Status Compute(OpKernelContext* context, Table* table) override {
    const Tensor& part = context->input(1);
    const Tensor& num_parts = context->input(2);
    if (part.dims() != 0 || num_parts.dims() != 0) {
      return absl::InvalidArgumentError("part and num_parts must be scalars");
    }
    const auto output = [&](int i, const TensorShape& shape) {
      Tensor* tensor = nullptr;
      if (!context->allocate_output(i, shape, &tensor).ok()) throw std::bad_alloc();
      return tensor;
    };
    const auto allocate = [&](int64_t rows) {
      return Table::Rows{output(0, {rows})->flat<int64_t>().data(),
                         output(1, {rows, table->dim()})->flat<float>().data(),
                         output(2, {rows, table->slot_dim()})->flat<float>().data(),
                         output(3, {rows})->flat<int64_t>().data()};
    };
    return ToTf(
        table->Export(part.scalar<int64_t>()(), num_parts.scalar<int64_t>()(), allocate, max_age_));
  }

 private:
  int64_t max_age_;
};

class TableImportOp : public TableKernel {
 public:
  explicit TableImportOp(tensorflow::OpKernelConstruction* context) : TableKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("initial_slots", &initial_));
  }

  absl::Status Compute(OpKernelContext* context, Table* table) override {
    const Tensor& keys = context->input(1);
    const Tensor& clocks = context->input(4);
    if (keys.dims() != 1) {
      return absl::InvalidArgumentError(
          StrCat("keys must be a vector, not of shape ", keys.shape().DebugString()));
    }
    const int64_t rows = keys.NumElements();
    const Tensor* values;
    const Tensor* slots;
    TF_RETURN_IF_ERROR(GetMatrix(context, "values", rows, table->dim(), &values));
    TF_RETURN_IF_ERROR(GetMatrix(context, "slots", rows, initial_ ? 0 : table->slot_dim(), &slots));
    if (clocks.shape() != keys.shape()) {
      return absl::InvalidArgumentError(StrCat("clocks has shape ", clocks.shape().DebugString(),
                                               ", expected ", keys.shape().DebugString()));
    }
    return ToTf(table->Import(
        {keys.flat<int64_t>().data(), values->flat<float>().data(),
         initial_ ? nullptr : slots->flat<float>().data(), clocks.flat<int64_t>().data()},
        rows));
  }

 private:
  bool initial_;
};

#define REGISTER_TABLE_KERNEL(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name("Het>" name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER_TABLE_KERNEL("TableHandle", TableHandleOp);
REGISTER_TABLE_KERNEL("TableLookup", TableLookupOp);
REGISTER_TABLE_KERNEL("TableApply", TableApplyOp);
REGISTER_TABLE_KERNEL("TableSync", TableSyncOp);
REGISTER_TABLE_KERNEL("TableSize", TableSizeOp);
REGISTER_TABLE_KERNEL("TableStats", TableStatsOp);
REGISTER_TABLE_KERNEL("TableClear", TableClearOp);
REGISTER_TABLE_KERNEL("TableExpire", TableExpireOp);
REGISTER_TABLE_KERNEL("TableExport", TableExportOp);
REGISTER_TABLE_KERNEL("TableImport", TableImportOp);
#undef REGISTER_TABLE_KERNEL

}  // namespace
}  // namespace het_tf
