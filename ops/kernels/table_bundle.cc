#include "ops/kernels/table_bundle.h"

#include <algorithm>

#include "ops/core/table/record.h"
#include "ops/kernels/kernel_util.h"
#include "tensorflow/core/platform/env.h"

namespace het_tf {
namespace {

using tensorflow::BundleWriter;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorSlice;

// Of a slice's rows, all columns together.
constexpr int64_t kBlockBytes = 4 << 20;
constexpr int64_t kMaxBlockBytes = 4 * kBlockBytes;

int64_t RowBytes(const Table& table) {
  return 3 * sizeof(int64_t) + sizeof(float) * (table.dim() + table.slot_dim());
}

// TensorFlow takes these two for a process that died, and runs the call again.
absl::Status NotOfTheNetwork(const absl::Status& status) {
  if (!absl::IsUnavailable(status) && !absl::IsAborted(status)) return status;
  return absl::InternalError(status.message());
}

// Beyond every time of a table.
constexpr int64_t kMaxAge = int64_t{1} << 32;

constexpr const char* kColumnNames[] = {"keys", "values", "clocks", "slots", "ages", "dropped"};

absl::Status OfColumn(int column, const absl::Status& status) {
  const absl::Status error = NotOfTheNetwork(status);
  return absl::Status(error.code(), StrCat(kColumnNames[column], ": ", error.message()));
}

absl::Status AddRows(BundleWriter* writer, const std::string& name, const Tensor& columns,
                     int64_t all_rows, int64_t first, int64_t rows) {
  TensorShape shape = columns.shape();
  shape.set_dim(0, all_rows);
  TensorSlice slice(shape.dims());
  slice.set_start(0, first);
  slice.set_length(0, rows);
  return writer->AddSlice(name, shape, slice, columns.Slice(0, rows));
}

}  // namespace

absl::Status WriteBundle(const std::string& prefix, const std::string& name,
                         const std::string& config, const Table& table, Table::Snapshot* snapshot) {
  const int64_t capacity = std::max<int64_t>(kBlockBytes / RowBytes(table), 1);
  const int64_t all_rows = snapshot->num_rows();
  std::vector<std::pair<std::string, Tensor>> columns = {
      {name + "/keys", Tensor(tensorflow::DT_INT64, {capacity})},
      {name + "/values", Tensor(tensorflow::DT_FLOAT, {capacity, table.dim()})},
      {name + "/slots", Tensor(tensorflow::DT_FLOAT, {capacity, table.slot_dim()})},
      {name + "/clocks", Tensor(tensorflow::DT_INT64, {capacity})},
      {name + "/ages", Tensor(tensorflow::DT_INT64, {capacity})},
  };
  const Table::Rows rows = {
      columns[0].second.flat<int64_t>().data(), columns[1].second.flat<float>().data(),
      columns[2].second.flat<float>().data(), columns[3].second.flat<int64_t>().data(),
      columns[4].second.flat<int64_t>().data()};
  const auto all = columns;  // `rows` points to them
  if (!table.lifetimes().expires()) columns.pop_back();
  if (table.slot_dim() == 0) columns.erase(columns.begin() + 2);

  BundleWriter writer(tensorflow::Env::Default(), prefix);
  const auto write = [&]() -> absl::Status {
    TF_RETURN_IF_ERROR(writer.status());
    Tensor text(tensorflow::DT_STRING, {});
    text.scalar<tensorflow::tstring>()() = config;
    TF_RETURN_IF_ERROR(writer.Add(name + "/config", text));
    if (all_rows == 0) {
      for (const auto& [key, column] : columns) {
        TF_RETURN_IF_ERROR(writer.Add(key, column.Slice(0, 0)));
      }
    }
    // Keys that have no row any longer, in as many blocks.
    const std::vector<int64_t>& dropped = snapshot->dropped();
    Tensor keys(tensorflow::DT_INT64, {capacity});
    for (int64_t at = 0; at < static_cast<int64_t>(dropped.size()); at += capacity) {
      const int64_t n = std::min<int64_t>(capacity, dropped.size() - at);
      std::copy_n(dropped.data() + at, n, keys.flat<int64_t>().data());
      TF_RETURN_IF_ERROR(AddRows(&writer, name + "/dropped", keys, dropped.size(), at, n));
    }
    absl::Status added;
    int64_t first = 0;
    const Status read = snapshot->Read(rows, capacity, [&](int64_t n) {
      for (const auto& [key, column] : columns) {
        added.Update(AddRows(&writer, key, column, all_rows, first, n));
      }
      first += n;
      return added.ok() ? Status() : FailedPrecondition("not written");
    });
    TF_RETURN_IF_ERROR(added);
    return ToTf(read);
  };
  absl::Status status = write();
  snapshot->End();
  // Of a file that could not be written it leaves nothing, but for one that it finished.
  status.Update(writer.Finish());
  if (!status.ok()) {
    for (const char* suffix : {".index", ".data-00000-of-00001"}) {
      tensorflow::Env::Default()->DeleteFile(prefix + suffix).IgnoreError();
    }
  }
  return NotOfTheNetwork(status);
}

TensorShape PartReader::ShapeOf(int column, int64_t rows) const {
  TensorShape shape({rows});
  if (column == kValues) shape.AddDim(table_.dim());
  if (column == kSlots) shape.AddDim(table_.slot_dim());
  return shape;
}

absl::Status PartReader::Find(int column, int64_t rows, std::vector<int64_t>* starts) {
  const auto invalid = [&](const auto&... what) {
    return OfColumn(column, absl::InvalidArgumentError(StrCat(what...)));
  };
  const std::string key = StrCat(name_, "/", kColumnNames[column]);
  tensorflow::DataType dtype;
  TensorShape shape;
  const absl::Status found = bundle_->LookupDtypeAndShape(key, &dtype, &shape);
  if (!found.ok()) return OfColumn(column, found);
  const tensorflow::DataType expected =
      column == kValues || column == kSlots ? tensorflow::DT_FLOAT : tensorflow::DT_INT64;
  if (dtype != expected || shape != ShapeOf(column, rows)) {
    return invalid("is ", tensorflow::DataTypeString(dtype), " ", shape.DebugString(),
                   ", expected ", tensorflow::DataTypeString(expected), " ",
                   ShapeOf(column, rows).DebugString());
  }
  tensors_[column] = Tensor(expected, ShapeOf(column, 0));
  std::vector<TensorSlice> slices;
  const absl::Status listed = bundle_->LookupTensorSlices(key, &slices);
  if (!listed.ok()) return OfColumn(column, listed);
  std::sort(slices.begin(), slices.end(),
            [](const TensorSlice& a, const TensorSlice& b) { return a.start(0) < b.start(0); });
  // A single slice of everything is stored as no slice at all.
  if (slices.empty() && rows > 0) slices.push_back(TensorSlice(shape.dims()));
  *starts = {0};
  const int64_t most = std::max(kMaxBlockBytes / RowBytes(table_), int64_t{1});
  for (const TensorSlice& slice : slices) {
    // A slice of all rows has no length of its own.
    const int64_t length = slice.IsFullAt(0) ? rows : slice.length(0);
    const int64_t start = slice.IsFullAt(0) ? 0 : slice.start(0);
    const bool whole_rows =
        slice.dims() == shape.dims() && (shape.dims() == 1 || slice.IsFullAt(1));
    if (!whole_rows || start != starts->back() || length < 1 || length > most ||
        length > rows - start) {
      return invalid("has a slice ", slice.DebugString(), " after ", starts->back(),
                     " rows, expected up to ", most, " whole rows");
    }
    starts->push_back(start + length);
  }
  if (starts->back() == rows) return absl::OkStatus();
  return invalid("has ", starts->back(), " of ", rows, " rows in slices");
}

absl::Status PartReader::Open(int64_t rows, int64_t dropped, int64_t elapsed) {
  if (std::min({rows, dropped, elapsed}) < 0 || elapsed > kMaxAge) {
    return absl::InvalidArgumentError(StrCat("rows = ", rows, ", dropped = ", dropped,
                                             " and elapsed = ", elapsed, " are no such numbers"));
  }
  elapsed_ = elapsed;
  TF_RETURN_IF_ERROR(Find(kKeys, rows, &starts_));
  for (int c = kKeys + 1; c < kNumColumns; ++c) {
    if (!has(c)) continue;
    std::vector<int64_t> starts;
    TF_RETURN_IF_ERROR(Find(c, rows, &starts));
    if (starts == starts_) continue;
    return OfColumn(c, absl::InvalidArgumentError("is sliced in another way than keys"));
  }
  return dropped == 0 ? absl::OkStatus() : Find(kDropped, dropped, &drops_);
}

absl::Status PartReader::Read(int column, const std::vector<int64_t>& starts, size_t block) {
  Tensor& tensor = tensors_[column];
  const int64_t first = starts[block], last = starts[block + 1];
  const TensorShape shape = ShapeOf(column, last - first);
  if (tensor.shape() != shape) tensor = Tensor(tensor.dtype(), shape);
  TensorSlice slice(shape.dims());
  slice.set_start(0, first);
  slice.set_length(0, last - first);
  const std::string key = StrCat(name_, "/", kColumnNames[column]);
  const absl::Status read = starts.size() == 2 ? bundle_->Lookup(key, &tensor)
                                               : bundle_->LookupSlice(key, slice, &tensor);
  return read.ok() ? read : OfColumn(column, read);
}

absl::Status PartReader::Next(Table::ConstRows* rows, int64_t* num_rows) {
  *num_rows = 0;
  if (drop_ + 1 < drops_.size()) {
    TF_RETURN_IF_ERROR(Read(kDropped, drops_, drop_++));
    const auto keys = tensors_[kDropped].flat<int64_t>();
    *num_rows = keys.size();
    *rows = {keys.data(), nullptr, nullptr, nullptr, nullptr};
    return absl::OkStatus();
  }
  if (block_ + 1 >= starts_.size()) return absl::OkStatus();
  for (int c = 0; c < kNumColumns; ++c) {
    if (has(c)) TF_RETURN_IF_ERROR(Read(c, starts_, block_));
  }
  *num_rows = starts_[block_ + 1] - starts_[block_];
  ++block_;
  if (ages_ && elapsed_ > 0) {
    auto ages = tensors_[kAges].flat<int64_t>();
    for (int64_t r = 0; r < *num_rows; ++r) {
      // A negative one is refused as it is.
      if (ages(r) >= 0) ages(r) = std::min(ages(r), kMaxAge) + elapsed_;
    }
  }
  *rows = {tensors_[kKeys].flat<int64_t>().data(), tensors_[kValues].flat<float>().data(),
           slots_ ? tensors_[kSlots].flat<float>().data() : nullptr,
           tensors_[kClocks].flat<int64_t>().data(),
           ages_ ? tensors_[kAges].flat<int64_t>().data() : nullptr};
  return absl::OkStatus();
}

}  // namespace het_tf
