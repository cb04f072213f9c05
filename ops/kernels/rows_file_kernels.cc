// A shard's rows as a file that servers map.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "ops/core/serving/rows_file.h"
#include "ops/kernels/file_kernels.h"

namespace het_tf {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// Of rows that are read from a snapshot at once.
constexpr int64_t kBlockBytes = 4 << 20;

// TensorFlow takes these two for a process that died, and runs the call again.
absl::Status NotOfTheNetwork(const absl::Status& status) {
  if (!absl::IsUnavailable(status) && !absl::IsAborted(status)) return status;
  return absl::InternalError(status.message());
}

class TableSaveRowsOp : public FileKernel {
 public:
  explicit TableSaveRowsOp(OpKernelConstruction* context) : FileKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype_));
    OP_REQUIRES_OK(context, context->GetAttr("min_clock", &min_clock_));
    OP_REQUIRES_OK(context, context->GetAttr("min_norm", &min_norm_));
    OP_REQUIRES_OK(context, context->GetAttr("max_age", &max_age_));
  }

 private:
  absl::Status Run(OpKernelContext* context, TableResource* resource) override {
    const Table& table = *resource->table;
    std::shared_ptr<TableSnapshot> snapshot;
    TF_RETURN_IF_ERROR(GetSnapshot(context, &table, &snapshot));
    std::string path;
    TF_RETURN_IF_ERROR(GetScalar(context, "path", &path));
    int64_t rows = 0, bytes = 0;
    const absl::Status written = Write(path, *resource, snapshot->rows.get(), &rows, &bytes);
    snapshot->rows->End();
    if (!written.ok()) {
      context->env()->DeleteFile(path).IgnoreError();
      return NotOfTheNetwork(absl::Status(written.code(), StrCat(path, ": ", written.message())));
    }
    TF_RETURN_IF_ERROR(SetScalar(context, 0, rows));
    return SetScalar(context, 1, bytes);
  }

  absl::Status Write(const std::string& path, const TableResource& resource,
                     Table::Snapshot* snapshot, int64_t* num_rows, int64_t* num_bytes) const {
    const int dim = resource.table->dim(), slot_dim = resource.table->slot_dim();
    StoredFormat format;
    TF_RETURN_IF_ERROR(ToTf(StoredFormat::Parse(dtype_, dim, &format)));
    std::unique_ptr<tensorflow::WritableFile> file;
    TF_RETURN_IF_ERROR(tensorflow::Env::Default()->NewWritableFile(path, &file));
    absl::Status appended;
    RowsWriter writer(format, resource.shard, resource.config.num_shards,
                      [&](const char* data, size_t size) {
                        appended = file->Append(absl::string_view(data, size));
                        return appended.ok() ? Status() : FailedPrecondition("not written");
                      });
    const int64_t row_bytes = 16 + sizeof(float) * (dim + slot_dim);
    const int64_t capacity = std::max<int64_t>(kBlockBytes / row_bytes, 1);
    std::vector<int64_t> keys(capacity), clocks(capacity), ages(capacity);
    std::vector<float> values(capacity * dim), slots(capacity * slot_dim);
    const Table::Rows rows = {keys.data(), values.data(), slots.data(), clocks.data(), ages.data()};
    std::vector<float> initial(dim);
    const auto add_initial_value = [&](int64_t key) {
      resource.table->InitialValue(key, initial.data());
      return writer.Add(key, initial.data());
    };
    const std::vector<int64_t>& returned = snapshot->returned();
    Status status = snapshot->Read(rows, capacity, [&](int64_t n) {
      for (int64_t r = 0; r < n; ++r) {
        const float* value = &values[r * dim];
        if (clocks[r] >= min_clock_ && ages[r] <= max_age_ && IsLongEnough(value, dim)) {
          HET_RETURN_IF_ERROR(writer.Add(keys[r], value));
        } else if (std::binary_search(returned.begin(), returned.end(), keys[r])) {
          // The row before this one may have been written once.
          HET_RETURN_IF_ERROR(add_initial_value(keys[r]));
        }
      }
      return Status();
    });
    // A key that has lost its row reads as its initial value, whatever is left out otherwise.
    for (const int64_t key : snapshot->dropped()) {
      if (!status.ok()) break;
      status = add_initial_value(key);
    }
    if (status.ok()) status = writer.Finish();
    TF_RETURN_IF_ERROR(appended);
    TF_RETURN_IF_ERROR(ToTf(status));
    TF_RETURN_IF_ERROR(file->Close());
    *num_rows = writer.num_rows();
    *num_bytes = writer.num_bytes();
    return absl::OkStatus();
  }

  bool IsLongEnough(const float* value, int dim) const {
    if (min_norm_ == 0) return true;
    double squares = 0;
    for (int i = 0; i < dim; ++i) squares += double{value[i]} * value[i];
    return squares >= double{min_norm_} * min_norm_;
  }

  std::string dtype_;
  int64_t min_clock_;
  float min_norm_;
  int64_t max_age_;
};

REGISTER_KERNEL_BUILDER(Name("Het>TableSaveRows").Device(tensorflow::DEVICE_CPU), TableSaveRowsOp);

}  // namespace
}  // namespace het_tf
