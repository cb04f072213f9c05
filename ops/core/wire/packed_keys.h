// Keys in as few whole bytes each as their range needs: their distances from the lowest.
//
// Every step asks for keys, and most of what it says of a row that need not come is the key. Those
// of a vocabulary take two to four bytes, those of a collection's tables five, hashes eight.

#ifndef HET_TF_OPS_CORE_WIRE_PACKED_KEYS_H_
#define HET_TF_OPS_CORE_WIRE_PACKED_KEYS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace het_tf {

struct KeyPacking {
  int64_t lowest = 0;
  uint8_t key_bytes = 1;  // 1 to 8: a message is not shorter than its keys are many

  // The shortest that holds these.
  static KeyPacking Of(const std::vector<int64_t>& keys);

  // to: (keys.size() * key_bytes)
  void Pack(const std::vector<int64_t>& keys, char* to) const;
  // from: (n * key_bytes), of which any will do.
  std::vector<int64_t> Unpack(const char* from, int64_t n) const;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_WIRE_PACKED_KEYS_H_
