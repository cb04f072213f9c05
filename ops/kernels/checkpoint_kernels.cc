// Tables in checkpoints: every shard writes and reads its own part.

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/table/key_repeats.h"
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

// Lets go of the owner's last cut, if it has not ended.
void EndCut(TableResource* resource, const std::string& owner) {
  std::shared_ptr<TableSnapshot> last;
  {
    const std::lock_guard<std::mutex> lock(resource->cut_mutex);
    if (resource->cut_owner == owner) last = resource->cut.lock();
  }
  if (last != nullptr) last->rows->End();
}

// What both kinds of cuts have in common.
class CutKernel : public tensorflow::OpKernel {
 public:
  explicit CutKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("owner", &owner_));
  }

  void Compute(OpKernelContext* context) override {
    auto snapshot = std::make_shared<TableSnapshot>();
    OP_REQUIRES_OK(context,
                   tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0),
                                              &snapshot->resource));
    TableResource* resource = snapshot->resource.get();
    if (!owner_.empty()) EndCut(resource, owner_);
    // May wait, for updates that wait until the last cut is read or let go of.
    OP_REQUIRES_OK(context, Cut(context, resource->table.get(), &snapshot->rows));
    {
      const std::lock_guard<std::mutex> lock(resource->cut_mutex);
      resource->cut_owner = owner_;
      resource->cut = snapshot;
    }
    OP_REQUIRES_OK(context, SetVariant(context, 0, std::move(snapshot)));
  }

 private:
  // Cuts, and sets the outputs from 1 on.
  virtual absl::Status Cut(OpKernelContext* context, Table* table,
                           std::unique_ptr<Table::Snapshot>* rows) = 0;

  std::string owner_;
};

class TableCutOp : public CutKernel {
 public:
  using CutKernel::CutKernel;

 private:
  absl::Status Cut(OpKernelContext* context, Table* table,
                   std::unique_ptr<Table::Snapshot>* rows) override {
    TF_RETURN_IF_ERROR(ToTf(table->Cut(rows)));
    TF_RETURN_IF_ERROR(SetScalar(context, 1, (*rows)->num_rows()));
    return SetScalar(context, 2, (*rows)->num_candidates());
  }
};

class TableCutChangedOp : public CutKernel {
 public:
  using CutKernel::CutKernel;

 private:
  absl::Status Cut(OpKernelContext* context, Table* table,
                   std::unique_ptr<Table::Snapshot>* rows) override {
    std::string reader;
    TF_RETURN_IF_ERROR(GetScalar(context, "reader", &reader));
    const Tensor& since = context->input(2);
    if (since.dims() != 0) {
      return absl::InvalidArgumentError(
          StrCat("since must be a scalar, not of shape ", since.shape().DebugString()));
    }
    uint64_t number = 0;
    bool whole = false;
    TF_RETURN_IF_ERROR(ToTf(table->CutChanged(
        reader, static_cast<uint64_t>(since.scalar<int64_t>()()), rows, &number, &whole)));
    TF_RETURN_IF_ERROR(SetScalar(context, 1, (*rows)->num_rows()));
    TF_RETURN_IF_ERROR(SetScalar(context, 2, static_cast<int64_t>(number)));
    Tensor* is_whole;
    TF_RETURN_IF_ERROR(context->allocate_output(3, {}, &is_whole));
    is_whole->scalar<bool>()() = whole;
    TF_RETURN_IF_ERROR(SetScalar(context, 4, (*rows)->dropped().size()));
    TF_RETURN_IF_ERROR(SetScalar(context, 5, (*rows)->time()));
    return SetScalar(context, 6, (*rows)->num_candidates());
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
  explicit TableCutEndOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("owner", &owner_));
  }

  void Compute(OpKernelContext* context) override {
    TableRef resource;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &resource));
    EndCut(resource.get(), owner_);
  }

 private:
  std::string owner_;
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

// The parts of a table that inputs name, one after the other.
class Parts {
 public:
  // what: of rows and counts, what is to be read.
  Parts(OpKernelContext* context, const Table& table, const PartContents& what)
      : env_(context->env()),
        table_(table),
        prefixes_(context->input(1).vec<tensorflow::tstring>()),
        names_(context->input(2).vec<tensorflow::tstring>()),
        rows_(context->input(3).vec<int64_t>()),
        dropped_(context->input(4).vec<int64_t>()),
        elapsed_(context->input(5).vec<int64_t>()),
        candidates_(context->input(6).vec<int64_t>()),
        contents_(what) {}

  // The next block; size 0: there is no more.
  absl::Status Next(Table::Piece* piece) {
    while (piece->size == 0 && !AtEnd()) TF_RETURN_IF_ERROR(NextOfBundle(piece));
    return absl::OkStatus();
  }

  // The next block; size 0: there is no more of this bundle.
  absl::Status NextOfBundle(Table::Piece* piece) {
    do {
      if (part_ == nullptr) TF_RETURN_IF_ERROR(OpenNext());
      TF_RETURN_IF_ERROR(part_->Next(piece));
      if (piece->size > 0) return absl::OkStatus();
      part_.reset();
    } while (p_ < names_.size() && prefixes_(p_) == prefixes_(p_ - 1));
    return absl::OkStatus();
  }

