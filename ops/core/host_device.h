// For what is one definition on host and device (HET_HD), and for what only runs on a device or, in
// the host build of ops/cuda, in its place (HET_DEVICE).

#ifndef HET_TF_OPS_CORE_HOST_DEVICE_H_
#define HET_TF_OPS_CORE_HOST_DEVICE_H_

#ifdef __CUDACC__
#define HET_HD __host__ __device__
#define HET_DEVICE __device__
#else
#define HET_HD
#define HET_DEVICE
#endif

#endif  // HET_TF_OPS_CORE_HOST_DEVICE_H_
