// Memory on a device, or pinned on the host, that is freed with its owner.

#ifndef HET_TF_OPS_CUDA_BLOCK_H_
#define HET_TF_OPS_CUDA_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ops/core/status.h"

namespace het_tf {
namespace cuda {

// Where a device's memory comes from: the driver, or whoever has taken all of it from the driver.
// Safe for concurrent use.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  // Aligned to 256. nullptr: there is no such memory.
  virtual void* Allocate(size_t bytes) = 0;
  // What the stream still does with it comes before what it does with whatever is there next.
  virtual void Free(void* memory) = 0;
  // How many bytes may still be had; -1: it does not say.
  virtual int64_t available() = 0;
};

std::shared_ptr<DeviceMemory> DriverMemory();

// One block, which is replaced by a larger one when that is needed. Not safe for concurrent use.
class Block {
 public:
  // memory: of a device, which must outlive the block; nullptr: the block is pinned on the host.
  explicit Block(DeviceMemory* memory) : source_(memory) {}
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Has at least so many bytes. What was in them is lost if there were fewer. ResourceExhausted:
  // there is no such memory, and the block is as it was.
  Status Reserve(size_t bytes);
  // The same, and no more than that.
  Status ReserveExactly(size_t bytes);

  char* get() const { return memory_; }

 private:
  void Free();

  DeviceMemory* const source_;
  char* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_BLOCK_H_
