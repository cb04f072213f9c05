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

// Of keys that are counted: 1 MB a column.
constexpr int64_t kCandidatesABlock = 1 << 17;

// Beyond every time of a table.
constexpr int64_t kMaxAge = int64_t{1} << 32;

absl::Status OfColumn(const std::string& column, const absl::Status& status) {
  const absl::Status error = NotOfTheNetwork(status);
  return absl::Status(error.code(), StrCat(column, ": ", error.message()));
}

std::string SketchName(int range) { return StrCat("sketch_", range); }

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
  const int64_t num_candidates = snapshot->num_candidates();
  const bool counts = num_candidates >= 0;
  std::vector<std::pair<std::string, Tensor>> of_counts;
  if (counts) {
    for (const char* column : {"/candidates", "/counts", "/candidate_ages"}) {
      of_counts.emplace_back(name + column, Tensor(tensorflow::DT_INT64, {kCandidatesABlock}));
    }
  }
  const Table::Rows rows = {
      columns[0].second.flat<int64_t>().data(), columns[1].second.flat<float>().data(),
      columns[2].second.flat<float>().data(), columns[3].second.flat<int64_t>().data(),
      columns[4].second.flat<int64_t>().data()};
  auto all = columns, all_counts = of_counts;  // what follows points to them
  if (!table.lifetimes().expires()) {
    columns.pop_back();
    if (counts) of_counts.pop_back();
  }
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
    if (num_candidates == 0) {
      for (const auto& [key, column] : of_counts) {
        TF_RETURN_IF_ERROR(writer.Add(key, column.Slice(0, 0)));
      }
    }
    absl::Status added;
    const auto whether_added = [&] {
      return added.ok() ? Status() : FailedPrecondition("not written");
    };
    const auto add_to = [&](const auto& to, int64_t of, int64_t* first, int64_t n) {
      for (const auto& [key, column] : to) {
        added.Update(AddRows(&writer, key, column, of, *first, n));
      }
      *first += n;
      return whether_added();
    };
    int64_t first_row = 0, first_candidate = 0;
    const auto number_of = [&](int c) {
      return counts ? all_counts[c].second.flat<int64_t>().data() : nullptr;
    };
    const auto add_words = [&](int range, int64_t first, const std::vector<int64_t>& words) {
      const int64_t n = static_cast<int64_t>(words.size());
      Tensor block(tensorflow::DT_INT64, {n});
      std::copy_n(words.data(), n, block.flat<int64_t>().data());
      added.Update(AddRows(&writer, StrCat(name, "/", SketchName(range)), block,
                           table.sketch_words(range), first, n));
      return whether_added();
    };
    const Table::Snapshot::CountsSink sink = {
        kCandidatesABlock,
        number_of(0),
        number_of(1),
        number_of(2),
        [&](int64_t n) { return add_to(of_counts, num_candidates, &first_candidate, n); },
        add_words};
    const Status read = snapshot->Read(
        rows, capacity, [&](int64_t n) { return add_to(columns, all_rows, &first_row, n); },
        counts ? &sink : nullptr);
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

absl::Status PartReader::Find(const Column& column, int64_t rows, int64_t max_rows,
                              std::vector<int64_t>* starts) {
  const auto invalid = [&](const auto&... what) {
    return OfColumn(column.name, absl::InvalidArgumentError(StrCat(what...)));
  };
  const std::string key = StrCat(name_, "/", column.name);
  tensorflow::DataType dtype;
  TensorShape shape;
  const absl::Status found = bundle_->LookupDtypeAndShape(key, &dtype, &shape);
  if (!found.ok()) return OfColumn(column.name, found);
  TensorShape expected({rows});
  if (column.width > 0) expected.AddDim(column.width);
  if (dtype != column.dtype || shape != expected) {
    return invalid("is ", tensorflow::DataTypeString(dtype), " ", shape.DebugString(),
                   ", expected ", tensorflow::DataTypeString(column.dtype), " ",
                   expected.DebugString());
  }
  std::vector<TensorSlice> slices;
  const absl::Status listed = bundle_->LookupTensorSlices(key, &slices);
  if (!listed.ok()) return OfColumn(column.name, listed);
  std::sort(slices.begin(), slices.end(),
            [](const TensorSlice& a, const TensorSlice& b) { return a.start(0) < b.start(0); });
  // A single slice of everything is stored as no slice at all.
  if (slices.empty() && rows > 0) slices.push_back(TensorSlice(shape.dims()));
  *starts = {0};
  for (const TensorSlice& slice : slices) {
    // A slice of all rows has no length of its own.
    const int64_t length = slice.IsFullAt(0) ? rows : slice.length(0);
    const int64_t start = slice.IsFullAt(0) ? 0 : slice.start(0);
    const bool whole_rows =
        slice.dims() == shape.dims() && (shape.dims() == 1 || slice.IsFullAt(1));
    if (!whole_rows || start != starts->back() || length < 1 || length > max_rows ||
        length > rows - start) {
      return invalid("has a slice ", slice.DebugString(), " after ", starts->back(),
                     " rows, expected up to ", max_rows, " whole rows");
    }
    starts->push_back(start + length);
  }
  if (starts->back() == rows) return absl::OkStatus();
  return invalid("has ", starts->back(), " of ", rows, " rows in slices");
}

