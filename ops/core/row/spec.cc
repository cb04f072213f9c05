#include "ops/core/row/spec.h"

#include <cmath>
#include <cstdlib>
#include <sstream>

namespace het_tf {

Status Spec::Parse(const std::string& what, const std::string& text, Spec* spec) {
  spec->what_ = what;
  spec->text_ = text;
  spec->parameters_.clear();
  std::istringstream words(text);
  if (!(words >> spec->name_)) return InvalidArgument(what, " is empty");
  std::string word;
  while (words >> word) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos || equals == 0) {
      return spec->Invalid(StrCat("'", word, "' is not of the form parameter=number"));
    }
    const std::string number = word.substr(equals + 1);
    char* end = nullptr;
    const double value = std::strtod(number.c_str(), &end);
    if (number.empty() || *end != '\0' || !std::isfinite(value)) {
      return spec->Invalid(StrCat("'", word, "' does not give a finite number"));
    }
    if (!spec->parameters_.emplace(word.substr(0, equals), value).second) {
      return spec->Invalid(StrCat("'", word.substr(0, equals), "' is given twice"));
    }
  }
  return Status();
}

double Spec::Take(const std::string& parameter, double default_value) {
  const auto found = parameters_.find(parameter);
  if (found == parameters_.end()) return default_value;
  const double value = found->second;
  parameters_.erase(found);
  return value;
}

Status Spec::Finish() const {
  if (parameters_.empty()) return Status();
  return Invalid(StrCat("there is no parameter '", parameters_.begin()->first, "'"));
}

Status Spec::Invalid(const std::string& reason) const {
  return InvalidArgument(what_, " = '", text_, "': ", reason);
}

}  // namespace het_tf
