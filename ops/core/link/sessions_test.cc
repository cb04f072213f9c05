#include "ops/core/link/sessions.h"

#include <gtest/gtest.h>

namespace het_tf {
namespace {

TEST(SessionsTest, ACacheKeepsItsSession) {
  Sessions sessions;
  const auto first = sessions.Of(7);
  first->sequence = 3;
  EXPECT_NE(sessions.Of(8)->number, first->number);
  EXPECT_EQ(sessions.Of(7), first);
  EXPECT_EQ(sessions.size(), 2);
}

TEST(SessionsTest, ASilentCacheIsForgottenAndGetsANewNumber) {
  constexpr int64_t kLifetime = 100;
  Sessions sessions(kLifetime);
  const uint64_t silent = sessions.Of(1)->number;
  for (uint64_t cache = 100; cache < 100 + 50 * kLifetime; ++cache) {
    sessions.Of(2);
    sessions.Of(cache);
    ASSERT_LE(sessions.size(), 2 * kLifetime);
  }
  EXPECT_EQ(sessions.Of(2)->number, silent + 1) << "never silent for so long";
  EXPECT_GT(sessions.Of(1)->number, silent);
}

TEST(SessionsTest, NumbersAreNotUsedAgainAfterClear) {
  Sessions sessions;
  const uint64_t before = sessions.Of(1)->number;
  sessions.Clear();
  EXPECT_EQ(sessions.size(), 0);
  EXPECT_GT(sessions.Of(1)->number, before);
}

}  // namespace
}  // namespace het_tf
