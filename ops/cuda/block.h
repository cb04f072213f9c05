// Memory on a device, or pinned on the host, that is freed with its owner.

#ifndef HET_TF_OPS_CUDA_BLOCK_H_
#define HET_TF_OPS_CUDA_BLOCK_H_

#include <cstddef>

#include "ops/core/status.h"

namespace het_tf {
namespace cuda {

// One block, which is replaced by a larger one when that is needed. Not safe for concurrent use.
class Block {
 public:
  enum Place { kDevice, kPinned };

  explicit Block(Place place) : place_(place) {}
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Has at least so many bytes. What was in them is lost if there were fewer; the device may still
  // be at work on those, for it is waited for. ResourceExhausted: there is no such memory, and the
  // block is as it was.
  Status Reserve(size_t bytes);

  char* get() const { return memory_; }

 private:
  const Place place_;
  char* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_BLOCK_H_
