// The cache in the host's memory through the watch tests of both caches.

#include <gtest/gtest.h>

#include "ops/core/cache/row_cache_watch_tests.h"

namespace het_tf {
namespace testing {

INSTANTIATE_TYPED_TEST_SUITE_P(Host, RowCacheWatchTest, HostSide);

}  // namespace testing
}  // namespace het_tf
