// How keys are spread over shards, stripes and index buckets.

#ifndef HET_TF_OPS_CORE_MEMORY_HASH_H_
#define HET_TF_OPS_CORE_MEMORY_HASH_H_

#include <cstdint>
#include <random>

#include "ops/core/host_device.h"

namespace het_tf {

// The 64-bit finalizer of MurmurHash3 (public domain). It is a bijection: distinct keys have
// distinct hashes, so a hash may stand for its key.
HET_HD inline uint64_t HashKey(int64_t key) {
  uint64_t h = static_cast<uint64_t>(key);
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdULL;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ULL;
  h ^= h >> 33;
  return h;
}

// x * n / 2^64: maps the hash evenly to [0, n) by its high bits.
HET_HD inline uint32_t ScaleHash(uint64_t hash, uint32_t n) {
  return static_cast<uint32_t>((static_cast<unsigned __int128>(hash) * n) >> 64);
}

// Shards use the high bits, stripes bits 8-15, the index's tag bits 0-7, and the index's bucket a
// product that depends on all of them, so that the four choices are independent.
HET_HD inline uint32_t ShardOfHash(uint64_t hash, uint32_t num_shards) {
  return ScaleHash(hash, num_shards);
}
inline uint32_t StripeOfHash(uint64_t hash, uint32_t num_stripes) {
  return (hash >> 8) & (num_stripes - 1);  // num_stripes is a power of two, at most 256
}
HET_HD inline uint8_t TagOfHash(uint64_t hash) { return (hash & 0xff) ? (hash & 0xff) : 1; }
// The order of hashes over an index's buckets, however many there are.
HET_HD inline uint64_t OrderOfHash(uint64_t hash) { return hash * 0x9e3779b97f4a7c15ULL; }
HET_HD inline uint32_t BucketOfHash(uint64_t hash, uint32_t num_buckets) {
  return ScaleHash(OrderOfHash(hash), num_buckets);
}

// A random number that is not 0: names incarnations and caches.
inline uint64_t RandomId() {
  std::random_device device;
  uint64_t id = 0;
  while (id == 0) id = (uint64_t{device()} << 32) | device();
  return id;
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MEMORY_HASH_H_
