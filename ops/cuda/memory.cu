#include "ops/cuda/memory.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include <cstdlib>
#include <cstring>
#endif

namespace het_tf {
namespace cuda {

std::atomic<int64_t> allocations_left{INT64_MAX};
std::atomic<int64_t> items_run{0};
std::atomic<int64_t> threaded_from{64};

#ifdef __CUDACC__

bool IsHostBuild() { return false; }

int Allocate(size_t bytes, void** memory) { return cudaMalloc(memory, bytes); }
int Free(void* memory) { return cudaFree(memory); }
int AllocatePinned(size_t bytes, void** memory) { return cudaMallocHost(memory, bytes); }
int FreePinned(void* memory) { return cudaFreeHost(memory); }

int Copy(const void* from, size_t bytes, void* to, Stream stream) {
  if (bytes == 0) return 0;  // of no memory, perhaps
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
}
int Fill(int byte, size_t bytes, void* to, Stream stream) {
  if (bytes == 0) return 0;
  return cudaMemsetAsync(to, byte, bytes, static_cast<cudaStream_t>(stream));
}
int Synchronize(Stream stream) { return cudaStreamSynchronize(static_cast<cudaStream_t>(stream)); }

int GetDevice(int* device) { return cudaGetDevice(device); }
int SetDevice(int device) { return cudaSetDevice(device); }

const char* ErrorString(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

#else

bool IsHostBuild() { return true; }

int Allocate(size_t bytes, void** memory) {
  constexpr int kOutOfMemory = 2;  // cudaErrorMemoryAllocation
  if (allocations_left.fetch_sub(1) <= 0) return kOutOfMemory;
  *memory = std::malloc(bytes);
  if (*memory == nullptr) return bytes == 0 ? 0 : kOutOfMemory;
  std::memset(*memory, 0xab, bytes);
  return 0;
}
int Free(void* memory) {
  std::free(memory);
  return 0;
}
int AllocatePinned(size_t bytes, void** memory) { return Allocate(bytes, memory); }
int FreePinned(void* memory) { return Free(memory); }

int Copy(const void* from, size_t bytes, void* to, Stream) {
  if (bytes > 0) std::memcpy(to, from, bytes);
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

const char* ErrorString(int error) { return error == 2 ? "out of memory" : "unknown error"; }

#endif

}  // namespace cuda
}  // namespace het_tf
