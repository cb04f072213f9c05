// Steps of several workers that count as one: what every worker reads is what one process would
// read that trains the union of the batches.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/cache/cache_testing.h"
#include "ops/core/plan/planner.h"
#include "ops/core/step/barrier.h"
#include "ops/core/step/sum.h"
#include "ops/core/table/table.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Buffer;
using testing::Chance;
using testing::Cluster;
using testing::Floats;
using testing::Ids;
using testing::kSanitized;
using testing::MakeTable;
using testing::PlainConfig;
using testing::Random;
using testing::RequestBuilder;
using testing::RunThreads;
using testing::Snapshot;
using testing::TableRow;
using testing::TableRows;

CacheConfig StepConfig(const std::string& optimizer, int dim, int num_shards) {
  CacheConfig config = PlainConfig(num_shards);
  config.rows.optimizer = optimizer;
  config.rows.dim = dim;
  testing::SetStaleness(&config, 0);
  config.synchronous = true;
  return config;
}

// One process that trains the union of the batches.
class Union {
 public:
  explicit Union(const RowConfig& rows) {
    RowConfig config = rows;
    config.num_shards = 1;
    table_ = MakeTable(config);
  }

  Floats Read(const Ids& ids) const { return testing::LookupRows(*table_, ids); }
  void Add(const Ids& ids, const Floats& gradients) {
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    gradients_.insert(gradients_.end(), gradients.begin(), gradients.end());
  }
  void Step(float rate) {
    EXPECT_OK(testing::ApplyRows(table_.get(), ids_, gradients_, rate));
    ids_.clear();
    gradients_.clear();
  }
  const Table& table() const { return *table_; }

 private:
  std::unique_ptr<Table> table_;
  Ids ids_;
  Floats gradients_;
};

void ExpectNear(const Floats& actual, const Floats& expected, bool exactly,
                const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    const float tolerance = exactly ? 0 : 2e-6f * std::max(1.0f, std::abs(expected[i]));
    ASSERT_NEAR(actual[i], expected[i], tolerance) << what << ", number " << i;
  }
}

// The messages of a step, all of them taken before the first is answered.
class StepMessages {
 public:
  explicit StepMessages(const Cluster* cluster) : cluster_(cluster) {}

  void Collect(const Cluster::Call& call) {
    for (int s = 0; s < cluster_->num_shards(); ++s) {
      const auto& request = call.requests[s];
      if (request->empty()) continue;
      std::shared_ptr<Table::StepPart> part;
      EXPECT_OK(cluster_->table(s)->Collect(call.cache, request->data(), request->size(), request,
                                            cluster_->parallel_for, &part));
      parts_.push_back({call.cache, s, part});
    }
  }
  void Merge() const {
    for (int s = 0; s < cluster_->num_shards(); ++s) {
      EXPECT_OK(cluster_->table(s)->MergeStep(cluster_->parallel_for));
    }
  }
  void Answer(Cluster::Call* call) const {
    for (const Part& part : parts_) {
      if (part.worker != call->cache) continue;
      Buffer* reply = &call->replies[part.shard];
      EXPECT_OK(cluster_->table(part.shard)
                    ->AnswerStep(*part.part, cluster_->parallel_for, [&](size_t bytes) {
                      reply->resize(bytes);
                      return reply->data();
                    }));
    }
  }

 private:
  struct Part {
    int worker, shard;
    std::shared_ptr<Table::StepPart> part;
  };
  const Cluster* const cluster_;
  std::vector<Part> parts_;
};

// The step after the last one: everything is pushed, and nothing looked up.
void PushEverything(const Cluster* cluster, const std::vector<int>& workers) {
  StepMessages messages(cluster);
  std::vector<Cluster::Call> calls;
  for (const int w : workers) {
    calls.push_back(cluster->CutFlush(w, /*all=*/true));
    messages.Collect(calls.back());
  }
  messages.Merge();
}

void ExpectRowsOf(const Union& all, const Cluster& cluster, bool exactly) {
  const TableRows actual = cluster.Rows(), expected = Snapshot(all.table());
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [key, row] : expected) {
    ASSERT_EQ(actual.count(key), 1u) << key;
    const TableRow& found = actual.at(key);
    ExpectNear(found.value, row.value, exactly, "key " + std::to_string(key));
    ExpectNear(found.slots, row.slots, exactly, "slots of key " + std::to_string(key));
  }
}

