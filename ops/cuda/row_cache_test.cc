// The cache on a device through the tests of both caches.

#include <gtest/gtest.h>

#include "ops/core/cache/row_cache_failure_tests.h"
#include "ops/core/cache/row_cache_paper_tests.h"
#include "ops/core/cache/row_cache_reply_tests.h"
#include "ops/core/cache/row_cache_watch_tests.h"
#include "ops/cuda/device_cache_testing.h"

namespace het_tf {
namespace testing {

INSTANTIATE_TYPED_TEST_SUITE_P(Device, RowCacheFailureTest, DeviceSide);
INSTANTIATE_TYPED_TEST_SUITE_P(Device, PaperCodeFaults, DeviceSide);
INSTANTIATE_TYPED_TEST_SUITE_P(Device, WrongReplyTest, DeviceSide);
INSTANTIATE_TYPED_TEST_SUITE_P(Device, RowCacheWatchTest, DeviceSide);
INSTANTIATE_TYPED_TEST_SUITE_P(Keeping, RowCacheFailureTest, KeepingSide);
INSTANTIATE_TYPED_TEST_SUITE_P(Keeping, PaperCodeFaults, KeepingSide);
INSTANTIATE_TYPED_TEST_SUITE_P(Keeping, WrongReplyTest, KeepingSide);
INSTANTIATE_TYPED_TEST_SUITE_P(Keeping, RowCacheWatchTest, KeepingSide);

}  // namespace testing
}  // namespace het_tf
