// The cache on the host through the failures of both caches, and its own.

#include <gtest/gtest.h>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/cache/row_cache_failure_tests.h"
#include "ops/core/cache/row_cache_reply_tests.h"

namespace het_tf {
namespace testing {

INSTANTIATE_TYPED_TEST_SUITE_P(Host, RowCacheFailureTest, HostSide);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, WrongReplyTest, HostSide);

// An evicted line lives on until its push is acknowledged; looked up before that, it stays.
TEST(CacheFailureTest, ALineThatComesBackWhileItsPushIsUnderWay) {
  CacheConfig config = PlainConfig();
  config.capacity = 1;
  config.read_bound = 0;
  const Cluster cluster(config);
  cluster.Step(0, {1}, {1});
  cluster.CutFlush(0, true);
  cluster.Lookup(0, {2});  // evicts key 1
  EXPECT_EQ(cluster.Read(0, {3, 1}), (Floats{0, -1}));
  for (int step = 0; step < 3; ++step) {
    cluster.Step(0, {1}, {1});
    cluster.Flush(0);
  }
  EXPECT_EQ(cluster.rows_sent(), 0);
  EXPECT_EQ(cluster.Rows(), (TableRows{{1, {{-4}, {}, 4}}}));
}

}  // namespace testing
}  // namespace het_tf
