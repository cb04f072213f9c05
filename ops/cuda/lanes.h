// Some lanes of a warp that work on one item together: the lanes of ops/core/row/lanes.h, and
//
//   Sum(to, n, first, last, at)   to[i] = at(first, i) + ... + at(last - 1, i), in this order, for
//                          i in [0, n); first < last
//   FirstWhere(n, holds)   the lowest i in [0, n) for which holds(i), or -1
//   LeastOf(n, at)         the i in [0, n) with the lowest at(i), an int64_t; the lowest of equals
//   Once(body)             calls body() once, after all that the lanes did before
//
// Every lane calls each of them, with the same arguments, and gets the same result. What was
// written in one call all lanes see after it; within it a lane sees its own alone.
//
// In the host build the lanes of ForEach take their turns from the last to the first.

#ifndef HET_TF_OPS_CUDA_LANES_H_
#define HET_TF_OPS_CUDA_LANES_H_

#include <cstdint>
#include <limits>

#include "ops/core/host_device.h"
#ifndef __CUDACC__
#include "ops/core/row/lanes.h"
#endif

namespace het_tf {
namespace cuda {

#ifdef __CUDACC__

// A pragma of nvcc's. (lanes_threads_test.cc has this half compiled by other compilers.)
#ifdef __NVCC__
#define HET_PRAGMA(text) _Pragma(#text)
#else
#define HET_PRAGMA(text)
#endif

template <int kLanes>
class Lanes {
  static_assert(kLanes == 16 || kLanes == 32);

 public:
  template <typename Body>
  __device__ void ForEach(int n, const Body& body) const {
    for (int i = lane(); i < n; i += kLanes) body(i);
    __syncwarp(mask());
  }

  // A lane computes several columns before it writes any of them, so that their loads overlap. The
  // compiler does not move a load past a write, which may be to the same address.
  template <typename At>
  __device__ void Transform(float* to, int n, const At& at) const {
    for (int first = lane(); first < n; first += kColumns * kLanes) {
      float x[kColumns];
      HET_PRAGMA(unroll)
      for (int k = 0; k < kColumns; ++k) {
        if (first + k * kLanes < n) x[k] = at(first + k * kLanes);
      }
      HET_PRAGMA(unroll)
      for (int k = 0; k < kColumns; ++k) {
        if (first + k * kLanes < n) to[first + k * kLanes] = x[k];
      }
    }
    __syncwarp(mask());
  }

  template <typename At>
  __device__ void Sum(float* to, int n, int32_t first, int32_t last, const At& at) const {
    if (n <= kLanes) {
      SumColumns<1>(to, n, first, last, at);
    } else {
      SumColumns<kColumns>(to, n, first, last, at);
    }
    __syncwarp(mask());
  }

  __device__ float SumOfSquares(const float* x, int n) const {
    return SumOfSquares(n, [&](int i) { return x[i]; });
  }

  template <typename At>
  __device__ float SumOfSquares(int n, const At& at) const {
    float sum = 0;  // of the columns that are this lane's modulo 8
    for (int first = 0; first < n; first += kLanes) {
      const float x = first + lane() < n ? at(first + lane()) : 0.0f;
      const float square = x * x;
      for (int part = 0; part < kLanes; part += 8) sum += FromLane(square, part + (lane() & 7));
    }
    sum += FromLane(sum, lane() ^ 4);
    sum += FromLane(sum, lane() ^ 2);
    return sum + FromLane(sum, lane() ^ 1);
  }

  template <typename At>
  __device__ float Largest(int n, const At& at) const {
    float largest = 0;
    for (int i = lane(); i < n; i += kLanes) largest = fmaxf(largest, at(i));
    for (int apart = kLanes / 2; apart > 0; apart /= 2) {
      largest = fmaxf(largest, FromLane(largest, lane() ^ apart));
    }
    return largest;
  }

  __device__ void Store(float* to, float x) const {
    Once([&] { *to = x; });
  }

