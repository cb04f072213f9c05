// How the numbers of a row lie in a table or a message: its value, as floats or as bfloat16, and
// after it what are always floats, such as slots. In words of 4 bytes.

#ifndef HET_TF_OPS_CORE_ROW_ROW_FORMAT_H_
#define HET_TF_OPS_CORE_ROW_ROW_FORMAT_H_

#include <cstdint>
#include <cstring>

#include "ops/core/bfloat16.h"

namespace het_tf {

struct RowFormat {
  int dim;
  bool half;  // the value is bfloat16

  // That a value and so many floats after it take.
  int64_t words(int64_t rest) const { return (half ? (int64_t{dim} + 1) / 2 : dim) + rest; }

  // words: (words(rest)), row: (dim + rest)
  void Read(const float* words, int64_t rest, float* row) const {
    if (half) {
      const auto* halves = reinterpret_cast<const uint16_t*>(words);
      for (int i = 0; i < dim; ++i) row[i] = FromBfloat16(halves[i]);
    } else {
      std::memcpy(row, words, sizeof(float) * dim);
    }
    CopyRest(words + RowFormat::words(0), rest, row + dim);
  }

  // row: (dim + rest), finite; words: (words(rest)).
  void Write(const float* row, int64_t rest, float* words) const {
    if (half) {
      RoundToNearest(row, dim, Halves(words));
    } else {
      std::memcpy(words, row, sizeof(float) * dim);
    }
    CopyRest(row + dim, rest, words + RowFormat::words(0));
  }

  // The same, rounded stochastically. number: of RoundStochastically.
  void Write(const float* row, int64_t rest, uint64_t number, float* words) const {
    if (!half) return Write(row, rest, words);
    RoundStochastically(row, dim, number, Halves(words));
    CopyRest(row + dim, rest, words + RowFormat::words(0));
  }

 private:
  // With zeros where an odd one is missing.
  uint16_t* Halves(float* words) const {
    if (dim % 2 != 0) words[dim / 2] = 0;
    return reinterpret_cast<uint16_t*>(words);
  }
  static void CopyRest(const float* from, int64_t rest, float* to) {
    if (rest > 0) std::memcpy(to, from, sizeof(float) * rest);
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_ROW_FORMAT_H_
