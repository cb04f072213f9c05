// The verbs of a device store: no shard, no message.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "ops/core/row/optimizer.h"
#include "ops/core/testing.h"
#include "ops/cuda/het_cuda.h"
#include "ops/cuda/store_testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::CollectDirty;
using testing::DeviceArray;
using testing::DeviceStore;
using testing::kStream;
using testing::PushedRow;
using testing::Random;
using testing::Step;
using Floats = std::vector<float>;
using Ids = std::vector<int64_t>;

const char* const kSpecs[] = {"sgd",
                              "sgd weight_decay=0.1 clipnorm=1 max_norm=0.5",
                              "momentum",
                              "momentum nesterov=1 max_norm=2",
                              "adagrad",
                              "row_wise_adagrad",
                              "adam",
                              "adam weight_decay=0.1",
                              "row_wise_adam",
                              "ftrl l1=0.01 l2=0.01 beta=0.1",
                              "momentum l2=0.1 clipnorm=1 nonnegative=1",
                              "rmsprop",
                              "rmsprop momentum=0.8 centered=1",
                              "lion weight_decay=0.1",
                              "lamb"};

std::unique_ptr<Optimizer> MakeOptimizer(const std::string& spec, int dim) {
  std::unique_ptr<Optimizer> optimizer;
  EXPECT_OK(Optimizer::Parse(spec, dim, &optimizer));
  return optimizer;
}

Floats InitialRow(const Optimizer& optimizer, float value) {
  Floats row(optimizer.row_dim(), value);
  optimizer.InitSlots(row.data() + optimizer.dim());
  return row;
}

// A step in which every miss gets a row of this value throughout, at this clock.
void Begin(Step* step, const DeviceStore& store, float value, int64_t base = 0) {
  step->MakeLines();
  const size_t misses = step->miss_keys().size();
  step->InstallMisses(std::vector<Floats>(misses, Floats(store.row_dim(), value)),
                      std::vector<int64_t>(misses, base));
}

