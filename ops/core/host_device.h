// For what is one definition on host and device.

#ifndef HET_TF_OPS_CORE_HOST_DEVICE_H_
#define HET_TF_OPS_CORE_HOST_DEVICE_H_

#ifdef __CUDACC__
#define HET_HD __host__ __device__
#else
#define HET_HD
#endif

#endif  // HET_TF_OPS_CORE_HOST_DEVICE_H_
