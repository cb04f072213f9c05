#include "ops/core/link/closures.h"

#include <gtest/gtest.h>

#include <atomic>

#include "ops/core/table/table.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Buffer;
using testing::MakeTable;
using testing::RequestBuilder;
using testing::RunThreads;
using testing::Snapshot;
using testing::Sync;
using testing::TableRows;

TEST(ClosuresTest, AClosureIsRememberedUntilItIsDone) {
  Closures closures;
  closures.Of(2, 0)->merged = true;
  EXPECT_TRUE(closures.Of(2, 0)->merged);
  EXPECT_FALSE(closures.Of(3, 1)->merged);
  EXPECT_EQ(closures.size(), 2);
  EXPECT_FALSE(closures.Of(4, 3)->merged);
  EXPECT_EQ(closures.size(), 1);
  EXPECT_TRUE(closures.Of(2, 0)->merged) << "it comes late";
  EXPECT_TRUE(closures.Of(3, 0)->merged) << "nothing was pushed here by the run that ended";
  EXPECT_EQ(closures.size(), 1);
}

TEST(ClosuresTest, WhatIsRememberedDoesNotGrow) {
  Closures closures;
  for (int64_t number = 1; number < 10000; ++number) {
    closures.Of(number, number < 8 ? 0 : number - 8)->merged = true;
    ASSERT_LE(closures.size(), 8);
  }
}

// Runs of a closure by several workers, all at once.
TEST(ClosuresTest, OneRunIsMerged) {
  constexpr int kRuns = 4;
  constexpr int64_t kClosures = 200;
  const auto table = MakeTable({1, "sgd", "zeros", 0, ClockRule::kCount, 1});
  std::atomic<int> merged{0};
  RunThreads(kRuns, [&](int run) {
    RequestBuilder request;
    request.header.cache_id = static_cast<uint64_t>(run) + 1;
    Buffer bytes;
    ReplyView reply;
    ASSERT_OK(Sync(table.get(), request.Encode(), &bytes));
    ASSERT_OK(ReplyView::Parse(bytes.data(), bytes.size(), &reply));
    request.header.incarnation = reply.header.incarnation;
    request.header.session = reply.header.session;
    for (int64_t number = 1; number <= kClosures; ++number) {
      request.pushes = {
          {static_cast<uint64_t>(number), {{5, 1, {1}}, {6, 2, {static_cast<float>(number)}}}}};
      request.pushes[0].closure = number;
      ASSERT_OK(Sync(table.get(), request.Encode(), &bytes));
      ASSERT_OK(ReplyView::Parse(bytes.data(), bytes.size(), &reply));
      EXPECT_EQ(reply.header.acknowledged, static_cast<uint64_t>(number));
      if ((reply.header.flags & kCounted) == 0) ++merged;
    }
  });
  EXPECT_EQ(merged, static_cast<int>(kClosures));
  EXPECT_EQ(table->counter(TableCounter::kPushesCounted),
            static_cast<int64_t>(kClosures) * (kRuns - 1));
  constexpr auto kSum = static_cast<float>(kClosures * (kClosures + 1) / 2);
  EXPECT_EQ(Snapshot(*table),
            (TableRows{{5, {{kClosures}, {}, kClosures}}, {6, {{kSum}, {}, 2 * kClosures}}}));
}

// A push of one update by a cache, in its session, of a closure.
RequestBuilder PushOf(const Table& table, uint64_t session, uint64_t sequence, int64_t closure,
                      int64_t done = 0) {
  RequestBuilder request;
  request.header.cache_id = request.header.session = session;
  request.header.incarnation = table.incarnation();
  request.pushes = {{sequence, {{5, 1, {1}}}}};
  request.pushes[0].closure = closure;
  request.pushes[0].closures_done = done;
  return request;
}

// The cache that hears "counted" takes its own updates back, so it must hear that again.
TEST(ClosuresTest, APushThatDidNotCountAndComesTwiceIsSaidNotToCountTwice) {
  const auto table = MakeTable({1, "sgd", "zeros", 0, ClockRule::kCount, 1});
  const auto send = [&](uint64_t session, uint64_t sequence, int64_t closure) {
    Buffer bytes;
    ReplyView reply;
    EXPECT_OK(Sync(table.get(), PushOf(*table, session, sequence, closure).Encode(), &bytes));
    EXPECT_OK(ReplyView::Parse(bytes.data(), bytes.size(), &reply));
    return (reply.header.flags & kCounted) != 0;
  };
  EXPECT_FALSE(send(1, 1, 4));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(send(2, 1, 4)) << i;
    EXPECT_FALSE(send(1, 1, 4)) << "its own: " << i;
  }
  EXPECT_FALSE(send(2, 2, 5)) << "the first run of the next";
  EXPECT_FALSE(send(2, 2, 5));
  EXPECT_EQ(Snapshot(*table).at(5).clock, 2);
}

TEST(ClosuresTest, NumbersThatCannotBeAreRefused) {
  const auto table = MakeTable({1, "sgd", "zeros", 0, ClockRule::kCount, 1});
  Buffer bytes;
  const auto push = [&](int64_t closure, int64_t done) {
    return Sync(table.get(), PushOf(*table, 1, 1, closure, done).Encode(), &bytes);
  };
  EXPECT_REFUSED(push(-1, -2), "neither may be negative");
  EXPECT_REFUSED(push(-1, 0), "neither may be negative");
  EXPECT_REFUSED(push(1, -1), "neither may be negative");
  EXPECT_REFUSED(push(4, 4), "closure 4, but all up to 4 are done");
  EXPECT_OK(push(1, 0));
  EXPECT_EQ(Snapshot(*table).at(5).clock, 1);
}

}  // namespace
}  // namespace het_tf
