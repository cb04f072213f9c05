// A named choice with numeric parameters, written as text: "adagrad epsilon=1e-07".
// Optimizers and initializers travel from Python to the ops in this form, so that a mismatch can be
// shown to the user as it is.

#ifndef HET_TF_OPS_CORE_ROW_SPEC_H_
#define HET_TF_OPS_CORE_ROW_SPEC_H_

#include <map>
#include <string>

#include "ops/core/status.h"

namespace het_tf {

class Spec {
 public:
  // what names the argument in errors, for example "optimizer".
  static Status Parse(const std::string& what, const std::string& text, Spec* spec);

  const std::string& name() const { return name_; }

  // Takes a parameter out, or returns the default.
  double Take(const std::string& parameter, double default_value);

  // An error if a parameter is left that nobody took.
  Status Finish() const;

  Status Invalid(const std::string& reason) const;

 private:
  std::string what_, text_, name_;
  std::map<std::string, double> parameters_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_SPEC_H_