  bool AtEnd() const { return part_ == nullptr && p_ == names_.size(); }

  // Begins again, with the keys of rows alone.
  void RewindToKeys() {
    contents_.only_keys = true;
    part_.reset();
    p_ = 0;
  }

  // An error, with the part that was read last.
  absl::Status OfPart(const absl::Status& status) const {
    if (status.ok() || p_ == 0) return status;
    return absl::Status(status.code(), StrCat("checkpoint ", prefixes_(p_ - 1), ", part ",
                                              names_(p_ - 1), ": ", status.message()));
  }

 private:
  absl::Status OpenNext() {
    if (p_ == 0 || prefixes_(p_) != prefixes_(p_ - 1)) {
      bundle_ = std::make_unique<BundleReader>(env_, prefixes_(p_));
    }
    ++p_;
    TF_RETURN_IF_ERROR(bundle_->status());
    part_ = std::make_unique<PartReader>(bundle_.get(), names_(p_ - 1), table_);
    PartContents contents = contents_;
    contents.rows = rows_(p_ - 1);
    contents.dropped = dropped_(p_ - 1);
    contents.elapsed = elapsed_(p_ - 1);
    contents.candidates = candidates_(p_ - 1);
    return part_->Open(contents);
  }

  tensorflow::Env* const env_;
  const Table& table_;
  const tensorflow::TTypes<tensorflow::tstring>::ConstVec prefixes_, names_;
  const tensorflow::TTypes<int64_t>::ConstVec rows_, dropped_, elapsed_, candidates_;
  PartContents contents_;
  std::unique_ptr<BundleReader> bundle_;
  std::unique_ptr<PartReader> part_;
  int64_t p_ = 0;  // the next part
};

class PartsKernel : public FileKernel {
 public:
  explicit PartsKernel(OpKernelConstruction* context) : FileKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("slots", &what_.slots));
    OP_REQUIRES_OK(context, context->GetAttr("clocks", &what_.clocks));
    OP_REQUIRES_OK(context, context->GetAttr("ages", &what_.ages));
    OP_REQUIRES_OK(context, context->GetAttr("sketches", &what_.sketches));
  }

 protected:
  // Errors are of the part that was read last.
  virtual absl::Status Use(const TableResource& resource, Parts* parts,
                           const ParallelFor& parallel_for, int64_t* owned) = 0;

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
    TF_RETURN_IF_ERROR(CheckShapes(context));
    Parts parts(context, *resource->table, what_);
    int64_t owned = 0;
    TF_RETURN_IF_ERROR(parts.OfPart(Use(*resource, &parts, PoolOf(context), &owned)));
    return SetScalar(context, 0, owned);
  }

  PartContents what_;
};

class TableCheckOp : public PartsKernel {
 public:
  using PartsKernel::PartsKernel;

 private:
  absl::Status Use(const TableResource& resource, Parts* parts, const ParallelFor& parallel_for,
                   int64_t* owned) override {
    int64_t rows = 0;
    while (true) {
      Table::Piece piece;
      int64_t of_piece = 0;
      TF_RETURN_IF_ERROR(parts->Next(&piece));
      if (piece.size == 0) break;
      TF_RETURN_IF_ERROR(ToTf(resource.table->CheckPiece(piece, parallel_for, &of_piece)));
      *owned += of_piece;
      if (piece.kind == Table::Piece::kRows) rows += of_piece;
    }
    return CheckRepeats(resource, rows, parts, parallel_for);
  }

  // Fails if a bundle has two rows of one key. Keys are read again, as often as it takes to look at
  // all of them in bounded memory.
  // rows: of this shard, in all bundles.
  static absl::Status CheckRepeats(const TableResource& resource, int64_t rows, Parts* parts,
                                   const ParallelFor& parallel_for) {
    const auto shard = static_cast<uint32_t>(resource.shard);
    const uint32_t num_shards = resource.table->num_shards();
    for (KeyRepeats repeats(rows); !repeats.done(); repeats.NextShare()) {
      parts->RewindToKeys();
      while (!parts->AtEnd()) {
        Table::Piece piece;
        TF_RETURN_IF_ERROR(parts->NextOfBundle(&piece));
        for (int64_t r = 0; r < piece.size; ++r) {
          const uint64_t hash = HashKey(piece.rows.keys[r]);
          if (ShardOfHash(hash, num_shards) == shard) repeats.Add(piece.rows.keys[r], hash);
        }
        if (piece.size > 0) continue;
        const auto key = repeats.Forget(parallel_for);
        if (key.has_value()) return absl::DataLossError(StrCat("keys holds ", *key, " twice"));
      }
    }
    return absl::OkStatus();
  }
};

class TableRestoreOp : public PartsKernel {
 public:
  explicit TableRestoreOp(OpKernelConstruction* context) : PartsKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("time", &time_));
  }

 private:
  absl::Status Use(const TableResource& resource, Parts* parts, const ParallelFor& parallel_for,
                   int64_t* owned) override {
    absl::Status read;
    const Status replaced = resource.table->Replace(
        [&](Table::Piece* piece) {
          read = parts->Next(piece);
          return read.ok() ? Status() : FailedPrecondition("not read");
        },
        parallel_for, time_);
    if (replaced.ok()) {
      *owned = resource.table->size();
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
