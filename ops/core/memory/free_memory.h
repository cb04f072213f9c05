// Memory that a process may still take.

#ifndef HET_TF_OPS_CORE_MEMORY_FREE_MEMORY_H_
#define HET_TF_OPS_CORE_MEMORY_FREE_MEMORY_H_

#include <cstdint>
#include <string>

namespace het_tf {

// Bytes that the machine has available, or that the process's control group (of a container) may
// still take, if that is less. -1: the kernel does not say. root: where /proc and /sys are.
int64_t FreeMemory(const std::string& root = "/");

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MEMORY_FREE_MEMORY_H_