  template <typename Holds>
  __device__ int FirstWhere(int n, const Holds& holds) const {
    for (int first = 0; first < n; first += kLanes) {
      const int i = first + lane();
      const unsigned found = __ballot_sync(mask(), i < n && holds(i)) & mask();
      if (found != 0) return first + __ffs(found) - 1 - group();
    }
    return -1;
  }

  template <typename At>
  __device__ int LeastOf(int n, const At& at) const {
    int64_t least = std::numeric_limits<int64_t>::max();
    int where = n;
    for (int i = lane(); i < n; i += kLanes) {
      const int64_t x = at(i);
      if (where == n || x < least) least = x, where = i;
    }
    for (int apart = kLanes / 2; apart > 0; apart /= 2) {
      const auto other = static_cast<int64_t>(
          __shfl_sync(mask(), static_cast<long long>(least), lane() ^ apart, kLanes));
      const int other_where = __shfl_sync(mask(), where, lane() ^ apart, kLanes);
      if (other < least || (other == least && other_where < where)) {
        least = other, where = other_where;
      }
    }
    return where;
  }

  template <typename Body>
  __device__ void Once(const Body& body) const {
    __syncwarp(mask());
    if (lane() == 0) body();
    __syncwarp(mask());
  }

 private:
  static constexpr int kColumns = 4;  // of a lane at a time

  template <int kAtOnce, typename At>
  __device__ static void SumColumns(float* to, int n, int32_t first, int32_t last, const At& at) {
    // Eight loads at a time: more spill registers (make gpu-kernels).
    [[maybe_unused]] constexpr int kUnrolled = kAtOnce == 1 ? 8 : 2;
    for (int begin = lane(); begin < n; begin += kAtOnce * kLanes) {
      float sum[kAtOnce] = {};
      HET_PRAGMA(unroll)
      for (int k = 0; k < kAtOnce; ++k) {
        if (begin + k * kLanes < n) sum[k] = at(first, begin + k * kLanes);
      }
      HET_PRAGMA(unroll kUnrolled)
      for (int32_t j = first + 1; j < last; ++j) {
        HET_PRAGMA(unroll)
        for (int k = 0; k < kAtOnce; ++k) {
          if (begin + k * kLanes < n) sum[k] += at(j, begin + k * kLanes);
        }
      }
      HET_PRAGMA(unroll)
      for (int k = 0; k < kAtOnce; ++k) {
        if (begin + k * kLanes < n) to[begin + k * kLanes] = sum[k];
      }
    }
  }

  __device__ static int lane() { return threadIdx.x % kLanes; }
  __device__ static int group() { return (threadIdx.x % 32) / kLanes * kLanes; }
  __device__ static unsigned mask() { return kLanes == 32 ? 0xffffffffu : 0xffffu << group(); }
  __device__ static float FromLane(float x, int from) {
    return __shfl_sync(mask(), x, from, kLanes);
  }
};

#else

template <int kLanes>
class Lanes : public OneLane {
 public:
  template <typename Body>
  void ForEach(int n, const Body& body) const {
    for (int lane = kLanes - 1; lane >= 0; --lane) {
      for (int i = lane; i < n; i += kLanes) body(i);
    }
  }

  template <typename At>
  void Transform(float* to, int n, const At& at) const {
    ForEach(n, [&](int i) { to[i] = at(i); });
  }

  template <typename At>
  void Sum(float* to, int n, int32_t first, int32_t last, const At& at) const {
    ForEach(n, [&](int i) {
      float sum = at(first, i);
      for (int32_t j = first + 1; j < last; ++j) sum += at(j, i);
      to[i] = sum;
    });
  }

  template <typename Holds>
  int FirstWhere(int n, const Holds& holds) const {
    for (int i = 0; i < n; ++i) {
      if (holds(i)) return i;
    }
    return -1;
  }

  template <typename At>
  int LeastOf(int n, const At& at) const {
    int where = 0;
    for (int i = 1; i < n; ++i) {
      if (at(i) < at(where)) where = i;
    }
    return where;
  }

  template <typename Body>
  void Once(const Body& body) const {
    body();
  }
};

#endif

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_LANES_H_
