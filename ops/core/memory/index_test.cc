#include "ops/core/memory/index.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/core/memory/arena.h"
#include "ops/core/memory/slab.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;

// Keys in slots, as the rows of a table keep them; the hash of each key may be chosen.
class Rows {
 public:
  explicit Rows(uint64_t (*hash)(int64_t)) : hash_(hash) {}

  void Insert(int64_t key) {
    uint32_t slot = keys_.size();
    if (free_.empty()) {
      keys_.push_back(key);
    } else {
      slot = free_.back();
      free_.pop_back();
      keys_[slot] = key;
    }
    index_.Insert(hash_(key), slot, [this](uint32_t s) { return hash_(keys_[s]); });
  }

  void Erase(int64_t key) {
    const uint32_t slot = Find(key);
    ASSERT_NE(slot, Index::kNone);
    index_.Erase(hash_(key), slot);
    free_.push_back(slot);
  }

  uint32_t Find(int64_t key) const {
    return index_.Find(hash_(key), [&](uint32_t slot) { return keys_[slot] == key; });
  }

  bool Has(int64_t key) const {
    const uint32_t slot = Find(key);
    return slot != Index::kNone && keys_[slot] == key;
  }

  std::multiset<int64_t> Keys() const {
    std::multiset<int64_t> keys;
    index_.ForEach([&](uint32_t slot) { keys.insert(keys_[slot]); });
    return keys;
  }

  // Those with an OrderOfHash in [first, last].
  std::multiset<int64_t> KeysBetween(uint64_t first, uint64_t last) const {
    std::multiset<int64_t> keys;
    index_.ForEachBetween(
        first, last, [&](uint32_t slot) { return hash_(keys_[slot]); },
        [&](uint32_t slot) { keys.insert(keys_[slot]); });
    return keys;
  }

  const Index& index() const { return index_; }

 private:
  uint64_t (*const hash_)(int64_t);
  Index index_;
  std::vector<int64_t> keys_;
  std::vector<uint32_t> free_;
};

// BucketOfHash multiplies by an odd number; with its inverse a test can choose the product, whose
// high bits are the bucket.
uint64_t HashWithProduct(uint64_t product) {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15ULL;
  uint64_t inverse = kFactor;  // Newton's iteration doubles the correct bits
  for (int i = 0; i < 6; ++i) inverse *= 2 - kFactor * inverse;
  return product * inverse;
}

uint64_t FirstBucket(int64_t key) { return HashWithProduct(key); }
uint64_t LastBucket(int64_t key) { return HashWithProduct(~static_cast<uint64_t>(key)); }
uint64_t SameHash(int64_t) { return 0x1234567890abcdefULL; }
// Even keys in the first bucket, odd ones in the last.
uint64_t EitherEnd(int64_t key) { return key % 2 ? LastBucket(key) : FirstBucket(key); }

// Between two bounds, some of which are at a key.
void ExpectKeysBetween(const Rows& rows, uint64_t (*hash)(int64_t), int64_t num_keys,
                       Random* random) {
  uint64_t bounds[2];
  for (uint64_t& bound : bounds) {
    const int64_t key = Below(random, num_keys) - num_keys / 2;
    const uint64_t choices[] = {0, ~uint64_t{0}, (*random)(), OrderOfHash(hash(key))};
    bound = choices[Below(random, 4)];
  }
  if (bounds[0] > bounds[1]) std::swap(bounds[0], bounds[1]);
  std::multiset<int64_t> expected;
  for (const int64_t key : rows.Keys()) {
    const uint64_t order = OrderOfHash(hash(key));
    if (order >= bounds[0] && order <= bounds[1]) expected.insert(key);
  }
  ASSERT_EQ(rows.KeysBetween(bounds[0], bounds[1]), expected)
      << "[" << bounds[0] << ", " << bounds[1] << "]";
}