struct Case {
  const char* optimizer;
  bool is_exact;
};
constexpr Case kCases[] = {
    {"sgd", true},
    {"adagrad", false},
    {"row_wise_adagrad", false},
    {"momentum momentum=0.9", false},
    {"sgd l2=0.5 weight_decay=0.1", false},
    {"adam", false},
    {"ftrl", false},
};

class StepScheduleTest : public ::testing::TestWithParam<Case> {};

TEST_P(StepScheduleTest, WorkersReadWhatOneProcessWouldRead) {
  constexpr int kSteps = kSanitized ? 15 : 40;
  for (uint64_t seed = 0; seed < (kSanitized ? 6 : 20); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    constexpr int kWorkers[] = {2, 3, 5, 8, 24};
    const int num_workers = kWorkers[Below(&random, 5)];
    const int dim = GetParam().is_exact ? 1 : 3;
    CacheConfig config =
        StepConfig(GetParam().optimizer, dim, static_cast<int>(1 + Below(&random, 3)));
    config.capacity = Chance(&random, 0.2) ? 0 : 1 + Below(&random, 40);
    config.policy = Chance(&random, 0.5) ? Policy::kLru : Policy::kLfu;
    // Beyond the workers of the beginning: those that take the place of dead ones.
    Cluster cluster(config, 2 * num_workers);
    if (num_workers == 2) cluster.parallel_for = testing::ThreadedFor;
    Union all(config.rows);
    std::vector<int> workers(num_workers);
    std::iota(workers.begin(), workers.end(), 0);
    int next_worker = num_workers;
    std::vector<Cluster::Call> calls;
    for (int step = 0; step < kSteps; ++step) {
      const float rate = GetParam().is_exact ? 1 : 0.1f;
      StepMessages messages(&cluster);
      calls.clear();
      std::vector<Ids> ids;
      for (const int w : workers) {
        ids.emplace_back(Below(&random, 8));
        for (int64_t& id : ids.back()) id = Below(&random, 1 + Below(&random, 60));
        calls.push_back(cluster.Lookup(w, ids.back()));
      }
      std::vector<int> order(workers.size());
      std::iota(order.begin(), order.end(), 0);
      for (size_t i = order.size() - 1; i > 0; --i)
        std::swap(order[i], order[Below(&random, i + 1)]);
      for (const int i : order) {
        messages.Collect(calls[i]);
        if (Chance(&random, 0.1)) messages.Collect(calls[i]);  // came twice
      }
      messages.Merge();
      for (const int i : order) {
        messages.Answer(&calls[i]);
        if (Chance(&random, 0.1)) messages.Answer(&calls[i]);  // the first was lost
        ExpectNear(cluster.Fill(&calls[i]), all.Read(ids[i]), GetParam().is_exact,
                   "step " + std::to_string(step) + ", worker " + std::to_string(workers[i]));
        if (HasFatalFailure()) return;
      }
      if (next_worker < cluster.num_caches() && Chance(&random, 0.1)) {
        const auto dead = static_cast<size_t>(Below(&random, workers.size()));
        workers.erase(workers.begin() + dead);
        calls.erase(calls.begin() + dead);
        ids.erase(ids.begin() + dead);
        workers.push_back(next_worker++);  // from the next step on
      }
      for (size_t i = 0; i < calls.size(); ++i) {
        Floats gradients(ids[i].size() * dim);
        for (float& g : gradients) g = static_cast<float>(Below(&random, 9) - 4);
        EXPECT_OK(cluster.Update(calls[i], gradients, rate));
        all.Add(ids[i], gradients);
      }
      all.Step(rate);
    }
    PushEverything(&cluster, workers);
    ExpectRowsOf(all, cluster, GetParam().is_exact);
  }
}

