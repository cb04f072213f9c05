// What a shard answers: one block of bytes, its writer and its reader.
//
//   ReplyHeader
//   ReplyRow[num_full], ReplyRow[num_values], ReplyRow[num_unasked]
//   float[num_full][dim + slot_dim], float[num_values][dim], float[num_unasked][dim + slot_dim];
//     with kHalfReply the first dim of each are bfloat16, padded to 4 bytes
//
// A query without a row: its row is fresh enough or, if it must come, nobody has updated it. Rows
// that nobody asked for were watched (link/watch.h).

#ifndef HET_TF_OPS_CORE_WIRE_REPLY_H_
#define HET_TF_OPS_CORE_WIRE_REPLY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ops/core/row/row_format.h"
#include "ops/core/status.h"
#include "ops/core/wire/request.h"

namespace het_tf {

inline constexpr uint32_t kReplyMagic = 0x52544548;  // "HETR"

// The request knows another incarnation or session: nothing that it pushed was merged, and every
// check was answered as for a key whose row must come.
// kCounted: what the request pushed was not merged, since another run of its closure was.
// kWatches: the rows of checks without an answer are watched from now on.
enum ReplyFlags : uint16_t { kRestarted = 1, kHalfReply = 2, kCounted = 4, kWatches = 8 };

struct ReplyHeader {
  uint32_t magic = kReplyMagic;
  uint16_t version = kWireVersion;
  uint16_t flags = 0;
  uint64_t incarnation = 0;
  uint64_t session = 0;
  uint64_t acknowledged = 0;  // the last sequence merged; the rows hold all up to it, and no other
  uint64_t number = 0;        // of the replies of the watch; 0: nothing is watched
  uint32_t num_queries = 0;   // of the request
  uint32_t num_full = 0;
  uint32_t num_values = 0;
  uint32_t dim = 0;
  uint32_t slot_dim = 0;
  uint32_t num_unasked = 0;

  RowFormat format() const { return {static_cast<int>(dim), (flags & kHalfReply) != 0}; }
  uint64_t num_rows() const { return uint64_t{num_full} + num_values + num_unasked; }
};

struct ReplyRow {
  int64_t clock;
  int64_t query;  // ascending among the full rows, and among the values; unasked: the key
};

static_assert(sizeof(ReplyHeader) == 64 && sizeof(ReplyRow) == 16);

// Where the parts of a reply lie in its block.
class ReplyWriter {
 public:
  static size_t Size(const ReplyHeader& header) {
    const RowFormat format = header.format();
    const uint64_t full = uint64_t{header.num_full} + header.num_unasked;
    return sizeof(ReplyHeader) + header.num_rows() * sizeof(ReplyRow) +
           (full * format.words(header.slot_dim) + header.num_values * format.words(0)) *
               sizeof(float);
  }

  // bytes: (Size(...)), aligned to 8.
  ReplyWriter(char* bytes, const ReplyHeader& header);

  // r: which of the full rows, or of the values. floats: (dim + slot_dim), or (dim). bfloat16 is
  // rounded to the nearest: the shard keeps what it has, so what a reader lacks does not add up.
  void SetFull(int64_t r, const ReplyRow& row, const float* floats) {
    full_rows_[r] = row;
    format_.Write(floats, slot_dim_, full_ + r * format_.words(slot_dim_));
  }
  void SetValue(int64_t r, const ReplyRow& row, const float* floats) {
    value_rows_[r] = row;
    format_.Write(floats, 0, values_ + r * format_.words(0));
  }
  void SetUnasked(int64_t r, const ReplyRow& row, const float* floats) {
    unasked_rows_[r] = row;
    format_.Write(floats, slot_dim_, unasked_ + r * format_.words(slot_dim_));
  }

 private:
  const RowFormat format_;
  const int64_t slot_dim_;
  ReplyRow *full_rows_, *value_rows_, *unasked_rows_;
  float *full_, *values_, *unasked_;
};

struct ReplyView {
  ReplyHeader header;
  const ReplyRow* full_rows;                // (header.num_full)
  const ReplyRow* value_rows;               // (header.num_values)
  const ReplyRow* unasked_rows;             // (header.num_unasked)
  const float* full;                        // (header.num_full, header.dim + header.slot_dim)
  const float* values;                      // (header.num_values, header.dim)
  const float* unasked;                     // (header.num_unasked, header.dim + header.slot_dim)
  std::shared_ptr<const float[]> unpacked;  // where these are, if they were bfloat16

  // bytes: (size), aligned to 8, which must outlive the view.
  static Status Parse(const char* bytes, size_t size, ReplyView* view);
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_WIRE_REPLY_H_