void RandomOperations(uint64_t (*hash)(int64_t), int64_t num_keys, int operations) {
  Rows rows(hash);
  std::unordered_map<int64_t, bool> oracle;
  Random random(num_keys);
  for (int i = 0; i < operations; ++i) {
    const int64_t key = Below(&random, num_keys) - num_keys / 2;
    ASSERT_EQ(rows.Has(key), oracle.count(key) == 1) << "operation " << i << ", key " << key;
    // Mostly inserts at first, mostly erases later.
    const bool insert = Below(&random, operations) > i;
    if (insert && oracle.emplace(key, true).second) rows.Insert(key);
    if (!insert && oracle.erase(key) == 1) rows.Erase(key);
    ASSERT_EQ(rows.index().size(), static_cast<int64_t>(oracle.size()));
    if (i % (operations / 50) == 0) ExpectKeysBetween(rows, hash, num_keys, &random);
  }
  std::multiset<int64_t> keys;
  for (const auto& entry : oracle) keys.insert(entry.first);
  EXPECT_EQ(rows.Keys(), keys);
}

TEST(IndexTest, MatchesUnorderedMap) {
  RandomOperations(HashKey, 20, 10000);
  RandomOperations(HashKey, 1000, 50000);
  RandomOperations(HashKey, 50000, 200000);
}

TEST(IndexTest, MatchesUnorderedMapWhereAllKeysWantOneBucket) {
  RandomOperations(FirstBucket, 200, 20000);
  RandomOperations(LastBucket, 200, 20000);  // overflows around the end
  RandomOperations(EitherEnd, 200, 20000);
}

TEST(IndexTest, MatchesUnorderedMapWhereAllKeysHaveOneHash) {
  RandomOperations(SameHash, 200, 20000);
}

TEST(IndexTest, EmptyFindsNothing) {
  const Index index;
  EXPECT_EQ(index.size(), 0);
  EXPECT_EQ(index.bytes(), 0);
  EXPECT_EQ(index.HomeOf(HashKey(1)).Guess(), Index::kNone);
  EXPECT_EQ(index.Find(HashKey(1), [](uint32_t) { return true; }), Index::kNone);
  index.HomeOf(HashKey(1)).Prefetch();
}

TEST(IndexTest, ClearForgetsAll) {
  Index index;
  const auto hash_of = [](uint32_t slot) { return HashKey(slot); };
  for (uint32_t slot = 0; slot < 100; ++slot) index.Insert(HashKey(slot), slot, hash_of);
  index.Clear();
  EXPECT_EQ(index.size(), 0);
  EXPECT_EQ(index.bytes(), 0);
  index.Insert(HashKey(5), 5, hash_of);
  EXPECT_EQ(index.Find(HashKey(5), [](uint32_t slot) { return slot == 5; }), 5u);
}

// An erase that left anything behind would make the index grow under churn, or a probe for an
// absent key go on for ever.
TEST(IndexTest, ChurnLeavesNothingBehind) {
  for (const int64_t live : {10, 15, 20, 30, 1000}) {
    Rows rows(HashKey);
    for (int64_t key = 0; key < live; ++key) rows.Insert(key);
    const int64_t bytes = rows.index().bytes();
    for (int64_t key = live; key < live + 50000; ++key) {
      rows.Erase(key - live);
      rows.Insert(key);
      ASSERT_FALSE(rows.Has(key - live));
    }
    EXPECT_EQ(rows.index().bytes(), bytes) << "with " << live << " keys";
  }
}

// Both buckets have sent a key to the other, so neither tells a probe to stop.
TEST(IndexTest, AbsentKeyIsNotSoughtForEver) {
  Rows rows(EitherEnd);
  for (int64_t i = 0; i < 13; ++i) rows.Insert(2 * i);     // the 13th goes to the last bucket
  for (int64_t i = 0; i < 7; ++i) rows.Insert(2 * i + 1);  // the last bucket holds 8
  for (int64_t i = 0; i < 11; ++i) rows.Erase(2 * i);
  for (int64_t i = 7; i < 12; ++i) rows.Insert(2 * i + 1);  // the last of them goes to the first
  EXPECT_FALSE(rows.Has(1000));
  EXPECT_FALSE(rows.Has(1001));
  for (int64_t i = 0; i < 12; ++i) EXPECT_TRUE(rows.Has(2 * i + 1));
  EXPECT_TRUE(rows.Has(22));
  EXPECT_TRUE(rows.Has(24));
}

