// What travels between a cache and a shard: one request, one reply, each one block of bytes.
//
// Request:  RequestHeader
//           num_batches x { PushHeader, PushRow[rows], float[rows][width], padding to 8 bytes }
//           Check[num_checks]
//           int64 key[num_absent]
// Reply:    ReplyHeader
//           ReplyRow[num_rows], float[num_rows][width]
//
// The width is dim + slot_dim, or dim for a cache that leaves the optimizer to the shard (then a
// push holds gradients). All numbers are little-endian. The readers accept any bytes: what they
// let pass lies within the block.

#ifndef HET_TF_OPS_CORE_MESSAGE_H_
#define HET_TF_OPS_CORE_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/core/status.h"

namespace het_tf {

inline constexpr uint32_t kRequestMagic = 0x51544548;  // "HETQ"
inline constexpr uint32_t kReplyMagic = 0x52544548;    // "HETR"
inline constexpr uint16_t kMessageVersion = 1;
inline constexpr int64_t kUnbounded = -1;

enum RequestFlags : uint16_t { kServerApplies = 1 };
// The shard was cleared or restored since the cache last heard of it: nothing that the cache pushed
// was merged, and every query was answered as for an absent key.
enum ReplyFlags : uint16_t { kRestarted = 1 };

struct RequestHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t flags;
  uint64_t cache_id;
  uint64_t incarnation;  // the shard's, as the cache knows it; 0: not yet
  int64_t read_bound;    // kUnbounded: cached rows are never sent again
  uint32_t dim;
  uint32_t slot_dim;
  uint32_t shard;
  uint32_t num_batches;
  int64_t num_checks;
  int64_t num_absent;
};

struct PushHeader {
  uint64_t sequence;  // from 1 on
  float learning_rate;
  uint32_t rows;
};

struct PushRow {
  int64_t key;
  int64_t clock;  // count: updates in this push; lamport: the cache's clock of the row
};

struct Check {
  int64_t key;
  int64_t base;
};

struct ReplyHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t flags;
  uint64_t incarnation;
  uint64_t acknowledged;  // the last sequence merged for this cache
  int64_t num_queries;    // checks and absent keys of the request
  int64_t num_rows;
  int64_t width;
};

struct ReplyRow {
  int64_t clock;
  int64_t query;  // which check, or num_checks + which absent key; ascending
};

static_assert(sizeof(RequestHeader) == 64 && sizeof(PushHeader) == 16 && sizeof(PushRow) == 16 &&
              sizeof(Check) == 16 && sizeof(ReplyHeader) == 48 && sizeof(ReplyRow) == 16);

struct PushView {
  uint64_t sequence;
  float learning_rate;
  int64_t num_rows;
  const PushRow* rows;  // (num_rows)
  const float* data;    // (num_rows, width)
};

struct RequestView {
  RequestHeader header;
  std::vector<PushView> pushes;
  const Check* checks;    // (header.num_checks)
  const int64_t* absent;  // (header.num_absent)

  int64_t num_queries() const { return header.num_checks + header.num_absent; }
  int64_t query_key(int64_t q) const {
    return q < header.num_checks ? checks[q].key : absent[q - header.num_checks];
  }

  // bytes: (size), aligned to 8, which must outlive the view.
  static Status Parse(const char* bytes, size_t size, RequestView* view);
};

struct ReplyView {
  ReplyHeader header;
  const ReplyRow* rows;  // (header.num_rows)
  const float* data;     // (header.num_rows, header.width)

  static Status Parse(const char* bytes, size_t size, ReplyView* view);
};

// Bytes of a push with its header and padding.
inline size_t PushBytes(int64_t rows, int64_t width) {
  return sizeof(PushHeader) + rows * sizeof(PushRow) + ((rows * width * sizeof(float) + 7) & ~7ULL);
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MESSAGE_H_
