#include "ops/core/table/table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::ApplyRows;
using testing::Below;
using testing::LookupRows;
using testing::MakeTable;
using testing::Pool;
using testing::Random;
using testing::Restore;
using testing::RunThreads;
using testing::Snapshot;
using testing::TableRow;
using testing::TableRows;
using testing::ThreadedFor;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One column of SGD from zero: a pushed delta is what the row gains.
RowConfig Plain(ClockRule clock = ClockRule::kCount) { return {1, "sgd", "zeros", 0, clock, 1}; }

TEST(TableTest, LookupOfUnknownKeysReadsTheInitializerAndAddsNoRow) {
  const auto table = MakeTable({5, "adam", "uniform", 9});
  const std::vector<int64_t> ids = {3, -4, 3, int64_t{1} << 60};
  const std::vector<float> out = LookupRows(*table, ids);
  Initializer initializer;
  ASSERT_OK(Initializer::Parse("uniform", 9, &initializer));
  for (size_t i = 0; i < ids.size(); ++i) {
    float row[5];
    initializer.Fill(ids[i], 5, row);
    EXPECT_EQ(std::vector<float>(row, row + 5),
              std::vector<float>(out.begin() + i * 5, out.begin() + i * 5 + 5));
  }
  EXPECT_EQ(table->size(), 0);
}

TEST(TableTest, ApplyUpdatesEachKeyOnce) {
  const auto table = MakeTable({2, "momentum momentum=0.5", "constant value=10"});
  ASSERT_OK(ApplyRows(table.get(), {7, 8, 7}, {1, 2, 3, 4, 5, 6}));
  ASSERT_OK(ApplyRows(table.get(), {7}, {0, 0}));
  EXPECT_EQ(Snapshot(*table),
            (TableRows{{7, {{10 - 6 - 3, 10 - 8 - 4}, {-3, -4}, 2}}, {8, {{7, 6}, {-3, -4}, 1}}}));
  EXPECT_EQ(LookupRows(*table, {8, 9, 7}), (std::vector<float>{7, 6, 10, 10, 1, -2}));
  EXPECT_EQ(table->size(), 2);
}

TEST(TableTest, ApplyRefusesOrSkipsWhatIsNotFinite) {
  const auto table = MakeTable(Plain());
  EXPECT_REFUSED(ApplyRows(table.get(), {1, 2}, {1, kNan}), "for 1 of 2 keys");
  EXPECT_REFUSED(ApplyRows(table.get(), {1}, {1}, kNan), "learning_rate");
  EXPECT_EQ(table->size(), 0);
  ASSERT_OK(ApplyRows(table.get(), {1, 2}, {1, kNan}, 1, Nonfinite::kSkip));
  EXPECT_EQ(Snapshot(*table), (TableRows{{1, {{-1}, {}, 1}}}));
  EXPECT_EQ(table->counter(TableCounter::kNonfiniteSkipped), 1);
}

TEST(TableTest, MatchesAMapWithThreads) {
  const auto table = MakeTable({3, "sgd", "zeros"});
  TableRows expected;
  Random random(1);
  for (int round = 0; round < 30; ++round) {
    std::vector<int64_t> ids(300);
    for (int64_t& id : ids) id = Below(&random, 5000) - 2500;
    std::vector<float> gradients(ids.size() * 3);
    for (float& gradient : gradients) gradient = static_cast<float>(Below(&random, 9) - 4);
    std::set<int64_t> keys(ids.begin(), ids.end());
    for (const int64_t key : keys) ++expected[key].clock;
    for (size_t i = 0; i < ids.size(); ++i) {
      expected[ids[i]].value.resize(3);
      for (int c = 0; c < 3; ++c) expected[ids[i]].value[c] -= gradients[3 * i + c];
    }
    const UniqueIds unique(ids.data(), ids.size());
    std::vector<float> out(gradients.size());
    FoundRows found;
    // Every other round goes to the rows that a lookup found, some of which were not there yet.
    if (round % 2 == 1) {
      ASSERT_OK(table->Lookup(unique, ThreadedFor, out.data(), &found));
    }
    ASSERT_OK(table->Apply(unique, found, gradients.data(), 1, Nonfinite::kError, ThreadedFor));
    ASSERT_OK(table->Lookup(unique, ThreadedFor, out.data(), &found));
    for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], expected[ids[i / 3]].value[i % 3]);
  }
  EXPECT_EQ(Snapshot(*table), expected);
}

