#include "ops/cuda/memory.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#endif

namespace het_tf {
namespace cuda {

std::atomic<int64_t> allocations_left{INT64_MAX};
std::atomic<int64_t> launches_left{INT64_MAX};
std::atomic<int64_t> items_run{0};
std::atomic<int64_t> unwritten_copies{0};
std::atomic<int64_t> threaded_from{64};

namespace {

int Reported(int error) {
  if (error != 0) TakeLastError();
  return error;
}

}  // namespace

#ifdef __CUDACC__

bool IsHostBuild() { return false; }

int TakeLastError() { return cudaGetLastError(); }

int Allocate(size_t bytes, void** memory) { return Reported(cudaMalloc(memory, bytes)); }
int Free(void* memory) { return Reported(cudaFree(memory)); }
int AllocatePinned(size_t bytes, void** memory) { return Reported(cudaMallocHost(memory, bytes)); }
int FreePinned(void* memory) { return Reported(cudaFreeHost(memory)); }

int Copy(const void* from, size_t bytes, void* to, Stream stream) {
  if (bytes == 0) return 0;  // of no memory, perhaps
  return Reported(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}
int Fill(int byte, size_t bytes, void* to, Stream stream) {
  if (bytes == 0) return 0;
  return Reported(cudaMemsetAsync(to, byte, bytes, static_cast<cudaStream_t>(stream)));
}
int Synchronize(Stream stream) {
  return Reported(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

int GetDevice(int* device) { return Reported(cudaGetDevice(device)); }
int SetDevice(int device) { return Reported(cudaSetDevice(device)); }

const char* ErrorString(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

#else

namespace {

constexpr int kOutOfMemory = 2;  // cudaErrorMemoryAllocation
constexpr uint32_t kUnwritten = 0xabababab, kUnwrittenPinned = 0xcdcdcdcd;

// As CUDA does: whoever asks next gets this error, too.
thread_local int last_error = 0;

int Malloc(uint32_t pattern, size_t bytes, void** memory) {
  if (allocations_left.fetch_sub(1) <= 0) return last_error = kOutOfMemory;
  *memory = std::malloc(bytes);
  if (*memory == nullptr) return bytes == 0 ? 0 : last_error = kOutOfMemory;
  std::memset(*memory, static_cast<int>(pattern & 0xff), bytes);
  return 0;
}

bool HoldsUnwritten(const void* from, size_t bytes) {
  const auto* words = static_cast<const char*>(from);
  for (size_t at = 0; at + sizeof(kUnwritten) <= bytes; at += sizeof(kUnwritten)) {
    if (std::memcmp(words + at, &kUnwritten, sizeof(kUnwritten)) == 0) return true;
  }
  return false;
}

}  // namespace

bool IsHostBuild() { return true; }

int TakeLastError() { return std::exchange(last_error, 0); }

int Allocate(size_t bytes, void** memory) { return Reported(Malloc(kUnwritten, bytes, memory)); }
int Free(void* memory) {
  std::free(memory);
  return 0;
}
int AllocatePinned(size_t bytes, void** memory) {
  return Reported(Malloc(kUnwrittenPinned, bytes, memory));
}
int FreePinned(void* memory) { return Free(memory); }

int Copy(const void* from, size_t bytes, void* to, Stream) {
  if (bytes == 0) return 0;
  std::memcpy(to, from, bytes);
  if (HoldsUnwritten(to, bytes)) ++unwritten_copies;
  return 0;
}
int Fill(int byte, size_t bytes, void* to, Stream) {
  if (bytes > 0) std::memset(to, byte, bytes);
  return 0;
}
int Synchronize(Stream) { return 0; }

int GetDevice(int* device) {
  *device = 0;
  return 0;
}
int SetDevice(int) { return 0; }

const char* ErrorString(int error) {
  return error == kOutOfMemory ? "out of memory" : "unknown error";
}

#endif

}  // namespace cuda
}  // namespace het_tf
