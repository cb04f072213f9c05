// A device cache where memory runs out: the device's, or the host's. Whichever allocation fails,
// the call can be made again, and nothing is lost or counted twice. And one where a launch fails.
// (On the host build: a device has no memory that runs out when a test says so.)

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/pooling.h"
#include "ops/cuda/device_cache.h"
#include "ops/cuda/device_cache_testing.h"

namespace {

// How often the heap still has memory for this thread.
thread_local int64_t heap_left = INT64_MAX;

void* Allocate(size_t bytes) noexcept {
  if (heap_left != INT64_MAX && heap_left-- <= 0) {
    heap_left = 0;
    return nullptr;
  }
  return std::malloc(bytes == 0 ? 1 : bytes);
}

}  // namespace

// For all tests of the program.
void* operator new(size_t bytes) {
  if (void* memory = Allocate(bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace het_tf {
namespace {

using testing::DeviceArray;
using testing::DeviceCluster;
using testing::Floats;
using testing::Ids;
using testing::PlainConfig;
using testing::SetStaleness;
using testing::TableRows;

// Has the memory of a kind run out after some more allocations.
using Limit = void (*)(int64_t left);
void LimitDevice(int64_t left) { cuda::allocations_left = left; }
void LimitHeap(int64_t left) { heap_left = left; }

// A call of which one verb after the other is short of memory, and is called again then.
class ShortCall {
 public:
  ShortCall(const DeviceCluster& cluster, int64_t left, Limit limit)
      : call(cluster.NewCall(0)), cluster_(cluster), left_(left), limit_(limit) {}

  template <typename Verb>
  void Run(const Verb& verb) {
    limit_(left_);
    const Status status = verb();
    limit_(INT64_MAX);
    if (status.ok()) return;
    ++failures;
    EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.message();
    EXPECT_OK(verb());
  }
  void Install() {
    cluster_.Deliver(&call);
    std::vector<ReplyBytes> replies;
    for (const testing::Buffer& reply : call.replies) {
      replies.push_back({reply.data(), reply.size()});
    }
    int64_t rows = 0;
    Run([&] { return cluster_.cache()->Install(call.ticket.get(), replies, SerialFor, &rows); });
  }

  DeviceCluster::Call call;
  int failures = 0;

 private:
  const DeviceCluster& cluster_;
  const int64_t left_;
  const Limit limit_;
};

// Steps that miss. pooled: each id in a bag of its own. Returns how often a verb was short.
int RunShort(const CacheConfig& config, int num_ids, int64_t left, Limit limit,
             bool pooled = false) {
  const DeviceCluster cluster(config, 2);
  cluster.Step(1, {1, 2}, {1, 1});
  cluster.Flush(1);
  cluster.Step(0, {1, 2, 3}, {1, 1, 1});
  cluster.Step(0, {2, 3}, {1, 1});
  Ids ids(num_ids);
  std::iota(ids.begin(), ids.end(), 0);
  const DeviceArray<float> gradients(Floats(num_ids, 1));
  ShortCall step(cluster, left, limit);
  DeviceCluster::Call& call = step.call;
  step.Run([&] { return cluster.TryLookup(ids, &call); });
  step.Install();
  const Floats values = cluster.Gather(call);
  for (int i = 0; i < num_ids; ++i) {
    EXPECT_EQ(values[i], ids[i] == 1 ? -2 : ids[i] == 2 ? -3 : ids[i] == 3 ? -2 : 0) << ids[i];
  }
  if (pooled) {
    std::shared_ptr<Pooling> pooling;
    EXPECT_OK(Pooling::Create({{Combiner::kMax, num_ids, num_ids}}, &pooling));
    const DeviceArray<float> out(num_ids);
    const std::vector<float*> outputs = {out.get()};
    const std::vector<const float*> of_outputs = {gradients.get()};
    std::shared_ptr<PooledRows> pooled_rows;
    step.Run([&] {
      return cluster.cache()->Pool(call.ticket, pooling, SerialFor, outputs, &pooled_rows);
    });
    EXPECT_EQ(out.Read(), values);
    std::shared_ptr<const UniqueIds> read;
    Floats kept;
    step.Run([&] { return pooled_rows->Read(&read, &kept); });
    EXPECT_EQ(read->keys, ids);
    EXPECT_EQ(kept, values);
    step.Run([&] { return pooled_rows->Update(call.ticket.get(), of_outputs, 1, SerialFor); });
  } else {
    step.Run(
        [&] { return cluster.cache()->Update(call.ticket.get(), gradients.get(), 1, SerialFor); });
  }
  call.ticket.reset();
  step.Run([&] { return cluster.cache()->Flush(true, cluster.Into(&call), &call.ticket); });
  step.Install();
  call.ticket.reset();
  EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
  EXPECT_EQ(cluster.count(CacheCounter::kUpdatesLost), 0);
  const TableRows rows = cluster.Rows();
  EXPECT_EQ(rows.size(), ids.size());
  for (const int64_t id : ids) {
    EXPECT_EQ(rows.at(id).value[0], values[id] - 1) << id;
    if (config.rows.clock == ClockRule::kCount) {
      EXPECT_EQ(rows.at(id).clock, 1 - values[id]) << id;
    }
  }
  return step.failures;
}

// Steps of hits: rows that come unasked, and what a shard watched that has restarted.
int RunWatchedShort(int64_t left, Limit limit) {
  CacheConfig config = PlainConfig(2);
  config.capacity = 30;
  SetStaleness(&config, 1);
  const DeviceCluster cluster(config, 2);
  Ids ids(20);
  std::iota(ids.begin(), ids.end(), 0);
  const auto others_update = [&] {
    cluster.Step(1, ids, Floats(ids.size(), 1));
    cluster.Flush(1);
  };
  others_update();
  for (int i = 0; i < 2; ++i) cluster.Read(0, ids);
  ShortCall step(cluster, left, limit);
  for (const bool restarted : {false, true}) {
    for (int i = 0; i < 2; ++i) others_update();
    if (restarted) cluster.table(0)->Clear();
    const int before = step.failures;
    step.Run([&] { return cluster.TryLookup(ids, &step.call); });
    const bool given_up =
        step.failures > before;  // after some request, perhaps: then all is checked
    step.Install();
    if (!given_up) {
      EXPECT_EQ(step.call.ticket->incomplete(), restarted);
    }
    if (step.call.ticket->incomplete()) {
      for (testing::Buffer& reply : step.call.replies) reply.clear();
      step.Run([&] {
        return cluster.cache()->AskAgain(step.call.ticket.get(), cluster.Into(&step.call));
      });
      step.Install();
    }
    const Floats values = cluster.Gather(step.call);
    for (size_t i = 0; i < ids.size(); ++i) {
      const bool anew = restarted && cluster.table_of(ids[i]) == cluster.table(0);
      EXPECT_EQ(values[i], anew ? 0 : restarted ? -5 : -3) << ids[i];
    }
    step.call.ticket.reset();
    for (int i = 0; i < 3; ++i) cluster.Read(0, ids);
    EXPECT_EQ(cluster.CutFlush(0, true).num_requests(), 0);
  }
  EXPECT_GT(cluster.count(CacheCounter::kChecksSpared), 0);
  return step.failures;
}

CacheConfig SmallConfig() {
  CacheConfig config = PlainConfig(2);
  config.capacity = 4;
  config.host_capacity = 6;
  SetStaleness(&config, 1);
  return config;
}

TEST(DeviceCacheMemoryTest, OfTheDevice) {
  CacheConfig config = SmallConfig();
  config.rows.clock = ClockRule::kLamport;  // looks up what is pushed, too
  int failures = 0;
  for (int64_t left = 0; left < 12; ++left) {
    SCOPED_TRACE(left);
    std::shared_ptr<cuda::DeviceCache> none;
    LimitDevice(left);
    const Status created = testing::DeviceSide::Create(config, &none);
    LimitDevice(INT64_MAX);
    if (!created.ok()) {
      EXPECT_EQ(created.code(), Code::kResourceExhausted) << created.message();
    }
    failures += !created.ok();
    for (const bool pooled : {false, true}) {
      failures += RunShort(config, 40, left, LimitDevice, pooled);
    }
    failures += RunWatchedShort(left, LimitDevice);
  }
  EXPECT_GT(failures, 16);
}

// Nothing else fails there: a step whose rows did not all come reads none, and the next asks anew.
TEST(DeviceCacheMemoryTest, AFailedLaunchWithinInstall) {
  int failures = 0;
  Status status = FailedPrecondition("not yet");
  for (int64_t left = 0; !status.ok(); ++left) {
    SCOPED_TRACE(left);
    CacheConfig config = PlainConfig(2);
    SetStaleness(&config, 1);
    const DeviceCluster cluster(config, 2);
    Ids ids(20);
    std::iota(ids.begin(), ids.end(), 0);
    const Ids watched(ids.begin(), ids.begin() + 10);
    const Floats ones(ids.size(), 1);
    const auto others_update = [&] {
      cluster.Step(1, ids, ones);
      cluster.Flush(1);
    };
    others_update();
    for (int i = 0; i < 2; ++i) cluster.Read(0, watched);
    for (int i = 0; i < 2; ++i) others_update();
    DeviceCluster::Call call = cluster.Lookup(0, ids);
    cluster.Deliver(&call);
    cuda::launches_left = left;
    status = cluster.TryInstall(&call);
    cuda::launches_left = INT64_MAX;
    if (!status.ok()) {
      ++failures;
      const DeviceArray<float> out(ids.size());
      for (const Status& refused : {status, cluster.TryInstall(&call),
                                    cluster.cache()->Gather(*call.ticket, SerialFor, out.get())}) {
        EXPECT_EQ(refused.code(), Code::kFailedPrecondition) << refused.message();
      }
    }
    call.ticket.reset();
    EXPECT_EQ(cluster.Step(0, ids, ones), Floats(ids.size(), -3));
    cluster.Flush(0);
    for (const auto& [key, row] : cluster.Rows()) EXPECT_EQ(row.value[0], -4) << key;
    EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
  }
  EXPECT_GT(failures, 3);
}

// Steps of fewer ids, and lines and visitors, than the host build starts threads for.
template <typename Steps>
void RunShortOfTheHost(const Steps& steps) {
  int failures = 0;
  for (int64_t left = 0; left < 400; ++left) {
    SCOPED_TRACE(left);
    const int short_now = steps(left);
    failures += short_now;
    if (short_now == 0 || ::testing::Test::HasFailure()) break;
  }
  EXPECT_GT(failures, 50);
}

TEST(DeviceCacheMemoryTest, OfTheHost) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    for (const bool half : {false, true}) {
      CacheConfig config = SmallConfig();
      config.rows.clock = clock;
      config.half = half;
      RunShortOfTheHost([&](int64_t left) { return RunShort(config, 20, left, LimitHeap); });
    }
  }
}

TEST(DeviceCacheMemoryTest, OfTheHostWhereRowsArePooled) {
  RunShortOfTheHost(
      [](int64_t left) { return RunShort(SmallConfig(), 20, left, LimitHeap, true); });
}

TEST(DeviceCacheMemoryTest, OfTheHostWhereRowsAreWatched) {
  RunShortOfTheHost([](int64_t left) { return RunWatchedShort(left, LimitHeap); });
}

// It is on its line still, where it is updated.
TEST(DeviceCacheMemoryTest, WhatALookupKeptThatFailedIsOldLater) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport}) {
    SCOPED_TRACE(static_cast<int>(clock));
    int failed_early = 0;
    Status status = ResourceExhausted("not yet");
    for (int64_t left = 0; !status.ok(); ++left) {
      SCOPED_TRACE(left);
      CacheConfig config = PlainConfig();
      config.rows.clock = clock;
      config.capacity = 2;
      config.host_capacity = 6;
      config.policy = Policy::kLru;
      SetStaleness(&config, 100);
      const DeviceCluster cluster(config);
      const Ids ids = {1, 2}, others = {3, 4};
      const Floats ones = {1, 1};
      cluster.Step(0, ids, ones);
      cluster.Flush(0);
      {
        DeviceCluster::Call call = cluster.NewCall(0);
        LimitHeap(left);
        status = cluster.TryLookup(others, &call);
        LimitHeap(INT64_MAX);
      }
      failed_early += cluster.count(CacheCounter::kEvictions) == 0;
      EXPECT_EQ(cluster.Step(0, ids, ones), (Floats{-1, -1}));
      cluster.Step(0, others, ones);
      EXPECT_EQ(cluster.Read(0, ids), (Floats{-2, -2}));
      EXPECT_EQ(cluster.count(CacheCounter::kPending), 0);
    }
    EXPECT_GT(failed_early, 10);
  }
}

}  // namespace
}  // namespace het_tf
