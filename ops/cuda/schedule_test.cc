// The rules of DESIGN section 3 with rows in device caches: beside the host's, and under
// random schedules. Every gradient is an integer, so a value is minus their sum, exactly.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/unique_ids.h"
#include "ops/cuda/device_cache_testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Chance;
using testing::Cluster;
using testing::DeviceCluster;
using testing::Floats;
using testing::Ids;
using testing::kFewer;
using testing::PlainConfig;
using testing::Random;

constexpr int64_t kBounds[] = {kUnbounded, 0, 1, 2, 5};

Ids RandomIds(Random* random, int64_t num_keys) {
  Ids ids(1 + Below(random, 8));
  for (int64_t& id : ids) id = Below(random, 1 + Below(random, num_keys));
  return ids;
}

// One worker or several, all clock rules: host and device read the same and leave the same table,
// to the last bit.
TEST(DeviceScheduleTest, HostAndDeviceReadTheSame) {
  for (uint64_t seed = 0; seed < 30 / kFewer; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    CacheConfig config = PlainConfig(static_cast<int>(1 + Below(&random, 4)));
    config.rows.dim = static_cast<int>(1 + Below(&random, 20));
    config.rows.clock = static_cast<ClockRule>(seed % 3);
    const int64_t scale = config.rows.clock == ClockRule::kDrift ? int64_t{1} << 14 : 1;
    const auto bound = [&] {
      const int64_t each = kBounds[Below(&random, 5)];
      return each > 0 ? each * scale : each;
    };
    config.read_bound = bound();
    config.write_bound = bound();
    const int num_workers = static_cast<int>(1 + Below(&random, 3));
    // The shard sends the host's cache a row that has passed the bound; the device's hears of it
    // when it asks. So what they read of others within a bound may differ.
    const bool differs = num_workers > 1 && config.rows.clock != ClockRule::kLamport;
    if (differs && config.read_bound > 0) config.read_bound = 0;
    const Cluster host(config, num_workers);
    const DeviceCluster device(config, num_workers);
    for (int step = 0; step < 80; ++step) {
      const int w = static_cast<int>(Below(&random, num_workers));
      const Ids ids = RandomIds(&random, 40);
      Floats gradients(ids.size() * config.rows.dim);
      for (float& g : gradients) g = static_cast<float>(Below(&random, 9) - 4);
      ASSERT_EQ(device.Step(w, ids, gradients), host.Step(w, ids, gradients)) << step;
      if (config.write_bound == 0 || Chance(&random, 0.1)) {
        host.Flush(w, false);
        device.Flush(w, false);
      }
    }
    for (int w = 0; w < num_workers; ++w) {
      host.Flush(w, true);
      device.Flush(w, true);
    }
    EXPECT_EQ(device.Rows(), host.Rows());
  }
}

// The same with every optimizer, one worker: what comes of it is what the host makes of it up to
// the last bits (a lone update travels as a gradient here, there as what is shorter).
TEST(DeviceScheduleTest, HostAndDeviceTrainTheSame) {
  for (const char* spec : {"momentum", "adagrad", "row_wise_adagrad", "adam", "row_wise_adam",
                           "rmsprop momentum=0.8 centered=1", "lion", "lamb", "ftrl l1=0.01",
                           "sgd weight_decay=0.1 max_norm=0.5"}) {
    SCOPED_TRACE(spec);
    Random random(1);
    CacheConfig config = PlainConfig(2);
    config.rows = {5, spec, "uniform", 3, ClockRule::kCount, 2};
    config.read_bound = 2;
    config.write_bound = 3;
    const Cluster host(config);
    const DeviceCluster device(config);
    for (int step = 0; step < 60; ++step) {
      const Ids ids = RandomIds(&random, 20);
      Floats gradients(ids.size() * config.rows.dim);
      for (float& g : gradients) g = static_cast<float>(Below(&random, 9) - 4) / 8;
      const Floats expected = host.Step(0, ids, gradients, 0.1f);
      const Floats values = device.Step(0, ids, gradients, 0.1f);
      for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], 1e-5) << step;
    }
    host.Flush(0);
    device.Flush(0);
    const testing::TableRows expected = host.Rows(), rows = device.Rows();
    ASSERT_EQ(rows.size(), expected.size());
    for (const auto& [key, row] : expected) {
      EXPECT_EQ(rows.at(key).clock, row.clock);
      for (size_t i = 0; i < row.value.size(); ++i) {
        EXPECT_NEAR(rows.at(key).value[i], row.value[i], 1e-5);
      }
    }
  }
}

using Counts = std::map<int64_t, int64_t>;

// Gradients of which each key's sum is 1.
Floats OneForEachKey(const UniqueIds& unique) {
  Floats gradients(unique.num_ids());
  for (int64_t u = 0; u < unique.num_keys(); ++u) gradients[unique.positions[unique.begin[u]]] = 1;
  return gradients;
}

