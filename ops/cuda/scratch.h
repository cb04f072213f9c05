// Cuts a verb's scratch memory into arrays. Run without memory it says how much that takes.

#ifndef HET_TF_OPS_CUDA_SCRATCH_H_
#define HET_TF_OPS_CUDA_SCRATCH_H_

#include <cstddef>
#include <cstdint>

namespace het_tf {
namespace cuda {

class Scratch {
 public:
  explicit Scratch(void* memory = nullptr) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  T* Take(int64_t n) {
    constexpr size_t kAlignment = 256;
    char* taken = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += (sizeof(T) * n + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(taken);
  }

  size_t bytes() const { return bytes_; }

 private:
  char* const memory_;
  size_t bytes_ = 0;
};

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_SCRATCH_H_
