// Rows of a table in a file that servers map into their memory: opened without being read, and
// shared by the processes of a machine. docs/serving.md has the format for who reads it elsewhere.
//
// In this order, numbers little-endian:
//   rows       a record each: key (int64), with int8 a scale (float), the values; zeros up to a
//              multiple of 4 bytes. In no particular order.
//   zeros      up to a multiple of 64 bytes.
//   index      uint64 entries, more than there are rows. 0: empty. Else the low 32 bits are the
//              number of a row + 1, the high ones the low 32 of its key's hash. A key is in the
//              first entry from HashKey(key) * 0x9e3779b97f4a7c15 * entries / 2^64 on, in a circle,
//              that has its hash and its row, or else not in the file before the first empty one.
//   checksums  uint32: CRC-32 of each 2^20 bytes of all before.
//   footer     56 bytes, see rows_file.cc.
//
// A lookup touches the page of an entry and the page of a row. What is opened has a footer that is
// right about the file's size; what the index says is checked as it is read. So a damaged file may
// give wrong rows, which Verify finds out, but no access outside of it. A file must not be changed
// while it is mapped, but it may be deleted.

#ifndef HET_TF_OPS_CORE_SERVING_ROWS_FILE_H_
#define HET_TF_OPS_CORE_SERVING_ROWS_FILE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/status.h"

namespace het_tf {

enum class StoredDtype : uint32_t { kFloat32, kFloat16, kInt8 };

// How a row is stored.
struct StoredFormat {
  StoredDtype dtype = StoredDtype::kFloat32;
  int dim = 0;

  static Status Parse(const std::string& dtype, int dim, StoredFormat* format);

  size_t record_bytes() const;
  // values: (dim), finite; record: (record_bytes()). Fails if a value is too large for float16.
  Status Write(int64_t key, const float* values, char* record) const;
  // values: (dim).
  void Read(const char* record, float* values) const;

  bool operator==(const StoredFormat& other) const {
    return dtype == other.dtype && dim == other.dim;
  }
};

int64_t KeyOfStored(const char* record);

// Writes a file front to back. Takes 21 bytes of memory a row.
class RowsWriter {
 public:
  using Append = std::function<Status(const char*, size_t)>;

  // This is shard `shard` of num_shards.
  RowsWriter(const StoredFormat& format, int shard, int num_shards, Append append);

  // A key that is not there yet. values: (dim).
  Status Add(int64_t key, const float* values);
  // To be called last.
  Status Finish();

  int64_t num_rows() const { return static_cast<int64_t>(hashes_.size()); }
  int64_t num_bytes() const { return written_ + static_cast<int64_t>(block_.size()); }

 private:
  Status Write(const char* data, size_t size);
  Status WriteBlock();

  const StoredFormat format_;
  const int shard_, num_shards_;
  const Append append_;
  std::vector<char> record_;
  std::vector<uint64_t> hashes_;
  std::string block_;  // not yet appended
  int64_t written_ = 0;
  std::vector<uint32_t> checksums_;
};

// A file that is mapped. Safe for concurrent use.
class RowsFile {
 public:
  // Errors name the file.
  static Status Open(const std::string& path, std::shared_ptr<const RowsFile>* file);
  ~RowsFile();
  RowsFile(const RowsFile&) = delete;
  RowsFile& operator=(const RowsFile&) = delete;

  const std::string& path() const { return path_; }
  const StoredFormat& format() const { return format_; }
  int shard() const { return shard_; }
  int num_shards() const { return num_shards_; }
  int64_t num_rows() const { return static_cast<int64_t>(num_rows_); }
  int64_t num_bytes() const { return static_cast<int64_t>(size_); }

  // Reads the file and compares its checksums.
  Status Verify() const;

  // row: in [0, num_rows()).
  const char* Record(int64_t row) const { return data_ + row * record_bytes_; }
  // The record of a key, or nullptr. hash: HashKey(key).
  const char* Find(uint64_t hash, int64_t key) const;
  // What Find will look at first.
  void PrefetchIndex(uint64_t hash) const;
  void PrefetchRecord(uint64_t hash) const;

 private:
  RowsFile() = default;
  Status Map(const std::string& path);
  Status ReadFooter();
  uint64_t PlaceOf(uint64_t hash) const;
  uint64_t Entry(uint64_t place) const;

  std::string path_;
  char* data_ = nullptr;
  size_t size_ = 0;
  StoredFormat format_;
  int shard_ = 0, num_shards_ = 1;
  size_t record_bytes_ = 0;
  uint64_t num_rows_ = 0, num_entries_ = 0, index_ = 0, checksums_ = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_SERVING_ROWS_FILE_H_
