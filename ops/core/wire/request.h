// What a cache sends to a shard: one block of bytes, its writer and its reader.
//
//   RequestHeader
//   num_pushes x push: PushHeader, PushRow[gradients + contributions], float[gradients][dim],
//                      float[contributions][contribution_dim], padding to 8 bytes; with kHalf the
//                      first dim numbers of each are bfloat16, padded to 4 bytes: a gradient, or
//                      of a contribution the change of the value (ftrl: of n)
//   num_checks + num_value_checks + num_full + num_values keys (KeyPacking)
//   the bases of the checks as varints (LEB128), padding to 8 bytes, whose length the header says:
//     a wrong count is never made good by it
//
// All numbers are little-endian. The reader accepts any bytes: what it lets pass lies within the
// block. Bases are written shortest because a check has to cost no more than 2 % over a key that
// is asked for without a cache (benchmarks/cache_traces.py).

#ifndef HET_TF_OPS_CORE_WIRE_REQUEST_H_
#define HET_TF_OPS_CORE_WIRE_REQUEST_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/core/row/row_format.h"
#include "ops/core/status.h"
#include "ops/core/thread_annotations.h"
#include "ops/core/wire/cursor.h"
#include "ops/core/wire/packed_keys.h"

namespace het_tf {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "messages are little-endian and read in place");

inline constexpr uint32_t kRequestMagic = 0x51544548;  // "HETQ"
inline constexpr uint8_t kWireVersion = 6;

// Values, their gradients and their changes are bfloat16, in the request and in its reply.
inline constexpr uint8_t kHalf = 1;

struct RequestHeader {
  uint32_t magic = kRequestMagic;
  uint8_t version = kWireVersion;
  uint8_t flags = 0;      // kHalf
  uint8_t key_bytes = 1;  // KeyPacking's
  uint8_t padding = 0;    // bytes at the end; RequestWriter's
  uint64_t cache_id = 0;
  uint64_t incarnation = 0;  // the shard's, as the cache knows it; 0: not yet
  uint64_t session = 0;      // the cache's on the shard; 0: not yet
  uint64_t cut = 0;          // the last sequence cut before this request
  int64_t read_bound = 0;    // kUnbounded: cached rows are never sent again
  int64_t lowest_key = 0;    // KeyPacking's
  uint64_t watch = 0;        // the epoch whose watched rows are not checked (link/watch.h); 0: none
  uint64_t seen = 0;         // replies of that epoch up to this number were taken
  uint32_t dim = 0;
  uint32_t slot_dim = 0;
  uint32_t contribution_dim = 0;
  uint32_t shard = 0;
  uint32_t num_pushes = 0;
  uint32_t num_checks = 0;        // keys whose row must come if it is beyond the read bound
  uint32_t num_value_checks = 0;  // the same, but then the value is enough
  uint32_t num_full = 0;          // keys whose row must come, slots and all
  uint32_t num_values = 0;        // keys of which the value is enough
  uint32_t base_bytes = 0;        // of the bases, without padding

  RowFormat format() const { return {static_cast<int>(dim), (flags & kHalf) != 0}; }
  int64_t num_bases() const { return int64_t{num_checks} + num_value_checks; }
  int64_t num_queries() const { return num_bases() + num_full + num_values; }
  // Of keys and bases, without padding.
  uint64_t query_bytes() const { return uint64_t{key_bytes} * num_queries() + base_bytes; }
  // What makes them a multiple of 8.
  uint8_t padding_needed() const { return static_cast<uint8_t>(-query_bytes() % 8); }
};

struct PushHeader {
  uint64_t sequence;  // from 1 on
  uint32_t num_gradients;
  uint32_t num_contributions;
  int64_t closure = 0;        // whose updates these are (link/closures.h); 0: of none
  int64_t closures_done = 0;  // closures up to this number will not be run again
};

struct PushRow {
  int64_t key;
  union {
    float learning_rate;  // of a gradient
    uint32_t updates;     // of a contribution
  };
  // count: 0; lamport: the low 32 bits of the cache's clock of the row; drift: the units.
  uint32_t clock;
};

static_assert(sizeof(RequestHeader) == 112 && sizeof(PushHeader) == 32 && sizeof(PushRow) == 16);

// base: not negative.
inline size_t BaseBytes(int64_t base) {
  size_t bytes = 1;
  for (auto rest = static_cast<uint64_t>(base); rest >= 128; rest >>= 7) ++bytes;
  return bytes;
}

// Words of 4 bytes that the numbers of a push take, without padding.
inline uint64_t PushWords(uint64_t gradients, uint64_t contributions, const RowFormat& format,
                          int64_t contribution_dim) {
  return gradients * format.words(0) + contributions * format.words(contribution_dim - format.dim);
}