TEST(TableTest, ExportThenImportIsTheSameTable) {
  const RowConfig config = {3, "adam", "uniform", 4};
  const auto table = MakeTable(config), copy = MakeTable(config);
  for (int64_t key = -500; key < 500; ++key) {
    ASSERT_OK(ApplyRows(table.get(), {key, 7}, {1, 2, 3, 4, 5, 6}));
  }
  const TableRows rows = Snapshot(*table);
  EXPECT_EQ(rows.size(), 1000u);
  EXPECT_EQ(rows.at(7).clock, 1000);
  ASSERT_OK(Restore(copy.get(), rows));
  EXPECT_EQ(Snapshot(*copy), rows);
  EXPECT_EQ(LookupRows(*copy, {1, 10000}), LookupRows(*table, {1, 10000}));
}

// However many the parts are, each row is in one of them, and they are about equally large.
TEST(TableTest, ExportInPartsIsTheWhole) {
  const auto table = MakeTable({1, "sgd", "zeros"});
  TableRows all;
  for (int64_t key = 0; key < 20000; ++key) all[key] = {{1}, {}, key};
  ASSERT_OK(Restore(table.get(), all));
  for (const int parts : {1, 3, 31, 32, 33, 100, 1000}) {
    TableRows rows;
    const double mean = 1.0 * all.size() / parts;
    for (int p = 0; p < parts; ++p) {
      TableRows part = Snapshot(*table, p, parts);
      EXPECT_NEAR(part.size(), mean, 5 * std::sqrt(mean));  // standard deviations
      rows.merge(part);
      EXPECT_TRUE(part.empty()) << part.size() << " rows came twice";
    }
    EXPECT_EQ(rows, all);
  }
}

TEST(TableTest, ExportOfPartsThatAreNotThereIsRefused) {
  const auto table = MakeTable(Plain());
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const auto& [part, parts] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 3}, {3, 3}, {0, 0}, {0, -1}, {-2, -1}, {kMost, kMost}, {-kMost - 1, kMost}}) {
    EXPECT_REFUSED(table->Export(part, parts, [](int64_t) { return Table::Rows{}; }), "num_parts");
  }
  EXPECT_TRUE(Snapshot(*table, 0, kMost).empty());
  EXPECT_TRUE(Snapshot(*table, kMost - 1, kMost).empty());
}

FoundRows Find(const Table& table, const std::vector<int64_t>& ids) {
  FoundRows found;
  std::vector<float> out(ids.size() * table.dim());
  EXPECT_OK(table.Lookup(UniqueIds(ids.data(), ids.size()), SerialFor, out.data(), &found));
  return found;
}

