#include "ops/core/wire/packed_keys.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace het_tf {
namespace {

// Calls use(kBytes) with the number of bytes as a constant, so that each copy is one move.
template <typename Use>
void WithKeyBytes(uint16_t key_bytes, const Use& use) {
  switch (key_bytes) {
    case 1:
      return use(std::integral_constant<int, 1>());
    case 2:
      return use(std::integral_constant<int, 2>());
    case 3:
      return use(std::integral_constant<int, 3>());
    case 4:
      return use(std::integral_constant<int, 4>());
    case 5:
      return use(std::integral_constant<int, 5>());
    case 6:
      return use(std::integral_constant<int, 6>());
    case 7:
      return use(std::integral_constant<int, 7>());
    default:
      return use(std::integral_constant<int, 8>());
  }
}

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
  WithKeyBytes(key_bytes, [&](auto bytes) {
    for (const int64_t key : keys) {
      const uint64_t distance = static_cast<uint64_t>(key) - static_cast<uint64_t>(lowest);
      std::memcpy(to, &distance, bytes);
      to += bytes;
    }
  });
}

std::vector<int64_t> KeyPacking::Unpack(const char* from, int64_t n) const {
  std::vector<int64_t> keys(n);
  WithKeyBytes(key_bytes, [&](auto bytes) {
    for (int64_t& key : keys) {
      uint64_t distance = 0;
      std::memcpy(&distance, from, bytes);
      key = static_cast<int64_t>(static_cast<uint64_t>(lowest) + distance);
      from += bytes;
    }
  });
  return keys;
}

}  // namespace het_tf
