// Pooled steps of a device's cache, beside the host's.

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/pooling.h"
#include "ops/cuda/device_cache_testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Cluster;
using testing::DeviceArray;
using testing::DeviceCluster;
using testing::Floats;
using testing::Ids;
using testing::PlainConfig;
using testing::Random;

// Ids of two features: bags of three, and bags of any size, some of none, which may have weights.
struct Bags {
  Bags(Random* random, Combiner first, Combiner second, bool weighted, int64_t most) {
    ids.resize(30);
    splits = {0};
    for (int bag = 0; bag < 8; ++bag) splits.push_back(splits.back() + Below(random, most));
    ids.resize(30 + splits.back());
    for (int64_t& id : ids) id = Below(random, 20);
    for (int64_t i = 0; i < splits.back(); ++i) {
      weights.push_back(static_cast<float>(Below(random, 5) - 1));  // some are 0, or equal
    }
    EXPECT_OK(Pooling::Create(
        {{first, 30, 10},
         {second, splits.back(), 8, splits.data(), weighted ? weights.data() : nullptr}},
        &pooling));
  }

  Ids ids;
  std::vector<int64_t> splits;
  Floats weights;
  std::shared_ptr<Pooling> pooling;
};

Floats Numbers(Random* random, int64_t n) {
  Floats numbers(n);
  for (float& x : numbers) x = static_cast<float>(Below(random, 2001) - 1000) / 1024;
  return numbers;
}

void ExpectNear(const Floats& device, const Floats& host, float tolerance) {
  ASSERT_EQ(device.size(), host.size());
  for (size_t i = 0; i < host.size(); ++i) ASSERT_NEAR(device[i], host[i], tolerance) << i;
}

// Sums go by the order of the ids on both sides, but for those of keys that come more than 256
// times; so all is the same to the last bit, but for these. of_rows, of_outputs: tolerances.
void TrainBesideTheHost(const std::string& optimizer, Combiner first_combiner,
                        Combiner second_combiner, bool weighted, int dim, int64_t most,
                        float of_rows = 0, float of_outputs = 0) {
  SCOPED_TRACE(StrCat(optimizer, " ", static_cast<int>(first_combiner), " ",
                      static_cast<int>(second_combiner), weighted ? " weighted " : " ", dim));
  CacheConfig config = PlainConfig(2);
  config.rows = {dim, optimizer, "uniform", 3, ClockRule::kCount, 2};
  config.capacity = 12;  // not for all keys
  const Cluster host(config);
  const DeviceCluster device(config);
  Random random(dim);
  for (int step = 0; step < 5; ++step) {
    const Bags bags(&random, first_combiner, second_combiner, weighted, most);
    Cluster::Call host_call = host.Lookup(0, bags.ids);
    DeviceCluster::Call device_call = device.Lookup(0, bags.ids);
    host.Deliver(&host_call);
    device.Deliver(&device_call);
    ASSERT_OK(host.TryInstall(&host_call));
    ASSERT_OK(device.TryInstall(&device_call));
    Floats first(10 * dim), second(8 * dim);
    std::shared_ptr<PooledRows> here, there;
    ASSERT_OK(host.cache()->Pool(host_call.ticket, bags.pooling, SerialFor,
                                 {first.data(), second.data()}, &here));
    const DeviceArray<float> first_there(10 * dim), second_there(8 * dim);
    ASSERT_OK(device.cache()->Pool(device_call.ticket, bags.pooling, SerialFor,
                                   {first_there.get(), second_there.get()}, &there));
    EXPECT_TRUE(here->IsOf(*host_call.ticket) && there->IsOf(*device_call.ticket));
    EXPECT_FALSE(here->IsOf(*device_call.ticket) || there->IsOf(*host_call.ticket));
    ExpectNear(first_there.Read(), first, of_outputs);
    ExpectNear(second_there.Read(), second, of_outputs);

    const Floats of_first = Numbers(&random, 10 * dim), of_second = Numbers(&random, 8 * dim);
    std::shared_ptr<const UniqueIds> ids, host_ids;
    Floats kept, host_kept;
    ASSERT_OK(here->Read(&host_ids, &host_kept));
    ASSERT_OK(there->Read(&ids, &kept));
    EXPECT_EQ(ids->keys, host_ids->keys);
    EXPECT_EQ(ids->key_of, host_ids->key_of);
    if (weighted) {
      const auto of_weights = [&](const UniqueIds& of_ids, const Floats& rows) {
        const PooledGradients gradients(*bags.pooling, of_ids, dim, SerialFor,
                                        {of_first.data(), of_second.data()}, rows.data());
        Floats out(bags.weights.size());
        gradients.OfWeights(1, SerialFor, out.data());
        return out;
      };
      EXPECT_EQ(of_weights(*ids, kept), of_weights(*host_ids, host_kept));
    }
    ASSERT_OK(
        here->Update(host_call.ticket.get(), {of_first.data(), of_second.data()}, 0.5f, SerialFor));
    const DeviceArray<float> of_first_there(of_first), of_second_there(of_second);
    ASSERT_OK(there->Update(device_call.ticket.get(), {of_first_there.get(), of_second_there.get()},
                            0.5f, SerialFor));
    // Unsent updates are where each has its lines, so that only tables can be compared.
    host.Flush(0);
    device.Flush(0);
  }
  const testing::TableRows expected = host.Rows(), rows = device.Rows();
  ASSERT_EQ(rows.size(), expected.size());
  for (const auto& [key, row] : expected) {
    SCOPED_TRACE(key);
    EXPECT_EQ(rows.at(key).clock, row.clock);
    ExpectNear(rows.at(key).value, row.value, of_rows);
    if (of_rows == 0) {
      EXPECT_EQ(rows.at(key).slots, row.slots);
    }
  }
}

