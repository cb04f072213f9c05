#include "ops/core/dense/replica.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "ops/core/dense/shard.h"
#include "ops/core/row/clock.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Chance;
using testing::Random;
using Message = std::vector<uint64_t>;  // for the alignment

// Servers of a few dense variables and workers that step on them by whole numbers, so that every
// sum is exact.
class System {
 public:
  struct Worker {
    std::shared_ptr<Replica> replica;
    std::vector<float> a, b, slots;  // floats in two variables, and what is not exchanged
    std::vector<int64_t> counters;
    int64_t steps = 0;

    Replica::Variables variables() {
      Replica::Variables v;
      v.floats = {{a.data(), static_cast<int64_t>(a.size())},
                  {b.data(), static_cast<int64_t>(b.size())}};
      for (int64_t& counter : counters) v.counters.push_back(&counter);
      v.rest = {{reinterpret_cast<char*>(slots.data()),
                 static_cast<int64_t>(slots.size() * sizeof(float))}};
      return v;
    }
    float value(size_t f) const { return f < a.size() ? a[f] : b[f - a.size()]; }
  };

  // Of a network that is not young any more: the intervals between two pushes are the longest.
  static constexpr int64_t kOld = int64_t{1} << 40;

  System(int num_workers, int num_shards, int64_t staleness, bool spreads, bool half = false,
         int64_t num_floats = 37, int num_phases = 1, int64_t clock = kOld)
      : num_floats_(num_floats), clock_(clock) {
    config_.num_floats = num_floats;
    config_.num_counters = 1;
    config_.rest_bytes = 5 * sizeof(float);
    config_.num_shards = num_shards;
    config_.num_phases = num_phases;
    config_.num_workers = num_workers;
    config_.staleness = staleness;
    config_.half = half;
    // Shards that know of one worker merge all of a contribution at once.
    workers_of_shards_ = spreads ? num_workers : 1;
    for (int s = 0; s < num_shards; ++s) shards_.push_back(std::make_unique<DenseShard>());
    start_.resize(num_floats);
    for (int64_t f = 0; f < num_floats; ++f) start_[f] = static_cast<float>(f);
    Set(start_);
    for (int w = 0; w < num_workers; ++w) AddWorker();
  }

  // total: what a step of one of several workers counts in the end.
  void Set(const std::vector<float>& floats, float total = 1) {
    for (int s = 0; s < config_.num_shards; ++s) {
      const auto part = [&](int64_t n, int shard) {
        return FirstOfShard(n, shard, config_.num_shards);
      };
      DenseShard::State state;
      state.floats.assign(floats.begin() + part(num_floats_, s),
                          floats.begin() + part(num_floats_, s + 1));
      state.counters.resize(part(1, s + 1) - part(1, s));
      std::vector<float> slots = {1, 2, 3, 4, 5};
      const char* bytes = reinterpret_cast<char*>(slots.data());
      state.rest.assign(bytes + part(20, s), bytes + part(20, s + 1));
      state.owed.resize(state.floats.size());
      state.clock = clock_;
      ASSERT_OK(shards_[s]->Set(std::move(state), workers_of_shards_, total));
    }
  }

  Worker& AddWorker() {
    auto worker = std::make_unique<Worker>();
    EXPECT_OK(Replica::Create(config_, &worker->replica));
    worker->a.resize(num_floats_ / 3);
    worker->b.resize(num_floats_ - num_floats_ / 3);
    worker->counters.resize(1);
    worker->slots.resize(5);
    workers_.push_back(std::move(worker));
    return *workers_.back();
  }

  // A request of a worker, on its way.
  struct Call {
    std::shared_ptr<ReplicaTicket> ticket;
    std::vector<Message> requests, replies;
    std::vector<size_t> reply_bytes;
  };

