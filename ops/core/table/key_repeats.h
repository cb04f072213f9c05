// Keys that come twice among more than memory should hold.

#ifndef HET_TF_OPS_CORE_TABLE_KEY_REPEATS_H_
#define HET_TF_OPS_CORE_TABLE_KEY_REPEATS_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/parallel.h"

namespace het_tf {

// Of many keys, one share at a time: every key belongs to one of num_shares, and Add takes those of
// the present share. So whoever has all of them goes through them num_shares times:
//
//   for (KeyRepeats repeats(num_keys); !repeats.done(); repeats.NextShare()) {
//     for (int64_t key : keys) repeats.Add(key, HashKey(key));
//     if (const auto key = repeats.Forget(parallel_for)) ...  // it comes twice
//   }
//
// Not to be called by two threads at once.
class KeyRepeats {
 public:
  // Of a share: 32 MB.
  static constexpr int64_t kKeysAShare = int64_t{1} << 22;

  explicit KeyRepeats(int64_t num_keys, int64_t keys_a_share = kKeysAShare)
      : num_shares_(static_cast<uint32_t>(1 + num_keys / keys_a_share)) {
    // Their numbers differ by chance.
    const int64_t of_bucket = num_keys / num_shares_ / kBuckets;
    for (auto& bucket : buckets_) bucket.reserve(of_bucket + of_bucket / 16 + 64);
  }

  bool done() const { return share_ == num_shares_; }

  // Takes a key if it is of this share. hash: HashKey(key).
  void Add(int64_t key, uint64_t hash) {
    // By bits that do not depend on the shard that the key is of.
    if (BucketOfHash(hash, num_shares_) != share_) return;
    buckets_[(hash >> 16) % kBuckets].push_back(key);
  }

  // Forgets the keys, of which it gives one that was added twice, if there is one.
  std::optional<int64_t> Forget(const ParallelFor& parallel_for) {
    std::array<const int64_t*, kBuckets> found{};
    const int64_t cost = 100 * static_cast<int64_t>(buckets_[0].size() + 1);
    parallel_for(kBuckets, cost, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        auto& bucket = buckets_[b];
        std::sort(bucket.begin(), bucket.end());
        const auto twice = std::adjacent_find(bucket.begin(), bucket.end());
        if (twice != bucket.end()) found[b] = &*twice;
      }
    });
    std::optional<int64_t> key;
    for (const int64_t* each : found) {
      if (each != nullptr) key = *each;
    }
    for (auto& bucket : buckets_) bucket.clear();
    return key;
  }

  void NextShare() { ++share_; }

 private:
  static constexpr int kBuckets = 64;

  const uint32_t num_shares_;
  uint32_t share_ = 0;
  std::array<std::vector<int64_t>, kBuckets> buckets_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_KEY_REPEATS_H_
