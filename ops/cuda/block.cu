#include "ops/cuda/block.h"
#include "ops/cuda/device.h"

namespace het_tf {
namespace cuda {
namespace {

// Free and FreePinned wait for the device.
void FreeAt(Block::Place place, void* memory) {
  place == Block::kDevice ? Free(memory) : FreePinned(memory);
}

}  // namespace

Block::~Block() { FreeAt(place_, memory_); }

Status Block::Reserve(size_t bytes) {
  if (bytes <= bytes_) return Status();
  // Steps differ in size, and a new block for each would wait for the device each time.
  const size_t roomy = bytes + bytes / 4;
  void* memory = nullptr;
  const int error = place_ == kDevice ? Allocate(roomy, &memory) : AllocatePinned(roomy, &memory);
  if (error != 0) {
    return ResourceExhausted(roomy, " bytes of ", place_ == kDevice ? "device" : "pinned",
                             " memory: ", ErrorString(error));
  }
  FreeAt(place_, memory_);
  memory_ = static_cast<char*>(memory);
  bytes_ = roomy;
  return Status();
}

}  // namespace cuda
}  // namespace het_tf