TEST(DeviceStoreTest, AllMissThenAllHitThenMixed) {
  const DeviceStore store("sgd", 2, 1000);
  {
    Step step(store, 2, {7, 8, 7, -9});
    EXPECT_EQ(step.miss_keys(), (Ids{7, 8, -9}));
    EXPECT_TRUE(step.check_keys().empty());
    step.MakeLines();
    step.InstallMisses({{1, 2}, {3, 4}, {5, 6}}, {0, 5, 0});
    EXPECT_EQ(step.Gather(), (Floats{1, 2, 3, 4, 1, 2, 5, 6}));
    step.Unpin();
  }
  {
    const Step step(store, 2, {-9, 8});
    EXPECT_TRUE(step.miss_keys().empty());
    EXPECT_EQ(step.check_keys(), (Ids{-9, 8}));
    EXPECT_EQ(step.check_bases(), (std::vector<int64_t>{0, 5}));
    EXPECT_EQ(step.Gather(), (Floats{5, 6, 3, 4}));
    step.Unpin();
  }
  Step step(store, 2, {1, 8, 2});
  EXPECT_EQ(step.miss_keys(), (Ids{1, 2}));
  EXPECT_EQ(step.miss_index(), (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(step.check_keys(), Ids{8});
  step.Unpin();
}

TEST(DeviceStoreTest, NoIdsIsAStep) {
  const DeviceStore store("adam", 3, 10);
  Step step(store, 3, {});
  EXPECT_TRUE(step.MakeLines().empty());
  step.InstallMisses({}, {});
  EXPECT_TRUE(step.Gather().empty());
  EXPECT_EQ(step.Update({}), 0);
  EXPECT_TRUE(step.CollectDue(0).empty());
  step.Unpin();
}

// What does not fit is a visitor for the step: it is read, and its gradient goes up.
TEST(DeviceStoreTest, MoreKeysThanLines) {
  for (const int64_t lines : {1, 5, 128, 300}) {
    const DeviceStore store("sgd", 1, lines);
    EXPECT_GE(store.info().lines, lines);
    Ids ids(1000);
    Floats expected(1000);
    std::vector<Floats> rows(1000);
    for (int64_t i = 0; i < 1000; ++i) {
      ids[i] = i;
      rows[i] = {expected[i] = static_cast<float>(i)};
    }
    Step step(store, 1, ids);
    step.MakeLines();
    step.InstallMisses(rows, std::vector<int64_t>(1000));
    EXPECT_EQ(step.Gather(), expected);
    const std::vector<int32_t> slots = step.slots();
    const std::set<int32_t> distinct(slots.begin(), slots.end());
    EXPECT_EQ(distinct.size(), 1000);
    const int64_t visitors = std::count_if(
        slots.begin(), slots.end(), [&](int32_t slot) { return slot >= store.info().lines; });
    EXPECT_EQ(1000 - visitors, store.info().lines);
    EXPECT_EQ(step.num_visitors(), visitors);
    EXPECT_EQ(step.num_evicted(), 0);
    EXPECT_EQ(store.CountLines(), store.info().lines);
    step.Update(Floats(1000, 2));
    std::vector<PushedRow> due = step.CollectDue(-1);
    EXPECT_EQ(static_cast<int64_t>(due.size()), visitors);
    for (const PushedRow& row : due) EXPECT_EQ(row.floats, Floats{2});
    step.Unpin();
    EXPECT_EQ(static_cast<int64_t>(CollectDirty(store).size()), store.info().lines);
  }
}

TEST(DeviceStoreTest, WhatIsNotWorthALineGetsNone) {
  const DeviceStore store("sgd", 1, 100);
  Step step(store, 1, {1, 2, 3});
  step.MakeLines({1, 0, 3});
  const std::vector<int32_t> slots = step.slots();
  EXPECT_LT(slots[0], store.info().lines);
  EXPECT_GE(slots[1], store.info().lines);
  EXPECT_LT(slots[2], store.info().lines);
  EXPECT_EQ(store.CountLines(), 0) << "their rows are still to come";
  step.InstallMisses({{1}, {2}, {3}}, {0, 0, 0});
  EXPECT_EQ(store.CountLines(), 2);
  EXPECT_EQ(step.Gather(), (Floats{1, 2, 3}));
  step.Unpin();
  const Step next(store, 1, {1, 2, 3});
  EXPECT_EQ(next.miss_keys(), Ids{2});
}

TEST(DeviceStoreTest, PinnedLinesStay) {
  const DeviceStore store("sgd", 1, 3);
  Step first(store, 1, {1, 2, 3});
  Begin(&first, store, 1);
  Step second(store, 1, {4, 3});
  second.MakeLines();
  EXPECT_GE(second.slots()[0], store.info().lines) << "all lines are pinned";
  first.Unpin();
  Step third(store, 1, {5, 6, 7});
  third.MakeLines();
  const std::vector<int32_t> slots = third.slots();
  EXPECT_EQ(std::count_if(slots.begin(), slots.end(), [](int32_t slot) { return slot < 3; }), 2)
      << "3 is pinned by the second step";
}

// Steps under way that have a key without a line share its visitor, and what they update.
TEST(DeviceStoreTest, StepsShareAVisitor) {
  const DeviceStore store("momentum momentum=0", 1, 1);
  const auto without_line = [](Step* step) { step->MakeLines({0}); };
  Step first(store, 1, {5}), second(store, 1, {5});
  without_line(&first);
  without_line(&second);
  EXPECT_EQ(first.slots(), second.slots());
  first.InstallMissesValues({{7}}, {3});
  EXPECT_EQ(first.Gather(), Floats{7});
  first.Update({1});
  EXPECT_EQ(first.Gather(), Floats{7}) << "a value without slots takes no update in";
  EXPECT_EQ(first.CollectDue(-1).at(0).floats, Floats{1});
  second.InstallMisses({{6, 1}}, {4});  // with that of the first
  first.InstallMissesValues({{9}}, {9});
  EXPECT_EQ(second.Gather(), Floats{6}) << "a row with slots stays";
  second.InstallMisses({{9, 9}}, {2});
  EXPECT_EQ(second.Gather(), Floats{6}) << "a row that is older is left out";
  second.Update({2});
  EXPECT_EQ(first.Gather(), Floats{4});
  EXPECT_EQ(second.CollectDue(-1).at(0).floats, Floats{2});
  second.InstallMisses({{9, 9}}, {4});
  EXPECT_EQ(second.Gather(), Floats{4}) << "own updates move the clock";
  first.Unpin();
  EXPECT_EQ(second.Gather(), Floats{4});
  second.Unpin();
  Step third(store, 1, {6});
  without_line(&third);
  EXPECT_EQ(third.slots(), second.slots()) << "it is another key's";
  third.InstallMisses({{8, 0}}, {0});
  EXPECT_EQ(third.Gather(), Floats{8});
}

// Its shard has other rows now: whoever has read it may do so again, and any row of the new ones is
// newer.
TEST(DeviceStoreTest, AForgottenVisitor) {
  const DeviceStore store("sgd", 1, 1);
  Step step(store, 1, {5});
  step.MakeLines({0});
  step.InstallMisses({{7}}, {9});
  EXPECT_EQ(store.Forget(), 0);
  EXPECT_EQ(step.Gather(), Floats{7});
  step.Update({1});
  EXPECT_EQ(step.Gather(), Floats{7});
  EXPECT_EQ(step.CollectDue(-1).at(0).floats, Floats{1});
  step.InstallMisses({{3}}, {1});
  EXPECT_EQ(step.Gather(), Floats{3});
}

// A key that has a visitor gets a line. It is read and updated by all of its steps once its row is
// there, and it stays until the last of them ends.
TEST(DeviceStoreTest, AVisitorGetsALine) {
  for (const bool line_ends_first : {true, false}) {
    SCOPED_TRACE(line_ends_first);
    const DeviceStore store("sgd", 1, 1);
    Step early(store, 1, {5}), late(store, 1, {5});
    early.MakeLines({0});
    early.InstallMissesValues({{7}}, {3});
    late.MakeLines();
    EXPECT_EQ(early.Gather(), Floats{7}) << "the line's row is still to come";
    const std::vector<int32_t> slots = early.slots();
    EXPECT_GE(slots[0], store.info().lines);
    late.InstallMisses({{6}}, {4});
    late.Update({1});
    if (line_ends_first) late.Unpin();
    Step other(store, 1, {9});
    other.MakeLines();
    EXPECT_EQ(other.num_visitors(), 1) << "the line is the key's";
    other.Unpin();
    EXPECT_EQ(early.Gather(), Floats{5});
    EXPECT_EQ(early.slots(), late.slots());
    early.Update({1});
    EXPECT_EQ(early.Gather(), Floats{4});
    early.Unpin();
    if (!line_ends_first) late.Unpin();
    EXPECT_EQ(CollectDirty(store).at(0).updates, 2);
    Step next(store, 1, {9});
    next.MakeLines();
    EXPECT_EQ(next.num_evicted(), 1);
  }
}

// Where no step has read the line in its place, it ends with the visitor all the same.
TEST(DeviceStoreTest, AVisitorLetsItsLineGo) {
  const DeviceStore store("sgd", 1, 1);
  Step early(store, 1, {5}), late(store, 1, {5});
  early.MakeLines({0});
  late.MakeLines();
  late.Unpin();
  EXPECT_EQ(Step(store, 1, {5}).check_bases(), std::vector<int64_t>{-1});
  early.Unpin();
  Step next(store, 1, {9});
  next.MakeLines();
  EXPECT_EQ(next.num_visitors(), 1) << "a step holds the line";
}

TEST(DeviceStoreTest, VisitorsStayWhereThereAreMore) {
  const DeviceStore store("sgd", 2, 1);
  Step first(store, 2, {1, 2, 3});
  first.MakeLines({0, 0, 0});
  first.InstallMisses({{1, 2}, {3, 4}, {5, 6}}, {0, 0, 0});
  Ids ids(300);
  std::iota(ids.begin(), ids.end(), 10);
  Step second(store, 2, ids);
  second.MakeLines(std::vector<int32_t>(300, 0));
  EXPECT_EQ(first.Gather(), (Floats{1, 2, 3, 4, 5, 6}));
}

TEST(DeviceStoreTest, LruEvictsTheLongestUnused) {
  const DeviceStore store("sgd", 1, 3);
  for (const int64_t key : {1, 2, 3, 1}) {
    Step step(store, 1, {key});
    if (!step.miss_keys().empty()) Begin(&step, store, static_cast<float>(key));
    step.Unpin();
  }
  Step step(store, 1, {4});
  Begin(&step, store, 4);
  EXPECT_EQ(step.num_evicted(), 1);
  EXPECT_EQ(step.evicted(), (std::map<int64_t, float>{{2, 1}}));
  step.Unpin();
  EXPECT_EQ(Step(store, 1, {1, 2, 3, 4}).miss_keys(), Ids{2});
}

TEST(DeviceStoreTest, LfuKeepsWhatIsUsedMoreUntilItAges) {
  const DeviceStore store("sgd", 1, 2, HET_LFU);
  std::map<int64_t, float> evicted;
  const auto use = [&](int64_t key, int32_t uses) {
    Step step(store, 1, {key});
    const bool missed = !step.miss_keys().empty();
    if (missed) {
      step.MakeLines({uses});
      step.InstallMisses({{1}}, {0});
      evicted = step.evicted();
    }
    const bool has_line = step.slots()[0] < store.info().lines;
    step.Unpin();
    return has_line;
  };
  for (int time = 0; time < 4; ++time) use(1, 1);
  for (int time = 0; time < 2; ++time) use(2, 1);
  EXPECT_FALSE(use(3, 1)) << "once is less than twice";
  EXPECT_TRUE(use(3, 3));
  ASSERT_EQ(evicted.count(2), 1u);
  EXPECT_GT(evicted[2], 1);
  EXPECT_LE(evicted[2], 2);
  EXPECT_TRUE(use(1, 1)) << "2 gave way";
  // A half-life is four capacities of uses.
  for (int time = 0; time < 80; ++time) use(3, 1);
  EXPECT_TRUE(use(4, 1)) << "1 has aged";
  EXPECT_TRUE(use(3, 1));
  for (int time = 0; time < 20; ++time) use(4, 1);
  EXPECT_FALSE(use(5, 1));
}

TEST(DeviceStoreTest, VictimsLeaveWithTheirContributions) {
  const DeviceStore store("momentum momentum=0.5", 2, 1);
  Step first(store, 2, {5});
  Begin(&first, store, 0);
  first.Update({1, 2});
  EXPECT_TRUE(first.CollectDue(-1).empty());
  first.Unpin();
  Step second(store, 2, {6});
  const std::vector<PushedRow> pushed = second.MakeLines();
  ASSERT_EQ(pushed.size(), 1);
  EXPECT_EQ(pushed[0].key, 5);
  EXPECT_EQ(pushed[0].updates, 1);
  EXPECT_EQ(pushed[0].floats, (Floats{-1, -2, -1, -2}));
  second.InstallMisses({{0, 0, 0, 0}}, {0});
  second.Unpin();
  Step third(store, 2, {7});
  EXPECT_TRUE(third.MakeLines().empty()) << "6 is clean";
}

// Each row is stepped as the host steps it, to the last bit, and so are contributions and rows that
// are read anew.
TEST(DeviceStoreTest, UpdatesAreTheHosts) {
  for (const char* spec : kSpecs) {
    for (const int dim : {1, 3, 16, 17, 64, 130, 1030}) {
      SCOPED_TRACE(std::string(spec) + " " + std::to_string(dim));
      const auto optimizer = MakeOptimizer(spec, dim);
      const DeviceStore store(spec, dim, 50);
      Random random(dim);
      const auto random_floats = [&](int64_t n) {
        Floats floats(n);
        for (float& x : floats) x = static_cast<float>(Below(&random, 2001) - 1000) / 300;
        return floats;
      };
      const Ids ids = {3, 1, 2};
      std::vector<Floats> rows, records;
      for (int r = 0; r < 3; ++r) {
        rows.push_back(InitialRow(*optimizer, 0.25f * static_cast<float>(r)));
        records.emplace_back(optimizer->record_dim());
        optimizer->BeginRecord(rows[r].data(), records[r].data());
      }
      Step first(store, dim, ids);
      first.MakeLines();
      first.InstallMisses(rows, {0, 0, 0});
      for (int time = 0; time < 7; ++time) {
        const Step step(store, dim, ids);
        if (time == 4) {
          // Others' updates, below our own.
          std::vector<Floats> fresh(3, InitialRow(*optimizer, 1));
          step.InstallChecked({0, 1, 2}, fresh, {10, 11, 12});
          for (int r = 0; r < 3; ++r) {
            optimizer->MoveOnto(rows[r].data(), fresh[r].data(), records[r].data(), 4);
            rows[r] = fresh[r];
          }
        }
        const Floats gradients = random_floats(3 * dim);
        step.Update(gradients, 0.125f);
        for (int r = 0; r < 3; ++r) {
          optimizer->Update(rows[r].data(), gradients.data() + r * dim, 0.125f, records[r].data());
          ASSERT_EQ(store.Row(step.slots()[r]), rows[r]) << time;
        }
        step.Unpin();
      }
      first.Unpin();
      std::vector<PushedRow> pushed = CollectDirty(store);
      ASSERT_EQ(pushed.size(), 3);
      for (const PushedRow& row : pushed) {
        const int r = static_cast<int>(std::find(ids.begin(), ids.end(), row.key) - ids.begin());
        Floats contribution(optimizer->contribution_dim());
        optimizer->Contribute(rows[r].data(), records[r].data(), contribution.data());
        EXPECT_EQ(row.floats, contribution);
        EXPECT_EQ(row.updates, 7);
      }
      EXPECT_TRUE(CollectDirty(store).empty());
    }
  }
}

TEST(DeviceStoreTest, OlderRowsAreLeftOut) {
  const DeviceStore store("sgd", 1, 10);
  Step step(store, 1, {1});
  Begin(&step, store, 5, 7);
  step.InstallChecked({0}, {{9}}, {6});
  EXPECT_EQ(step.Gather(), Floats{5});
  step.InstallChecked({0}, {{9}}, {7});
  EXPECT_EQ(step.Gather(), Floats{9});
}

TEST(DeviceStoreTest, ALineThatGotNoRowIsGone) {
  const DeviceStore store("sgd", 1, 10);
  Step failed(store, 1, {1});
  failed.MakeLines();
  {
    const Step meanwhile(store, 1, {1});
    EXPECT_TRUE(meanwhile.miss_keys().empty()) << "its row is under way";
    EXPECT_EQ(meanwhile.check_bases(), std::vector<int64_t>{-1});
    failed.Unpin();
    meanwhile.Unpin();
  }
  EXPECT_EQ(Step(store, 1, {1}).miss_keys(), Ids{1});
}

TEST(DeviceStoreTest, DueByTheWriteBound) {
  const DeviceStore store("sgd", 1, 10);
  Step step(store, 1, {1, 2});
  Begin(&step, store, 0);
  step.Update({1, 1});
  EXPECT_TRUE(step.CollectDue(2).empty());
  step.Update({1, 3});
  std::vector<PushedRow> due = step.CollectDue(2);
  ASSERT_EQ(due.size(), 2);
  for (const PushedRow& row : due) {
    EXPECT_FALSE(row.gradient);
    EXPECT_EQ(row.updates, 2);
    EXPECT_EQ(row.floats, Floats{row.key == 1 ? -2.0f : -4.0f});
  }
  EXPECT_TRUE(step.CollectDue(2).empty()) << "they are clean";
  EXPECT_EQ(Step(store, 1, {1, 2}).check_bases(), (std::vector<int64_t>{2, 2}))
      << "own updates are not taken for those of others";
  step.Update({5, 6});
  due = step.CollectDue(0);
  ASSERT_EQ(due.size(), 2);
  EXPECT_TRUE(due[0].gradient);
  EXPECT_EQ(due[0].floats, Floats{5});
}

TEST(DeviceStoreTest, LamportAndDriftClocks) {
  const DeviceStore lamport("sgd", 2, 10, HET_LRU, HET_CLOCK_LAMPORT);
  Step step(lamport, 2, {1});
  Begin(&step, lamport, 0, 40);
  step.Update({1, 1});
  step.Update({1, 1});
  EXPECT_EQ(Step(lamport, 2, {1}).check_bases(), std::vector<int64_t>{42});
  EXPECT_EQ(step.CollectDue(2)[0].clock, 42);
  EXPECT_EQ(Step(lamport, 2, {1}).check_bases(), std::vector<int64_t>{42});

  const DeviceStore drift("sgd", 2, 10, HET_LRU, HET_CLOCK_DRIFT);
  Step long_step(drift, 2, {1});
  Begin(&long_step, drift, 0, 40);
  long_step.Update({3, 4});
  long_step.Update({0, 0});
  const auto units = static_cast<uint32_t>(5 / kDriftUnit) + 1;
  EXPECT_TRUE(long_step.CollectDue(units + 1).empty());
  EXPECT_EQ(long_step.CollectDue(units)[0].clock, units);
  EXPECT_EQ(Step(drift, 2, {1}).check_bases(), std::vector<int64_t>{40 + units});
}

TEST(DeviceStoreTest, NonfiniteGradientsAreSkippedOrRefused) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const DeviceStore store("sgd", 1, 2);
  Step step(store, 1, {1, 2, 3});
  Begin(&step, store, 0);
  EXPECT_EQ(step.Update({1, kInf, kInf}, 1, true), 2);
  EXPECT_EQ(step.Gather(), (Floats{0, 0, 0}));
  EXPECT_EQ(step.Update({1, kInf, kInf}, 1, false), 2);
  const Floats values = step.Gather();
  EXPECT_EQ(values[1], 0);
  const std::vector<PushedRow> due = step.CollectDue(0);
  ASSERT_EQ(due.size(), 1);
  EXPECT_EQ(due[0].key, 1);
}

// A shard that was restored: its lines are gone, steps under way still read what they saw, and what
// they update goes up as a gradient.
TEST(DeviceStoreTest, Forget) {
  const DeviceStore store("sgd", 1, 500);
  Ids ids(200), of_one;
  for (int64_t i = 0; i < 200; ++i) ids[i] = i;
  for (const int64_t id : ids) {
    if (ShardOfHash(HashKey(id), 3) == 1) of_one.push_back(id);
  }
  Step step(store, 1, ids);
  Begin(&step, store, 8);
  step.Update(Floats(200, 1));
  EXPECT_EQ(store.Forget(1, 3), static_cast<int64_t>(of_one.size()));
  EXPECT_EQ(step.Gather(), Floats(200, 7));
  step.Update(Floats(200, 2));
  std::vector<PushedRow> due = step.CollectDue(-1);
  ASSERT_EQ(due.size(), of_one.size());
  for (const PushedRow& row : due) {
    EXPECT_TRUE(row.gradient);
    EXPECT_EQ(row.floats, Floats{2});
  }
  EXPECT_EQ(CollectDirty(store).size(), 200 - of_one.size());
  const Step next(store, 1, ids);
  EXPECT_TRUE(next.miss_keys().empty()) << "a step under way keeps the lines";
  const std::vector<int64_t> bases = next.check_bases();
  std::vector<int32_t> index;
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool forgotten = ShardOfHash(HashKey(ids[i]), 3) == 1;
    EXPECT_EQ(bases[i] < 0, forgotten);
    if (forgotten) index.push_back(static_cast<int32_t>(i));
  }
  EXPECT_EQ(step.Gather()[of_one[0]], 7);
  next.InstallChecked(index, std::vector<Floats>(index.size(), {3}),
                      std::vector<int64_t>(index.size()));
  EXPECT_EQ(step.Gather()[of_one[0]], 3) << "a line is of both";
  EXPECT_EQ(store.CountLines(), 200);
  EXPECT_EQ(store.Forget(1, 3), 0);
  next.Unpin();
  step.Unpin();
  EXPECT_EQ(Step(store, 1, of_one).miss_keys(), of_one);
  EXPECT_EQ(store.Forget(), 0);
  EXPECT_EQ(Step(store, 1, ids).miss_keys().size(), 200);
}

