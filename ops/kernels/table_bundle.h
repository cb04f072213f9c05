// A shard's rows in a tensor bundle, the format of TensorFlow's checkpoints, in slices of a few MB.

#ifndef HET_TF_OPS_KERNELS_TABLE_BUNDLE_H_
#define HET_TF_OPS_KERNELS_TABLE_BUNDLE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ops/core/table/snapshot.h"
#include "ops/core/table/table.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_slice.h"
#include "tensorflow/core/util/tensor_bundle/tensor_bundle.h"

namespace het_tf {

// Writes a bundle with one shard. Ends the snapshot. On an error no file of it is left.
absl::Status WriteBundle(const std::string& prefix, const std::string& name,
                         const std::string& config, const Table& table, Table::Snapshot* snapshot);

// Reads the rows of one part of a bundle, block by block.
class PartReader {
 public:
  // bundle: must outlive the reader.
  PartReader(tensorflow::BundleReader* bundle, const std::string& name, const Table& table,
             bool slots, bool ages)
      : bundle_(bundle), name_(name), table_(table), slots_(slots), ages_(ages) {}

  // Finds the blocks. Fails unless the part has so many rows, of the table's width, and so many
  // keys without one. elapsed: to be added to the rows' ages.
  absl::Status Open(int64_t rows, int64_t dropped, int64_t elapsed);

  // The next rows, or keys for Table::Replace to drop, which are there until the next call; 0 rows:
  // there are no more. Checksums are verified.
  absl::Status Next(Table::ConstRows* rows, int64_t* num_rows);

 private:
  enum Column { kKeys, kValues, kClocks, kSlots, kAges, kNumColumns, kDropped = kNumColumns };

  bool has(int column) const {
    return column == kAges ? ages_ : column != kSlots || (slots_ && table_.slot_dim() > 0);
  }
  tensorflow::TensorShape ShapeOf(int column, int64_t rows) const;
  // Finds where the blocks of a column begin; the last of them is the number of rows.
  absl::Status Find(int column, int64_t rows, std::vector<int64_t>* starts);
  absl::Status Read(int column, const std::vector<int64_t>& starts, size_t block);

  tensorflow::BundleReader* const bundle_;
  const std::string name_;
  const Table& table_;
  const bool slots_, ages_;
  std::vector<int64_t> starts_, drops_;  // of the blocks of rows, and of dropped keys
  size_t block_ = 0, drop_ = 0;
  int64_t elapsed_ = 0;
  std::array<tensorflow::Tensor, kNumColumns + 1> tensors_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_TABLE_BUNDLE_H_