// With a plan of who trains what, a worker pushes a row only when another worker needs it.
TEST_P(StepScheduleTest, PlannedWorkersReadWhatOneProcessWouldRead) {
  constexpr int kSteps = kSanitized ? 15 : 40;
  for (uint64_t seed = 0; seed < (kSanitized ? 6 : 20); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    constexpr int kWorkers[] = {2, 3, 8, 24};
    const int num_workers = kWorkers[Below(&random, 4)];
    const int dim = GetParam().is_exact ? 1 : 3;
    CacheConfig config =
        StepConfig(GetParam().optimizer, dim, static_cast<int>(1 + Below(&random, 3)));
    config.capacity = Chance(&random, 0.2) ? 0 : 1 + Below(&random, 40);
    config.policy = Chance(&random, 0.5) ? Policy::kLru : Policy::kLfu;
    Cluster cluster(config, num_workers);
    std::vector<int> workers(num_workers);
    std::iota(workers.begin(), workers.end(), 0);
    Union all(config.rows);
    // Of another size than the caches.
    Planner planner({num_workers, Chance(&random, 0.3) ? 0 : 1 + Below(&random, 40)});
    const int64_t share = 1 + Below(&random, 3), width = 1 + Below(&random, 4);
    const int64_t num_keys = 10 + Below(&random, 200);
    const std::vector<int32_t> tables(width);
    std::vector<int32_t> columns(width);
    std::iota(columns.begin(), columns.end(), 0);
    std::vector<Cluster::Call> calls;
    for (int step = 0; step < kSteps; ++step) {
      Ids keys(num_workers * share * width);
      for (int64_t& key : keys) key = Below(&random, 1 + Below(&random, num_keys));
      Planner::Step plan;
      planner.Plan({keys.data(), num_workers * share, tables, columns}, SerialFor, &plan);
      StepMessages messages(&cluster);
      calls.clear();
      std::vector<Ids> ids(num_workers);
      for (int64_t e = 0; e < num_workers * share; ++e) {
        Ids& of_worker = ids[plan.worker_of[e]];
        of_worker.insert(of_worker.end(), keys.begin() + e * width, keys.begin() + (e + 1) * width);
      }
      for (int w = 0; w < num_workers; ++w) {
        ASSERT_EQ(ids[w].size(), static_cast<size_t>(share * width));
        Ids due;
        for (const Planner::TableKey& key : plan.due[w]) due.push_back(key.key);
        // Now and then all unsent updates are pushed, as at the end of a closure.
        EXPECT_OK(cluster.cache(w)->KeepUpdates(step % 13 != 12));
        EXPECT_OK(cluster.cache(w)->KeepUpdates(true));
        EXPECT_OK(cluster.cache(w)->PushRows(due.data(), static_cast<int64_t>(due.size())));
        calls.push_back(cluster.Lookup(w, ids[w]));
        messages.Collect(calls.back());
      }
      messages.Merge();
      for (int w = 0; w < num_workers; ++w) {
        messages.Answer(&calls[w]);
        ExpectNear(cluster.Fill(&calls[w]), all.Read(ids[w]), GetParam().is_exact,
                   "step " + std::to_string(step) + ", worker " + std::to_string(w));
        if (HasFatalFailure()) return;
      }
      const float rate = GetParam().is_exact ? 1 : 0.1f;
      for (int w = 0; w < num_workers; ++w) {
        Floats gradients(ids[w].size() * dim);
        for (float& g : gradients) g = static_cast<float>(Below(&random, 9) - 4);
        EXPECT_OK(cluster.Update(calls[w], gradients, rate));
        all.Add(ids[w], gradients);
      }
      all.Step(rate);
    }
    PushEverything(&cluster, workers);
    ExpectRowsOf(all, cluster, GetParam().is_exact);
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, StepScheduleTest, ::testing::ValuesIn(kCases));

TEST(StepTest, RowsThatNobodyElseTrainedAreNotSent) {
  const CacheConfig config = StepConfig("sgd", 1, 1);
  Cluster cluster(config, 2);
  const auto step = [&](const std::vector<Ids>& ids) {
    StepMessages messages(&cluster);
    std::vector<Cluster::Call> calls;
    for (int w = 0; w < 2; ++w) {
      calls.push_back(cluster.Lookup(w, ids[w]));
      messages.Collect(calls.back());
    }
    messages.Merge();
    const int64_t sent = cluster.rows_sent();
    for (Cluster::Call& call : calls) {
      messages.Answer(&call);
      cluster.Install(&call);
      EXPECT_OK(cluster.Update(call, Floats(call.ticket->num_ids(), 1)));
    }
    return cluster.rows_sent() - sent;
  };
  const std::vector<Ids> apart = {{1, 2}, {3, 4}}, shared = {{1, 2}, {1, 4}};
  EXPECT_EQ(step(apart), 0) << "nobody has updated them yet";
  for (int i = 0; i < 5; ++i) EXPECT_EQ(step(apart), 0) << "step " << i;
  EXPECT_EQ(step(shared), 1) << "key 1, to worker 1";
  EXPECT_EQ(step(shared), 2) << "key 1, to both";
  EXPECT_EQ(step(apart), 1) << "key 1, to worker 0, which lacks what worker 1 did last";
  EXPECT_EQ(step(apart), 0);
}

TEST(StepTest, OnlyUnsentUpdatesArePushedByKey) {
  Cluster cluster(StepConfig("sgd", 1, 1));
  EXPECT_OK(cluster.cache()->KeepUpdates(true));
  cluster.Step(0, {1, 2}, {1, 1});
  cluster.Read(0, {3});
  const auto push = [&](const Ids& keys) {
    EXPECT_OK(cluster.cache(0)->PushRows(keys.data(), static_cast<int64_t>(keys.size())));
    cluster.Flush(0, /*all=*/false);
    return cluster.count(CacheCounter::kRowsPushed);
  };
  EXPECT_EQ(push({3, 4}), 0) << "3 was not trained, 4 is not there";
  EXPECT_EQ(push({1, 1}), 1);
  EXPECT_EQ(push({1}), 1);
  EXPECT_EQ(cluster.table()->size(), 1);
  EXPECT_OK(cluster.cache()->KeepUpdates(false));
  EXPECT_EQ(push({}), 2) << "all that is unsent";
  cluster.Step(0, {1, 5}, {1, 1});
  EXPECT_EQ(push({}), 4) << "the write bound holds again";
  EXPECT_OK(cluster.cache()->KeepUpdates(true));
  cluster.Flush(0);
  cluster.Step(0, {1}, {1});
  EXPECT_EQ(push({}), 5) << "a flush of everything ends it";
}

TEST(StepTest, WhatAnotherClockOrAClosurePushesIsRefused) {
  const auto lamport = MakeTable({1, "sgd", "zeros", 0, ClockRule::kLamport, 1});
  RequestBuilder request;
  std::shared_ptr<Table::StepPart> part;
  const auto collect = [&](Table* table) {
    const auto bytes = std::make_shared<Buffer>(request.Encode());
    return table->Collect(0, bytes->data(), bytes->size(), bytes, SerialFor, &part);
  };
  EXPECT_REFUSED(collect(lamport.get()), "clock must be 'count'");
  const auto table = MakeTable({1, "sgd", "zeros", 0, ClockRule::kCount, 1});
  request.header.incarnation = request.header.session = 1;
  request.pushes = {{1, {{5, 0, {1}}}, /*closure=*/3}};
  EXPECT_REFUSED(collect(table.get()), "a push of closure 3");
  request.pushes = {{1, {{5, 0, {std::nanf("")}}}}};
  EXPECT_REFUSED(collect(table.get()), "request pushes key 5");
  EXPECT_OK(table->MergeStep(SerialFor));
}

// Gradients that come together and whose sum is infinite are taken one by one, as Keras would.
TEST(StepTest, GradientsWhoseSumIsInfiniteAreTakenOneByOne) {
  Cluster cluster(StepConfig("sgd", 1, 1), 2);
  constexpr float kHuge = 1.5e19f;  // its square is finite, that of twice as much is not
  for (int step = 0; step < 2; ++step) {
    StepMessages messages(&cluster);
    std::vector<Cluster::Call> calls;
    for (int w = 0; w < 2; ++w) {
      calls.push_back(cluster.Lookup(w, {7}));
      messages.Collect(calls.back());
    }
    messages.Merge();
    for (Cluster::Call& call : calls) {
      messages.Answer(&call);
      const Floats rows = cluster.Fill(&call);
      EXPECT_EQ(rows[0], step == 0 ? 0 : -2 * kHuge);
      EXPECT_OK(cluster.Update(call, {kHuge}));
    }
  }
}

// ---- StepBarrier

struct Log {
  StepBarrier::Done Done() {
    return [this](const Status& status) { statuses.push_back(status); };
  }
  std::vector<Status> statuses;
};

TEST(StepBarrierTest, TheLastToArriveMergesThenAllAreAnswered) {
  StepBarrier barrier;
  barrier.Begin(1, 3);
  int merges = 0;
  const auto merge = [&] { return ++merges, Status(); };
  Log log;
  for (int step = 0; step < 3; ++step) {
    for (const int member : {2, 0}) barrier.Arrive(1, member, step, false, merge, log.Done());
    EXPECT_EQ(barrier.waiting().step, step);
    EXPECT_EQ(barrier.waiting().absent, std::vector<int64_t>{1});
    EXPECT_EQ(barrier.waiting().workers,
              std::vector<int64_t>{step == 0 ? StepBarrier::kNobody : 7});
    EXPECT_EQ(barrier.Join(1, 1, 7), step == 0) << "nobody joins a round that is under way";
    EXPECT_EQ(merges, step);
    EXPECT_EQ(log.statuses.size(), 3u * step);
    barrier.Arrive(1, 1, step, false, merge, log.Done());
    EXPECT_EQ(merges, step + 1);
    EXPECT_EQ(log.statuses.size(), 3u * (step + 1));
  }
  for (const Status& status : log.statuses) EXPECT_OK(status);
  barrier.Arrive(1, 1, 2, false, merge, log.Done());
  EXPECT_EQ(merges, 3);
  EXPECT_REFUSED(log.statuses.back(), "step = 2 of member 1, but the round is at step 3");
}

TEST(StepBarrierTest, AMemberLeavesAfterItsLastStep) {
  StepBarrier barrier;
  barrier.Begin(1, 2);
  int merges = 0;
  const auto merge = [&] { return ++merges, Status(); };
  Log log;
  barrier.Arrive(1, 0, 0, true, merge, log.Done());
  EXPECT_EQ(merges, 0);
  barrier.Arrive(1, 1, 0, false, merge, log.Done());
  EXPECT_EQ(merges, 1);
  barrier.Arrive(1, 1, 1, true, merge, log.Done());
  EXPECT_EQ(merges, 2);
  EXPECT_EQ(log.statuses.size(), 3u);
  for (const Status& status : log.statuses) EXPECT_OK(status);
  EXPECT_TRUE(barrier.waiting().absent.empty());
}

TEST(StepBarrierTest, AMemberThatLeavesIsNotWaitedFor) {
  StepBarrier barrier;
  barrier.Begin(1, 3);
  const auto merge = [] { return Status(); };
  Log log, gone;
  barrier.Arrive(1, 0, 0, false, merge, log.Done());
  barrier.Arrive(1, 1, 0, false, merge, gone.Done());
  barrier.Leave(1, 1);
  ASSERT_EQ(gone.statuses.size(), 1u);
  EXPECT_REFUSED(gone.statuses[0], "member 1 takes no part");
  barrier.Leave(2, 0);  // of another round
  EXPECT_TRUE(log.statuses.empty());
  barrier.Leave(1, 2);
  EXPECT_EQ(log.statuses.size(), 1u);
  EXPECT_REFUSED(barrier.Check(1, 2, 1), "member = 2 takes no part in round 1");
  EXPECT_FALSE(barrier.Join(1, 2, 7));
  EXPECT_FALSE(barrier.Join(2, 0, 7));
  EXPECT_OK(barrier.Check(1, 0, 1));
  EXPECT_REFUSED(barrier.Check(1, 0, 2), "step = 2 of member 0");
  EXPECT_REFUSED(barrier.Check(1, 0, -1), "step = -1");
  barrier.Leave(1, 0);  // nobody is left, so no step is merged
  EXPECT_EQ(barrier.waiting().step, 1);
}

TEST(StepBarrierTest, AMessageThatIsGivenUpOrReplacedStillCounts) {
  StepBarrier barrier;
  barrier.Begin(1, 2);
  const auto merge = [] { return Status(); };
  Log first, second, other;
  barrier.Arrive(1, 0, 0, false, merge, first.Done());
  barrier.Arrive(1, 0, 0, false, merge, second.Done());
  ASSERT_EQ(first.statuses.size(), 1u);
  EXPECT_REFUSED(first.statuses[0], "came again");
  barrier.GiveUp(1, 0, 0);
  ASSERT_EQ(second.statuses.size(), 1u);
  EXPECT_EQ(second.statuses[0].code(), Code::kCancelled);
  barrier.GiveUp(1, 0, 0);
  barrier.Arrive(1, 1, 0, false, merge, other.Done());
  ASSERT_EQ(other.statuses.size(), 1u);
  EXPECT_OK(other.statuses[0]);
}

TEST(StepBarrierTest, ANewRoundEndsTheOldOne) {
  StepBarrier barrier;
  const auto merge = [] { return Status(); };
  Log old, now;
  barrier.Begin(1, 2);
  barrier.Arrive(1, 0, 0, false, merge, old.Done());
  barrier.Begin(2, 1);
  ASSERT_EQ(old.statuses.size(), 1u);
  EXPECT_REFUSED(old.statuses[0], "round of the step is over");
  barrier.Arrive(1, 1, 0, false, merge, old.Done());
  ASSERT_EQ(old.statuses.size(), 2u);
  EXPECT_REFUSED(old.statuses[1], "round = 1 of the steps is over: this is round 2");
  barrier.Arrive(2, 0, 0, false, merge, now.Done());
  ASSERT_EQ(now.statuses.size(), 1u);
  EXPECT_OK(now.statuses[0]);
}

TEST(StepBarrierTest, AllHearOfAMergeThatFailed) {
  StepBarrier barrier;
  barrier.Begin(1, 2);
  const auto merge = [] { return ResourceExhausted("no memory"); };
  Log log;
  barrier.Arrive(1, 0, 0, false, merge, log.Done());
  barrier.Arrive(1, 1, 0, false, merge, log.Done());
  ASSERT_EQ(log.statuses.size(), 2u);
  for (const Status& status : log.statuses) EXPECT_REFUSED(status, "no memory");
}

// A step ahead of nobody: each thread reads, after every step, the sum of what all have added.
TEST(StepBarrierTest, ThreadsStayInStep) {
  constexpr int kMembers = 6, kSteps = 200;
  StepBarrier barrier;
  barrier.Begin(1, kMembers);
  StepSum sum;
  sum.Begin(kMembers);
  std::atomic<int> merges{0};
  RunThreads(kMembers, [&](int member) {
    for (int step = 0; step < kSteps; ++step) {
      if (member == 5 && step == 100) return barrier.Leave(1, 5);
      const std::vector<float> mine = {static_cast<float>(step), static_cast<float>(member)};
      EXPECT_OK(sum.Collect(member, mine.data(), mine.size()));
      std::mutex mutex;
      std::condition_variable changed;
      bool is_done = false;
      const auto merge = [&] {
        ++merges;
        return sum.Merge();
      };
      barrier.Arrive(1, member, step, false, merge, [&](const Status& status) {
        EXPECT_OK(status);
        std::lock_guard<std::mutex> lock(mutex);
        is_done = true;
        changed.notify_one();
      });
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return is_done; });
      std::vector<float> mean(2);
      EXPECT_OK(sum.Read(2, mean.data()));
      const int left = step < 100 ? kMembers : kMembers - 1;  // of six
      const float steps = static_cast<float>(step) * left / kMembers;
      const float members = static_cast<float>(left * (left - 1)) / 2 / kMembers;
      EXPECT_FLOAT_EQ(mean[0], steps);
      EXPECT_FLOAT_EQ(mean[1], members);
    }
  });
  EXPECT_EQ(merges, kSteps);
}

