#include "ops/cuda/block.h"

#include "ops/cuda/memory.h"

namespace het_tf {
namespace cuda {
namespace {

class Driver : public DeviceMemory {
 public:
  void* Allocate(size_t bytes) override {
    void* memory = nullptr;
    return cuda::Allocate(bytes, &memory) == 0 ? memory : nullptr;
  }
  void Free(void* memory) override { cuda::Free(memory); }
  int64_t available() override { return -1; }
};

}  // namespace

std::shared_ptr<DeviceMemory> DriverMemory() { return std::make_shared<Driver>(); }

Block::~Block() { Free(); }

void Block::Free() {
  if (memory_ == nullptr) return;
  source_ == nullptr ? static_cast<void>(FreePinned(memory_)) : source_->Free(memory_);
}

Status Block::Reserve(size_t bytes) {
  if (bytes <= bytes_) return Status();
  // Steps differ in size, and a new block for each would cost time each time.
  return ReserveExactly(bytes + bytes / 4);
}

Status Block::ReserveExactly(size_t bytes) {
  if (bytes <= bytes_) return Status();
  void* memory = nullptr;
  if (source_ == nullptr) {
    if (AllocatePinned(bytes, &memory) != 0) memory = nullptr;
  } else {
    memory = source_->Allocate(bytes);
  }
  if (memory == nullptr) {
    return ResourceExhausted(bytes, " bytes of ", source_ == nullptr ? "pinned" : "device",
                             " memory: there are no more");
  }
  Free();
  memory_ = static_cast<char*>(memory);
  bytes_ = bytes;
  return Status();
}

}  // namespace cuda
}  // namespace het_tf
