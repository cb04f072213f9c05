// What a device cache refuses of its shards, which changes nothing.

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/wire/reply.h"
#include "ops/cuda/device_cache_testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::DeviceCluster;
using testing::Floats;
using testing::kFewer;
using testing::PlainConfig;
using testing::Random;
using testing::TableRows;

class DeviceWrongReplyTest : public ::testing::Test {
 protected:
  DeviceWrongReplyTest() : cluster_(Config(), 2) {
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
    config.read_bound = 1;
    config.write_bound = 3;
    return config;
  }

  // After refusals the right replies must do what they always do.
  ~DeviceWrongReplyTest() override {
    EXPECT_EQ(cluster_.count(CacheCounter::kPending), 1);
    EXPECT_EQ(cluster_.count(CacheCounter::kUpdatesLost), 0);
    call_.replies = right_;
    EXPECT_EQ(cluster_.Fill(&call_), (Floats{-2, -4, 0}));
    cluster_.Flush(0);
    EXPECT_EQ(cluster_.Rows(), (TableRows{{1, {{-2}, {}, 2}}, {2, {{-4}, {}, 4}}}));
    EXPECT_EQ(cluster_.count(CacheCounter::kPending), 0);
  }

  ReplyHeader* header(int s) { return reinterpret_cast<ReplyHeader*>(call_.replies[s].data()); }

  void Refused(const char* text) {
    EXPECT_REFUSED(cluster_.TryInstall(&call_), text);
    EXPECT_REFUSED(cluster_.Update(call_, {1, 1, 1}), "not installed");
    call_.replies = right_;
  }

  DeviceCluster cluster_;
  DeviceCluster::Call call_;
  std::vector<testing::Buffer> right_;
};

TEST_F(DeviceWrongReplyTest, SizeAndNumber) {
  for (int s = 0; s < 2; ++s) {
    ASSERT_NE(right_[s].size(), 0u);
    call_.replies[s].pop_back();
    Refused("reply has");
    call_.replies[s].clear();
    Refused("reply has 0 bytes");
    ++header(s)->num_queries;
    Refused("queries with rows of dim 1 and slot_dim 0, not");
  }
  int64_t rows;
  EXPECT_REFUSED(cluster_.cache()->Install(call_.ticket.get(), {}, SerialFor, &rows),
                 "0 messages for 2 shards");
  std::swap(call_.replies[0], call_.replies[1]);
  Refused("queries");
}

TEST_F(DeviceWrongReplyTest, WidthOfRows) {
  for (int s = 0; s < 2; ++s) {
    // Without rows any width has the right size.
    call_.replies[s].resize(sizeof(ReplyHeader));
    header(s)->num_full = header(s)->num_values = 0;
    header(s)->dim = 2;
    Refused("queries with rows of dim 2");
  }
}

// As long as slot_dim is 0 a value is as long as a row.
TEST_F(DeviceWrongReplyTest, AValueWhereARowWasAskedFor) {
  int tried = 0;
  for (int s = 0; s < 2; ++s) {
    if (header(s)->num_full == 0) continue;
    header(s)->num_values = header(s)->num_full;
    header(s)->num_full = 0;
    Refused("with a value; it asks for the row");
    ++tried;
  }
  EXPECT_GT(tried, 0);
}

TEST_F(DeviceWrongReplyTest, WhatTheLinkDoesNotBelieve) {
  for (int s = 0; s < 2; ++s) {
    header(s)->acknowledged = 1000;
    Refused("acknowledges push 1000, the last cut is");
    header(s)->incarnation = 0;
    Refused("incarnation = 0");
  }
}

// Whatever the shards say, the cache goes on.
TEST(DeviceCacheFuzzTest, AnyReply) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    CacheConfig config = PlainConfig(2);
    config.rows = {2, "adam", "uniform", 0, clock, 2};
    config.capacity = 10;
    config.read_bound = config.write_bound = 1;
    std::unique_ptr<DeviceCluster> cluster;
    Random random(1);
    int accepted = 0;
    constexpr int kSteps = 2000 / kFewer;
    for (int step = 0; step < kSteps; ++step) {
      if (step % 50 == 0) cluster = std::make_unique<DeviceCluster>(config);
      DeviceCluster::Call call = cluster->Lookup(0, {Below(&random, 20), Below(&random, 20)});
      for (int s = 0; s < 2; ++s) {
        // A shard may refuse what the cache makes of such replies.
        if (!call.requests[s]->empty()) {
          (void)testing::Sync(cluster->table(s), *call.requests[s], &call.replies[s]).ok();
        }
      }
      for (testing::Buffer& reply : call.replies) {
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

}  // namespace
}  // namespace het_tf
