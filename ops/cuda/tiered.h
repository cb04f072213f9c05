// A table larger than device memory: the rows in use are in a device store, all others on the host.
// A step's rows that are not on the device yet, and no others, cross the bus, in pinned buffers;
// rows that give way to them come back if they were updated. (ScaleFreeCTR's virtual sparse ids:
// Guo et al., SIGIR 2021.)
//
// A step goes through
//   Fetch     unique ids, lines for what is missing, rows that leave, rows from the host
//   Install   those rows to the device
//   Gather, Update, Release      what training does with them
// and is a stage of a Pipeline in each: while step t trains, the rows of t + 1 cross the bus and
// those of t + 2 are looked for on the host. From Fetch on its lines are pinned, so no row leaves
// that a step under way needs, and one that leaves is final (ScratchPipe: Kwon & Rhu, ISCA 2022).

#ifndef HET_TF_OPS_CUDA_TIERED_H_
#define HET_TF_OPS_CUDA_TIERED_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/core/status.h"
#include "ops/cuda/het_cuda.h"
#include "ops/cuda/memory.h"

namespace het_tf {
namespace cuda {

// The host's side of a tiered table. Called by Fetch and Flush, one at a time.
class HostRows {
 public:
  virtual ~HostRows() = default;
  // rows: (n, stride), of each the first row_dim. What was never written is a row that nobody has
  // updated.
  virtual void Read(const int64_t* keys, int64_t n, float* rows, int64_t stride) = 0;
  virtual void Write(const int64_t* keys, int64_t n, const float* rows, int64_t stride) = 0;
};

struct TieredConfig {
  int32_t dim = 0;
  std::string optimizer;  // Optimizer::Parse
  int64_t lines = 0;      // rows on the device: more than the unique keys of all steps under way,
                          // since the buckets of lines do not fill evenly
  int64_t max_ids = 0;    // of a step
  int32_t policy = HET_LFU;
};

// Device and pinned memory that is freed with its owner.
class Buffers {
 public:
  ~Buffers();
  template <typename T>
  Status NewDevice(int64_t n, T** memory) {
    return New(false, sizeof(T) * n, reinterpret_cast<void**>(memory));
  }
  template <typename T>
  Status NewPinned(int64_t n, T** memory) {
    return New(true, sizeof(T) * n, reinterpret_cast<void**>(memory));
  }

 private:
  Status New(bool pinned, size_t bytes, void** memory);

  std::vector<void*> device_, pinned_;
};

class TieredTable {
 public:
  // A step's arrays, to be used for one step after the other.
  class Step {
   private:
    friend class TieredTable;

    Buffers buffers_;
    HetBatch batch_ = {};
    HetList misses_ = {}, checks_ = {};
    int64_t* ids_ = nullptr;          // (max_ids)
    int32_t* slots_ = nullptr;        // (max_ids)
    float* arriving_ = nullptr;       // (max_ids, row_stride)
    int64_t* bases_ = nullptr;        // (max_ids), zeros
    float* sums_ = nullptr;           // (max_ids, dim)
    float* squares_ = nullptr;        // (max_ids)
    int64_t* nonfinite_ = nullptr;    // (1)
    char* scratch_ = nullptr;         // of gather to release
    float* arriving_host_ = nullptr;  // (max_ids, row_stride), pinned
    int64_t num_misses_ = 0;
  };

  // rows must outlive the table. stream runs what works on rows, copies what crosses the bus; they
  // may be one.
  static Status Create(const TieredConfig& config, HostRows* rows, Stream stream, Stream copies,
                       std::unique_ptr<TieredTable>* table);
  ~TieredTable();

  Status NewStep(std::unique_ptr<Step>* step);

  // The functions below may run beside each other for different steps; of one step they run in this
  // order, and Fetch and Flush not beside each other.

  // ids: (n), host memory. Where its keys and those of the steps under way do not fit the lines
  // this is an error, and the step holds nothing.
  Status Fetch(const int64_t* ids, int64_t n, Step* step);
  Status Install(Step* step);
  // out: (n, dim), device memory; there when this returns.
  Status Gather(Step* step, float* out);
  // gradients: (n, dim), device memory, there by now. Keys whose gradient is not finite are left
  // out.
  Status Update(Step* step, const float* gradients, float learning_rate);
  Status Release(Step* step);

  // Writes what was updated to the host: before anybody else reads there. No step may be under way.
  Status Flush();

  struct Counters {
    int64_t rows_up, rows_down;    // to the device, and back
    int64_t bytes_up, bytes_down;  // of them
  };
  Counters counters() const;

 private:
  TieredTable(const TieredConfig& config, HostRows* rows, Stream stream, Stream copies)
      : config_(config), host_rows_(rows), stream_(stream), copies_(copies) {}

  Status Plan(const int64_t* ids, int64_t n, Step* step, int64_t* num_victims);
  Status WriteBack(int64_t num_victims);
  Status CopyRows(const float* from, int64_t n, float* to);

  const TieredConfig config_;
  HostRows* const host_rows_;
  const Stream stream_, copies_;
  HetStore* store_ = nullptr;
  HetStoreInfo info_ = {};

  // Held while verbs are put on the stream, and until what Fetch must know has come back. What a
  // verb needs is there before, so that no step waits behind another's.
  std::mutex mutex_;

  // Fetch's and Flush's alone.
  Buffers buffers_;
  char* scratch_ = nullptr;
  HetSlots leaving_slots_ = {};       // (max(max_ids, lines))
  int64_t* leaving_keys_ = nullptr;   // (max_ids)
  float* leaving_ = nullptr;          // (max_ids, row_stride)
  int64_t* keys_host_ = nullptr;      // (max_ids), pinned
  float* leaving_host_ = nullptr;     // (max_ids, row_stride), pinned
  int64_t* num_visitors_ = nullptr;   // (1)
  int64_t* num_evicted_ = nullptr;    // (1)
  int32_t* counts_host_ = nullptr;    // (2), pinned
  int64_t* visitors_host_ = nullptr;  // (1), pinned
  int32_t* ones_ = nullptr;           // (max_ids)

  std::atomic<int64_t> rows_up_{0}, rows_down_{0};
};

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_TIERED_H_
