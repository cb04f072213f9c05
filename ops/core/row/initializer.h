// Initial values of rows: a pure function of (seed, key, column), so that any worker computes the
// same row without asking, whatever the layout of shards.
//
// Random numbers are Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011). The counter is (key low, key high, column / 4, 0), the Philox key is the seed, and the
// four words of a block serve four neighbouring columns.

#ifndef HET_TF_OPS_CORE_ROW_INITIALIZER_H_
#define HET_TF_OPS_CORE_ROW_INITIALIZER_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/core/status.h"

namespace het_tf {

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

class Initializer {
 public:
  // Specs: "zeros", "constant value=", "uniform minval= maxval=", "normal mean= stddev=",
  // "truncated_normal mean= stddev=" (cut at two standard deviations, as in Keras),
  // "orthogonal rows= gain=": of the first `rows` keys, columns of length gain that are orthogonal,
  // or rows, where there are fewer of these.
  // Several for ranges of keys: "zeros; 10 constant value=1; 20 zeros": 1 for keys 10 to 19.
  static Status Parse(const std::string& text, int64_t seed, Initializer* initializer);

  // row: (dim). Safe to call from many threads.
  void Fill(int64_t key, int dim, float* row) const;

 private:
  enum class Kind { kConstant, kUniform, kNormal, kTruncatedNormal, kOrthogonal };

  // What keys from first_key on have, up to those of the next one.
  struct Distribution {
    int64_t first_key = 0;  // the first one's does not count
    Kind kind = Kind::kConstant;
    float a = 0;  // value, minval, mean
    float b = 0;  // maxval - minval, stddev, gain
    int64_t rows = 0;

    static Status Parse(const std::string& text, Distribution* distribution);
    void Fill(int64_t key, uint64_t seed, int dim, float* row) const;
    void FillOrthogonal(int64_t key, uint64_t seed, int dim, float* row) const;
    void FillBlock(const std::array<uint32_t, 4>& words, float* out) const;
  };

  uint64_t seed_ = 0;
  std::vector<Distribution> distributions_ = {Distribution()};
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_INITIALIZER_H_