// Which of the keys a lookup lists where shard 0 of 2 watches, and how many of it it leaves out.
std::vector<Ids> ListWatched(const DeviceStore& store, const Ids& ids, uint8_t shard_0 = 1) {
  const testing::Batch batch(ids);
  const auto n = static_cast<int64_t>(ids.size());
  const DeviceArray<uint8_t> marked(std::vector<uint8_t>{shard_0, 0});
  const DeviceArray<int32_t> slots(n), spared(2 * HET_SPREAD);
  const DeviceArray<char> scratch(het_list_scratch_bytes(n));
  const testing::List misses(n), checks(n);
  const HetShards watching = {2, marked.get()};
  EXPECT_CUDA(het_find(store.get(), batch.get(), slots.get(), kStream));
  EXPECT_CUDA(het_list(store.get(), batch.get(), slots.get(), &watching, spared.get(), &misses.list,
                       &checks.list, scratch.get(), kStream));
  EXPECT_CUDA(het_unpin(store.get(), batch.get(), slots.get(), kStream));
  const std::vector<int32_t> spared_here = spared.Read();
  const auto middle = spared_here.begin() + HET_SPREAD;
  return {misses.keys.Read(misses.size()),
          checks.keys.Read(checks.size()),
          {std::accumulate(spared_here.begin(), middle, int64_t{0}),
           std::accumulate(middle, spared_here.end(), int64_t{0})}};
}