// Workers with few lines whose steps overlap, and whose messages overtake each other, come twice or
// never.
class Schedule {
 public:
  Schedule(uint64_t seed, ClockRule clock, bool half_rows, bool half_wire)
      : random_(seed), clock_(clock) {
    CacheConfig config = PlainConfig(static_cast<int>(1 + Below(&random_, 4)));
    config.rows.clock = clock;
    config.rows.half = half_rows;
    config.half = half_wire;
    config.capacity = 1 + Below(&random_, 40);
    config.policy = Chance(&random_, 0.5) ? Policy::kLru : Policy::kLfu;
    config.read_bound = kBounds[Below(&random_, 5)];
    config.write_bound = kBounds[Below(&random_, 5)];
    const int num_workers = static_cast<int>(1 + Below(&random_, 3));
    cluster_ = std::make_unique<DeviceCluster>(config, num_workers);
    own_.resize(num_workers);
  }

  void Run(int events) {
    for (int event = 0; event < events; ++event) {
      const int w = static_cast<int>(Below(&random_, cluster_->num_caches()));
      switch (Below(&random_, 4)) {
        case 0:
          if (under_way_.size() < 5) Lookup(w);
          break;
        case 1:
          DeliverOne();
          break;
        case 2:
          FinishOne();
          break;
        case 3:
          if (Chance(&random_, 0.2)) Flush(w);
          break;
      }
    }
    while (!under_way_.empty()) FinishOne();
    for (int w = 0; w < cluster_->num_caches(); ++w) {
      cluster_->CutFlush(w, true);  // lost
      cluster_->Flush(w);
      EXPECT_EQ(cluster_->count(CacheCounter::kPending, w), 0);
      EXPECT_EQ(cluster_->count(CacheCounter::kUpdatesLost, w), 0);
    }
  }

  void ExpectExactSums() const {
    const testing::TableRows rows = cluster_->Rows();
    EXPECT_EQ(rows.size(), total_.size());
    for (const auto& [key, count] : total_) {
      ASSERT_EQ(rows.count(key), 1u);
      EXPECT_EQ(rows.at(key).value[0], -count) << "key " << key;
      if (clock_ == ClockRule::kCount) {
        EXPECT_EQ(rows.at(key).clock, count) << "key " << key;
      }
    }
  }

  int64_t num_updates() const {
    int64_t sum = 0;
    for (const auto& entry : total_) sum += entry.second;
    return sum;
  }

 private:
  struct UnderWay {
    Ids ids;
    DeviceCluster::Call call;
    Counts own;  // the worker's updates when the lookup was made
  };

  void Lookup(int w) {
    const Ids ids = RandomIds(&random_, 60);
    under_way_.push_back({ids, cluster_->Lookup(w, ids), own_[w]});
  }

  // Any request of any call, also one that was there before.
  void DeliverOne() {
    if (under_way_.empty()) return;
    cluster_->Deliver(&under_way_[Below(&random_, under_way_.size())].call,
                      static_cast<int>(Below(&random_, cluster_->num_shards())));
  }

  void Flush(int w) {
    DeviceCluster::Call call = cluster_->CutFlush(w, Chance(&random_, 0.5));
    if (Chance(&random_, 0.2)) return;  // lost
    cluster_->Deliver(&call);
    if (Chance(&random_, 0.2)) return;  // its replies were
    EXPECT_OK(cluster_->TryInstall(&call));
  }

  void FinishOne() {
    if (under_way_.empty()) return;
    std::swap(under_way_[Below(&random_, under_way_.size())], under_way_.back());
    UnderWay step = std::move(under_way_.back());
    under_way_.pop_back();
    if (Chance(&random_, 0.2)) return;  // lost
    for (int s = 0; s < cluster_->num_shards(); ++s) {
      if (step.call.replies[s].empty()) cluster_->Deliver(&step.call, s);
    }
    const Floats values = cluster_->Fill(&step.call);
    const UniqueIds unique(step.ids.data(), static_cast<int64_t>(step.ids.size()));
    for (size_t i = 0; i < values.size(); ++i) {
      const int64_t key = step.ids[i];
      EXPECT_LE(-values[i], total_[key]) << "key " << key << " has updates that nobody made";
      EXPECT_GE(-values[i], step.own[key]) << "own updates of key " << key << " are missing";
    }
    EXPECT_OK(cluster_->Update(step.call, OneForEachKey(unique)));
    for (const int64_t key : unique.keys) {
      ++total_[key];
      ++own_[step.call.cache][key];
    }
  }

  Random random_;
  const ClockRule clock_;
  std::unique_ptr<DeviceCluster> cluster_;
  std::vector<UnderWay> under_way_;
  Counts total_;
  std::vector<Counts> own_;
};

