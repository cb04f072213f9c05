#include "ops/core/row/initializer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using Words = std::array<uint32_t, 4>;

Initializer Make(const std::string& spec, int64_t seed = 1) {
  Initializer initializer;
  EXPECT_OK(Initializer::Parse(spec, seed, &initializer));
  return initializer;
}

std::vector<float> Row(const Initializer& initializer, int64_t key, int dim) {
  std::vector<float> row(dim);
  initializer.Fill(key, dim, row.data());
  return row;
}

// Many values, a few from each of many keys.
std::vector<float> Sample(const std::string& spec, int keys = 20000, int dim = 10) {
  const Initializer initializer = Make(spec);
  std::vector<float> sample;
  for (int key = 0; key < keys; ++key) {
    for (const float x : Row(initializer, key, dim)) sample.push_back(x);
  }
  return sample;
}

double Moment(const std::vector<float>& sample, int power, double center = 0) {
  double sum = 0;
  for (const float x : sample) sum += std::pow(x - center, power);
  return sum / static_cast<double>(sample.size());
}

// The vectors of Random123's kat_vectors, for philox4x32 with 10 rounds.
TEST(PhiloxTest, KnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(Philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(InitializerTest, RangesOfKeysHaveTheirOwn) {
  const std::string uniform = "uniform minval=-1 maxval=2", normal = "normal mean=3 stddev=2";
  const Initializer ranges = Make(uniform + "; -5 " + normal + ";10 zeros; 20 " + uniform);
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min(),
                    kHighest = std::numeric_limits<int64_t>::max();
  for (const int64_t key : {kLowest, int64_t{-6}, int64_t{20}, kHighest}) {
    EXPECT_EQ(Row(ranges, key, 7), Row(Make(uniform), key, 7)) << key;
  }
  for (const int64_t key : {-5, 0, 9}) {
    EXPECT_EQ(Row(ranges, key, 7), Row(Make(normal), key, 7)) << key;
  }
  for (const int64_t key : {10, 19}) EXPECT_EQ(Row(ranges, key, 7), std::vector<float>(7)) << key;
}

TEST(InitializerTest, AnOrthogonalRangeBeginsWithItsFirstKey) {
  const Initializer one = Make("orthogonal rows=6 gain=1; 6 orthogonal rows=6 gain=1");
  std::vector<std::vector<float>> rows;
  for (int64_t key = 0; key < 12; ++key) rows.push_back(Row(one, key, 6));
  for (int i = 0; i < 12; ++i) {
    for (int j = i / 6 * 6; j < i; ++j) {
      double product = 0;
      for (int c = 0; c < 6; ++c) product += rows[i][c] * rows[j][c];
      EXPECT_NEAR(product, 0, 1e-6) << i << " and " << j;
    }
  }
  EXPECT_NE(rows[0], rows[6]);
  EXPECT_EQ(rows[3], Row(Make("orthogonal rows=6 gain=1"), 3, 6));
}

TEST(InitializerTest, WrongRanges) {
  Initializer initializer;
  const auto parse = [&](const std::string& text) {
    return Initializer::Parse(text, 1, &initializer);
  };
  EXPECT_REFUSED(parse("zeros; uniform"), "' uniform' does not begin with a key");
  EXPECT_REFUSED(parse("zeros; 5uniform"), "' 5uniform' does not begin with a key");
  EXPECT_REFUSED(parse("zeros; 5 zeros; 5 zeros"), "key 5 does not follow key 5");
  EXPECT_REFUSED(parse("zeros; 99999999999999999999 zeros"), "does not begin with a key");
  EXPECT_REFUSED(parse("zeros; 5 zero"), "initializer = ' zero'");
  EXPECT_REFUSED(parse("zeros;"), "does not begin with a key");
  EXPECT_REFUSED(parse("zeros; 5 "), "initializer is empty");
}

TEST(InitializerTest, ConstantsNeedNoRandomNumbers) {
  EXPECT_EQ(Row(Make("zeros"), 5, 3), (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(Row(Make("constant value=-2.5"), 5, 3), (std::vector<float>{-2.5, -2.5, -2.5}));
}

TEST(InitializerTest, ColumnDoesNotDependOnTheDimension) {
  for (const char* spec : {"uniform", "normal", "truncated_normal"}) {
    const Initializer initializer = Make(spec);
    const std::vector<float> all = Row(initializer, -12345, 20);
    for (int dim = 0; dim < 20; ++dim) {
      const std::vector<float> prefix(all.begin(), all.begin() + dim);
      EXPECT_EQ(Row(initializer, -12345, dim), prefix) << spec;
    }
  }
}

// A saved model is no good if the rows that nobody has updated change with the version.
TEST(InitializerTest, UniformIsThePhiloxWordOfSeedKeyAndColumn) {
  const int64_t seed = 0x123456789abcdef0, key = -0x7edcba9876543210;
  const std::vector<float> row = Row(Make("uniform minval=-1 maxval=1", seed), key, 8);
  for (uint32_t column = 0; column < 8; ++column) {
    const Words words =
        Philox4x32({static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), column / 4, 0},
                   {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    EXPECT_EQ(row[column], -1 + static_cast<float>(words[column % 4] >> 8) * 0x1p-24f * 2);
  }
}

TEST(InitializerTest, EveryBitOfSeedAndKeyCounts) {
  std::set<std::vector<float>> rows = {Row(Make("uniform", 0), 0, 4)};
  for (int bit = 0; bit < 64; ++bit) {
    const auto changed = static_cast<int64_t>(uint64_t{1} << bit);
    rows.insert(Row(Make("uniform", changed), 0, 4));
    rows.insert(Row(Make("uniform", 0), changed, 4));
  }
  EXPECT_EQ(rows.size(), 129u);
}

TEST(InitializerTest, ColumnsDiffer) {
  for (const char* spec : {"uniform", "normal", "truncated_normal"}) {
    const std::vector<float> row = Row(Make(spec), 7, 100);
    EXPECT_GE(std::set<float>(row.begin(), row.end()).size(), 99u) << spec;
  }
}

TEST(InitializerTest, UniformMoments) {
  const std::vector<float> sample = Sample("uniform minval=2 maxval=4");
  for (const float x : sample) ASSERT_TRUE(x >= 2 && x <= 4);
  // Five standard deviations of each estimate from 200,000 values.
  EXPECT_NEAR(Moment(sample, 1), 3, 0.0065);
  EXPECT_NEAR(Moment(sample, 2, 3), 1.0 / 3, 0.0034);
}

TEST(InitializerTest, UniformDefaultIsThatOfKeras) {
  const std::vector<float> sample = Sample("uniform");
  const auto [low, high] = std::minmax_element(sample.begin(), sample.end());
  EXPECT_NEAR(*low, -0.05, 1e-5);
  EXPECT_NEAR(*high, 0.05, 1e-5);
}

TEST(InitializerTest, NormalMoments) {
  const std::vector<float> sample = Sample("normal mean=1 stddev=2");
  EXPECT_NEAR(Moment(sample, 1), 1, 0.023);
  EXPECT_NEAR(Moment(sample, 2, 1), 4, 0.064);
  EXPECT_NEAR(Moment(sample, 3, 1), 0, 0.35);
  EXPECT_NEAR(Moment(sample, 4, 1), 48, 1.8);
  EXPECT_NEAR(std::sqrt(Moment(Sample("normal"), 2)), 0.05, 0.0005);
}

TEST(InitializerTest, NormalHasItsShare) {
  const std::vector<float> sample = Sample("normal mean=0 stddev=1");
  for (const double z : {-2.5, -1.0, -0.3, 0.0, 0.7, 2.0}) {
    const auto below = std::count_if(sample.begin(), sample.end(), [&](float x) { return x < z; });
    EXPECT_NEAR(static_cast<double>(below) / static_cast<double>(sample.size()),
                0.5 * std::erfc(-z / std::sqrt(2)), 0.0056);
  }
}

// Box-Muller makes columns in pairs from the same words.
TEST(InitializerTest, NormalColumnsAreUncorrelated) {
  const Initializer initializer = Make("normal mean=0 stddev=1");
  double products[3] = {0};
  constexpr int kKeys = 50000;
  for (int key = 0; key < kKeys; ++key) {
    const std::vector<float> row = Row(initializer, key, 4);
    for (int i = 0; i < 3; ++i) products[i] += row[i] * row[i + 1];
  }
  for (const double sum : products) EXPECT_NEAR(sum / kKeys, 0, 0.0224);
}

TEST(InitializerTest, TruncatedNormalStaysWithinTwoDeviations) {
  const std::vector<float> sample = Sample("truncated_normal mean=1 stddev=0.5");
  const auto [low, high] = std::minmax_element(sample.begin(), sample.end());
  EXPECT_GE(*low, 0);
  EXPECT_LE(*high, 2);
  EXPECT_LT(*low, 0.001);
  EXPECT_GT(*high, 1.999);
  EXPECT_NEAR(Moment(sample, 1), 1, 0.005);
  // The variance of the standard normal cut at 2 is 1 - 4 phi(2) / (1 - 2 Phi(-2)) = 0.7737.
  EXPECT_NEAR(Moment(sample, 2, 1), 0.25 * 0.7737, 0.0025);
}

// The distribution function, which the C library knows, undoes the quantile.
TEST(InitializerTest, TruncatedNormalIsTheQuantileOfItsWord) {
  const double low = 0.5 * std::erfc(2 / std::sqrt(2.0));
  const Initializer initializer = Make("truncated_normal mean=0 stddev=1", 0);
  for (uint32_t key = 0; key < 20000; ++key) {
    const Words words = Philox4x32({key, 0, 0, 0}, {0, 0});
    const std::vector<float> row = Row(initializer, key, 4);
    for (int i = 0; i < 4; ++i) {
      const double p = low + ((words[i] >> 8) * 0x1p-24 + 0x1p-25) * (1 - 2 * low);
      ASSERT_NEAR(0.5 * std::erfc(-row[i] / std::sqrt(2.0)), p, 5e-8) << row[i];
    }
  }
}

// Columns are orthogonal and of the gain's length; where there are fewer rows, these are.
TEST(InitializerTest, OrthogonalIs) {
  const std::vector<std::pair<int, int>> shapes = {{1, 1}, {64, 8}, {61, 61}, {1000, 33}, {5, 16}};
  for (const auto& [rows, dim] : shapes) {
    for (const int64_t seed : {int64_t{0}, int64_t{12345}, int64_t{-7}}) {
      SCOPED_TRACE(StrCat(rows, " x ", dim));
      const Initializer initializer = Make(StrCat("orthogonal gain=2 rows=", rows), seed);
      std::vector<std::vector<float>> x;
      for (int key = 0; key < rows; ++key) x.push_back(Row(initializer, key, dim));
      const int vectors = std::min(rows, dim), length = std::max(rows, dim);
      for (int a = 0; a < vectors; ++a) {
        for (int b = 0; b <= a; ++b) {
          double product = 0;
          for (int i = 0; i < length; ++i) {
            product += rows >= dim ? double{x[i][a]} * x[i][b] : double{x[a][i]} * x[b][i];
          }
          ASSERT_NEAR(product, a == b ? 4 : 0, 1e-5) << a << " " << b;
        }
      }
      EXPECT_EQ(Row(initializer, rows + 3, dim), Row(initializer, 3 % rows, dim));
    }
  }
}

TEST(InitializerTest, SpecErrorsNameWhatIsWrong) {
  Initializer initializer = Make("constant value=3");
  const auto parse = [&](const char* spec) { return Initializer::Parse(spec, 0, &initializer); };
  EXPECT_REFUSED(parse(""), "initializer is empty");
  EXPECT_REFUSED(parse("glorot"), "initializer = 'glorot': known are zeros");
  EXPECT_REFUSED(parse("zeros value=1"), "there is no parameter 'value'");
  EXPECT_REFUSED(parse("uniform minval=1 maxval=0"), "minval is greater than maxval");
  EXPECT_REFUSED(parse("uniform stddev=1"), "'stddev'");
  EXPECT_REFUSED(parse("normal stddev=-1"), "stddev is negative");
  EXPECT_REFUSED(parse("truncated_normal stddev=-1"), "stddev is negative");
  for (const char* rows : {"", " rows=0", " rows=2e9", " rows=-1"}) {
    EXPECT_REFUSED(parse(StrCat("orthogonal", rows).c_str()), "rows is out of range");
  }
  EXPECT_EQ(Row(initializer, 0, 1)[0], 3) << "an error must leave the initializer as it was";
}

TEST(InitializerTest, ParametersBeyondFloatAreRefused) {
  Initializer initializer;
  for (const char* spec : {"constant value=1e39", "normal mean=-1e39", "normal stddev=1e39",
                           "uniform minval=-3e38 maxval=3e38", "uniform minval=-1e300"}) {
    EXPECT_REFUSED(Initializer::Parse(spec, 0, &initializer), "float") << spec;
  }
}

}  // namespace
}  // namespace het_tf
