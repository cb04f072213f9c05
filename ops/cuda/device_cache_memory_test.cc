// A device cache where memory runs out: the device's, or the host's. Whichever allocation fails,
// the call can be made again, and nothing is lost or counted twice.

#ifndef __CUDACC__  // a device has no memory that runs out when a test says so

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

// Steps of which one verb after the other is short of memory, and is called again then. pooled:
// each id in a bag of its own. Returns how often one was.
int RunShort(const CacheConfig& config, int num_ids, int64_t left, Limit limit,
             bool pooled = false) {
  int failures = 0;
  const DeviceCluster cluster(config, 2);
  cluster.Step(1, {1, 2}, {1, 1});
  cluster.Flush(1);
  cluster.Step(0, {1, 2, 3}, {1, 1, 1});
  cluster.Step(0, {2, 3}, {1, 1});
  Ids ids(num_ids);
  std::iota(ids.begin(), ids.end(), 0);
  const DeviceArray<float> gradients(Floats(num_ids, 1));
  DeviceCluster::Call call = cluster.NewCall(0);
  const auto run = [&](const auto& verb) {
    limit(left);
    Status status = verb();
    limit(INT64_MAX);
    if (status.ok()) return;
    ++failures;
    EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.message();
    EXPECT_OK(verb());
  };
  const auto install = [&] {
    cluster.Deliver(&call);
    std::vector<ReplyBytes> replies;
    for (const testing::Buffer& reply : call.replies) {
      replies.push_back({reply.data(), reply.size()});
    }
    int64_t rows = 0;
    run([&] { return cluster.cache()->Install(call.ticket.get(), replies, SerialFor, &rows); });
  };
  run([&] { return cluster.TryLookup(ids, &call); });
  install();
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
    std::shared_ptr<cuda::DeviceBags> bags;
    run([&] { return cluster.cache()->Pool(*call.ticket, pooling, outputs, &bags); });
    EXPECT_EQ(out.Read(), values);
    Ids read;
    Floats kept;
    run([&] { return cluster.cache()->ReadPooled(*call.ticket, *bags, &read, &kept); });
    EXPECT_EQ(read, ids);
    EXPECT_EQ(kept, values);
    run([&] { return cluster.cache()->Update(call.ticket.get(), bags.get(), of_outputs, 1); });
  } else {
    run([&] { return cluster.cache()->Update(call.ticket.get(), gradients.get(), 1, SerialFor); });
  }
  call.ticket.reset();
  run([&] { return cluster.cache()->Flush(true, cluster.Into(&call), &call.ticket); });
  install();
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
  return failures;
}

CacheConfig SmallConfig() {
  CacheConfig config = PlainConfig(2);
  config.capacity = 4;
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
  }
  EXPECT_GT(failures, 16);
}

// Fewer ids than the host build starts threads for.
void RunShortOfTheHost(const CacheConfig& config, bool pooled) {
  int failures = 0;
  for (int64_t left = 0; left < 400; ++left) {
    SCOPED_TRACE(left);
    const int short_now = RunShort(config, 20, left, LimitHeap, pooled);
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
      RunShortOfTheHost(config, false);
    }
  }
}

TEST(DeviceCacheMemoryTest, OfTheHostWhereRowsArePooled) { RunShortOfTheHost(SmallConfig(), true); }

}  // namespace
}  // namespace het_tf

#endif
