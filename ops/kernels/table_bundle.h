// A shard's rows in a tensor bundle, the format of TensorFlow's checkpoints, in slices of a few MB.

#ifndef HET_TF_OPS_KERNELS_TABLE_BUNDLE_H_
#define HET_TF_OPS_KERNELS_TABLE_BUNDLE_H_

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

// What a part says of itself, and what is to be read of it.
struct PartContents {
  int64_t rows = 0;         // must have so many
  int64_t dropped = 0;      // keys that have no row any longer
  int64_t candidates = -1;  // keys without a row that are counted; -1: no counts are to be read
  int64_t elapsed = 0;      // to be added to the ages of the rows
  bool slots = true, ages = false, sketches = false;  // whether they are to be read
  bool clocks = true;                                 // whether they mean something; if not: 0
  bool only_keys = false;  // of rows: they and nothing else are to be read
};

// Reads one part of a bundle, block by block.
class PartReader {
 public:
  // bundle: must outlive the reader.
  PartReader(tensorflow::BundleReader* bundle, const std::string& name, const Table& table)
      : bundle_(bundle), name_(name), table_(table) {}

  // Finds the blocks. Fails unless the part has what it should, of the table's width.
  absl::Status Open(const PartContents& contents);

  // The next block, which is there until the next call; size 0: there is no more. Checksums are
  // verified.
  absl::Status Next(Table::Piece* piece);

 private:
  struct Column {
    std::string name;
    tensorflow::DataType dtype;
    int width = 0;  // 0: one number a row, in a vector
    tensorflow::Tensor block = {};
  };
  // Columns of as many rows, in the same blocks.
  struct Group {
    Table::Piece::Kind kind;
    int range = 0;
    std::vector<Column> columns;
    std::vector<int64_t> starts = {0};  // of the blocks; the last of them is the number of rows
    size_t block = 0;
  };

  // max_rows: of a block.
  absl::Status AddGroup(Group group, int64_t rows, int64_t max_rows);
  absl::Status Find(const Column& column, int64_t rows, int64_t max_rows,
                    std::vector<int64_t>* starts);
  absl::Status ReadBlock(Group* group, Table::Piece* piece);
  absl::Status ReadColumn(const Group& group, Column* column);

  tensorflow::BundleReader* const bundle_;
  const std::string name_;
  const Table& table_;
  PartContents contents_;
  std::vector<Group> groups_;
  size_t group_ = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_TABLE_BUNDLE_H_
