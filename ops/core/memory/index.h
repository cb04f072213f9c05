// An open-addressing hash index from keys to slots, one cache line a bucket.
//
// A bucket holds up to 12 slots with an 8-bit tag of each key's hash, so that one line read answers
// most probes, and one comparison of the row's own key settles it. The keys live in the rows; the
// caller says how to compare. A bucket that is full sends later keys to its neighbour and counts
// them, which lets a probe stop early and an erase leave no tombstone.
//
// Not safe for concurrent use, except that Find and Prefetch may run together.

#ifndef HET_TF_OPS_CORE_MEMORY_INDEX_H_
#define HET_TF_OPS_CORE_MEMORY_INDEX_H_

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/core/memory/arena.h"
#include "ops/core/memory/hash.h"
#include "ops/core/memory/prefetch.h"

namespace het_tf {

class Index {
  static constexpr int kBucketSlots = 12;

  struct alignas(64) Bucket {
    uint8_t tags[kBucketSlots] = {0};  // 0: empty
    uint32_t overflowed = 0;           // keys that found this bucket full and went on
    uint32_t slots[kBucketSlots];

    uint32_t TagMatches(uint8_t tag) const {
#ifdef __SSE2__
      const __m128i line = _mm_load_si128(reinterpret_cast<const __m128i*>(tags));
      return _mm_movemask_epi8(_mm_cmpeq_epi8(line, _mm_set1_epi8(tag))) & 0xfff;
#else
      uint32_t hits = 0;
      for (int i = 0; i < kBucketSlots; ++i) hits |= uint32_t{tags[i] == tag} << i;
      return hits;
#endif
    }
  };
  static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");

 public:
  static constexpr uint32_t kNone = 0xffffffff;

  int64_t size() const { return size_; }
  int64_t bytes() const { return static_cast<int64_t>(buckets_.capacity() * sizeof(Bucket)); }

  // The bucket in which a hash is looked for first; good until the index grows.
  class Home {
   public:
    void Prefetch() const { het_tf::Prefetch(bucket_); }
    // The slot of the first tag match there: what Find will look at first, or kNone.
    uint32_t Guess() const {
      if (bucket_ == nullptr) return kNone;
      const uint32_t hits = bucket_->TagMatches(tag_);
      return hits == 0 ? kNone : bucket_->slots[__builtin_ctz(hits)];
    }

   private:
    friend class Index;
    const Bucket* bucket_ = nullptr;  // where the index has none
    uint8_t tag_ = 0;
  };
  Home HomeOf(uint64_t hash) const {
    Home home;
    if (!buckets_.empty()) home.bucket_ = &buckets_[BucketOf(hash)];
    home.tag_ = TagOfHash(hash);
    return home;
  }

  // The slot for which matches(slot) is true among those inserted with this hash, or kNone.
  template <typename Matches>
  uint32_t Find(uint64_t hash, const Matches& matches) const {
    if (buckets_.empty()) return kNone;
    const uint8_t tag = TagOfHash(hash);
    const uint32_t home = BucketOf(hash);
    uint32_t b = home;
    do {
      const Bucket& bucket = buckets_[b];
      for (uint32_t hits = bucket.TagMatches(tag); hits != 0; hits &= hits - 1) {
        const uint32_t slot = bucket.slots[__builtin_ctz(hits)];
        if (matches(slot)) return slot;
      }
      if (bucket.overflowed == 0) return kNone;
      b = Next(b);
    } while (b != home);  // all buckets may have overflowed, when there are few
    return kNone;
  }

  // The same. guess: what Home::Guess said, if slots were only inserted since.
  template <typename Matches>
  uint32_t Find(uint64_t hash, uint32_t guess, const Matches& matches) const {
    return guess != kNone && matches(guess) ? guess : Find(hash, matches);
  }

  // The key must not be there yet. hash_of(slot) gives the hash a slot was inserted with; it is
  // called for every slot when the index grows.
  template <typename HashOf>
  void Insert(uint64_t hash, uint32_t slot, const HashOf& hash_of) {
    Reserve(size_ + 1, hash_of);
    Place(hash, slot);
    ++size_;
  }

  // Makes room for that many slots in all, so that it does not grow until then. Throws, as Insert
  // does, with nothing changed.
  template <typename HashOf>
  void Reserve(int64_t slots, const HashOf& hash_of) {
    const int64_t buckets = (slots + kMaxPerBucket - 1) / kMaxPerBucket;
    if (buckets > static_cast<int64_t>(buckets_.size())) Grow(buckets, hash_of);
  }