// What a lookup found is void once the table has other rows, and says nothing of another table.
TEST(TableTest, AnUpdateDoesNotGoToRowsThatAreNoLongerThere) {
  const std::vector<int64_t> ids = {1, 2, 2};
  const UniqueIds unique(ids.data(), ids.size());
  const std::vector<float> gradients = {1, 2, 3};
  const auto table = MakeTable(Plain()), other = MakeTable(Plain());
  const auto apply = [&](const FoundRows& found) {
    EXPECT_OK(table->Apply(unique, found, gradients.data(), 1, Nonfinite::kError, SerialFor));
  };
  ASSERT_OK(ApplyRows(table.get(), {1}, {10}));
  ASSERT_OK(ApplyRows(other.get(), {1, 2}, {7, 7}));
  const FoundRows found = Find(*table, ids);
  EXPECT_NE(found.records[0], nullptr);
  EXPECT_EQ(found.records[1], nullptr);
  ASSERT_OK(ApplyRows(table.get(), {2}, {10}));  // comes into being after the lookup
  apply(found);
  EXPECT_EQ(LookupRows(*table, {1, 2}), (std::vector<float>{-11, -15}));
  table->Clear();
  ASSERT_OK(ApplyRows(table.get(), {5, 6}, {1, 1}));  // where rows 1 and 2 were
  apply(found);
  EXPECT_EQ(LookupRows(*table, {1, 2, 5, 6}), (std::vector<float>{-1, -5, -1, -1}));
  const FoundRows before = Find(*table, ids);
  ASSERT_OK(Restore(table.get(), {{1, {{100}, {}, 1}}}));
  apply(before);
  EXPECT_EQ(LookupRows(*table, {1, 2}), (std::vector<float>{99, -10}));
  apply(Find(*other, ids));
  EXPECT_EQ(LookupRows(*table, {1, 2}), (std::vector<float>{98, -15}));
  EXPECT_EQ(LookupRows(*other, {1, 2}), (std::vector<float>{-7, -7}));
}

// Work for the pool waits in line behind work that waits for a lock.
TEST(TableTest, CallsOfOnePoolDoNotWaitForEachOther) {
  const auto table = MakeTable(Plain());
  Pool pool(2);
  std::vector<int64_t> ids(3000);
  std::iota(ids.begin(), ids.end(), 0);
  const UniqueIds unique(ids.data(), ids.size());
  const std::vector<float> gradients(ids.size(), 1);
  constexpr int kRounds = 200;
  RunThreads(3, [&](int t) {
    std::vector<float> out(ids.size());
    FoundRows found;
    testing::RequestBuilder pushes;
    testing::Buffer reply;
    pushes.header.incarnation = table->incarnation();
    for (int round = 0; round < kRounds; ++round) {
      if (t == 0) {
        EXPECT_OK(table->Apply(unique, found, gradients.data(), 1, Nonfinite::kError,
                               pool.parallel_for()));
      } else if (t == 1) {
        EXPECT_OK(table->Lookup(unique, pool.parallel_for(), out.data(), &found));
        for (const float value : out) EXPECT_EQ(value, out[0]);
      } else {
        pushes.full = ids;
        for (int64_t& id : pushes.full) id += 3000;
        EXPECT_OK(testing::Sync(table.get(), pushes.Encode(), &reply, pool.parallel_for()));
        const auto* answer = reinterpret_cast<const ReplyHeader*>(reply.data());
        pushes.header.session = answer->session;
        pushes.pushes = {{uint64_t(round) + 1, {}}};
        for (const int64_t id : pushes.full) pushes.pushes[0].rows.push_back({id, 0, {1}});
      }
    }
  });
  EXPECT_EQ(LookupRows(*table, {0, 2999, 3000, 5999}),
            (std::vector<float>{-kRounds, -kRounds, 1 - kRounds, 1 - kRounds}));
}

TEST(TableTest, AReaderAfterAnotherDoesNotKeepWritersOut) {
  const auto table = MakeTable(Plain());
  const std::vector<int64_t> ids = {1, 2, 3};
  std::atomic<bool> written{false};
  RunThreads(4, [&](int t) {
    if (t == 0) {
      for (int i = 0; i < 20; ++i) ASSERT_OK(Restore(table.get(), {{1, {{10}, {}, 1}}}));
      written = true;
    } else {
      while (!written) LookupRows(*table, ids);
    }
  });
}