  Call Ask(Worker* worker, bool only_ask = false) {
    Call call;
    call.requests.resize(shards_.size());
    call.replies.resize(shards_.size());
    call.reply_bytes.resize(shards_.size());
    EXPECT_OK(worker->replica->Request(
        only_ask,
        [&](int shard, size_t bytes) {
          call.requests[shard].resize(bytes / 8);
          return reinterpret_cast<char*>(call.requests[shard].data());
        },
        &call.ticket));
    return call;
  }
  Status Serve(Call* call, int shard) {
    Message& request = call->requests[shard];
    if (request.empty()) return Status();
    return shards_[shard]->Sync(reinterpret_cast<char*>(request.data()), request.size() * 8,
                                SerialFor, [&](size_t bytes) {
                                  call->reply_bytes[shard] = bytes;
                                  call->replies[shard].assign((bytes + 7) / 8, 0);
                                  return reinterpret_cast<char*>(call->replies[shard].data());
                                });
  }
  Status Answer(Worker* worker, Call* call) {
    std::vector<Frame> frames;
    for (size_t s = 0; s < call->replies.size(); ++s) {
      frames.push_back({reinterpret_cast<char*>(call->replies[s].data()), call->reply_bytes[s]});
    }
    return worker->replica->Receive(call->ticket.get(), frames);
  }
  void Exchange(Worker* worker) {
    Call call = Ask(worker);
    for (size_t s = 0; s < shards_.size(); ++s) ASSERT_OK(Serve(&call, s));
    ASSERT_OK(Answer(worker, &call));
  }
  Replica::Must Settle(Worker* worker, int64_t steps, bool reads, bool all = false) {
    Replica::Must must;
    bool started;
    EXPECT_OK(worker->replica->Settle(worker->variables(), steps, reads, all, &must, &started));
    return must;
  }
  // A step begins.
  void Begin(Worker* worker, int64_t steps) {
    for (bool reads = true; Settle(worker, steps, reads) != Replica::Must::kNothing;) {
      Exchange(worker);
      steps = 0;
      reads = false;
    }
  }
  void Add(Worker* worker, float amount) {
    for (float& value : worker->a) value += amount;
    for (float& value : worker->b) value += amount;
    for (int64_t& counter : worker->counters) ++counter;
    ++worker->steps;
  }
  // Steps between which nothing is exchanged.
  void Make(Worker* worker, int steps) {
    for (int i = 0; i < steps; ++i) {
      Add(worker, 1);
      Settle(worker, 1, true);
    }
  }
  void Flush(Worker* worker, int64_t steps) {
    while (Settle(worker, steps, false, true) != Replica::Must::kNothing) {
      Exchange(worker);
      steps = 0;
    }
  }
  std::vector<float> Values(std::vector<int64_t>* counters = nullptr,
                            std::vector<float>* owed = nullptr) {
    std::vector<float> values;
    const auto append = [](const auto& from, auto* to) {
      if (to != nullptr) to->insert(to->end(), from.begin(), from.end());
    };
    for (const auto& shard : shards_) {
      const DenseShard::State state = shard->Get();
      append(state.floats, &values);
      append(state.counters, counters);
      append(state.owed, owed);
    }
    return values;
  }
  // Steps merged here.
  int64_t clock(int shard) const { return shards_[shard]->clock() - clock_; }
  const std::vector<float>& start() const { return start_; }
  Worker& operator[](size_t w) { return *workers_[w]; }
  size_t num_workers() const { return workers_.size(); }
  size_t num_shards() const { return shards_.size(); }
  DenseShard& shard(int s) { return *shards_[s]; }

