// Asking for memory before it is needed.

#ifndef HET_TF_OPS_CORE_MEMORY_PREFETCH_H_
#define HET_TF_OPS_CORE_MEMORY_PREFETCH_H_

#include <cstddef>

namespace het_tf {

inline void Prefetch(const void* begin, size_t bytes) {
  const char* at = static_cast<const char*>(begin);
  for (const char* end = at + bytes; at < end; at += 64) __builtin_prefetch(at);
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MEMORY_PREFETCH_H_