  void Erase(uint64_t hash, uint32_t slot) {
    uint32_t b = BucketOf(hash);
    while (true) {
      Bucket& bucket = buckets_[b];
      for (int i = 0; i < kBucketSlots; ++i) {
        if (bucket.tags[i] != 0 && bucket.slots[i] == slot) {
          bucket.tags[i] = 0;
          --size_;
          return;
        }
      }
      --bucket.overflowed;
      b = Next(b);
    }
  }

  void Clear() {
    Buckets().swap(buckets_);
    size_ = 0;
  }

  // Calls visit(slot) for every slot, in no particular order.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (const Bucket& bucket : buckets_) {
      for (int i = 0; i < kBucketSlots; ++i) {
        if (bucket.tags[i] != 0) visit(bucket.slots[i]);
      }
    }
  }

  // The same of the slots whose hashes have an OrderOfHash in [first, last], first <= last. Reads
  // no more than their buckets and those next to them. hash_of: as for Insert; called for few of
  // the slots.
  template <typename HashOf, typename Visit>
  void ForEachBetween(uint64_t first, uint64_t last, const HashOf& hash_of,
                      const Visit& visit) const {
    if (buckets_.empty()) return;
    const uint32_t begin = ScaleHash(first, buckets_.size());
    const uint32_t end = ScaleHash(last, buckets_.size());
    // Whether keys of begin and before may be in this bucket, and those of end and beyond.
    bool from_before = true, from_beyond = false;
    uint32_t b = begin;
    do {
      const Bucket& bucket = buckets_[b];
      from_beyond |= b == end;
      for (int i = 0; i < kBucketSlots; ++i) {
        if (bucket.tags[i] == 0) continue;
        const uint32_t slot = bucket.slots[i];
        if (from_before || from_beyond) {
          const uint64_t order = OrderOfHash(hash_of(slot));
          if (order < first || order > last) continue;
        }
        visit(slot);
      }
      if (bucket.overflowed == 0) {
        if (from_beyond) return;
        from_before = false;
      }
      b = Next(b);
    } while (b != begin);
  }

 private:
  static constexpr int kMaxPerBucket = 10;  // grow beyond 83 % full

  using Buckets = std::vector<Bucket, BlockAllocator<Bucket>>;

  uint32_t BucketOf(uint64_t hash) const { return BucketOfHash(hash, buckets_.size()); }
  uint32_t Next(uint32_t b) const { return b + 1 == buckets_.size() ? 0 : b + 1; }

  void Place(uint64_t hash, uint32_t slot) {
    uint32_t b = BucketOf(hash);
    while (true) {
      Bucket& bucket = buckets_[b];
      for (int i = 0; i < kBucketSlots; ++i) {
        if (bucket.tags[i] == 0) {
          bucket.tags[i] = TagOfHash(hash);
          bucket.slots[i] = slot;
          return;
        }
      }
      ++bucket.overflowed;
      b = Next(b);
    }
  }

  // To at least that many buckets.
  template <typename HashOf>
  void Grow(int64_t buckets, const HashOf& hash_of) {
    const int64_t size = static_cast<int64_t>(buckets_.size());
    Buckets old(std::max(buckets, size + (size + 1) / 2));
    old.swap(buckets_);
    for (const Bucket& bucket : old) {
      for (int i = 0; i < kBucketSlots; ++i) {
        if (bucket.tags[i] != 0) Place(hash_of(bucket.slots[i]), bucket.slots[i]);
      }
    }
  }

  Buckets buckets_;
  int64_t size_ = 0;
};

// A key's hash and the index that it is in.
struct IndexedHash {
  const Index* index;
  uint64_t hash;
};

// Visits n keys in order, hiding the memory's latency: the buckets of a block of keys are fetched
// together, then their records, so that the processor waits for all of them at once. at(i) gives an
// IndexedHash, prefetch(i, slot) fetches a record. visit(i, guess) may insert into the index, but
// not erase; guess: what the key's slot is if it has one, nearly always, for Index::Find.
template <typename At, typename PrefetchRecord, typename Visit>
void VisitInBlocks(int64_t n, const At& at, const PrefetchRecord& prefetch, const Visit& visit) {
  constexpr int64_t kBlock = 32;
  Index::Home homes[kBlock];
  uint32_t guesses[kBlock];
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t size = std::min(kBlock, n - first);
    for (int64_t i = 0; i < size; ++i) {
      const IndexedHash key = at(first + i);
      homes[i] = key.index->HomeOf(key.hash);
      homes[i].Prefetch();
    }
    for (int64_t i = 0; i < size; ++i) {
      guesses[i] = homes[i].Guess();
      if (guesses[i] != Index::kNone) prefetch(first + i, guesses[i]);
    }
    for (int64_t i = 0; i < size; ++i) visit(first + i, guesses[i]);
  }
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MEMORY_INDEX_H_
