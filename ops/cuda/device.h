// A device: kernel launches and atomics; with memory.h its memory and streams.
//
// Compiled by nvcc this is CUDA. Compiled by any other compiler the host takes the device's place
// (the host build): the same kernels' bodies run on a few threads, so that they can be tested,
// under sanitizers too, where there is no GPU. A launch returns when its kernel is done, device
// memory is the heap's, filled with a pattern that no test takes for a result.
//
// A kernel is a plain struct of arguments with a body for one item: operator()(int64_t item), run
// by a thread, or operator()(const Lanes<n>&, int64_t item), run by n lanes of a warp (lanes.h).
// Items run in any order and at the same time. No kernel waits for another item or uses shared
// memory.

#ifndef HET_TF_OPS_CUDA_DEVICE_H_
#define HET_TF_OPS_CUDA_DEVICE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include <thread>
#endif

#include "ops/core/host_device.h"
#include "ops/cuda/lanes.h"
#include "ops/cuda/memory.h"

#define HET_CUDA_RETURN_IF_ERROR(expr)          \
  do {                                          \
    if (const int error = (expr)) return error; \
  } while (false)

namespace het_tf {
namespace cuda {

#ifdef __CUDACC__

inline cudaStream_t ToCuda(Stream stream) { return static_cast<cudaStream_t>(stream); }

inline constexpr int kThreads = 256;  // of a block
// Blocks that have to fit a multiprocessor at a time, which leaves a thread 64 registers. Unless
// told, ptxas keeps to 40 for the greatest optimizers and spills the rest (make gpu-kernels).
inline constexpr int kBlocks = 4;
// The most blocks of a launch whose items lanes share: several times what a device runs at once. A
// launch has an item for each id, but often fewer than half of the items have work, and starting a
// block takes longer than finding an item without work (make gpu-bench: find .074 ms for .126).
inline constexpr unsigned kMostBlocks = 4096;

template <typename Kernel>
__global__ void __launch_bounds__(kThreads) RunThreads(const Kernel kernel, int64_t n) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item < n) kernel(item);
}

template <int kLanes, typename Kernel>
__global__ void __launch_bounds__(kThreads, kBlocks) RunLanes(const Kernel kernel, int64_t n) {
  constexpr uint32_t kItems = kThreads / kLanes;  // n is below 2^31, so that 32 bits do
  uint32_t item = blockIdx.x * kItems + threadIdx.x / kLanes;
  for (; item < n; item += gridDim.x * kItems) kernel(Lanes<kLanes>(), item);
}

inline unsigned Blocks(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

template <typename Kernel>
int Launch(const Kernel& kernel, int64_t n, Stream stream) {
  if (n <= 0) return 0;
  RunThreads<<<Blocks(n), kThreads, 0, ToCuda(stream)>>>(kernel, n);
  return TakeLastError();
}

template <int kLanes, typename Kernel>
int LaunchLanes(const Kernel& kernel, int64_t n, Stream stream) {
  if (n <= 0) return 0;
  const unsigned blocks = std::min(Blocks(n * kLanes), kMostBlocks);
  RunLanes<kLanes><<<blocks, kThreads, 0, ToCuda(stream)>>>(kernel, n);
  return TakeLastError();
}

#else

// Items go round the threads from the last to the first, so that a kernel that leans on their order
// fails, and one that has them share memory is seen by ThreadSanitizer.
template <typename Body>
int RunItems(int64_t n, const Body& body) {
  constexpr int kLaunchFailure = 719;  // cudaErrorLaunchFailure
  if (n <= 0) return 0;
  if (launches_left.fetch_sub(1) <= 0) return kLaunchFailure;
  items_run += n;
  constexpr int64_t kThreads = 3;
  const auto run = [&](int64_t first, int64_t stride) {
    for (int64_t item = n - 1 - first; item >= 0; item -= stride) body(item);
  };
  if (n < threaded_from) {
    run(0, 1);
    return TakeLastError();
  }
  std::thread others[kThreads - 1];
  for (int64_t t = 1; t < kThreads; ++t) others[t - 1] = std::thread(run, t, kThreads);
  run(0, kThreads);
  for (std::thread& other : others) other.join();
  return TakeLastError();
}

template <typename Kernel>
int Launch(const Kernel& kernel, int64_t n, Stream) {
  return RunItems(n, kernel);
}

template <int kLanes, typename Kernel>
int LaunchLanes(const Kernel& kernel, int64_t n, Stream) {
  return RunItems(n, [&](int64_t item) { kernel(Lanes<kLanes>(), item); });
}

#endif

// ---- Atomics, for kernels. All are relaxed.

HET_DEVICE inline int32_t AtomicLoad(const int32_t* from) {
#ifdef __CUDA_ARCH__
  return *static_cast<const volatile int32_t*>(from);
#else
  return __atomic_load_n(from, __ATOMIC_RELAXED);
#endif
}

// Returns what was there.
HET_DEVICE inline int32_t AtomicCompareAndSwap(int32_t* at, int32_t expected, int32_t desired) {
#ifdef __CUDA_ARCH__
  return atomicCAS(at, expected, desired);
#else
  __atomic_compare_exchange_n(at, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
#endif
}

HET_DEVICE inline void AtomicMin(int32_t* at, int32_t x) {
#ifdef __CUDA_ARCH__
  atomicMin(at, x);
#else
  int32_t seen = AtomicLoad(at);
  while (x < seen &&
         !__atomic_compare_exchange_n(at, &seen, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

HET_DEVICE inline void AtomicAdd(int32_t* at, int32_t x) {
#ifdef __CUDA_ARCH__
  atomicAdd(at, x);
#else
  __atomic_fetch_add(at, x, __ATOMIC_RELAXED);
#endif
}

HET_DEVICE inline void AtomicAdd(int64_t* at, int64_t x) {
#ifdef __CUDA_ARCH__
  atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(x));
#else
  __atomic_fetch_add(at, x, __ATOMIC_RELAXED);
#endif
}

// Adds x for each thread that comes here: once for all those of a warp that do so together. at and
// x: the same for all of them.
HET_DEVICE inline void AtomicAddEach(int64_t* at, int64_t x) {
#ifdef __CUDA_ARCH__
  const unsigned together = __activemask();
  if (static_cast<int>(threadIdx.x % 32) == __ffs(together) - 1) {
    AtomicAdd(at, x * __popc(together));
  }
#else
  AtomicAdd(at, x);
#endif
}

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_DEVICE_H_