// Its own bucket is all that a probe reads once the keys that had to go on are gone again.
TEST(IndexTest, EraseTakesBackThatABucketOverflowed) {
  uint64_t product = 0;
  const auto next_hash = [&] {  // the next of one tag
    while (TagOfHash(HashWithProduct(product)) != 0x42) ++product;
    return HashWithProduct(product++);
  };
  Index index;
  std::vector<uint64_t> hashes;
  const auto insert = [&] {
    hashes.push_back(next_hash());
    index.Insert(hashes.back(), hashes.size() - 1, [&](uint32_t slot) { return hashes[slot]; });
  };
  for (int i = 0; i < 13; ++i) insert();  // of the first bucket, which holds 12
  index.Erase(hashes[12], 12);
  const uint64_t absent = next_hash();
  product = ~uint64_t{0} - 100000;
  for (int i = 0; i < 5; ++i) insert();  // of the last bucket
  int compared = 0;
  EXPECT_EQ(index.Find(absent, [&](uint32_t) { return ++compared < 0; }), Index::kNone);
  EXPECT_EQ(compared, 12);
}

TEST(IndexTest, MemoryIsAFewBytesAKey) {
  Rows rows(HashKey);
  constexpr int64_t kKeys = 100000;
  for (int64_t key = 0; key < kKeys; ++key) rows.Insert(key);
  EXPECT_GE(rows.index().bytes(), kKeys * 64 / 12);
  EXPECT_LE(rows.index().bytes(), kKeys * 64 / 10 * 3 / 2 + 64);
}

TEST(VisitInBlocksTest, VisitsEachOnceInOrderWhileTheIndexChanges) {
  for (const int64_t n : {0, 1, 31, 32, 33, 100, 1000}) {
    std::vector<uint64_t> hashes(n);
    for (int64_t i = 0; i < n; ++i) hashes[i] = HashKey(i);
    Index index;
    const auto hash_of = [&](uint32_t slot) { return hashes[slot]; };
    for (int64_t i = 0; i < n; i += 2) index.Insert(hashes[i], i, hash_of);
    std::vector<int64_t> visited;
    VisitInBlocks(
        n, [&](int64_t i) { return IndexedHash{&index, hashes.at(i)}; },
        [&](int64_t i, uint32_t slot) {
          EXPECT_LT(i, n);
          EXPECT_LT(slot, n);
        },
        [&](int64_t i, uint32_t guess) {
          visited.push_back(i);
          const uint32_t found =
              index.Find(hashes[i], guess, [&](uint32_t slot) { return slot == i; });
          EXPECT_EQ(found, i % 2 == 0 ? i : Index::kNone);
          if (i % 2 == 1) index.Insert(hashes[i], i, hash_of);
        });
    ASSERT_EQ(visited.size(), static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(visited[i], i);
    EXPECT_EQ(index.size(), n);
  }
}

TEST(VisitInBlocksTest, PrefetchesTheRecordsThatAreThere) {
  constexpr int64_t kKeys = 50;
  Index index;
  for (int64_t key = 0; key < kKeys; ++key) {
    index.Insert(HashKey(key), key, [](uint32_t slot) { return HashKey(slot); });
  }
  std::set<uint32_t> prefetched;
  VisitInBlocks(
      kKeys, [&](int64_t i) { return IndexedHash{&index, HashKey(i)}; },
      [&](int64_t, uint32_t slot) { prefetched.insert(slot); }, [](int64_t, uint32_t) {});
  EXPECT_GT(prefetched.size(), kKeys * 3 / 4);  // a guess may meet another key's tag
}

TEST(HashTest, ShardsAndStripesShareKeysEvenly) {
  constexpr int kShards = 5, kStripes = 64, kKeys = 320000;
  std::vector<int> count(kShards * kStripes);
  for (int64_t key = 0; key < kKeys; ++key) {
    const uint64_t hash = HashKey(key);
    ++count[ShardOfHash(hash, kShards) * kStripes + StripeOfHash(hash, kStripes)];
  }
  for (const int n : count) EXPECT_NEAR(n, 1000, 160);  // five standard deviations
}

TEST(ArenaTest, PiecesAreAlignedAndApart) {
  Arena arena;
  std::vector<std::vector<char*>> pieces(3);
  // Some beyond the first region.
  const std::vector<size_t> sizes = {1, 64, 100, 5000, size_t{1} << 21, size_t{40} << 20};
  testing::RunThreads(3, [&](int t) {
    for (const size_t bytes : sizes) {
      char* piece = arena.Allocate(bytes);
      piece[0] = static_cast<char>(t + 1);
      piece[bytes - 1] = static_cast<char>(t + 1);
      pieces[t].push_back(piece);
    }
  });
  for (int t = 0; t < 3; ++t) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(pieces[t][i]) % 64, 0u);
      EXPECT_EQ(pieces[t][i][0], t + 1);
      EXPECT_EQ(pieces[t][i][sizes[i] - 1], t + 1);
    }
  }
  arena.Clear();
  arena.Allocate(10)[9] = 1;
}

