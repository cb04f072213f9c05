// What a worker's replica of the dense variables and a server's part of them say to each other
// (docs/protocol.md, 8).
//
// A request:
//   DenseRequestHeader
//   for each push: DensePushHeader, int64[num_counters], numbers[num_floats]
// A reply:
//   DenseReplyHeader
//   kValues: int64[num_counters], numbers[num_floats]
//   kRest:   char[rest_bytes]
// Numbers are floats or, where the push's or the reply's header says kDenseHalf, bfloat16; either
// are padded with zeros to a multiple of 8 bytes. Pushes hold contributions: what to add. The
// numbers of a reply are the values of the variables, or with kDenseHalf what to add to those of
// the reply named `known`.

#ifndef HET_TF_OPS_CORE_WIRE_DENSE_H_
#define HET_TF_OPS_CORE_WIRE_DENSE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ops/core/bfloat16.h"
#include "ops/core/status.h"

namespace het_tf {

inline constexpr uint32_t kDenseRequestMagic = 0x44544548;  // "HETD"
inline constexpr uint32_t kDenseReplyMagic = 0x45544548;    // "HETE"
inline constexpr uint16_t kDenseVersion = 3;

enum DenseFlags : uint16_t {
  kDenseHalf = 1,       // numbers are bfloat16; of a request: those of the reply may be
  kDenseValues = 2,     // of a reply: it holds values
  kDenseRest = 4,       // of a reply: it holds the rest, for a replica that starts
  kDenseRestarted = 8,  // of a reply: nothing that the request pushed was merged
  kDenseAsk = 16,       // of a request: only a header comes back, which has the clock
};

struct DenseRequestHeader {
  uint32_t magic = kDenseRequestMagic;
  uint16_t version = kDenseVersion;
  uint16_t flags = 0;
  uint64_t replica_id = 0;
  uint64_t incarnation = 0;  // of the server, as the replica knows it, and its session there; 0:
  uint64_t session = 0;      // it knows nothing yet
  uint64_t known = 0;        // the last reply with values that it took; 0: none
  int64_t clock = 0;         // steps that its values hold
  int64_t read_bound = 0;    // steps of others that it may miss; kUnbounded: any number
  uint64_t num_floats = 0;
  uint32_t num_counters = 0;
  uint32_t num_pushes = 0;
};

struct DensePushHeader {
  uint64_t sequence;
  int64_t steps;
  uint32_t flags;     // kDenseHalf or 0
  uint32_t interval;  // steps between two pushes to this server, as the replica goes on now
};

struct DenseReplyHeader {
  uint32_t magic = kDenseReplyMagic;
  uint16_t version = kDenseVersion;
  uint16_t flags = 0;
  uint64_t incarnation = 0;
  uint64_t session = 0;
  uint64_t acknowledged = 0;  // the last push merged; values hold all up to it, and no later one
  uint64_t known = 0;         // a name for these values, within the session
  int64_t clock = 0;          // steps merged; the values hold them all
  uint64_t num_floats = 0;
  uint64_t rest_bytes = 0;
  uint32_t num_counters = 0;
  uint32_t padding = 0;
};

static_assert(sizeof(DenseRequestHeader) == 72 && sizeof(DensePushHeader) == 24 &&
              sizeof(DenseReplyHeader) == 72);

// Bytes that n numbers take, padding included.
inline uint64_t NumbersBytes(uint64_t n, bool half) {
  return (n * (half ? sizeof(uint16_t) : sizeof(float)) + 7) / 8 * 8;
}

// n numbers somewhere in a message.
class Numbers {
 public:
  Numbers() = default;
  Numbers(const char* bytes, bool half) : bytes_(bytes), half_(half) {}

  float operator[](size_t i) const {
    if (half_) return FromBfloat16(reinterpret_cast<const uint16_t*>(bytes_)[i]);
    return reinterpret_cast<const float*>(bytes_)[i];
  }
  bool half() const { return half_; }
  // What they are in memory, where they are floats.
  const float* floats() const { return reinterpret_cast<const float*>(bytes_); }

 private:
  const char* bytes_ = nullptr;
  bool half_ = false;
};

// Where the parts of a push lie in its block.
class DensePushWriter {
 public:
  static size_t Size(uint64_t num_floats, uint32_t num_counters, bool half) {
    return sizeof(DensePushHeader) + num_counters * sizeof(int64_t) +
           NumbersBytes(num_floats, half);
  }

  // bytes: (Size(...)), aligned to 8, with the header's kDenseHalf.
  DensePushWriter(char* bytes, const DensePushHeader& header, uint64_t num_floats,
                  uint32_t num_counters);

  int64_t* counters() const { return counters_; }
  // Writes contribution i. Returns what will be read.
  float Set(size_t i, float contribution) {
    if (!half_) return floats_[i] = contribution;
    return FromBfloat16(reinterpret_cast<uint16_t*>(floats_)[i] = ToBfloat16(contribution));
  }

 private:
  const bool half_;
  int64_t* counters_;
  float* floats_;
};

struct DensePushView {
  uint64_t sequence;
  int64_t steps;
  int64_t interval;         // at least 1
  const int64_t* counters;  // (num_counters)
  Numbers contributions;    // (num_floats)
};

// A push of a replica's own, as DensePushWriter left it.
DensePushView ViewDensePush(const char* bytes, uint32_t num_counters);

struct DenseRequestView {
  DenseRequestHeader header;
  std::vector<DensePushView> pushes;

  bool half() const { return header.flags & kDenseHalf; }

  // bytes: (size), aligned to 8, which must outlive the view.
  static Status Parse(const char* bytes, size_t size, DenseRequestView* view);
};

struct DenseReplyView {
  DenseReplyHeader header;
  const int64_t* counters = nullptr;  // (num_counters), if kDenseValues
  Numbers values;                     // (num_floats), if kDenseValues
  const char* rest = nullptr;         // (rest_bytes), if kDenseRest

  bool has(DenseFlags flag) const { return header.flags & flag; }

  // bytes: (size), aligned to 8, which must outlive the view.
  static Status Parse(const char* bytes, size_t size, DenseReplyView* view);
};

// Bytes of a reply with this header.
size_t DenseReplyBytes(const DenseReplyHeader& header);

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_WIRE_DENSE_H_
