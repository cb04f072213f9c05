// What ThreadSanitizer watches: many threads on one cache, many caches on one table.

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "ops/core/cache/cache.h"
#include "ops/core/cache/cache_testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Chance;
using testing::Cluster;
using testing::Floats;
using testing::Ids;
using testing::PlainConfig;
using testing::Random;
using testing::RunThreads;
using testing::SetStaleness;
using testing::ThreadedFor;

// What a thread has done to each key.
struct Done {
  int64_t sum = 0, updates = 0;
};
using Doings = std::map<int64_t, Done>;

void RandomSteps(const Cluster& cluster, int w, uint64_t seed, int steps, double loss,
                 Doings* doings) {
  Random random(seed);
  for (int step = 0; step < steps; ++step) {
    Ids ids(1 + Below(&random, 20));
    for (int64_t& id : ids) id = Below(&random, 1 + Below(&random, 200));
    Cluster::Call call = cluster.Lookup(w, ids);
    if (Chance(&random, loss)) continue;
    cluster.Deliver(&call);
    if (Chance(&random, loss)) continue;
    cluster.Fill(&call);
    Floats gradients(ids.size());
    for (float& gradient : gradients) gradient = static_cast<float>(Below(&random, 7) - 3);
    EXPECT_OK(cluster.Update(call, gradients));
    for (size_t i = 0; i < ids.size(); ++i)
      (*doings)[ids[i]].sum += static_cast<int64_t>(gradients[i]);
    for (const int64_t key : testing::UniqueIdsOf(*call.ticket).keys) ++(*doings)[key].updates;
    if (Chance(&random, 0.1)) cluster.Flush(w, Chance(&random, 0.5));
  }
}

void ExpectExact(const Cluster& cluster, const std::vector<Doings>& doings, bool count_clocks) {
  Doings total;
  for (const Doings& one : doings) {
    for (const auto& [key, done] : one) {
      total[key].sum += done.sum;
      total[key].updates += done.updates;
    }
  }
  for (int w = 0; w < cluster.num_caches(); ++w) {
    cluster.Flush(w);
    EXPECT_EQ(cluster.count(CacheCounter::kPending, w), 0);
    EXPECT_EQ(cluster.count(CacheCounter::kUpdatesLost, w), 0);
  }
  const testing::TableRows rows = cluster.Rows();
  EXPECT_EQ(rows.size(), total.size());
  for (const auto& [key, done] : total) {
    EXPECT_EQ(rows.at(key).value[0], -static_cast<float>(done.sum)) << "key " << key;
    if (!count_clocks) continue;
    EXPECT_EQ(rows.at(key).clock, done.updates) << "key " << key;
  }
}

TEST(CacheThreadTest, StepsOfManyThreadsAddUp) {
  for (const int64_t staleness : {int64_t{0}, int64_t{3}, kUnbounded}) {
    for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport}) {
      CacheConfig config = PlainConfig(3);
      config.rows.clock = clock;
      config.capacity = 50;
      SetStaleness(&config, staleness);
      const Cluster cluster(config, 2);
      std::vector<Doings> doings(4);
      RunThreads(4, [&](int t) { RandomSteps(cluster, t % 2, t, 60, 0.1, &doings[t]); });
      ExpectExact(cluster, doings, clock == ClockRule::kCount);
    }
  }
}

TEST(CacheThreadTest, GradientsOfManyThreadsAddUpOnTheServer) {
  CacheConfig config = PlainConfig(3);
  config.capacity = 0;
  const Cluster cluster(config, 2);
  std::vector<Doings> doings(4);
  RunThreads(4, [&](int t) { RandomSteps(cluster, t % 2, t, 60, 0.1, &doings[t]); });
  ExpectExact(cluster, doings, true);
}

TEST(CacheThreadTest, WorkSplitOverThreads) {
  CacheConfig config = PlainConfig(2);
  config.capacity = 50;
  SetStaleness(&config, 1);
  Cluster cluster(config, 1);
  cluster.parallel_for = ThreadedFor;
  std::vector<Doings> doings(2);
  RunThreads(2, [&](int t) { RandomSteps(cluster, 0, t, 25, 0.1, &doings[t]); });
  ExpectExact(cluster, doings, true);
}

TEST(CacheThreadTest, TicketsEndOnOtherThreads) {
  CacheConfig config = PlainConfig(2);
  config.capacity = 1;
  const Cluster cluster(config);
  std::mutex mutex;
  std::deque<std::shared_ptr<RowTicket>> tickets;
  std::atomic<int> looking{2};
  RunThreads(4, [&](int t) {
    if (t < 2) {
      Random random(t);
      for (int step = 0; step < 300; ++step) {
        Cluster::Call call = cluster.Lookup(0, {Below(&random, 30), Below(&random, 30)});
        cluster.Deliver(&call);
        cluster.Fill(&call);
        std::lock_guard<std::mutex> lock(mutex);
        tickets.push_back(std::move(call.ticket));
      }
      --looking;
      return;
    }
    while (true) {
      std::shared_ptr<RowTicket> ticket;
      std::lock_guard<std::mutex> lock(mutex);
      if (tickets.empty() && looking == 0) return;
      if (tickets.empty()) continue;
      ticket = std::move(tickets.front());
      tickets.pop_front();
    }
  });
  cluster.Flush(0);
  EXPECT_EQ(cluster.count(CacheCounter::kRows), 1);
}

// Values are not exact here, since clearing loses updates; what is left must be consistent.
TEST(CacheThreadTest, EverythingAtOnce) {
  CacheConfig config = PlainConfig(2);
  config.rows.optimizer = "adam";
  config.rows.initializer = "uniform";
  config.capacity = 20;
  SetStaleness(&config, 2);
  const Cluster cluster(config, 2);
  std::atomic<int> stepping{3};
  RunThreads(5, [&](int t) {
    if (t < 3) {
      Doings doings;
      RandomSteps(cluster, t % 2, t, 80, 0.1, &doings);
      --stepping;
    } else if (t == 3) {
      while (stepping > 0) {
        EXPECT_OK(cluster.cache(0)->Clear());
        EXPECT_GE(cluster.count(CacheCounter::kPending), 0);
      }
    } else {
      while (stepping > 0) {
        const testing::TableRows rows = testing::Snapshot(*cluster.table());
        cluster.table()->Clear();
        EXPECT_OK(testing::Restore(cluster.table(), rows));
      }
    }
  });
  for (int w = 0; w < 2; ++w) {
    cluster.Flush(w);
    EXPECT_EQ(cluster.count(CacheCounter::kPending, w), 0);
    const Floats values = cluster.Read(w, {1, 2, 3});
    EXPECT_EQ(cluster.Read(w, {1, 2, 3}), values);
  }
}

}  // namespace
}  // namespace het_tf