TEST(DeviceStoreTest, WatchedRows) {
  const DeviceStore store("sgd", 1, 500);
  Ids ids(200), there, here;
  std::iota(ids.begin(), ids.end(), 0);
  for (const int64_t id : ids) (ShardOfHash(HashKey(id), 2) == 0 ? here : there).push_back(id);
  Step made(store, 1, ids);
  Begin(&made, store, 3, 5);
  made.Unpin();
  Step checked(store, 1, ids);
  checked.Watch({1, 0});
  const auto num_here = static_cast<int64_t>(here.size());
  EXPECT_EQ(ListWatched(store, ids), (std::vector<Ids>{{}, there, {num_here, 0}}));
  EXPECT_EQ(ListWatched(store, ids, 0), (std::vector<Ids>{{}, ids, {0, 0}}))
      << "nobody counts on it";
  // One that came, though its line knows more, is to be checked again.
  const auto index = static_cast<int32_t>(here[3]);
  checked.InstallChecked({index}, {{7}}, {4});
  EXPECT_EQ(store.Row(checked.slots()[index]), Floats{3});
  EXPECT_EQ(ListWatched(store, here), (std::vector<Ids>{{}, {here[3]}, {num_here - 1, 0}}));
  EXPECT_CUDA(het_unwatch(store.get(), 1, 2, kStream));
  EXPECT_EQ(ListWatched(store, here)[2], (Ids{num_here - 1, 0}));
  EXPECT_CUDA(het_unwatch(store.get(), 0, 2, kStream));
  EXPECT_EQ(ListWatched(store, here)[1], here);
  checked.Unpin();
}