TEST(StepSumTest, AMemberCountsOnceAndSizesMustAgree) {
  StepSum sum;
  sum.Begin(2);
  const std::vector<float> one = {1, 2}, three = {3, 6};
  EXPECT_OK(sum.Collect(0, one.data(), 2));
  EXPECT_OK(sum.Collect(0, one.data(), 2));
  EXPECT_REFUSED(sum.Collect(1, one.data(), 1),
                 "member 1 of a step adds up 1 numbers, the others 2");
  EXPECT_OK(sum.Collect(1, three.data(), 2));
  EXPECT_OK(sum.Merge());
  std::vector<float> mean(2);
  EXPECT_OK(sum.Read(2, mean.data()));
  EXPECT_EQ(mean, (std::vector<float>{2, 4}));
  EXPECT_OK(sum.Collect(0, one.data(), 2));  // of a step that never ends
  sum.Begin(2);
  for (const int member : {0, 1}) EXPECT_OK(sum.Collect(member, three.data(), 2));
  EXPECT_OK(sum.Merge());
  EXPECT_OK(sum.Read(2, mean.data()));
  EXPECT_EQ(mean, three);
  mean.resize(3);
  EXPECT_REFUSED(sum.Read(3, mean.data()), "asks for 3 numbers, the step had 2");
}

}  // namespace
}  // namespace het_tf
