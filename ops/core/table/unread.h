// The slots that a snapshot has still to read, a bit each.
//
// Not safe for concurrent use, but that the snapshot's only reader may take bits while it shares
// the lock under which others take them alone.

#ifndef HET_TF_OPS_CORE_TABLE_UNREAD_H_
#define HET_TF_OPS_CORE_TABLE_UNREAD_H_

#include <cstdint>
#include <utility>
#include <vector>

namespace het_tf {

class Unread {
 public:
  // A bit for every slot in [0, end).
  static std::vector<uint64_t> AllOf(uint32_t end) {
    std::vector<uint64_t> bits((end + 63) / 64, ~uint64_t{0});
    if (end % 64 != 0) bits.back() = (uint64_t{1} << end % 64) - 1;
    return bits;
  }

  // A snapshot begins, of the slots that have a bit and are not free.
  void Begin(std::vector<uint64_t> bits, const std::vector<uint32_t>& free) {
    for (const uint32_t slot : free) {
      if (slot / 64 < bits.size()) bits[slot / 64] &= ~(uint64_t{1} << slot % 64);
    }
    bits_ = std::move(bits);
  }
  void End() { std::vector<uint64_t>().swap(bits_); }

  bool empty() const { return bits_.empty(); }
  int64_t size() const {
    int64_t size = 0;
    for (const uint64_t word : bits_) size += __builtin_popcountll(word);
    return size;
  }

  // Whether a slot had to be read. It is no longer.
  bool Take(uint32_t slot) {
    if (slot / 64 >= bits_.size()) return false;
    const uint64_t bit = uint64_t{1} << slot % 64;
    const bool unread = (bits_[slot / 64] & bit) != 0;
    bits_[slot / 64] &= ~bit;
    return unread;
  }

  // Calls visit(slot) for the slots from `from` on, at most so many, and takes none.
  template <typename Visit>
  void Peek(uint32_t from, int64_t most, const Visit& visit) const {
    for (size_t w = from / 64; w < bits_.size() && most > 0; ++w) {
      for (uint64_t word = bits_[w]; word != 0 && most > 0; word &= word - 1, --most) {
        visit(static_cast<uint32_t>(w * 64 + __builtin_ctzll(word)));
      }
    }
  }

  // Takes the slots from *from on, at most so many, and calls visit(slot) for each. Returns whether
  // there may be more.
  template <typename Visit>
  bool TakeNext(uint32_t* from, int64_t most, const Visit& visit) {
    const uint32_t end = static_cast<uint32_t>(bits_.size() * 64);
    while (*from < end && most > 0) {
      uint64_t& word = bits_[*from / 64];
      if (word == 0) {
        *from = (*from / 64 + 1) * 64;
        continue;
      }
      *from = *from / 64 * 64 + __builtin_ctzll(word);
      word &= word - 1;
      visit(*from);
      --most;
    }
    return *from < end;
  }

 private:
  std::vector<uint64_t> bits_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_UNREAD_H_