// Neither a key without a line, nor one whose row is still to come, nor a row that is no more.
TEST(DeviceStoreTest, RowsThatNobodyAskedForFindTheirLines) {
  const DeviceStore store("sgd", 1, 500);
  Step step(store, 1, {1, 2, 3});
  Begin(&step, store, 3, 5);
  Step to_come(store, 1, {4});
  to_come.MakeLines();
  const DeviceArray<int64_t> keys(Ids{3, 9, 4, 2, 1}), bases(Ids{6, 6, 6, -1, 4});
  const DeviceArray<int32_t> slots(5);
  const DeviceArray<int64_t> num_found(Ids{40});
  EXPECT_CUDA(het_find_unasked(store.get(), keys.get(), bases.get(), 5, slots.get(),
                               num_found.get(), kStream));
  const std::vector<int32_t> of_step = step.slots();
  EXPECT_EQ(slots.Read(), (std::vector<int32_t>{of_step[2], -1, -1, -1, of_step[0]}));
  EXPECT_EQ(num_found.Read(), Ids{42});
  std::vector<float> rows(5 * store.info().row_stride);
  for (size_t r = 0; r < 5; ++r) rows[r * store.info().row_stride] = 10 + static_cast<float>(r);
  const DeviceArray<float> rows_there(rows);
  EXPECT_CUDA(
      het_install(store.get(), nullptr, slots.get(), rows_there.get(), bases.get(), 5, kStream));
  EXPECT_EQ(step.Gather(), (Floats{3, 3, 10})) << "that of 1 is older";
}

