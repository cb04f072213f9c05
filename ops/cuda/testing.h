// What the tests of ops/cuda need: arrays on the device, and its verbs as expectations.

#ifndef HET_TF_OPS_CUDA_TESTING_H_
#define HET_TF_OPS_CUDA_TESTING_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "ops/cuda/het_cuda.h"
#include "ops/cuda/memory.h"

#define EXPECT_CUDA(expr) EXPECT_PRED_FORMAT1(::het_tf::testing::IsCudaSuccess, expr)

namespace het_tf {
namespace testing {

constexpr HetStream kStream = nullptr;

// Random tests do this part of their rounds on a device, where every array is a call of the driver.
inline const int kFewer = cuda::IsHostBuild() ? 1 : 4;

inline ::testing::AssertionResult IsCudaSuccess(const char* expression, int error) {
  if (error == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << expression << ": " << het_error_string(error);
}

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t n = 0) : n_(n) {
    void* memory = nullptr;
    EXPECT_CUDA(cuda::Allocate(sizeof(T) * n, &memory));
    memory_ = static_cast<T*>(memory);
  }
  explicit DeviceArray(const std::vector<T>& from)
      : DeviceArray(static_cast<int64_t>(from.size())) {
    EXPECT_CUDA(cuda::Copy(from.data(), sizeof(T) * from.size(), memory_, kStream));
    EXPECT_CUDA(cuda::Synchronize(kStream));  // from may end with this
  }
  DeviceArray(DeviceArray&& other) noexcept : memory_(other.memory_), n_(other.n_) {
    other.memory_ = nullptr;
  }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(n_, other.n_);
    return *this;
  }
  ~DeviceArray() { cuda::Free(memory_); }

  T* get() const { return memory_; }
  int64_t size() const { return n_; }

  // The first n.
  std::vector<T> Read(int64_t n) const {
    EXPECT_LE(n, n_);
    std::vector<T> read(n);
    EXPECT_CUDA(cuda::Copy(memory_, sizeof(T) * n, read.data(), kStream));
    EXPECT_CUDA(cuda::Synchronize(kStream));
    return read;
  }
  std::vector<T> Read() const { return Read(n_); }

 private:
  T* memory_ = nullptr;
  int64_t n_ = 0;
};

// A batch with its arrays, brought to unique keys.
class Batch {
 public:
  explicit Batch(const std::vector<int64_t>& ids)
      : n_(static_cast<int64_t>(ids.size())),
        keys_(n_),
        key_of_(n_),
        begin_(n_ + 1),
        positions_(n_),
        num_keys_(1),
        batch_{n_, keys_.get(), key_of_.get(), begin_.get(), positions_.get(), num_keys_.get()} {
    const DeviceArray<int64_t> on_device(ids);
    const DeviceArray<char> scratch(het_unique_scratch_bytes(n_));
    EXPECT_CUDA(het_unique(on_device.get(), &batch_, scratch.get(), kStream));
  }

  const HetBatch* get() const { return &batch_; }
  int64_t num_ids() const { return n_; }
  int64_t num_keys() const { return num_keys_.Read()[0]; }
  std::vector<int64_t> keys() const { return keys_.Read(num_keys()); }
  std::vector<int32_t> key_of() const { return key_of_.Read(); }
  std::vector<int32_t> begin() const { return begin_.Read(num_keys() + 1); }
  std::vector<int32_t> positions() const { return positions_.Read(); }

 private:
  const int64_t n_;
  DeviceArray<int64_t> keys_;
  DeviceArray<int32_t> key_of_, begin_, positions_, num_keys_;
  const HetBatch batch_;
};

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_TESTING_H_
