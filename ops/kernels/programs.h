// Programs that have resources in this process.

#ifndef HET_TF_OPS_KERNELS_PROGRAMS_H_
#define HET_TF_OPS_KERNELS_PROGRAMS_H_

#include <string>

#include "absl/status/status.h"

namespace het_tf {

// An error if the program whose resources are in `container` was replaced (Het>ProgramHandle): a
// function of it that still runs would make a table anew, without its rows.
absl::Status CheckNotReplaced(const std::string& container);

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_PROGRAMS_H_
