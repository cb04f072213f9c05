// CRC-32 as zlib, gzip and PNG have it, so that any language can check our files.

#ifndef HET_TF_OPS_CORE_SERVING_CRC32_H_
#define HET_TF_OPS_CORE_SERVING_CRC32_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace het_tf {

// Of the bytes after those that have the checksum `crc`; 0: there are none.
inline uint32_t Crc32(const char* data, size_t size, uint32_t crc = 0) {
  // Eight bytes at a time: table k has the effect of a byte that k more bytes follow.
  using Tables = std::array<std::array<uint32_t, 256>, 8>;
  static const Tables tables = [] {
    Tables made{};
    for (uint32_t b = 0; b < 256; ++b) {
      uint32_t value = b;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xedb88320u : 0);
      made[0][b] = value;
    }
    for (int k = 1; k < 8; ++k) {
      for (int b = 0; b < 256; ++b) {
        made[k][b] = (made[k - 1][b] >> 8) ^ made[0][made[k - 1][b] & 0xff];
      }
    }
    return made;
  }();
  crc = ~crc;
  for (; size >= 8; size -= 8, data += 8) {
    uint32_t low, high;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= crc;
    crc = 0;
    for (int k = 0; k < 4; ++k) {
      crc ^= tables[7 - k][low >> 8 * k & 0xff] ^ tables[3 - k][high >> 8 * k & 0xff];
    }
  }
  for (; size > 0; --size, ++data) {
    crc = (crc >> 8) ^ tables[0][(crc ^ static_cast<uint8_t>(*data)) & 0xff];
  }
  return ~crc;
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_SERVING_CRC32_H_
