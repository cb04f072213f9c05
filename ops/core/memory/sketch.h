// How often keys that have no line, or no row, were asked for lately, in half a byte a counter.
//
// A count-min sketch with conservative increments, whose counters are halved in turn (TinyLFU:
// Einziger, Friedman & Manes, ACM ToS 2017). Halving goes on a little with every lookup, so that
// none pays for all of it. The four counters of a key lie apart: in one cache line they met those
// of the same other keys, and the sketch remembered too long (benchmarks/cache_traces.py,
// MovieLens).

#ifndef HET_TF_OPS_CORE_MEMORY_SKETCH_H_
#define HET_TF_OPS_CORE_MEMORY_SKETCH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ops/core/memory/arena.h"
#include "ops/core/memory/hash.h"
#include "ops/core/memory/prefetch.h"

namespace het_tf {

class Sketch {
 public:
  static constexpr int kMax = 15;

  // 16 bytes for each of so many rows, at most 256 MB.
  explicit Sketch(int64_t capacity)
      : words_(NumWords(capacity)),
        words_a_lookup_(static_cast<double>(words_.size()) /
                        static_cast<double>(kWindowInCapacities * std::max<int64_t>(capacity, 1))) {
  }

  // Of a sketch of about so many bytes.
  static int64_t CapacityOf(double bytes) { return static_cast<int64_t>(bytes / 16); }
  int64_t bytes() const { return static_cast<int64_t>(words_.size() * sizeof(uint64_t)); }

  void Prefetch(uint64_t hash) const {
    for (int row = 0; row < kRows; ++row) het_tf::Prefetch(&words_[PlaceOf(hash, row).word]);
  }

  // How often the key was counted lately, at most kMax.
  int Get(uint64_t hash) const {
    int least = kMax;
    for (int row = 0; row < kRows; ++row) least = std::min(least, At(PlaceOf(hash, row)));
    return least;
  }

  // Counts the key once. Returns how often it is counted now.
  int Count(uint64_t hash) {
    const int count = std::min(Get(hash) + 1, kMax);
    AtLeast(hash, count);
    return count;
  }

  // Makes the count of a key at least this.
  void AtLeast(uint64_t hash, int count) {
    for (int row = 0; row < kRows; ++row) {
      const Place place = PlaceOf(hash, row);
      if (At(place) >= count) continue;
      uint64_t& word = words_[place.word];
      word = (word & ~(uint64_t{15} << place.shift)) | static_cast<uint64_t>(count) << place.shift;
    }
  }

  // That many keys were looked up: every counter is halved once in a window of them.
  void Age(int64_t keys) {
    due_ += static_cast<double>(keys) * words_a_lookup_;
    for (; due_ >= 1; due_ -= 1) {
      words_[hand_] = (words_[hand_] >> 1) & 0x7777777777777777ULL;
      hand_ = hand_ + 1 == words_.size() ? 0 : hand_ + 1;
    }
  }

  // All of it as numbers: the place that is halved next, the bits of what is due there, and the
  // counters, 16 in each. A sketch of as many numbers can be given them.
  int64_t state_words() const { return kHeader + static_cast<int64_t>(words_.size()); }
  // Those in [first, first + num_words). out: (num_words).
  void Read(int64_t first, int64_t num_words, int64_t* out) const {
    for (int64_t w = first; w < first + num_words; ++w) {
      if (w >= kHeader) {
        *out++ = static_cast<int64_t>(words_[w - kHeader]);
      } else if (w == kHand) {
        *out++ = static_cast<int64_t>(hand_);
      } else {
        std::memcpy(out++, &due_, sizeof(due_));
      }
    }
  }
  // Whether Merge takes number w.
  bool Takes(int64_t w, int64_t word) const {
    if (w == kHand) return word >= 0 && word < static_cast<int64_t>(words_.size());
    const double due = DueOf(word);
    return w != kDue || (due >= 0 && due < 1);
  }
  // Makes every counter at least what it is in another sketch, of other keys or the same. in:
  // (num_words) that Read gave from `first` on.
  void Merge(int64_t first, int64_t num_words, const int64_t* in) {
    for (int64_t w = first; w < first + num_words; ++w, ++in) {
      if (w >= kHeader) {
        words_[w - kHeader] = LargerOf(words_[w - kHeader], static_cast<uint64_t>(*in));
      } else if (w == kHand) {
        hand_ = static_cast<size_t>(*in);
      } else {
        due_ = DueOf(*in);
      }
    }
  }

 private:
  static constexpr int64_t kHand = 0, kDue = 1, kHeader = 2;

  static double DueOf(int64_t word) {
    double due;
    std::memcpy(&due, &word, sizeof(due));
    return due;
  }
  // Counter by counter.
  static uint64_t LargerOf(uint64_t one, uint64_t other) {
    uint64_t larger = 0;
    for (uint64_t counter = 15; counter != 0; counter <<= 4) {
      larger |= std::max(one & counter, other & counter);
    }
    return larger;
  }

  static constexpr int kRows = 4;
  static constexpr int64_t kWindowInCapacities = 8;

  struct Place {
    uint32_t word;
    int shift;
  };

  static size_t NumWords(int64_t capacity) {
    return static_cast<size_t>(std::clamp<int64_t>(2 * capacity, 64, 32 << 20));
  }

  Place PlaceOf(uint64_t hash, int row) const {
    constexpr uint64_t kOdd[kRows] = {0xd6e8feb86659fd93ULL, 0xa0761d6478bd642fULL,
                                      0xe7037ed1a0b428dbULL, 0x8ebc6af09c88c6e3ULL};
    const uint64_t mixed = hash * kOdd[row];
    return {ScaleHash(mixed, static_cast<uint32_t>(words_.size())),
            static_cast<int>(mixed & 15) * 4};
  }
  int At(const Place& place) const {
    return static_cast<int>((words_[place.word] >> place.shift) & 15);
  }

  std::vector<uint64_t, BlockAllocator<uint64_t>> words_;
  const double words_a_lookup_;  // that are halved
  size_t hand_ = 0;
  double due_ = 0;  // words
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_MEMORY_SKETCH_H_