absl::Status PartReader::AddGroup(Group group, int64_t rows, int64_t max_rows) {
  for (const Column& column : group.columns) {
    std::vector<int64_t> starts;
    TF_RETURN_IF_ERROR(Find(column, rows, max_rows, &starts));
    if (&column == &group.columns[0]) group.starts = starts;
    if (starts == group.starts) continue;
    return OfColumn(column.name, absl::InvalidArgumentError(StrCat("is sliced in another way than ",
                                                                   group.columns[0].name)));
  }
  groups_.push_back(std::move(group));
  return absl::OkStatus();
}

absl::Status PartReader::Open(const PartContents& contents) {
  contents_ = contents;
  if (std::min({contents.rows, contents.dropped, contents.elapsed, contents.candidates + 1}) < 0 ||
      contents.elapsed > kMaxAge) {
    return absl::InvalidArgumentError(
        StrCat("rows = ", contents.rows, ", dropped = ", contents.dropped, ", candidates = ",
               contents.candidates, " and elapsed = ", contents.elapsed, " are no such numbers"));
  }
  using Piece = Table::Piece;
  constexpr auto kInt64 = tensorflow::DT_INT64, kFloat = tensorflow::DT_FLOAT;
  const int64_t max_rows = std::max(kMaxBlockBytes / RowBytes(table_), int64_t{1});
  if (contents.only_keys) {
    return AddGroup({Piece::kRows, 0, {{"keys", kInt64}}}, contents.rows, max_rows);
  }
  if (contents.dropped > 0) {
    TF_RETURN_IF_ERROR(
        AddGroup({Piece::kDropped, 0, {{"dropped", kInt64}}}, contents.dropped, max_rows));
  }
  Group rows = {Piece::kRows, 0, {{"keys", kInt64}, {"values", kFloat, table_.dim()}}};
  rows.columns.push_back({"clocks", kInt64});
  if (contents.slots && table_.slot_dim() > 0) {
    rows.columns.push_back({"slots", kFloat, table_.slot_dim()});
  }
  if (contents.ages) rows.columns.push_back({"ages", kInt64});
  TF_RETURN_IF_ERROR(AddGroup(std::move(rows), contents.rows, max_rows));
  if (contents.candidates < 0) return absl::OkStatus();
  Group counts = {Piece::kCandidates, 0, {{"candidates", kInt64}, {"counts", kInt64}}};
  if (contents.ages) counts.columns.push_back({"candidate_ages", kInt64});
  TF_RETURN_IF_ERROR(AddGroup(std::move(counts), contents.candidates, kCandidatesABlock));
  for (int r = 0; contents.sketches && r < table_.lifetimes().num_ranges(); ++r) {
    const int64_t words = table_.sketch_words(r);
    if (words == 0) continue;
    TF_RETURN_IF_ERROR(AddGroup({Piece::kSketch, r, {{SketchName(r), kInt64}}}, words,
                                kMaxBlockBytes / sizeof(int64_t)));
  }
  return absl::OkStatus();
}

absl::Status PartReader::ReadColumn(const Group& group, Column* column) {
  const int64_t first = group.starts[group.block], last = group.starts[group.block + 1];
  TensorShape shape({last - first});
  if (column->width > 0) shape.AddDim(column->width);
  if (column->block.dtype() != column->dtype || column->block.shape() != shape) {
    column->block = Tensor(column->dtype, shape);
  }
  TensorSlice slice(shape.dims());
  slice.set_start(0, first);
  slice.set_length(0, last - first);
  const std::string key = StrCat(name_, "/", column->name);
  const absl::Status read = group.starts.size() == 2
                                ? bundle_->Lookup(key, &column->block)
                                : bundle_->LookupSlice(key, slice, &column->block);
  return read.ok() ? read : OfColumn(column->name, read);
}

absl::Status PartReader::ReadBlock(Group* group, Table::Piece* piece) {
  for (Column& column : group->columns) TF_RETURN_IF_ERROR(ReadColumn(*group, &column));
  piece->kind = group->kind;
  piece->range = group->range;
  piece->first = group->starts[group->block];
  piece->size = group->starts[group->block + 1] - piece->first;
  ++group->block;
  Table::ConstRows& rows = piece->rows;
  for (Column& column : group->columns) {
    const std::string& name = column.name;
    if (column.dtype == tensorflow::DT_FLOAT) {
      (name == "values" ? rows.values : rows.slots) = column.block.flat<float>().data();
      continue;
    }
    if (name == "clocks" && !contents_.clocks) column.block.flat<int64_t>().setZero();
    const int64_t* numbers = column.block.flat<int64_t>().data();
    if (group->kind == Table::Piece::kSketch) {
      piece->words = numbers;
    } else if (name == "clocks" || name == "counts") {
      rows.clocks = numbers;
    } else if (name == "ages" || name == "candidate_ages") {
      rows.ages = numbers;
    } else {
      rows.keys = numbers;
    }
    if (name != "ages" || contents_.elapsed == 0) continue;
    auto ages = column.block.flat<int64_t>();
    for (int64_t r = 0; r < piece->size; ++r) {
      // A negative one is refused as it is.
      if (ages(r) >= 0) ages(r) = std::min(ages(r), kMaxAge) + contents_.elapsed;
    }
  }
  return absl::OkStatus();
}

absl::Status PartReader::Next(Table::Piece* piece) {
  *piece = Table::Piece();
  for (; group_ < groups_.size(); ++group_) {
    Group& group = groups_[group_];
    if (group.block + 1 < group.starts.size()) return ReadBlock(&group, piece);
    group.columns.clear();
  }
  return absl::OkStatus();
}

}  // namespace het_tf
