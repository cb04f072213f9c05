#include "ops/core/wire/packed_keys.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace het_tf {
namespace {

// Calls use(key_bytes) with a constant, 1 to 8, so that each copy is one move.
template <typename Use, int... kLess>
void WithKeyBytes(int key_bytes, const Use& use, std::integer_sequence<int, kLess...>) {
  ((key_bytes == kLess + 1 ? use(std::integral_constant<int, kLess + 1>()) : void()), ...);
}
using UpTo8 = std::make_integer_sequence<int, 8>;

}  // namespace

KeyPacking KeyPacking::Of(const std::vector<int64_t>& keys) {
  KeyPacking packing;
  if (keys.empty()) return packing;
  const auto [low, high] = std::minmax_element(keys.begin(), keys.end());
  packing.lowest = *low;
  const uint64_t range = static_cast<uint64_t>(*high) - static_cast<uint64_t>(*low);
  for (uint64_t rest = range >> 8; rest != 0; rest >>= 8) ++packing.key_bytes;
  return packing;
}

void KeyPacking::Pack(const std::vector<int64_t>& keys, char* to) const {
  const auto pack = [&](auto bytes) {
    for (const int64_t key : keys) {
      const uint64_t distance = static_cast<uint64_t>(key) - static_cast<uint64_t>(lowest);
      std::memcpy(to, &distance, bytes);
      to += bytes;
    }
  };
  WithKeyBytes(key_bytes, pack, UpTo8());
}

std::vector<int64_t> KeyPacking::Unpack(const char* from, int64_t n) const {
  std::vector<int64_t> keys(n);
  const auto unpack = [&](auto bytes) {
    for (int64_t& key : keys) {
      uint64_t distance = 0;
      std::memcpy(&distance, from, bytes);
      key = static_cast<int64_t>(static_cast<uint64_t>(lowest) + distance);
      from += bytes;
    }
  };
  WithKeyBytes(key_bytes, unpack, UpTo8());
  return keys;
}

}  // namespace het_tf
