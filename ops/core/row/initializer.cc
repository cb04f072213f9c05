#include "ops/core/row/initializer.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>
#include <utility>

#include "ops/core/row/spec.h"

namespace het_tf {
namespace {

constexpr float kTwoPi = 6.28318530717958647692f;
constexpr double kPi = 3.14159265358979323846;

// So that products of rows and frequencies fit an int64.
constexpr double kMostOrthogonalRows = 1 << 30;

// 24 bits, the precision of a float: [0, 1).
float Unit(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

// The inverse of the normal distribution function: Acklam's rational approximation, then one step
// of Halley's method, which takes it to the precision of a double.
double NormalQuantile(double p) {
  static const double a[] = {-3.969683028665376e+01, 2.209460984245205e+02,  -2.759285104469687e+02,
                             1.383577518672690e+02,  -3.066479806614716e+01, 2.506628277459239e+00};
  static const double b[] = {-5.447609879822406e+01, 1.615858368580409e+02, -1.556989798598866e+02,
                             6.680131188771972e+01, -1.328068155288572e+01};
  static const double c[] = {-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e+00,
                             -2.549732539343734e+00, 4.374664141464968e+00,  2.938163982698783e+00};
  static const double d[] = {7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e+00,
                             3.754408661907416e+00};
  constexpr double kLow = 0.02425;
  double x;
  if (p < kLow || p > 1 - kLow) {
    const double q = std::sqrt(-2 * std::log(std::min(p, 1 - p)));
    x = (((((c[0] * q + c[1]) * q + c[2]) * q + c[3]) * q + c[4]) * q + c[5]) /
        ((((d[0] * q + d[1]) * q + d[2]) * q + d[3]) * q + 1);
    if (p > 0.5) x = -x;
  } else {
    const double q = p - 0.5;
    const double r = q * q;
    x = (((((a[0] * r + a[1]) * r + a[2]) * r + a[3]) * r + a[4]) * r + a[5]) * q /
        (((((b[0] * r + b[1]) * r + b[2]) * r + b[3]) * r + b[4]) * r + 1);
  }
  const double error = 0.5 * std::erfc(-x / std::sqrt(2.0)) - p;
  const double u = error * std::sqrt(2 * 3.14159265358979323846) * std::exp(x * x / 2);
  return x - u / (1 + x * u / 2);
}

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

Status Initializer::Parse(const std::string& text, int64_t seed, Initializer* initializer) {
  Initializer result;
  result.seed_ = static_cast<uint64_t>(seed);
  result.distributions_.clear();
  size_t begin = 0;
  while (true) {
    const size_t end = std::min(text.find(';', begin), text.size());
    std::string part = text.substr(begin, end - begin);
    Distribution next;
    if (begin > 0) {
      const char* at = part.c_str();
      while (*at == ' ') ++at;
      const auto [rest, error] = std::from_chars(at, part.c_str() + part.size(), next.first_key);
      if (error != std::errc() || *rest != ' ') {
        return InvalidArgument("initializer: '", part, "' does not begin with a key");
      }
      if (result.distributions_.size() > 1 &&
          next.first_key <= result.distributions_.back().first_key) {
        return InvalidArgument("initializer: key ", next.first_key, " does not follow key ",
                               result.distributions_.back().first_key);
      }
      part.erase(0, rest - part.c_str());
    }
    HET_RETURN_IF_ERROR(Distribution::Parse(part, &next));
    result.distributions_.push_back(next);
    if (end == text.size()) break;
    begin = end + 1;
  }
  *initializer = std::move(result);
  return Status();
}

Status Initializer::Distribution::Parse(const std::string& text, Distribution* distribution) {
  Spec spec;
  HET_RETURN_IF_ERROR(Spec::Parse("initializer", text, &spec));
  Distribution& result = *distribution;
  if (spec.name() == "zeros") {
    result.kind = Kind::kConstant;
  } else if (spec.name() == "constant") {
    result.kind = Kind::kConstant;
    result.a = spec.Take("value", 0);
  } else if (spec.name() == "uniform") {
    result.kind = Kind::kUniform;
    const double low = spec.Take("minval", -0.05);
    const double high = spec.Take("maxval", 0.05);
    if (low > high) return spec.Invalid("minval is greater than maxval");
    result.a = low;
    result.b = high - low;
  } else if (spec.name() == "normal" || spec.name() == "truncated_normal") {
    result.kind = spec.name() == "normal" ? Kind::kNormal : Kind::kTruncatedNormal;
    result.a = spec.Take("mean", 0);
    result.b = spec.Take("stddev", 0.05);
    if (result.b < 0) return spec.Invalid("stddev is negative");
  } else if (spec.name() == "orthogonal") {
    result.kind = Kind::kOrthogonal;
    const double rows = spec.Take("rows", 0);
    if (!(rows >= 1 && rows <= kMostOrthogonalRows)) return spec.Invalid("rows is out of range");
    result.rows = static_cast<int64_t>(rows);
    result.b = spec.Take("gain", 1);
  } else {
    return spec.Invalid("known are zeros, constant, uniform, normal, truncated_normal, orthogonal");
  }
  HET_RETURN_IF_ERROR(spec.Finish());
  if (!std::isfinite(result.a) || !std::isfinite(result.b)) {
    return spec.Invalid("a value is beyond the range of a float");
  }
  return Status();
}

void Initializer::Distribution::FillBlock(const std::array<uint32_t, 4>& words, float* out) const {
  switch (kind) {
    case Kind::kConstant:
    case Kind::kOrthogonal:
      break;
    case Kind::kUniform:
      for (int i = 0; i < 4; ++i) out[i] = a + Unit(words[i]) * b;
      break;
    case Kind::kNormal:  // Box-Muller, two at a time
      for (int i = 0; i < 4; i += 2) {
        const float radius = std::sqrt(-2.0f * std::log(Unit(words[i]) + 0x1p-24f));
        const float angle = kTwoPi * Unit(words[i + 1]);
        out[i] = a + b * (radius * std::cos(angle));
        out[i + 1] = a + b * (radius * std::sin(angle));
      }
      break;
    case Kind::kTruncatedNormal: {
      static const double low = 0.5 * std::erfc(2 / std::sqrt(2.0));  // P(x < -2)
      for (int i = 0; i < 4; ++i) {
        const double p = low + (Unit(words[i]) + 0x1p-25) * (1 - 2 * low);
        out[i] = a + b * static_cast<float>(NormalQuantile(p));
      }
      break;
    }
  }
}

// Some of the functions of a discrete cosine transform (DCT-II), which are orthogonal, as columns,
// or, where there are fewer rows than columns, as rows; each row and each column times -1 or 1 at
// random.
void Initializer::Distribution::FillOrthogonal(int64_t key, uint64_t seed, int dim,
                                               float* row) const {
  const int64_t length = std::max<int64_t>(rows, dim);
  const int64_t i = (key % rows + rows) % rows;
  // The q-th function's frequency is (stride * q + first) mod length: all of them differ.
  int64_t stride = std::max<int64_t>(1, static_cast<int64_t>(length * 0.6180339887498949));
  while (std::gcd(stride, length) != 1) ++stride;
  const auto first = static_cast<int64_t>(seed % static_cast<uint64_t>(length));
  const auto sign = [&](int64_t which, uint32_t what) {
    const auto words = Philox4x32({static_cast<uint32_t>(which), 0, 0, what},
                                  {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    return (words[0] & 1) != 0 ? -1.0 : 1.0;
  };
  const double row_sign = sign(i, 1);
  for (int j = 0; j < dim; ++j) {
    const int64_t p = rows >= dim ? i : j, q = rows >= dim ? j : i;
    const int64_t frequency = (stride * q + first) % length;
    const int64_t turned = (2 * p + 1) * frequency % (4 * length);  // in quarters of 1 / length
    const double scale = std::sqrt((frequency == 0 ? 1.0 : 2.0) / static_cast<double>(length));
    const double angle = kPi * static_cast<double>(turned) / static_cast<double>(2 * length);
    row[j] = static_cast<float>(b * row_sign * sign(j, 2) * scale * std::cos(angle));
  }
}

void Initializer::Distribution::Fill(int64_t key, uint64_t seed, int dim, float* row) const {
  if (kind == Kind::kConstant) {
    std::fill(row, row + dim, a);
    return;
  }
  if (kind == Kind::kOrthogonal) {
    // Its rows are counted from its first key, and another range has other ones.
    const auto first = static_cast<uint64_t>(first_key);
    const auto place = static_cast<int64_t>(static_cast<uint64_t>(key) - first);
    return FillOrthogonal(place, seed + first, dim, row);
  }
  const uint64_t k = static_cast<uint64_t>(key);
  for (int column = 0; column < dim; column += 4) {
    const auto words = Philox4x32({static_cast<uint32_t>(k), static_cast<uint32_t>(k >> 32),
                                   static_cast<uint32_t>(column / 4), 0},
                                  {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    float block[4];
    FillBlock(words, block);
    std::memcpy(row + column, block, sizeof(float) * std::min(4, dim - column));
  }
}

void Initializer::Fill(int64_t key, int dim, float* row) const {
  const auto next =
      std::upper_bound(distributions_.begin() + 1, distributions_.end(), key,
                       [](int64_t k, const Distribution& d) { return k < d.first_key; });
  std::prev(next)->Fill(key, seed_, dim, row);
}

}  // namespace het_tf
