// What CUDA reports, as a Status.

#ifndef HET_TF_OPS_CUDA_ERROR_H_
#define HET_TF_OPS_CUDA_ERROR_H_

#include <new>

#include "ops/core/status.h"
#include "ops/cuda/het_cuda.h"

namespace het_tf {
namespace cuda {

// what: that failed.
inline Status ToStatus(int error, const char* what) {
  constexpr int kOutOfMemory = 2;  // cudaErrorMemoryAllocation
  if (error == 0) return Status();
  if (error == kOutOfMemory) return ResourceExhausted(what, ": ", het_error_string(error));
  return FailedPrecondition(what, ": ", het_error_string(error));
}

// What call() returns, or ResourceExhausted where it runs out of the host's memory.
template <typename Call>
Status OrOutOfMemory(const Call& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("a device cache's part on the host: out of memory");
  }
}

}  // namespace cuda
}  // namespace het_tf

#define HET_RETURN_IF_CUDA_ERROR(expr) HET_RETURN_IF_ERROR(::het_tf::cuda::ToStatus((expr), #expr))

#endif  // HET_TF_OPS_CUDA_ERROR_H_