void RunSchedules(ClockRule clock, bool half_rows = false, bool half_wire = false) {
  const uint64_t seeds = (half_rows || half_wire ? 10 : 40) / kFewer;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Schedule schedule(seed, clock, half_rows, half_wire);
    schedule.Run(300);
    schedule.ExpectExactSums();
    EXPECT_GT(schedule.num_updates(), 50);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(DeviceScheduleTest, EveryUpdateIsMergedOnce) { RunSchedules(ClockRule::kCount); }

TEST(DeviceScheduleTest, EveryUpdateIsMergedOnceWithLamportClocks) {
  RunSchedules(ClockRule::kLamport);
}

TEST(DeviceScheduleTest, EveryUpdateIsMergedOnceWithDriftClocks) {
  RunSchedules(ClockRule::kDrift);
}

// Of integers that bfloat16 has, nothing is rounded: each counts once here, too.
TEST(DeviceScheduleTest, EveryUpdateIsMergedOnceInBfloat16) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    RunSchedules(clock, true, false);
    RunSchedules(clock, false, true);
    RunSchedules(clock, true, true);
  }
}

// DESIGN 3.2: without losses and with one step at a time, a read misses at most
// read_bound + (N - 1) * write_bound updates of the others.
TEST(DeviceScheduleTest, AReadMissesNoMoreThanTheBounds) {
  for (const int64_t read_bound : {0, 1, 4}) {
    for (const int64_t write_bound : {0, 1, 3}) {
      CacheConfig config = PlainConfig(2);
      config.read_bound = read_bound;
      config.write_bound = write_bound;
      config.capacity = 8;
      constexpr int kWorkers = 3;
      const DeviceCluster cluster(config, kWorkers);
      Random random(1);
      Counts total;
      int64_t most_missed = 0;
      for (int step = 0; step < 400 / kFewer; ++step) {
        const int w = static_cast<int>(Below(&random, kWorkers));
        const Ids ids = RandomIds(&random, 12);
        const UniqueIds unique(ids.data(), static_cast<int64_t>(ids.size()));
        const Floats values = cluster.Step(w, ids, OneForEachKey(unique));
        for (size_t i = 0; i < values.size(); ++i) {
          most_missed = std::max(most_missed, total[ids[i]] + static_cast<int64_t>(values[i]));
        }
        for (const int64_t key : unique.keys) ++total[key];
        if (write_bound == 0) cluster.Flush(w, false);
      }
      const int64_t unsent = write_bound == 0 ? 0 : (kWorkers - 1) * write_bound;
      EXPECT_LE(most_missed, read_bound + unsent);
      EXPECT_EQ(most_missed > 0, read_bound + unsent > 0) << "whether the bound was tried";
    }
  }
}

// The clocks of cached rows as a call's requests send them.
Counts ClocksSent(const DeviceCluster::Call& call) {
  Counts clocks;
  for (const auto& request : call.requests) {
    if (request->empty()) continue;
    RequestView view;
    EXPECT_OK(RequestView::Parse(request->data(), request->size(), &view));
    for (int64_t c = 0; c < view.header.num_bases(); ++c) clocks[view.keys[c]] = view.bases[c];
  }
  return clocks;
}

// By every clock rule: once a lookup is installed, no shard's clock of its lines is more than the
// read bound beyond what the worker knows. (Lamport's is the paper's Lemma 1, seen from one
// worker.)
TEST(DeviceScheduleTest, ALineIsNoOlderThanTheReadBound) {
  for (const ClockRule rule : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    for (const int64_t bound : {0, 2, 6}) {
      SCOPED_TRACE("rule " + std::to_string(static_cast<int>(rule)) + " bound " +
                   std::to_string(bound));
      CacheConfig config = PlainConfig(2);
      config.rows.clock = rule;
      config.read_bound = rule == ClockRule::kDrift ? bound << 14 : bound;
      config.write_bound = rule == ClockRule::kDrift ? 2 << 14 : 2;
      config.capacity = 10;
      constexpr int kWorkers = 3;
      const DeviceCluster cluster(config, kWorkers);
      Random random(2);
      int64_t furthest = 0;
      for (int step = 0; step < 200 / kFewer; ++step) {
        const int w = static_cast<int>(Below(&random, kWorkers));
        const Ids ids = RandomIds(&random, 12);
        DeviceCluster::Call call = cluster.Lookup(w, ids);
        cluster.Deliver(&call);
        ASSERT_OK(cluster.TryInstall(&call));
        const testing::TableRows rows = cluster.Rows();
        // What a step that came now would say of the same lines.
        const DeviceCluster::Call look = cluster.Lookup(w, ids);
        for (const auto& [key, base] : ClocksSent(look)) {
          const auto row = rows.find(key);
          if (row != rows.end()) furthest = std::max(furthest, row->second.clock - base);
        }
        ASSERT_OK(cluster.Update(call, OneForEachKey(UniqueIds(ids.data(), ids.size()))));
      }
      EXPECT_LE(furthest, config.read_bound);
      EXPECT_EQ(furthest > 0, bound > 0) << "whether the bound was tried";
    }
  }
}

}  // namespace
}  // namespace het_tf
