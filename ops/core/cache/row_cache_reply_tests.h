// What both caches (row_cache.h) refuse of their shards, which changes nothing. Tests of a kind of
// cache instantiate these with its side (cache_testing.h).

#ifndef HET_TF_OPS_CORE_CACHE_ROW_CACHE_REPLY_TESTS_H_
#define HET_TF_OPS_CORE_CACHE_ROW_CACHE_REPLY_TESTS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/wire/reply.h"

namespace het_tf {
namespace testing {

template <typename Side>
class WrongReplyTest : public ::testing::Test {
 protected:
  WrongReplyTest() : cluster_(Config(), 2) {
    cluster_.Step(0, {1, 2}, {1, 1});
    cluster_.Flush(0);
    cluster_.Step(0, {1}, {1});
    for (int step = 0; step < 3; ++step) cluster_.Step(1, {2}, {1});
    cluster_.Flush(1);
    call_ = cluster_.Lookup(0, {1, 2, 3});
    cluster_.Deliver(&call_);
    right_ = call_.replies;
  }

  static CacheConfig Config() {
    CacheConfig config = PlainConfig(2);
    SetStaleness(&config, 1);
    return config;
  }

  // After refusals the right replies must do what they always do.
  ~WrongReplyTest() override {
    EXPECT_EQ(cluster_.count(CacheCounter::kPending), 1);
    EXPECT_EQ(cluster_.count(CacheCounter::kUpdatesLost), 0);
    call_.replies = right_;
    EXPECT_EQ(cluster_.Fill(&call_), (Floats{-2, -4, 0}));
    cluster_.Flush(0);
    EXPECT_EQ(cluster_.Rows(), (TableRows{{1, {{-2}, {}, 2}}, {2, {{-4}, {}, 4}}}));
    EXPECT_EQ(cluster_.count(CacheCounter::kPending), 0);
  }

  void Refused(const char* text) {
    EXPECT_REFUSED(cluster_.TryInstall(&call_), text);
    EXPECT_REFUSED(cluster_.Update(call_, {1, 1, 1}), "not installed");
    call_.replies = right_;
  }

  ReplyHeader* header(int s) { return reinterpret_cast<ReplyHeader*>(call_.replies[s].data()); }

  ClusterOf<Side> cluster_;
  typename ClusterOf<Side>::Call call_;
  std::vector<Buffer> right_;
};

TYPED_TEST_SUITE_P(WrongReplyTest);

TYPED_TEST_P(WrongReplyTest, SizeAndNumber) {
  for (int s = 0; s < 2; ++s) {
    ASSERT_NE(this->right_[s].size(), 0u);
    this->call_.replies[s].pop_back();
    this->Refused("reply has");
    this->call_.replies[s].clear();
    this->Refused("reply has 0 bytes");
    ++this->header(s)->num_queries;
    this->Refused("queries with rows of dim 1 and slot_dim 0, not");
  }
  int64_t rows;
  EXPECT_REFUSED(this->cluster_.cache()->Install(this->call_.ticket.get(), {}, SerialFor, &rows),
                 "0 messages for 2 shards");
  std::swap(this->call_.replies[0], this->call_.replies[1]);
  this->Refused("queries");
}

TYPED_TEST_P(WrongReplyTest, WidthOfRows) {
  for (int s = 0; s < 2; ++s) {
    // Without rows any width has the right size.
    this->call_.replies[s].resize(sizeof(ReplyHeader));
    this->header(s)->num_full = this->header(s)->num_values = 0;
    this->header(s)->dim = 2;
    this->Refused("queries with rows of dim 2");
  }
}

// As long as slot_dim is 0 a value is as long as a row.
TYPED_TEST_P(WrongReplyTest, AValueWhereARowWasAskedFor) {
  int tried = 0;
  for (int s = 0; s < 2; ++s) {
    if (this->header(s)->num_full == 0) continue;
    this->header(s)->num_values = this->header(s)->num_full;
    this->header(s)->num_full = 0;
    this->Refused("with a value; it asks for the row");
    ++tried;
  }
  EXPECT_GT(tried, 0);
}

TYPED_TEST_P(WrongReplyTest, AClockThatWouldOverflow) {
  int tried = 0;
  for (int s = 0; s < 2; ++s) {
    if (this->header(s)->num_full == 0) continue;
    auto* row = reinterpret_cast<ReplyRow*>(this->call_.replies[s].data() + sizeof(ReplyHeader));
    row->clock = INT64_MAX;
    this->Refused("has clock 9223372036854775807");
    ++tried;
  }
  EXPECT_GT(tried, 0);
}

TYPED_TEST_P(WrongReplyTest, WhatTheLinkDoesNotBelieve) {
  for (int s = 0; s < 2; ++s) {
    this->header(s)->acknowledged = 1000;
    this->Refused("acknowledges push 1000, the last cut is");
    this->header(s)->incarnation = 0;
    this->Refused("incarnation = 0");
  }
}

// Whatever the shards say, the cache goes on.
TYPED_TEST_P(WrongReplyTest, AnyReply) {
  using Cluster = ClusterOf<TypeParam>;
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    CacheConfig config = PlainConfig(2);
    config.rows = {2, "adam", "uniform", 0, clock, 2};
    config.capacity = 10;
    SetStaleness(&config, 1);
    std::unique_ptr<Cluster> cluster;
    Random random(1);
    int accepted = 0;
    const int kSteps = 3000 / TypeParam::kFewer;
    for (int step = 0; step < kSteps; ++step) {
      if (step % 50 == 0) cluster = std::make_unique<Cluster>(config);
      auto call = cluster->Lookup(0, {Below(&random, 20), Below(&random, 20)});
      for (int s = 0; s < 2; ++s) {
        // A shard may refuse what the cache makes of such replies.
        if (!call.requests[s]->empty()) {
          (void)Sync(cluster->table(s), *call.requests[s], &call.replies[s]).ok();
        }
      }
      for (Buffer& reply : call.replies) {
        for (int64_t n = Below(&random, 4); n > 0 && !reply.empty(); --n) {
          const uint64_t bits = random() >> Below(&random, 64);
          std::memcpy(reply.data() + Below(&random, reply.size() / 8) * 8, &bits, 8);
        }
      }
      if (!cluster->TryInstall(&call).ok()) continue;
      ++accepted;
      cluster->Gather(call);
      EXPECT_OK(cluster->Update(call, {1, 1, 1, 1}));
    }
    EXPECT_GT(accepted, kSteps / 10) << "too few to test anything";
  }
}

REGISTER_TYPED_TEST_SUITE_P(WrongReplyTest, SizeAndNumber, WidthOfRows, AValueWhereARowWasAskedFor,
                            AClockThatWouldOverflow, WhatTheLinkDoesNotBelieve, AnyReply);

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_ROW_CACHE_REPLY_TESTS_H_