// Bytes of a push with its header and padding.
inline size_t PushBytes(const PushHeader& header, const RowFormat& format,
                        int64_t contribution_dim) {
  const uint64_t gradients = header.num_gradients, contributions = header.num_contributions;
  const uint64_t words = PushWords(gradients, contributions, format, contribution_dim);
  return sizeof(PushHeader) + (gradients + contributions) * sizeof(PushRow) + (words + 1) / 2 * 8;
}

// Lays out a push in place. What is bfloat16 is rounded stochastically, so that no update is lost
// on average however small, by numbers that depend on the key, the sequence and the place alone.
class PushWriter {
 public:
  // bytes: (PushBytes(...)), aligned to 8.
  PushWriter(char* bytes, const PushHeader& header, const RowFormat& format, int contribution_dim);

  // gradient: (dim)
  void AddGradient(int64_t key, float learning_rate, uint32_t clock, const float* gradient);
  // fill(contribution) writes the (contribution_dim) floats.
  template <typename Fill>
  void AddContribution(int64_t key, uint32_t updates, uint32_t clock,
                       const Fill& fill) HET_NO_THREAD_SAFETY_ANALYSIS {
    contribution_row_->key = key;
    contribution_row_->updates = updates;
    contribution_row_->clock = clock;
    if (format_.half) {
      fill(scratch_.data());
      format_.Write(scratch_.data(), rest_, NumberOf(*contribution_row_), contribution_);
    } else {
      fill(contribution_);
    }
    ++contribution_row_;
    contribution_ += format_.words(rest_);
  }

 private:
  uint64_t NumberOf(const PushRow& row) const {
    return HashKey(row.key) + (sequence_ << 32) + static_cast<uint64_t>(&row - rows_);
  }

  const RowFormat format_;
  const int64_t rest_;  // floats of a contribution after its first dim
  const uint64_t sequence_;
  PushRow *rows_, *gradient_row_, *contribution_row_;
  float *gradient_, *contribution_;
  std::vector<float> scratch_;  // (contribution_dim), if half
};

// Lays out a request in place, in the order of its parts; pushes are laid out by their writers.
class RequestWriter {
 public:
  static size_t Size(const RequestHeader& header, size_t push_bytes) {
    return sizeof(RequestHeader) + push_bytes + header.query_bytes() + header.padding_needed();
  }

  // bytes: (Size(...)), aligned to 8.
  RequestWriter(char* bytes, const RequestHeader& header);

  char* AddPush(size_t bytes) { return cursor_.Take<char>(bytes); }
  // All of them, as the header says that they are packed.
  void AddKeys(const std::vector<int64_t>& keys) {
    packing_.Pack(keys, cursor_.Take<char>(keys.size() * packing_.key_bytes));
  }
  void AddBase(int64_t base) {
    auto rest = static_cast<uint64_t>(base);
    for (; rest >= 128; rest >>= 7) *cursor_.Take<uint8_t>(1) = static_cast<uint8_t>(rest | 128);
    *cursor_.Take<uint8_t>(1) = static_cast<uint8_t>(rest);
  }
  // After the last base.
  void Finish() {
    for (int i = 0; i < padding_; ++i) *cursor_.Take<char>(1) = 0;
  }

 private:
  WriteCursor cursor_;
  const KeyPacking packing_;
  const int padding_;
};

struct PushView {
  uint64_t sequence;
  int64_t num_gradients;
  int64_t num_contributions;
  const PushRow* rows;                      // (num_gradients + num_contributions)
  const float* gradients;                   // (num_gradients, dim)
  const float* contributions;               // (num_contributions, contribution_dim)
  std::shared_ptr<const float[]> unpacked;  // where these are, if they were bfloat16
  int64_t closure = 0;                      // PushHeader's, as the next
  int64_t closures_done = 0;

  int64_t num_rows() const { return num_gradients + num_contributions; }
};

// Reads one push off a cursor; false where it ends too early.
bool ReadPush(ReadCursor* cursor, const RowFormat& format, int64_t contribution_dim,
              PushView* push);

struct RequestView {
  RequestHeader header;
  std::vector<PushView> pushes;
  std::vector<int64_t> keys;   // (header.num_queries())
  std::vector<int64_t> bases;  // (header.num_bases())

  bool is_check(int64_t q) const { return q < header.num_bases(); }
  bool wants_value(int64_t q) const {
    return q >= header.num_bases() + header.num_full ||
           (q >= header.num_checks && q < header.num_bases());
  }

  // bytes: (size), aligned to 8, which must outlive the view.
  static Status Parse(const char* bytes, size_t size, RequestView* view);
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_WIRE_REQUEST_H_
