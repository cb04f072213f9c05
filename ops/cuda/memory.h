// A device's memory and its streams, for whoever launches no kernel: what includes this needs no
// nvcc. (memory.cu has the two halves, CUDA's and the host build's.)

#ifndef HET_TF_OPS_CUDA_MEMORY_H_
#define HET_TF_OPS_CUDA_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace het_tf {
namespace cuda {

using Stream = void*;  // cudaStream_t

// Whether the host takes the device's place (device.h).
bool IsHostBuild();

// Everything below that returns an int returns 0, or a cudaError_t.

// What went wrong with the calling thread's last launch, which is then forgotten. (CUDA keeps one
// error a thread, of launches and of its other functions. So what they return is forgotten below,
// or the launch after an allocation that failed would seem to fail.)
int TakeLastError();

// The driver's memory. Freeing waits for the device.
int Allocate(size_t bytes, void** memory);
int Free(void* memory);
int AllocatePinned(size_t bytes, void** memory);
int FreePinned(void* memory);

// Either may be host memory, which must live and stay as it is until the stream has come there. (Of
// memory that is not pinned CUDA leaves open whether it is copied before this returns.)
int Copy(const void* from, size_t bytes, void* to, Stream stream);
int Fill(int byte, size_t bytes, void* to, Stream stream);
int Synchronize(Stream stream);

// The device of the calling thread.
int GetDevice(int* device);
int SetDevice(int device);

const char* ErrorString(int error);

// Host build: so many allocations succeed; after them tests see what a device out of memory does.
extern std::atomic<int64_t> allocations_left;
// Host build: so many launches run their kernel; those after them fail.
extern std::atomic<int64_t> launches_left;
// Host build: how many items kernels were run for; tests see what a call's work depends on.
extern std::atomic<int64_t> items_run;
// Host build: how many copies held a word that nobody had written since Allocate. On a device the
// initcheck of compute-sanitizer finds them.
extern std::atomic<int64_t> unwritten_copies;
// Host build: as many items run on several threads, fewer on the caller's; 64. Tests that are to
// show races set it lower.
extern std::atomic<int64_t> threaded_from;

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_MEMORY_H_
