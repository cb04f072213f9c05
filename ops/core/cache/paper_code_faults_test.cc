// The cache in the host's memory through the faults of the paper's code.

#include <gtest/gtest.h>

#include "ops/core/cache/row_cache_paper_tests.h"

namespace het_tf {
namespace testing {

INSTANTIATE_TYPED_TEST_SUITE_P(Host, PaperCodeFaults, HostSide);

}  // namespace testing
}  // namespace het_tf