TEST(ArenaTest, BlocksOfEverySize) {
  for (const size_t n : {1, 1000, 100000, 300000, 1000000}) {
    std::vector<int64_t, BlockAllocator<int64_t>> numbers(n, 5);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(numbers.data()) % 64, 0u);
    numbers.resize(n + 1, 6);
    EXPECT_EQ(numbers[n - 1] + numbers[n], 11);
  }
}

TEST(SlabTest, RecordsKeepTheirPlaceAndBytes) {
  constexpr uint32_t kRecords = 5000;
  for (const size_t record_bytes : {20, 64, 100}) {
    Arena arena;
    Slab slab(record_bytes, &arena);
    std::vector<char*> place;
    for (uint32_t i = 0; i < kRecords; ++i) {
      const uint32_t slot = slab.Allocate();
      ASSERT_EQ(slot, i);
      std::memset(slab[slot], static_cast<int>(i % 251), record_bytes);
      place.push_back(slab[slot]);
    }
    for (uint32_t i = 0; i < kRecords; ++i) {
      ASSERT_EQ(slab[i], place[i]);
      for (size_t b = 0; b < record_bytes; ++b) {
        ASSERT_EQ(static_cast<unsigned char>(slab[i][b]), i % 251);
      }
    }
    EXPECT_EQ(slab.end(), kRecords);
    EXPECT_GE(slab.bytes(), static_cast<int64_t>(kRecords * record_bytes));
  }
}

TEST(SlabTest, FreedSlotsComeBackFirst) {
  Arena arena;
  Slab slab(24, &arena);
  for (int i = 0; i < 2000; ++i) slab.Allocate();
  const int64_t bytes = slab.bytes();
  slab.Free(7);
  slab.Free(1500);
  const std::set<uint32_t> reused = {slab.Allocate(), slab.Allocate()};
  EXPECT_EQ(reused, (std::set<uint32_t>{7, 1500}));
  EXPECT_EQ(slab.end(), 2000u);
  EXPECT_EQ(slab.bytes(), bytes);
  EXPECT_EQ(slab.Allocate(), 2000u);
  slab.Clear();
  EXPECT_EQ(slab.bytes(), 0);
  EXPECT_EQ(slab.end(), 0u);
  EXPECT_EQ(slab.Allocate(), 0u);
}

}  // namespace
}  // namespace het_tf