TEST(DeviceStoreTest, WhatAStepLacksOfShardsThatRestarted) {
  const DeviceStore store("sgd", 1, 500);
  Ids ids(100), here;
  std::iota(ids.begin(), ids.end(), 0);
  for (const int64_t id : ids) {
    if (ShardOfHash(HashKey(id), 2) == 0) here.push_back(id);
  }
  Step step(store, 1, ids);
  Begin(&step, store, 3);
  EXPECT_EQ(step.Lacking({1, 1}), Ids{});
  store.Forget();
  const Step brought(store, 1, {here[0], here[1]});
  EXPECT_EQ(step.Lacking({1, 0}), here) << "the rows of two are still to come";
  brought.InstallChecked({0, 1}, {{8}, {9}}, {0, 0});
  EXPECT_EQ(step.Lacking({1, 0}), Ids(here.begin() + 2, here.end()));
  EXPECT_EQ(step.Gather()[here[1]], 9) << "their lines are of both";
  EXPECT_EQ(step.Gather()[here[2]], 3) << "what it saw";
  EXPECT_EQ(step.Lacking({0, 0}), Ids{});
  brought.Unpin();
  step.Unpin();
}

TEST(DeviceStoreTest, ConfigsThatCannotBeAreRefused) {
  const auto refused = [](const HetStoreConfig& config) {
    HetStore* store = nullptr;
    char message[200] = "";
    EXPECT_NE(
        het_store_create(&config, nullptr, &store, message, sizeof(message), testing::kStream), 0);
    EXPECT_EQ(store, nullptr);
    return std::string(message);
  };
  EXPECT_NE(refused({4, "adan", 10, 0, 0}).find("optimizer = 'adan'"), std::string::npos);
  EXPECT_NE(refused({4, "sgd cowclip=1", 10, 0, 0}).find("no cowclip"), std::string::npos);
  EXPECT_NE(refused({0, "sgd", 10, 0, 0}).find("dim = 0"), std::string::npos);
  EXPECT_NE(refused({4, "sgd", 0, 0, 0}).find("lines = 0"), std::string::npos);
  EXPECT_NE(refused({4, "sgd", 10, 2, 0}).find("policy = 2"), std::string::npos);
  EXPECT_NE(refused({4, "sgd", 10, 0, 3}).find("clock = 3"), std::string::npos);
}

}  // namespace
}  // namespace het_tf
