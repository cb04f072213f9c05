// Where a shard keeps its rows: in memory, or in a file on a disk with a part of it in memory.

#ifndef HET_TF_OPS_CORE_TABLE_STORAGE_H_
#define HET_TF_OPS_CORE_TABLE_STORAGE_H_

#include <cstdint>
#include <string>

#include "ops/core/status.h"

namespace het_tf {

struct Storage {
  int64_t memory = 0;  // bytes of rows that may be in memory; 0: a quarter of the free memory
  std::string path;    // folder of the file; empty: all rows are in memory

  bool on_disk() const { return !path.empty(); }

  // text: empty, or "memory=BYTES path=FOLDER" with a number or "auto".
  static Status Parse(const std::string& text, Storage* storage);
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_STORAGE_H_
