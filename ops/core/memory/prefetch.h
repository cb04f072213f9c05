// Asking for memory before it is needed.

#ifndef HET_TF_OPS_CORE_MEMORY_PREFETCH_H_
#define HET_TF_OPS_CORE_MEMORY_PREFETCH_H_

#include <cstddef>

namespace het_tf {

// The line of that address. g++ takes a function that does nothing but __builtin_prefetch for one
// without any effect, and leaves out calls of it; so they look as if they did more.
inline void Prefetch(const void* at) {
  __builtin_prefetch(at);
  asm volatile("" : : "r"(at));
}
inline void PrefetchToWrite(const void* at) {
  __builtin_prefetch(at, 1);
  asm volatile("" : : "r"(at));
}

inline void Prefetch(const void* begin, size_t bytes) {
  const char* at = static_cast<const char*>(begin);
  for (const char* end = at + bytes; at < end; at += 64) Prefetch(at);
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MEMORY_PREFETCH_H_
