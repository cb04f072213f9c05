// What a shard answers: one block of bytes, its writer and its reader.
//
//   ReplyHeader
//   ReplyRow[num_full], ReplyRow[num_values]
//   float[num_full][dim + slot_dim], float[num_values][dim]
//
// A query without a row: its row is fresh enough or, if it must come, nobody has updated it.

#ifndef HET_TF_OPS_CORE_WIRE_REPLY_H_
#define HET_TF_OPS_CORE_WIRE_REPLY_H_

#include <cstddef>
#include <cstdint>

#include "ops/core/status.h"
#include "ops/core/wire/request.h"

namespace het_tf {

inline constexpr uint32_t kReplyMagic = 0x52544548;  // "HETR"

// The request knows another incarnation or session: nothing that it pushed was merged, and every
// check was answered as for a key whose row must come.
enum ReplyFlags : uint16_t { kRestarted = 1 };

struct ReplyHeader {
  uint32_t magic = kReplyMagic;
  uint16_t version = kWireVersion;
  uint16_t flags = 0;
  uint64_t incarnation = 0;
  uint64_t session = 0;
  uint64_t acknowledged = 0;  // the last sequence merged; the rows hold all up to it, and no other
  uint32_t num_queries = 0;   // of the request
  uint32_t num_full = 0;
  uint32_t num_values = 0;
  uint32_t dim = 0;
  uint32_t slot_dim = 0;
  uint32_t padding = 0;
};

struct ReplyRow {
  int64_t clock;
  int64_t query;  // ascending among the full rows, and among the values
};

static_assert(sizeof(ReplyHeader) == 56 && sizeof(ReplyRow) == 16);

// Where the parts of a reply lie in its block.
class ReplyWriter {
 public:
  static size_t Size(const ReplyHeader& header) {
    const uint64_t width = uint64_t{header.dim} + header.slot_dim;
    return sizeof(ReplyHeader) +
           (uint64_t{header.num_full} + header.num_values) * sizeof(ReplyRow) +
           (header.num_full * width + uint64_t{header.num_values} * header.dim) * sizeof(float);
  }

  // bytes: (Size(...)), aligned to 8.
  ReplyWriter(char* bytes, const ReplyHeader& header);

  // r: which of the full rows, or of the values. Returns where its floats go.
  float* SetFull(int64_t r, const ReplyRow& row) {
    full_rows_[r] = row;
    return full_ + r * width_;
  }
  float* SetValue(int64_t r, const ReplyRow& row) {
    value_rows_[r] = row;
    return values_ + r * dim_;
  }

 private:
  const int64_t dim_, width_;
  ReplyRow *full_rows_, *value_rows_;
  float *full_, *values_;
};

struct ReplyView {
  ReplyHeader header;
  const ReplyRow* full_rows;   // (header.num_full)
  const ReplyRow* value_rows;  // (header.num_values)
  const float* full;           // (header.num_full, header.dim + header.slot_dim)
  const float* values;         // (header.num_values, header.dim)

  // bytes: (size), aligned to 8, which must outlive the view.
  static Status Parse(const char* bytes, size_t size, ReplyView* view);
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_WIRE_REPLY_H_