TEST(DeviceCachePoolTest, PoolsAndTrainsAsTheHost) {
  constexpr Combiner kAll[] = {Combiner::kSum, Combiner::kMean, Combiner::kSqrtN, Combiner::kMax};
  for (const Combiner combiner : kAll) {
    for (const int dim : {1, 5, 16, 33}) {
      for (const char* optimizer : {"sgd", "adagrad", "adam"}) {
        TrainBesideTheHost(optimizer, combiner, combiner, false, dim, 7);
      }
      for (const Combiner other : kAll) {
        TrainBesideTheHost("adagrad", combiner, other, true, dim, 7);
      }
    }
    TrainBesideTheHost("adagrad", combiner, combiner, false, 8, 2000, 1e-5f, 2e-3f);
  }
}

TEST(DeviceCachePoolTest, WhatIsNotInstalledOrNotFiniteIsRefused) {
  const DeviceCluster cluster(PlainConfig());
  DeviceCluster::Call call = cluster.Lookup(0, {1, 2});
  const DeviceArray<float> out(2);
  std::shared_ptr<PooledRows> pooled;
  std::shared_ptr<Pooling> pooling;
  ASSERT_OK(Pooling::Create({{Combiner::kSum, 2, 2}}, &pooling));
  const auto pool = [&] {
    return cluster.cache()->Pool(call.ticket, pooling, SerialFor, {out.get()}, &pooled);
  };
  EXPECT_REFUSED(pool(), "not installed");
  cluster.Deliver(&call);
  ASSERT_OK(cluster.TryInstall(&call));
  ASSERT_OK(pool());
  const DeviceArray<float> gradients(Floats{1, HUGE_VALF});
  EXPECT_REFUSED(pooled->Update(call.ticket.get(), {gradients.get()}, 1, SerialFor),
                 "hold NaN or infinity for 1 of 2 keys; no row was updated");
  EXPECT_EQ(cluster.count(CacheCounter::kUpdates), 0);
}

void PoolNoIds(const DeviceCluster& cluster, DeviceCluster::Call call) {
  cluster.Deliver(&call);
  ASSERT_OK(cluster.TryInstall(&call));
  const std::vector<int64_t> splits(4, 0);
  std::shared_ptr<Pooling> pooling;
  ASSERT_OK(Pooling::Create({{Combiner::kMax, 0, 3, splits.data()}}, &pooling));
  const DeviceArray<float> out(Floats(3, 7));
  std::shared_ptr<PooledRows> pooled;
  ASSERT_OK(cluster.cache()->Pool(call.ticket, pooling, SerialFor, {out.get()}, &pooled));
  EXPECT_EQ(out.Read(), Floats(3, 0));
  ASSERT_OK(pooled->Update(call.ticket.get(), {out.get()}, 1, SerialFor));
  std::shared_ptr<const UniqueIds> ids;
  Floats kept;
  ASSERT_OK(pooled->Read(&ids, &kept));
  EXPECT_EQ(ids->num_ids(), 0);
}

TEST(DeviceCachePoolTest, NoIdsAreZeros) {
  const DeviceCluster cluster(PlainConfig());
  PoolNoIds(cluster, cluster.Lookup(0, {}));
  PoolNoIds(cluster, cluster.CutFlush(0, true));
}

}  // namespace
}  // namespace het_tf
