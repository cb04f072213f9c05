#include "ops/core/table/lifetimes.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "ops/core/memory/sketch.h"
#include "ops/core/row/spec.h"

namespace het_tf {
namespace {

constexpr double kMaxInteger = 0x1p53;  // that a double holds exactly
constexpr double kMaxSketchBytes = 0x1p33;

// A whole number, which becomes *to.
template <typename T>
Status TakeInteger(Spec* spec, const char* name, double low, double high, T* to) {
  const double value = spec->Take(name, static_cast<double>(*to));
  if (value != std::floor(value) || value < low || value > high) {
    return spec->Invalid(StrCat(name, " must be an integer from ", static_cast<int64_t>(low),
                                " to ", static_cast<int64_t>(high)));
  }
  *to = static_cast<T>(value);
  return Status();
}

Status ParseAdmission(Spec* spec, LifeRules* rules) {
  if (!rules->admits_all()) return spec->Invalid("there is another admission");
  HET_RETURN_IF_ERROR(TakeInteger(spec, "count", 1, 0x1p31 - 1, &rules->count));
  HET_RETURN_IF_ERROR(TakeInteger(spec, "sketch", 0, kMaxSketchBytes, &rules->sketch_bytes));
  rules->probability = spec->Take("probability", 1);
  if (!(rules->probability >= 0 && rules->probability <= 1)) {
    return spec->Invalid("probability must lie in [0, 1]");
  }
  if (rules->count > 1 && rules->probability < 1) {
    return spec->Invalid("count and probability exclude each other");
  }
  if (rules->sketch_bytes > 0 && rules->count > Sketch::kMax) {
    return spec->Invalid(StrCat("a sketch counts to ", Sketch::kMax));
  }
  return Status();
}

Status ParseExpiry(Spec* spec, LifeRules* rules) {
  ExpiryRule rule;
  double updates = kMaxInteger;
  HET_RETURN_IF_ERROR(TakeInteger(spec, "age", 0, 0x1p31 - 1, &rule.age));
  HET_RETURN_IF_ERROR(TakeInteger(spec, "updates_below", 0, kMaxInteger, &updates));
  if (updates < kMaxInteger) rule.updates_below = static_cast<int64_t>(updates);
  const double norm = spec->Take("norm_below", -1);
  if (norm >= 0) rule.norm_below = static_cast<float>(norm);
  rules->expiries.push_back(rule);
  return Status();
}

}  // namespace

Status Lifetimes::Parse(const std::string& text, Lifetimes* lifetimes) {
  Lifetimes parsed;
  std::istringstream clauses(text);
  std::string clause;
  while (std::getline(clauses, clause, ';')) {
    std::istringstream words(clause);
    std::string word, rest;
    words >> word;
    if (word == "keys") {  // int64, which a Spec's doubles do not hold
      Range range;
      if (!(words >> range.first >> range.last) || words >> rest || range.first > range.last) {
        return InvalidArgument("lifetimes = '", text, "': '", clause,
                               "' is not of the form keys FIRST LAST");
      }
      parsed.ranges_.push_back(range);
      continue;
    }
    Spec spec;
    HET_RETURN_IF_ERROR(Spec::Parse("lifetimes", clause, &spec));
    LifeRules* rules = &parsed.ranges_.back().rules;
    if (word == "admit") {
      HET_RETURN_IF_ERROR(ParseAdmission(&spec, rules));
    } else if (word == "expire") {
      HET_RETURN_IF_ERROR(ParseExpiry(&spec, rules));
    } else if (word == "given") {
      parsed.time_is_given_ = true;
    } else {
      return spec.Invalid("there is no such clause");
    }
    HET_RETURN_IF_ERROR(spec.Finish());
  }
  *lifetimes = std::move(parsed);
  return Status();
}

bool Lifetimes::admits_some() const {
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [](const Range& range) { return !range.rules.admits_all(); });
}

bool Lifetimes::expires() const {
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [](const Range& range) { return !range.rules.expiries.empty(); });
}

uint32_t Lifetimes::shortest_age() const {
  uint32_t shortest = std::numeric_limits<uint32_t>::max();
  for (const Range& range : ranges_) {
    for (const ExpiryRule& rule : range.rules.expiries) shortest = std::min(shortest, rule.age);
  }
  return shortest;
}

}  // namespace het_tf