 private:
  const int64_t num_floats_, clock_;
  ReplicaConfig config_;
  int workers_of_shards_;
  std::vector<float> start_;
  std::vector<std::unique_ptr<DenseShard>> shards_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

TEST(ReplicaTest, StartsFromTheServers) {
  System system(1, 2, 4, false);
  System::Worker& worker = system[0];
  EXPECT_EQ(system.Settle(&worker, 0, false), Replica::Must::kNothing) << "no step begins";
  EXPECT_EQ(system.Settle(&worker, 0, true), Replica::Must::kExchange);
  system.Begin(&worker, 0);
  for (size_t f = 0; f < system.start().size(); ++f) EXPECT_EQ(worker.value(f), system.start()[f]);
  EXPECT_EQ(worker.slots, (std::vector<float>{1, 2, 3, 4, 5}));
}

TEST(ReplicaTest, AWorkerAloneSendsHalfOfWhatMayBeUnsentAndGetsNothingBack) {
  System system(1, 1, 8, true);
  System::Worker& worker = system[0];
  system.Begin(&worker, 0);
  const int64_t down = worker.replica->counters().Get(ReplicaCounter::kBytesDown);
  for (int step = 1; step <= 16; ++step) {
    system.Add(&worker, 1);
    EXPECT_EQ(system.Settle(&worker, 1, true), Replica::Must::kNothing);
    System::Call call = system.Ask(&worker);
    EXPECT_EQ(call.requests[0].empty(), step % 4 != 0) << "after step " << step;
    ASSERT_OK(system.Serve(&call, 0));
    ASSERT_OK(system.Answer(&worker, &call));
  }
  EXPECT_EQ(worker.replica->counters().Get(ReplicaCounter::kBytesDown) - down,
            4 * static_cast<int64_t>(sizeof(DenseReplyHeader)));
  EXPECT_EQ(system.Values()[5], 5 + 16);
  EXPECT_EQ(worker.value(5), 5 + 16);
}

TEST(ReplicaTest, OwnStepsWithoutAnAnswerAreBounded) {
  System system(2, 1, 4, false);
  System::Worker& worker = system[0];
  system.Begin(&worker, 0);
  for (int step = 0; step < 4; ++step) {
    system.Add(&worker, 1);
    ASSERT_EQ(system.Settle(&worker, 1, true), Replica::Must::kNothing) << step;
  }
  System::Call slow = system.Ask(&worker);
  system.Add(&worker, 1);
  EXPECT_EQ(system.Settle(&worker, 1, true), Replica::Must::kWait) << "5 > 4, and one is under way";
  bool idle = false;
  worker.replica->WhenIdle([&] { idle = true; });
  EXPECT_FALSE(idle);
  ASSERT_OK(system.Serve(&slow, 0));
  ASSERT_OK(system.Answer(&worker, &slow));
  EXPECT_TRUE(idle);
  EXPECT_EQ(system.Settle(&worker, 0, true), Replica::Must::kNothing);
}

TEST(ReplicaTest, AStalenessOfZeroReadsAndWritesEveryStep) {
  System system(2, 2, 0, false);
  for (int step = 0; step < 5; ++step) {
    for (int w = 0; w < 2; ++w) {
      system.Begin(&system[w], 0);
      EXPECT_EQ(system[w].value(7), 7 + 2 * step + w) << "all steps before";
      system.Add(&system[w], 1);
      EXPECT_EQ(system.Settle(&system[w], 1, false), Replica::Must::kExchange);
      system.Exchange(&system[w]);
      EXPECT_EQ(system.Settle(&system[w], 0, false), Replica::Must::kNothing);
    }
  }
}

TEST(ReplicaTest, AContributionOfTwoWorkersCountsInFullButNotAtOnce) {
  System system(2, 2, 4, true);
  for (int w = 0; w < 2; ++w) system.Begin(&system[w], 0);
  for (int w = 0; w < 2; ++w) {
    system.Add(&system[w], w == 0 ? 2 : 6);
    system.Add(&system[w], 0);
    system.Flush(&system[w], 2);
  }
  // Half at once; of what is owed so much that half would be left after a push of each.
  const double left = std::sqrt(0.5);
  const double first = 1 * left, second = (first + 3) * left;
  std::vector<int64_t> counters;
  std::vector<float> owed;
  const float value = system.Values(&counters, &owed)[3];
  EXPECT_NEAR(owed[3], second, 1e-6);
  EXPECT_NEAR(value, 3 + 2 + 6 - second, 1e-6);
  EXPECT_EQ(counters, std::vector<int64_t>{4}) << "counters add";
  EXPECT_EQ(system[1].value(3), value) << "it was told";
  EXPECT_NEAR(system[0].value(3), 3 + 2 - first, 1e-6) << "it was told before the other one";
}

TEST(ReplicaTest, StepsThatCountInPartGoAsFarAtOnceAndOweLess) {
  System system(4, 1, 4, true);
  system.Set(std::vector<float>(37), 0.5);
  for (int w = 0; w < 4; ++w) system.Begin(&system[w], 0);
  for (int w = 0; w < 4; ++w) {
    system.Add(&system[w], 8);
    system.Add(&system[w], 0);
    system.Flush(&system[w], 2);
  }
  // A quarter at once, and a quarter later. Together the steps go twice as far as their mean, so
  // that half of what is owed is left after a push of each.
  const double left = std::pow(0.5, 0.25);
  double expected = 0;
  for (int w = 0; w < 4; ++w) expected = (expected + 2) * left;
  std::vector<float> owed;
  const float value = system.Values(nullptr, &owed)[3];
  EXPECT_NEAR(owed[3], expected, 1e-5);
  EXPECT_NEAR(value, 4 * 4 - expected, 1e-5);
}

TEST(ReplicaTest, WhatIsOwedComesWithTheStepsThatFollow) {
  System system(4, 1, 8, true);
  for (int w = 0; w < 4; ++w) system.Begin(&system[w], 0);
  for (int w = 0; w < 4; ++w) {
    for (int step = 0; step < 4; ++step) system.Add(&system[w], 100);
    system.Flush(&system[w], 4);
  }
  for (int round = 0; round < 80; ++round) {
    std::vector<float> owed;
    const float value = system.Values(nullptr, &owed)[0];
    ASSERT_NEAR(value + owed[0], 1600, 0.01);
    // Nobody pushes more often than others, and a flush in the middle of an interval hurries
    // nothing: it is the steps that count.
    ASSERT_NEAR(owed[0], owed[36], 0.01);
    const int w = round % 4;
    for (int part = 0; part < (round < 40 ? 1 : 4); ++part) {
      system.Add(&system[w], 0);
      system.Flush(&system[w], round < 40 ? 4 : 1);
    }
  }
  std::vector<float> owed;
  system.Values(nullptr, &owed);
  // After a push of every worker three quarters are left.
  const double at_first =
      300 * (std::pow(0.75, 0.25) + std::pow(0.75, 0.5) + std::pow(0.75, 0.75) + 0.75);
  EXPECT_NEAR(owed[0], at_first * std::pow(0.75, 20), 0.01);
}

TEST(ReplicaTest, AWorkerAloneTakesOverWhatIsOwedByHalves) {
  DenseShard::State state;
  state.floats = {1, 2};
  state.owed = {8, -4};
  DenseShard shard;
  ASSERT_OK(shard.Set(state, 1));
  ReplicaConfig config;
  config.num_floats = 2;
  std::shared_ptr<Replica> replica;
  ASSERT_OK(Replica::Create(config, &replica));
  std::vector<float> values(2);
  Replica::Variables variables;
  variables.floats = {{values.data(), 2}};
  Message message;
  const auto settle = [&](int64_t steps) {
    Replica::Must must;
    bool started;
    ASSERT_OK(replica->Settle(variables, steps, true, false, &must, &started));
    while (must != Replica::Must::kNothing) {
      std::shared_ptr<ReplicaTicket> ticket;
      ASSERT_OK(replica->Request(
          false,
          [&](int, size_t bytes) {
            message.resize(bytes / 8);
            return reinterpret_cast<char*>(message.data());
          },
          &ticket));
      Message answer;
      size_t answer_bytes = 0;
      ASSERT_OK(shard.Sync(reinterpret_cast<char*>(message.data()), message.size() * 8, SerialFor,
                           [&](size_t bytes) {
                             answer_bytes = bytes;
                             answer.resize((bytes + 7) / 8);
                             return reinterpret_cast<char*>(answer.data());
                           }));
      ASSERT_OK(
          replica->Receive(ticket.get(), {{reinterpret_cast<char*>(answer.data()), answer_bytes}}));
      ASSERT_OK(replica->Settle(variables, 0, false, false, &must, &started));
    }
  };
  settle(0);
  for (float& value : values) value += 10;
  settle(1);
  EXPECT_EQ(shard.Get().floats, (std::vector<float>{1 + 10 + 4, 2 + 10 - 2}));
  EXPECT_EQ(shard.Get().owed, (std::vector<float>{4, -2}));
  EXPECT_EQ(values, shard.Get().floats) << "it was told";
}

TEST(ReplicaTest, IntervalsGrowWithTheStepsThatWereMade) {
  System system(2, 1, 8, true, false, 37, 1, 0);
  for (int w = 0; w < 2; ++w) system.Begin(&system[w], 0);
  std::vector<int> pushed;  // after so many steps of each
  for (int step = 1; step <= 60; ++step) {
    for (int w = 0; w < 2; ++w) {
      system.Add(&system[w], 1);
      system.Settle(&system[w], 1, true);
      System::Call call = system.Ask(&system[w]);
      if (w == 0 && !call.requests[0].empty()) pushed.push_back(step);
      ASSERT_OK(system.Serve(&call, 0));
      ASSERT_OK(system.Answer(&system[w], &call));
    }
  }
  // A tenth of the steps may be unsent, and half of 8 at most.
  std::vector<int> intervals(pushed.size());
  std::adjacent_difference(pushed.begin(), pushed.end(), intervals.begin());
  for (size_t i = 0; i < pushed.size(); ++i) EXPECT_LE(intervals[i], std::max(1, pushed[i] / 10));
  EXPECT_TRUE(std::is_sorted(intervals.begin(), intervals.end()));
  EXPECT_EQ(intervals.back(), 4);
}

TEST(ReplicaTest, AskingCostsAHeaderAndTellsThatTooMuchIsMissed) {
  System system(2, 1, 4, false);
  for (int w = 0; w < 2; ++w) system.Begin(&system[w], 0);
  const auto ask = [&] {
    System::Call call = system.Ask(&system[0], true);
    EXPECT_EQ(call.requests[0].size() * 8, sizeof(DenseRequestHeader));
    EXPECT_OK(system.Serve(&call, 0));
    EXPECT_EQ(call.reply_bytes[0], sizeof(DenseReplyHeader));
    EXPECT_OK(system.Answer(&system[0], &call));
  };
  bool urgent = false;
  system[0].replica->SetClosed(false);
  system[0].replica->WhenUrgent([&](bool is) { urgent = is; });
  for (int step = 1; step <= 5; ++step) {
    system.Add(&system[1], 1);
    system.Flush(&system[1], 1);
    ask();
    EXPECT_EQ(urgent, step > 4);
    EXPECT_EQ(system.Settle(&system[0], 0, true),
              step > 4 ? Replica::Must::kExchange : Replica::Must::kNothing);
  }
  system.Exchange(&system[0]);
  EXPECT_EQ(system.Settle(&system[0], 0, true), Replica::Must::kNothing);
  EXPECT_EQ(system[0].value(1), 1 + 5);
}

TEST(ReplicaTest, AskingTellsTooWhileAPushIsUnderWay) {
  System system(2, 1, 4, false);
  for (int w = 0; w < 2; ++w) system.Begin(&system[w], 0);
  system.Add(&system[0], 10);
  system.Add(&system[0], 10);
  EXPECT_EQ(system.Settle(&system[0], 2, true), Replica::Must::kNothing);
  System::Call push = system.Ask(&system[0]);
  ASSERT_OK(system.Serve(&push, 0));
  for (int step = 1; step <= 5; ++step) {
    system.Add(&system[1], 1);
    system.Flush(&system[1], 1);
    System::Call ask = system.Ask(&system[0], true);
    ASSERT_OK(system.Serve(&ask, 0));
    ASSERT_OK(system.Answer(&system[0], &ask));
    EXPECT_EQ(system.Settle(&system[0], 0, true),
              step > 4 ? Replica::Must::kWait : Replica::Must::kNothing);
  }
  // That reply is older than what was asked for.
  ASSERT_OK(system.Answer(&system[0], &push));
  EXPECT_EQ(system.Settle(&system[0], 0, false), Replica::Must::kExchange);
  system.Exchange(&system[0]);
  EXPECT_EQ(system.Settle(&system[0], 0, true), Replica::Must::kNothing);
  EXPECT_EQ(system[0].value(1), 1 + 20 + 5);
}

TEST(ReplicaTest, SaysWhenSomethingIsUrgent) {
  System system(1, 2, 4, false);
  System::Worker& worker = system[0];
  std::vector<bool> told;
  const auto wait = [&] { worker.replica->WhenUrgent([&](bool is) { told.push_back(is); }); };
  wait();
  EXPECT_EQ(told, std::vector<bool>{false}) << "closed at first";
  worker.replica->SetClosed(false);
  system.Begin(&worker, 0);
  wait();
  for (int step = 1; step <= 3; ++step) {
    system.Add(&worker, 1);
    system.Settle(&worker, 1, true);
    EXPECT_EQ(told.size(), step == 3 ? 2u : 1u)
        << "two of four are due, a third is half of the rest";
  }
  EXPECT_EQ(told, (std::vector<bool>{false, true}));
  System::Call call = system.Ask(&worker);
  wait();
  EXPECT_EQ(told.size(), 2u) << "it is under way";
  worker.replica->SetClosed(true);
  EXPECT_EQ(told, (std::vector<bool>{false, true, false}));
}

TEST(ReplicaTest, WhatIsDueTravelsWithAQuestion) {
  System system(2, 2, 4, false, false, 37, 2);
  for (int w = 0; w < 2; ++w) system.Begin(&system[w], 0);
  System::Worker& worker = system[0];
  system.Add(&worker, 1);
  EXPECT_EQ(system.Settle(&worker, 1, true), Replica::Must::kNothing);
  System::Call first = system.Ask(&worker, true);  // the second shard is due after one step
  EXPECT_EQ(first.requests[0].size() * 8, sizeof(DenseRequestHeader));
  EXPECT_GT(first.requests[1].size() * 8, sizeof(DenseRequestHeader));
  system.Add(&worker, 1);
  EXPECT_EQ(system.Settle(&worker, 1, true), Replica::Must::kNothing);
  System::Call second = system.Ask(&worker, true);
  EXPECT_GT(second.requests[0].size() * 8, sizeof(DenseRequestHeader));
  EXPECT_EQ(second.requests[1].size() * 8, sizeof(DenseRequestHeader)) << "one is under way";
  for (System::Call* call : {&second, &first}) {
    for (int s = 0; s < 2; ++s) ASSERT_OK(system.Serve(call, s));
    ASSERT_OK(system.Answer(&worker, call));
  }
  EXPECT_EQ(system.Values()[0], 0 + 2);
  EXPECT_EQ(system.Values()[36], 36 + 1);
  system.Flush(&worker, 0);
  EXPECT_EQ(system.Values()[36], 36 + 2);
}

// As of a step that failed while it waited for the reply, and holds the ticket still.
TEST(ReplicaTest, AFlushDoesNotWaitForRequestsThatAreGivenUp) {
  for (const bool arrives : {false, true}) {
    System system(1, 2, 4, false);
    System::Worker& worker = system[0];
    system.Begin(&worker, 0);
    system.Make(&worker, 3);
    System::Call lost = system.Ask(&worker);
    if (arrives) {
      ASSERT_OK(system.Serve(&lost, 0));
    }
    EXPECT_EQ(system.Settle(&worker, 0, false, true), Replica::Must::kWait);
    bool idle = false;
    worker.replica->WhenIdle([&] { idle = true; });
    worker.replica->GiveUpRequests();
    EXPECT_TRUE(idle);
    system.Flush(&worker, 0);
    for (size_t f = 0; f < system.start().size(); ++f) {
      EXPECT_EQ(system.Values()[f], system.start()[f] + 3);
    }
    if (arrives) {
      ASSERT_OK(system.Serve(&lost, 1));
      ASSERT_OK(system.Answer(&worker, &lost));
    }
    lost.ticket.reset();
    system.Flush(&worker, 0);
    for (int s : {0, 1}) EXPECT_EQ(system.clock(s), 3);
  }
}

TEST(ReplicaTest, ANewStateReplacesTheOld) {
  System system(1, 2, 8, false);
  System::Worker& worker = system[0];
  system.Begin(&worker, 0);
  system.Make(&worker, 5);
  worker.slots[0] = 99;
  std::vector<float> other(system.start().size(), -7);
  system.Set(other);
  system.Flush(&worker, 0);
  system.Settle(&worker, 0, true);
  EXPECT_EQ(system.Values(), other);
  EXPECT_EQ(worker.value(0), -7);
  EXPECT_EQ(worker.slots[0], 1);
  EXPECT_EQ(worker.replica->counters().Get(ReplicaCounter::kStepsLost), 5);
}

// Steps of any number of workers, messages lost before and after they arrived, in any order.
struct Case {
  int workers, shards;
  int64_t staleness;
  bool spreads, half;
};

class ReplicaScheduleTest : public ::testing::TestWithParam<Case> {};

TEST_P(ReplicaScheduleTest, EveryStepCountsOnceAndNoReplicaMissesMoreThanItMay) {
  const Case p = GetParam();
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    Random random(seed);
    System system(p.workers, p.shards, p.staleness, p.spreads, p.half, 37,
                  seed % 4 < 2 ? 1 : p.shards);
    std::vector<System::Call> under_way(p.workers), asked(p.workers);
    std::vector<int64_t> made(p.workers), ready(p.workers, 1);
    // By worker and shard: own steps that it has merged; steps of others that it had when it was
    // last asked, and when it was asked what it has answered.
    std::vector<std::vector<int64_t>> merged(p.workers), served(p.workers), answered(p.workers);
    for (auto* each : {&merged, &served, &answered}) {
      for (auto& shards : *each) shards.resize(p.shards);
    }
    // Where every step adds 1, a replica's values say how many it has.
    const bool counts = !p.spreads && !p.half && seed % 2 == 0;
    int64_t most_missed = 0;
    double sum = 0;
    for (int w = 0; w < p.workers; ++w) system.Begin(&system[w], 0);
    for (int event = 0; event < 600 + 100 * p.workers; ++event) {
      const int w = Below(&random, p.workers);
      System::Worker& worker = system[w];
      System::Call& call = under_way[w];
      if (Chance(&random, 0.3)) {
        // Asks, and pushes what is due: on another way than the other request, and not lost.
        if (asked[w].ticket == nullptr) {
          asked[w] = system.Ask(&worker, true);
          for (int s = 0; s < p.shards; ++s) {
            merged[w][s] -= system.clock(s);
            ASSERT_OK(system.Serve(&asked[w], s));
            merged[w][s] += system.clock(s);
            served[w][s] = system.clock(s) - merged[w][s];
          }
        } else {
          ASSERT_OK(system.Answer(&worker, &asked[w]));
          asked[w] = {};
          answered[w] = served[w];
        }
      } else if (call.ticket != nullptr) {
        const bool arrives = !Chance(&random, 0.2);
        for (int s = 0; arrives && s < p.shards; ++s) {
          merged[w][s] -= system.clock(s);
          ASSERT_OK(system.Serve(&call, s));
          merged[w][s] += system.clock(s);
        }
        if (arrives && !Chance(&random, 0.2)) {
          ASSERT_OK(system.Answer(&worker, &call));
        }
        call = {};
      } else if (ready[w] && Chance(&random, 0.6)) {
        ready[w] = system.Settle(&worker, 0, false) == Replica::Must::kNothing;
        if (!ready[w]) continue;
        // With a fraction that bfloat16 rounds, which the servers have at the end all the same.
        const float amount = counts ? 1 : 1 + Below(&random, 3) + (p.half ? 0.01f : 0);
        for (int s = 0; counts && s < p.shards; ++s) {
          const int64_t f = FirstOfShard(system.start().size(), s, p.shards);
          const auto others = static_cast<int64_t>(worker.value(f) - system.start()[f]) - made[w];
          most_missed = std::max(most_missed, answered[w][s] - others);
          ASSERT_LE(answered[w][s] - others, p.staleness)
              << "worker " << w << ", event " << event << ", seed " << seed;
        }
        system.Add(&worker, amount);
        sum += amount;
        ++made[w];
        ready[w] = system.Settle(&worker, 1, false) == Replica::Must::kNothing;
      } else {
        ready[w] = system.Settle(&worker, 0, false) == Replica::Must::kNothing;
        call = system.Ask(&worker);
      }
      // What no server has yet.
      int64_t others = 0;
      for (int v = 0; v < p.workers; ++v) {
        const int64_t unmerged = system[v].replica->counters().Get(ReplicaCounter::kPending);
        const int64_t bound = p.staleness + (ready[v] ? 0 : 1);
        ASSERT_LE(unmerged, bound) << "worker " << v << ", event " << event << ", seed " << seed;
        others += made[v];
      }
      for (int s = 0; s < p.shards; ++s) {
        ASSERT_GE(system.clock(s), others - p.workers * (p.staleness + 1));
      }
    }
    under_way.clear();
    asked.clear();
    if (counts && p.workers > 1 && p.staleness > 0) {
      EXPECT_GT(most_missed, 0);
    }
    for (int w = 0; w < p.workers; ++w) system.Flush(&system[w], 0);
    std::vector<int64_t> counters;
    std::vector<float> owed;
    const std::vector<float> values = system.Values(&counters, &owed);
    int64_t steps = 0;
    for (const int64_t n : made) steps += n;
    EXPECT_EQ(counters, std::vector<int64_t>{steps});
    for (size_t f = 0; f < values.size(); ++f) {
      const double expected = system.start()[f] + sum;
      ASSERT_NEAR(values[f] + owed[f], expected, p.spreads || p.half ? 1e-6 * expected * steps : 0)
          << "float " << f << ", seed " << seed;
    }
    // Whoever reads now has all of it.
    for (int w = 0; w < p.workers && p.staleness == 0; ++w) {
      system.Begin(&system[w], 0);
      ASSERT_NEAR(system[w].value(9), values[9], std::abs(values[9]) * (p.half ? 0.004 : 1e-6));
    }
  }
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const int workers : {1, 2, 5, 24}) {
    for (const int64_t staleness : {0, 1, 3, 16}) {
      for (const bool spreads : {false, true}) {
        for (const bool half : {false, true}) {
          cases.push_back({workers, 1 + workers % 3, staleness, spreads, half});
        }
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, ReplicaScheduleTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) {
                           const Case& c = info.param;
                           return StrCat(c.workers, "_workers_", c.staleness,
                                         c.spreads ? "_spread" : "_at_once", c.half ? "_half" : "");
                         });

TEST(ReplicaTest, ShardsOfAServerAreDueAtStepsOfTheirOwn) {
  System system(1, 4, 8, false, false, 37, 2);
  System::Worker& worker = system[0];
  system.Begin(&worker, 0);
  const auto due = [&] {
    const System::Call call = system.Ask(&worker);
    std::vector<bool> speaks;
    for (const Message& request : call.requests) speaks.push_back(!request.empty());
    return speaks;
  };
  const std::vector<bool> none(4, false), first = {true, false, true, false},
                                          second = {false, true, false, true};
  for (const bool flushed : {false, true}) {
    for (int step = 1; step <= 16; ++step) {
      system.Add(&worker, 1);
      EXPECT_EQ(system.Settle(&worker, 1, true), Replica::Must::kNothing);
      // Half of 8 apart; the second of each server first after two.
      EXPECT_EQ(due(), step % 4 == 0 ? first : step % 4 == 2 ? second : none) << step << flushed;
      system.Exchange(&worker);
    }
    EXPECT_EQ(system.Settle(&worker, 0, false, true), Replica::Must::kExchange);
    EXPECT_EQ(due(), second) << "all that is not sent";
    system.Flush(&worker, 0);
    // What was sent for the flush does not put them in step.
    if (!flushed) {
      EXPECT_EQ(due(), none);
    }
  }
  EXPECT_EQ(system.Values()[9], 9 + 32);
}

TEST(ReplicaTest, WhatRoundingTakesOffIsSentLater) {
  System system(1, 1, 1, false, true, 8);
  System::Worker& worker = system[0];
  system.Begin(&worker, 0);
  // A step of 1.01 is 1.0078125 in bfloat16.
  for (int step = 1; step <= 1000; ++step) {
    system.Add(&worker, 1.01f);
    system.Begin(&worker, 1);
    system.Exchange(&worker);
  }
  EXPECT_NEAR(system.Values()[2], worker.value(2), 0.005) << "not off by 1000 times the rounding";
  EXPECT_NEAR(worker.value(2), 2 + 1010, 0.1);
  system.Flush(&worker, 0);
  EXPECT_EQ(system.Values()[2], worker.value(2)) << "everything: without rounding";
  const int64_t pushes = worker.replica->counters().Get(ReplicaCounter::kPushes);
  system.Flush(&worker, 0);
  EXPECT_EQ(worker.replica->counters().Get(ReplicaCounter::kPushes), pushes) << "nothing is left";
}

TEST(ReplicaTest, WhatRoundingTookOffIsSentThoughTheFirstMessageIsLost) {
  System system(1, 2, 4, false, true, 8);
  System::Worker& worker = system[0];
  system.Begin(&worker, 0);
  for (int step = 1; step <= 2; ++step) {
    system.Add(&worker, 1.01f);
    system.Settle(&worker, 1, false);
  }
  {
    System::Call call = system.Ask(&worker);  // with both steps, rounded
    ASSERT_OK(system.Serve(&call, 0));        // and its reply is lost
  }
  system.Flush(&worker, 0);
  for (const size_t f : {2, 6}) EXPECT_EQ(system.Values()[f], worker.value(f));
}

TEST(ReplicaTest, ReplicasThatRoundComeToTheSame) {
  System system(3, 2, 2, true, true, 8);
  Random random(5);
  for (auto w : {0, 1, 2}) system.Begin(&system[w], 0);
  for (int step = 1; step <= 300; ++step) {
    System::Worker& worker = system[Below(&random, 3)];
    system.Add(&worker, 0.001f * Below(&random, 1000));
    system.Begin(&worker, 1);
    system.Exchange(&worker);
  }
  for (auto w : {0, 1, 2}) system.Flush(&system[w], 0);
  // What comes is the difference to what came before: less every time, as what is owed is.
  for (int i = 0; i < 80; ++i) {
    for (auto w : {0, 1, 2}) system.Flush(&system[w], 1);
  }
  for (auto w : {0, 1, 2}) EXPECT_NEAR(system[w].value(4), system.Values()[4], 1e-5);
}

TEST(ReplicaTest, ThreadsThatStepAndExchangeAtOnce) {
  System system(2, 2, 6, false, false, 50'000);
  std::vector<std::thread> threads;
  for (int w = 0; w < 2; ++w) {
    threads.emplace_back([&system, w] {
      System::Worker& worker = system[w];
      system.Begin(&worker, 0);
      std::atomic<bool> done{false};
      std::thread exchanging([&] {
        while (!done) system.Exchange(&worker);
      });
      for (int step = 0; step < 100; ++step) {
        system.Add(&worker, 1);
        int64_t steps = 1;
        Replica::Must must;
        while ((must = system.Settle(&worker, steps, false)) != Replica::Must::kNothing) {
          if (must == Replica::Must::kExchange) system.Exchange(&worker);
          steps = 0;
        }
      }
      done = true;
      exchanging.join();
      system.Flush(&worker, 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(system.Values()[40'000], 40'000 + 200);
}

// What a shard or a replica must refuse.

TEST(DenseShardTest, AMalformedRequestChangesNothing) {
  System system(1, 1, 4, false);
  System::Worker& worker = system[0];
  system.Begin(&worker, 0);
  for (int i = 0; i < 4; ++i) {
    system.Add(&worker, 1);
    system.Settle(&worker, 1, true);
  }
  const std::vector<float> before = system.Values();
  System::Call call = system.Ask(&worker);
  const Message good = call.requests[0];
  ASSERT_FALSE(good.empty());
  const auto refused = [&](size_t bytes, const std::string& text) {
    return testing::IsRefused(
        system.shard(0).Sync(reinterpret_cast<char*>(call.requests[0].data()), bytes, SerialFor,
                             [](size_t) -> char* { return nullptr; }),
        text);
  };
  auto* header = reinterpret_cast<DenseRequestHeader*>(call.requests[0].data());
  EXPECT_TRUE(refused(8, "fewer than its header"));
  EXPECT_TRUE(refused(good.size() * 8 - 8, "not what its header announces"));
  header->magic = 1;
  EXPECT_TRUE(refused(good.size() * 8, "HETD"));
  header->magic = kDenseRequestMagic;
  header->version = 9;
  EXPECT_TRUE(refused(good.size() * 8, "version 9"));
  header->version = kDenseVersion;
  header->flags = 64;
  EXPECT_TRUE(refused(good.size() * 8, "unknown flags 64"));
  header->flags = 0;
  header->replica_id = 0;
  EXPECT_TRUE(refused(good.size() * 8, "replica_id = 0"));
  header->replica_id = 5;
  header->num_pushes = 4'000'000'000u;
  EXPECT_TRUE(refused(good.size() * 8, "not what its header announces"));
  header->num_pushes = 1;
  auto* push = reinterpret_cast<DensePushHeader*>(header + 1);
  push->flags = 2;
  EXPECT_TRUE(refused(good.size() * 8, "push 0 of a dense request has unknown flags 2"));
  push->flags = 0;
  push->interval = 0;
  EXPECT_TRUE(refused(good.size() * 8, "interval 0"));
  push->interval = 1;
  push->flags = kDenseHalf;
  EXPECT_TRUE(refused(good.size() * 8, "not what its header announces"));
  header->num_pushes = 0;
  header->num_floats = 1;
  EXPECT_TRUE(refused(sizeof(*header), "num_floats = 1"));
  EXPECT_EQ(system.Values(), before);
  call.requests[0] = good;
  ASSERT_OK(system.Serve(&call, 0));
  ASSERT_OK(system.Answer(&worker, &call));
  EXPECT_EQ(system.Values()[0], 2) << "half of the four that may be unsent";
}

TEST(DenseShardTest, WhatWasNotSetIsNotThere) {
  System system(1, 1, 4, false);
  System::Call call = system.Ask(&system[0]);
  DenseShard empty;
  EXPECT_REFUSED(
      empty.Sync(reinterpret_cast<char*>(call.requests[0].data()), call.requests[0].size() * 8,
                 SerialFor, [](size_t) -> char* { return nullptr; }),
      "not set");
  DenseShard::State state;
  state.owed.resize(1);
  EXPECT_REFUSED(empty.Set(state, 1), "owed holds 1 numbers");
  EXPECT_REFUSED(empty.Set({}, 0), "num_workers = 0");
  state.owed.clear();
  EXPECT_REFUSED(empty.Set(state, 2, 0), "total = 0");
  EXPECT_REFUSED(empty.Set(state, 2, NAN), "total = nan");
  state.clock = -1;
  EXPECT_REFUSED(empty.Set(state, 1), "clock = -1");
}

TEST(ReplicaTest, WrongRepliesChangeNothing) {
  System system(2, 1, 4, false);
  System::Worker& worker = system[0];
  system.Begin(&worker, 0);
  system.Add(&worker, 2);
  system.Settle(&worker, 2, true);  // as many as are sent
  const auto reply = [&](const std::function<void(DenseReplyHeader*, System::Call*)>& spoil) {
    System::Call call = system.Ask(&worker);
    EXPECT_OK(system.Serve(&call, 0));
    spoil(reinterpret_cast<DenseReplyHeader*>(call.replies[0].data()), &call);
    return system.Answer(&worker, &call);
  };
  EXPECT_REFUSED(reply([](auto* header, auto*) { header->magic = 0; }), "replies[0]");
  EXPECT_REFUSED(reply([](auto* header, auto*) { header->num_floats = 3; }), "num_floats = 3");
  EXPECT_REFUSED(reply([](auto* header, auto*) { header->acknowledged = 99; }), "push 99");
  EXPECT_REFUSED(reply([](auto* header, auto*) {
                   header->incarnation += 1;
                   header->acknowledged = 0;
                 }),
                 "new state");
  EXPECT_REFUSED(reply([](auto*, auto* call) { call->reply_bytes[0] = 3; }), "3 bytes");
  EXPECT_REFUSED(reply([](auto*, auto* call) { call->reply_bytes.clear(), call->replies.clear(); }),
                 "0 messages for 1");
  EXPECT_EQ(worker.value(0), 2);
  system.Flush(&worker, 0);
  EXPECT_EQ(system.Values()[0], 2);
}

TEST(ReplicaTest, BadArguments) {
  std::shared_ptr<Replica> replica;
  ReplicaConfig config;
  config.staleness = -1;
  EXPECT_REFUSED(Replica::Create(config, &replica), "staleness = -1");
  config.staleness = 0;
  config.num_shards = 0;
  EXPECT_REFUSED(Replica::Create(config, &replica), "num_shards = 0");
  config.num_shards = 3;
  config.num_phases = 2;
  EXPECT_REFUSED(Replica::Create(config, &replica), "num_phases = 2");
  config.num_shards = config.num_phases = 1;
  config.num_floats = -1;
  EXPECT_REFUSED(Replica::Create(config, &replica), "num_floats = -1");
  config.num_floats = 3;
  ASSERT_OK(Replica::Create(config, &replica));
  Replica::Must must;
  bool started;
  EXPECT_REFUSED(replica->Settle({}, 0, true, false, &must, &started), "hold 0 floats");
}

}  // namespace
}  // namespace het_tf