// Rows of a part are of one moment, and others are read and updated meanwhile.
TEST(TableTest, ExportLetsOthersIn) {
  const auto table = MakeTable(Plain());
  for (int64_t key = 0; key < 100; ++key) ASSERT_OK(ApplyRows(table.get(), {key}, {1}));
  std::vector<int64_t> keys(1000), clocks(1000);
  std::vector<float> values(1000), slots(1);
  EXPECT_OK(table->Export(0, 1, [&](int64_t) {
    // Half-way through, from another thread: a read of the same rows, and one of the table's size.
    RunThreads(1, [&](int) {
      EXPECT_EQ(LookupRows(*table, {5}), std::vector<float>{-1});
      EXPECT_EQ(table->size(), 100);
    });
    return Table::Rows{keys.data(), values.data(), slots.data(), clocks.data()};
  }));
}

TEST(TableTest, ImportReplacesAllOrNone) {
  RowConfig config = Plain();
  const auto table = MakeTable(config);
  ASSERT_OK(Restore(table.get(), {{1, {{10}, {}, 1}}, {2, {{20}, {}, 2}}}));
  ASSERT_OK(Restore(table.get(), {{2, {{21}, {}, 5}}, {3, {{30}, {}, 0}}}));
  const TableRows rows = {{1, {{10}, {}, 1}}, {2, {{21}, {}, 5}}, {3, {{30}, {}, 0}}};
  EXPECT_EQ(Snapshot(*table), rows);
  EXPECT_REFUSED(Restore(table.get(), {{1, {{11}, {}, 1}}, {2, {{22}, {}, -3}}}),
                 "clocks holds -3");
  EXPECT_REFUSED(Restore(table.get(), {{1, {{11}, {}, 1}}, {2, {{22}, {}, kMaxClock + 1}}}),
                 "clocks holds 4611686018427387905");
  EXPECT_REFUSED(Restore(table.get(), {{1, {{11}, {}, 1}}, {2, {{kNan}, {}, 1}}}),
                 "NaN or infinity for key 2");
  EXPECT_EQ(Snapshot(*table), rows);

  config.num_shards = 2;
  const int owner = ShardOfHash(HashKey(1), 2);
  const auto other = MakeTable(config, 1 - owner);
  EXPECT_REFUSED(Restore(other.get(), {{1, {{10}, {}, 1}}}), "keys holds key 1 of shard");
  EXPECT_EQ(other->size(), 0);
}

TEST(TableTest, ClearDropsRowsAndMemory) {
  const auto table = MakeTable(Plain());
  for (int64_t key = 0; key < 1000; ++key) ASSERT_OK(ApplyRows(table.get(), {key}, {1}));
  EXPECT_GE(table->memory_bytes(), 1000 * (16 + 4));
  table->Clear();
  EXPECT_EQ(table->size(), 0);
  EXPECT_EQ(table->memory_bytes(), 0);
  EXPECT_EQ(LookupRows(*table, {5}), std::vector<float>{0});
  ASSERT_OK(ApplyRows(table.get(), {5}, {1}));
  EXPECT_EQ(Snapshot(*table), (TableRows{{5, {{-1}, {}, 1}}}));
}

TEST(TableTest, ConfigsThatCannotBeAreRefused) {
  std::unique_ptr<Table> table;
  const auto create = [&](RowConfig config, int shard) {
    return Table::Create(config, shard, &table);
  };
  EXPECT_REFUSED(create({0, "sgd", "zeros"}, 0), "dim = 0");
  EXPECT_REFUSED(create({1, "adan", "zeros"}, 0), "optimizer = 'adan'");
  EXPECT_REFUSED(create({1, "sgd", "ones"}, 0), "initializer = 'ones'");
  EXPECT_REFUSED(create({1, "sgd", "zeros", 0, ClockRule::kCount, 0}, 0), "num_shards = 0");
  EXPECT_REFUSED(create({1, "sgd", "zeros", 0, ClockRule::kCount, 2}, 2), "shard = 2");
  EXPECT_REFUSED(create({1, "sgd", "zeros", 0, ClockRule::kCount, 2}, -1), "shard = -1");
}

}  // namespace
}  // namespace het_tf
