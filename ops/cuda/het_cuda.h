// Embedding rows in a device's memory: C functions for what a training step does with them.
//
// All pointers are to device memory unless said otherwise, with the shape beside them; n is a
// number that the caller knows, num_... one that the device has computed. Everything runs on the
// caller's stream, and nothing waits for it or allocates: what a verb needs beside its arguments is
// scratch of its ..._scratch_bytes, which it is free to overwrite and which is not read again.
//
// Verbs of one batch may run beside those of another. A function returns 0 or a cudaError_t.

#ifndef HET_TF_OPS_CUDA_HET_CUDA_H_
#define HET_TF_OPS_CUDA_HET_CUDA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void* HetStream;  // cudaStream_t

const char* het_error_string(int error);

// ---- A batch of ids and its unique keys

// The arrays are the caller's; het_unique writes them.
typedef struct {
  int64_t num_ids;     // n, below 2^31
  int64_t* keys;       // (n): the first num_keys, in the order of their first occurrence
  int32_t* key_of;     // (n): which of the keys each id is
  int32_t* begin;      // (n + 1): key u occurs begin[u + 1] - begin[u] times,
  int32_t* positions;  // (n): at positions[begin[u]] < ... < positions[begin[u + 1] - 1]
  int32_t* num_keys;   // (1)
} HetBatch;

size_t het_unique_scratch_bytes(int64_t n);
int het_unique(const int64_t* ids,  // (n)
               const HetBatch* batch, void* scratch, HetStream stream);

// Each id's row: the first dim floats of rows[slots[u]], or of visitors[slots[u] - lines] where
// that is not negative. (Pooled forms, once there are combiners, are verbs beside this one.)
int het_gather(const HetBatch* batch,
               const int32_t* slots,                           // (num_keys)
               const float* rows, int64_t stride,              // (lines, stride)
               int64_t lines,                                  //
               const float* visitors, int64_t visitor_stride,  // (visitors, visitor_stride)
               int32_t dim,                                    //
               float* out,                                     // (n, dim)
               HetStream stream);

// The gradient of each key: the sum of its occurrences' gradients, which comes out the same every
// time, and in the order of its occurrences where these are no more than 256.
size_t het_segment_sum_scratch_bytes(int64_t n, int32_t dim);
int het_segment_sum(const HetBatch* batch,
                    const float* gradients,  // (n, dim)
                    int32_t dim,
                    float* sums,             // (n, dim): the first num_keys
                    float* squares,          // (n): the sum of each one's squares
                    int64_t* num_nonfinite,  // (1): keys for which that is not finite
                    void* scratch, HetStream stream);

#ifdef __cplusplus
}
#endif

#endif  // HET_TF_OPS_CUDA_HET_CUDA_H_
