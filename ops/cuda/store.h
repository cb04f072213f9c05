// How a store lies in device memory, and the object on the host that knows where.
//
// A key lives in one bucket of lines. A bucket's tags, a byte a line, lie side by side, so that a
// warp looks at all of them at once (as in NVIDIA's HierarchicalKV); they say which lines are worth
// comparing, and which are live at all. Nothing is probed beyond the bucket: when it is full, one
// of its lines gives way. A bucket is changed by one warp at a time (evict.cu), so it needs no
// lock.
//
// Visitors, the keys that got no line, lie beside the lines. Which of them a key has is known to
// the host; slots say it.

#ifndef HET_TF_OPS_CUDA_STORE_H_
#define HET_TF_OPS_CUDA_STORE_H_

#include <cstdint>
#include <variant>

#include "ops/core/cache/score.h"
#include "ops/core/memory/hash.h"
#include "ops/core/row/clock.h"
#include "ops/core/row/rule.h"
#include "ops/cuda/device.h"
#include "ops/cuda/het_cuda.h"

namespace het_tf {
namespace cuda {

// What a lookup touches of a line: 32 bytes, one sector of memory.
struct DeviceLine {
  int64_t key;
  int64_t base;  // the row's clock when last refreshed, moved by pushes since; -1: none came yet
  union {
    uint32_t score;  // Scoring's
    int32_t line;    // of a visitor: that which its key got since, or -1
  };
  int32_t pending;       // own updates in no push yet
  uint32_t units;        // drift clock: their length
  uint32_t pins : 30;    // steps that need the line, and a visitor of its key
  uint32_t watched : 1;  // its shard sends the row once it is beyond the bound (link/watch.h)
  uint32_t full : 1;  // the row is there with its slots, and own updates are made on it; without,
                      // whoever has read it may do so again
};
static_assert(sizeof(DeviceLine) == 32);

// Copied into kernels.
struct StoreView {
  static constexpr int kBucket = 128;  // tags of a bucket; a small store has fewer lines in each
  static constexpr uint8_t kNoTag = 0;

  uint8_t* tags;         // (buckets, kBucket)
  DeviceLine* lines;     // (num_lines): buckets, ways
  float* rows;           // (num_lines, row_stride)
  float* records;        // (num_lines, record_stride)
  DeviceLine* visitors;  // (num_visitors): without score and record, and never watched
  float* visitor_rows;   // (num_visitors, row_stride)
  double* time;          // (1): Scoring's
  int64_t* num_rows;     // (1): lines that have a row, so that nobody has to count them
  Scoring scoring;
  ClockRule clock;
  uint32_t buckets;
  int32_t ways;  // lines of a bucket
  int32_t num_lines, num_visitors;
  int32_t row_stride, record_stride;

  HET_DEVICE bool is_line(int32_t slot) const { return slot < num_lines; }
  HET_DEVICE DeviceLine& line(int32_t slot) const {
    return is_line(slot) ? lines[slot] : visitors[slot - num_lines];
  }
  HET_DEVICE float* row(int32_t slot) const {
    return is_line(slot) ? rows + int64_t{slot} * row_stride
                         : visitor_rows + int64_t{slot - num_lines} * row_stride;
  }
  // nullptr: a visitor's updates are in a push at once.
  HET_DEVICE float* record(int32_t slot) const {
    return is_line(slot) ? records + int64_t{slot} * record_stride : nullptr;
  }
  // slot: of a line.
  HET_DEVICE uint8_t& tag(int32_t slot) const {
    return tags[int64_t{slot / ways} * kBucket + slot % ways];
  }
  HET_DEVICE bool is_free(int32_t slot) const { return tag(slot) == kNoTag; }
  HET_DEVICE uint32_t now() const { return Scoring::Now(*time); }

  // The slot of a key's line, or -1.
  template <typename LanesType>
  HET_DEVICE int32_t Find(const LanesType& lanes, int64_t key) const {
    const uint64_t hash = HashKey(key);
    const uint32_t bucket = BucketOfHash(hash, buckets);
    const uint8_t tag_of_key = TagOfHash(hash);
    // Four tags at a time, so that a warp reads all of them at once. (Beyond the ways there are
    // none.)
    const auto* fours = reinterpret_cast<const uint32_t*>(tags + int64_t{bucket} * kBucket);
    const auto first = static_cast<int32_t>(bucket * ways);
    const auto slot_in = [&](int four) {
      const uint32_t four_tags = fours[four];
      for (int i = 0; i < 4; ++i) {
        const int32_t slot = first + 4 * four + i;
        if (((four_tags >> (8 * i)) & 0xff) == tag_of_key && lines[slot].key == key) return slot;
      }
      return -1;
    };
    const int four = lanes.FirstWhere(kBucket / 4, [&](int i) { return slot_in(i) >= 0; });
    return four < 0 ? -1 : slot_in(four);
  }

  // The line's clock once its updates are in a push.
  HET_DEVICE int64_t BaseAfterPush(const DeviceLine& line) const {
    return Advance(line.base, clock == ClockRule::kDrift ? line.units : line.pending);
  }
  // Its clock as a check carries it; -1: the row is still to come.
  HET_DEVICE int64_t CheckedBase(const DeviceLine& line) const {
    if (!line.full) return -1;
    return clock == ClockRule::kLamport ? BaseAfterPush(line) : line.base;
  }
  // What a push says of the clock of a line whose base was moved.
  HET_DEVICE uint32_t PushedClock(int64_t base_after, uint32_t units) const {
    switch (clock) {
      case ClockRule::kCount:
        return 0;
      case ClockRule::kLamport:
        return static_cast<uint32_t>(base_after);
      case ClockRule::kDrift:
        return units;
    }
    return 0;
  }
  // A step needs it no longer. A line without a row is gone with the last.
  HET_DEVICE void Unpin(int32_t slot) const {
    if (!is_line(slot)) {
      DeviceLine& visitor = line(slot);
      if (--visitor.pins > 0 || visitor.line < 0) return;
      slot = visitor.line;
      visitor.line = -1;
    }
    if (--lines[slot].pins == 0 && !lines[slot].full) tag(slot) = kNoTag;
  }

  // The line's updates are in a push.
  HET_DEVICE void MakeClean(DeviceLine* line) const {
    line->base = BaseAfterPush(*line);
    line->pending = 0;
    line->units = 0;
  }
};

// The mark of a key's shard.
HET_DEVICE inline uint8_t MarkOf(const HetShards& shards, int64_t key) {
  return shards.marked[ShardOfHash(HashKey(key), shards.num_shards)];
}
HET_DEVICE inline bool IsMarked(const HetShards& shards, int64_t key) {
  return MarkOf(shards, key) != 0;
}

// Runs a kernel whose lanes share a row of that dim.
template <typename Kernel>
int LaunchRows(const Kernel& kernel, int dim, int64_t n, Stream stream) {
  return dim <= 16 ? LaunchLanes<16>(kernel, n, stream) : LaunchLanes<32>(kernel, n, stream);
}

}  // namespace cuda
}  // namespace het_tf

struct HetStore {
  het_tf::cuda::StoreView view;
  het_tf::AnyRule rule;  // its table is in device memory
  int32_t dim, row_dim, contribution_dim;
  int64_t bytes;
};

#endif  // HET_TF_OPS_CUDA_STORE_H_
