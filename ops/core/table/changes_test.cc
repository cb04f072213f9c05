// Cuts of what changed: a reader that lays them over one another has the table.

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/table/lifetimes.h"
#include "ops/core/table/snapshot.h"
#include "ops/core/table/sweep.h"
#include "ops/core/table/table.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::ApplyRows;
using testing::Below;
using testing::MakeTable;
using testing::Random;
using testing::RequestBuilder;
using testing::Restore;
using testing::RunThreads;
using testing::TableRow;
using testing::TableRows;

// Somebody who reads what changed.
class Reader {
 public:
  Reader(Table* table, const std::string& name) : table_(table), name_(name) {}

  // Reads a cut, which gets lost if `loses`. How many rows it had.
  int64_t Read(bool loses = false) {
    std::unique_ptr<Table::Snapshot> snapshot;
    uint64_t number = 0;
    EXPECT_OK(table_->CutChanged(name_, since_, &snapshot, &number, &whole));
    if (snapshot == nullptr) return -1;
    const int64_t rows = snapshot->num_rows();
    if (loses) return rows;
    std::vector<int64_t> keys(64), clocks(64);
    std::vector<float> values(64 * table_->dim()), slots(64 * table_->slot_dim());
    if (whole) seen.clear();
    for (const int64_t key : snapshot->dropped()) seen.erase(key);
    returned = snapshot->returned();
    EXPECT_OK(snapshot->Read(
        {keys.data(), values.data(), slots.data(), clocks.data()}, 64, [&](int64_t n) {
          for (int64_t r = 0; r < n; ++r) {
            const float* value = &values[r * table_->dim()];
            const float* slot = slots.data() + r * table_->slot_dim();
            seen[keys[r]] = TableRow{
                {value, value + table_->dim()}, {slot, slot + table_->slot_dim()}, clocks[r]};
          }
          return Status();
        }));
    since_ = number;
    return rows;
  }

  bool whole = false;
  TableRows seen;
  std::vector<int64_t> returned;  // of the last cut that was read

 private:
  Table* const table_;
  const std::string name_;
  uint64_t since_ = 0;
};

Status Update(Table* table, const std::vector<int64_t>& keys) {
  return ApplyRows(table, keys, std::vector<float>(keys.size() * table->dim(), 1.0f));
}

std::vector<int64_t> Range(int64_t first, int64_t last) {
  std::vector<int64_t> keys;
  for (int64_t key = first; key < last; ++key) keys.push_back(key * 7);
  return keys;
}

TEST(ChangesTest, ACutHasWhatChangedSinceTheOneBefore) {
  const auto table = MakeTable({3, "adam", "uniform", 5});
  ASSERT_OK(Update(table.get(), Range(0, 1000)));
  Reader reader(table.get(), "a");
  EXPECT_EQ(reader.Read(), 1000);
  EXPECT_TRUE(reader.whole);
  EXPECT_EQ(reader.Read(), 0);
  EXPECT_FALSE(reader.whole);
  ASSERT_OK(Update(table.get(), Range(0, 10)));
  ASSERT_OK(Update(table.get(), Range(5, 20)));
  ASSERT_OK(Update(table.get(), Range(2000, 2003)));  // new
  EXPECT_EQ(reader.Read(), 23);
  EXPECT_FALSE(reader.whole);
  EXPECT_EQ(reader.seen, testing::Snapshot(*table));
}

TEST(ChangesTest, PushesOfCachesAreChanges) {
  const auto table = MakeTable({2, "sgd", "zeros", 5});
  ASSERT_OK(Update(table.get(), {1, 2, 3}));
  Reader reader(table.get(), "a");
  reader.Read();
  RequestBuilder request;
  request.header.dim = request.header.contribution_dim = 2;
  request.full = {1};
  testing::Buffer reply;
  ASSERT_OK(testing::Sync(table.get(), request.Encode(), &reply));
  ReplyView heard;
  ASSERT_OK(ReplyView::Parse(reply.data(), reply.size(), &heard));
  EXPECT_EQ(reader.Read(), 0);  // what is only read does not change
  request.header.incarnation = heard.header.incarnation;
  request.header.session = heard.header.session;
  request.pushes = {{1, {{2, 1, {0.5f, 0.5f}}, {9, 1, {0.25f, 0.25f}}}}};
  ASSERT_OK(testing::Sync(table.get(), request.Encode(), &reply));
  EXPECT_EQ(reader.Read(), 2);
  EXPECT_EQ(reader.seen, testing::Snapshot(*table));
}

TEST(ChangesTest, ACutThatWasLostComesAgainWithTheNext) {
  const auto table = MakeTable({3, "adam", "uniform", 5});
  ASSERT_OK(Update(table.get(), Range(0, 100)));
  Reader reader(table.get(), "a");
  EXPECT_EQ(reader.Read(/*loses=*/true), 100);
  EXPECT_EQ(reader.Read(), 100);
  EXPECT_TRUE(reader.whole);
  ASSERT_OK(Update(table.get(), Range(0, 10)));
  EXPECT_EQ(reader.Read(/*loses=*/true), 10);
  ASSERT_OK(Update(table.get(), Range(20, 25)));
  EXPECT_EQ(reader.Read(/*loses=*/true), 15);
  ASSERT_OK(Update(table.get(), Range(5, 11)));
  EXPECT_EQ(reader.Read(), 16);
  EXPECT_FALSE(reader.whole);
  EXPECT_EQ(reader.seen, testing::Snapshot(*table));
  EXPECT_EQ(reader.Read(), 0);
}

TEST(ChangesTest, WhatIsPutOverAnotherReplacesItAndDropsKeys) {
  const auto table = MakeTable({2, "sgd", "zeros", 1});
  ASSERT_OK(Update(table.get(), Range(0, 5)));
  using Block = std::pair<std::vector<int64_t>, float>;  // of keys, 0: dropped
  // Key 7 comes again after it went, 14 goes for good, and 1000 was never there.
  const std::vector<Block> blocks = {
      {{7, 14, 21}, 1}, {{7, 14, 1000}, 0}, {{7, 28}, 2}, {{28}, 3}, {{}, 1}};
  size_t at = 0;
  std::vector<float> values;
  std::vector<int64_t> clocks;
  ASSERT_OK(table->Replace(
      [&](Table::Piece* piece) {
        const auto& [keys, value] = blocks[at++];
        piece->kind = value == 0 ? Table::Piece::kDropped : Table::Piece::kRows;
        piece->size = keys.size();
        values.assign(2 * keys.size(), value);
        clocks.assign(keys.size(), static_cast<int64_t>(value));
        piece->rows = {keys.data(), values.data(), nullptr, clocks.data()};
        return Status();
      },
      SerialFor));
  const TableRows expected = {{7, {{2, 2}, {}, 2}}, {21, {{1, 1}, {}, 1}}, {28, {{3, 3}, {}, 3}}};
  EXPECT_EQ(testing::Snapshot(*table), expected);
  EXPECT_EQ(table->size(), 3);
  // The place of a key that went is free, and no snapshot reads it.
  Reader reader(table.get(), "a");
  EXPECT_EQ(reader.Read(), 3);
  EXPECT_EQ(reader.seen, expected);
  ASSERT_OK(Update(table.get(), Range(0, 100)));
  EXPECT_EQ(table->size(), 100);
}

TEST(ChangesTest, WhereTheTableDoesNotKnowAllRowsCome) {
  const auto table = MakeTable({3, "adam", "uniform", 5});
  ASSERT_OK(Update(table.get(), Range(0, 100)));
  Reader reader(table.get(), "a");
  reader.Read();
  table->Clear();
  ASSERT_OK(Update(table.get(), Range(50, 60)));
  EXPECT_EQ(reader.Read(), 10);
  EXPECT_TRUE(reader.whole);
  EXPECT_EQ(reader.seen, testing::Snapshot(*table));
  // Another table, as after a server was started again.
  const auto other = MakeTable({3, "adam", "uniform", 5});
  ASSERT_OK(Update(other.get(), Range(0, 3)));
  std::unique_ptr<Table::Snapshot> snapshot;
  uint64_t number = 0;
  bool whole = false;
  ASSERT_OK(table->CutChanged("b", 0, &snapshot, &number, &whole));
  snapshot.reset();
  ASSERT_OK(other->CutChanged("b", number, &snapshot, &number, &whole));
  EXPECT_TRUE(whole);
  EXPECT_EQ(snapshot->num_rows(), 3);
  // One at a time.
  EXPECT_REFUSED(other->CutChanged("c", 0, &snapshot, &number, &whole), "already being saved");
}

TEST(ChangesTest, RowsThatAreImportedAreChanges) {
  const auto table = MakeTable({3, "adam", "uniform", 5});
  ASSERT_OK(Update(table.get(), Range(0, 100)));
  TableRows some = testing::Snapshot(*table);
  some.erase(some.begin(), std::next(some.begin(), 90));
  Reader reader(table.get(), "a");
  reader.Read();
  ASSERT_OK(Update(table.get(), Range(0, 100)));
  reader.Read();
  ASSERT_OK(Restore(table.get(), some));
  EXPECT_EQ(reader.Read(), 10);
  EXPECT_EQ(reader.seen, testing::Snapshot(*table));
}

// Readers of two names, cuts that get lost, readers that are forgotten, other snapshots.
TEST(ChangesTest, RandomReadersHaveTheTable) {
  Random random(7);
  const auto table = MakeTable({2, "adam", "uniform", 5});
  std::map<std::string, std::unique_ptr<Reader>> readers;
  for (int round = 0; round < 400; ++round) {
    std::vector<int64_t> keys(Below(&random, 40));
    for (int64_t& key : keys) key = Below(&random, 1 + 20 * round);
    ASSERT_OK(Update(table.get(), keys));
    const std::string name(1, static_cast<char>('a' + Below(&random, 3)));
    switch (Below(&random, 12)) {
      case 0:
        table->Forget(name);
        readers.erase(name);
        break;
      case 1:
        if (Below(&random, 4) == 0) table->Clear();
        break;
      case 2: {
        std::unique_ptr<Table::Snapshot> snapshot;
        ASSERT_OK(table->Cut(&snapshot));
        break;
      }
      default:
        auto& reader = readers[name];
        if (reader == nullptr) reader = std::make_unique<Reader>(table.get(), name);
        const bool loses = Below(&random, 4) == 0;
        reader->Read(loses);
        if (!loses) {
          ASSERT_EQ(reader->seen, testing::Snapshot(*table));
        }
    }
  }
}

TEST(ChangesTest, KeysWhoseRowsExpireAreNamedUntilTheyHaveOneAgain) {
  Lifetimes lifetimes;
  ASSERT_OK(Lifetimes::Parse("given; expire age=10", &lifetimes));
  std::unique_ptr<Table> table;
  ASSERT_OK(Table::Create({2, "adam", "uniform", 5}, 0, &table, lifetimes));
  ASSERT_OK(table->SetTime(0));
  Random random(8);
  Reader often(table.get(), "often"), seldom(table.get(), "seldom");
  int64_t dropped = 0;
  for (int64_t now = 1; now < 300; ++now) {
    ASSERT_OK(table->SetTime(now));
    std::vector<int64_t> keys(20);
    for (int64_t& key : keys) key = Below(&random, 300);
    ASSERT_OK(Update(table.get(), keys));
    Table::Sweep sweep(table.get());
    while (sweep.Next()) {
    }
    dropped += sweep.num_expired();
    if (Below(&random, 2) == 0) {
      const bool loses = Below(&random, 3) == 0;
      often.Read(loses);
      if (!loses) {
        ASSERT_EQ(often.seen, testing::Snapshot(*table));
      }
    }
    if (now % 50 != 0) continue;
    seldom.Read();
    EXPECT_EQ(seldom.whole, now == 50);
    ASSERT_EQ(seldom.seen, testing::Snapshot(*table));
  }
  EXPECT_GT(dropped, 1000);
}

TEST(ChangesTest, KeysThatHaveAnotherRowAreNamedApart) {
  Lifetimes lifetimes;
  ASSERT_OK(Lifetimes::Parse("given; expire age=1", &lifetimes));
  std::unique_ptr<Table> table;
  ASSERT_OK(Table::Create({1, "sgd", "zeros"}, 0, &table, lifetimes));
  ASSERT_OK(table->SetTime(0));
  ASSERT_OK(Update(table.get(), {1, 2, 3, 4, 5}));
  Reader reader(table.get(), "reader");
  reader.Read();
  EXPECT_TRUE(reader.returned.empty());
  ASSERT_OK(table->SetTime(1));
  ASSERT_OK(Update(table.get(), {4, 5}));
  Table::Sweep sweep(table.get());
  while (sweep.Next()) {
  }
  EXPECT_EQ(sweep.num_expired(), 3);
  ASSERT_OK(Update(table.get(), {3, 2}));  // have one again
  const std::vector<int64_t> keys = {4, 5};
  const std::vector<float> values = {7, 8};
  const std::vector<int64_t> clocks = {0, 2};  // 4 begins anew, 5 was updated twice
  ASSERT_OK(table->Import({keys.data(), values.data(), nullptr, clocks.data()}, 2));
  reader.Read(true);
  reader.Read();
  EXPECT_EQ(reader.returned, (std::vector<int64_t>{2, 3, 4})) << "also if a cut got lost";
  EXPECT_EQ(reader.seen, testing::Snapshot(*table));
  reader.Read();
  EXPECT_TRUE(reader.returned.empty());
}

TEST(ChangesTest, WhoNeverReadsTakesNoMemoryForRowsThatExpire) {
  Lifetimes lifetimes;
  ASSERT_OK(Lifetimes::Parse("given; expire age=0", &lifetimes));
  std::unique_ptr<Table> table;
  ASSERT_OK(Table::Create({1, "sgd", "zeros"}, 0, &table, lifetimes));
  Reader reader(table.get(), "reader");
  ASSERT_OK(Update(table.get(), {1}));
  reader.Read();
  for (int64_t first = 0; first < 100000; first += 1000) {
    std::vector<int64_t> keys(1000);
    for (int64_t i = 0; i < 1000; ++i) keys[i] = first + i;
    ASSERT_OK(Update(table.get(), keys));
    Table::Sweep sweep(table.get());
    while (sweep.Next()) {
    }
  }
  reader.Read();
  EXPECT_TRUE(reader.whole) << "more rows went than there were places";
  EXPECT_TRUE(reader.seen.empty());
  ASSERT_OK(Update(table.get(), {5}));
  reader.Read();
  EXPECT_FALSE(reader.whole);
  EXPECT_EQ(reader.seen, testing::Snapshot(*table));
}

// Every row of a cut is one that the table had, and in the end the reader has them all.
TEST(ChangesTest, NothingIsMissedWhileThreadsUpdate) {
  const auto table = MakeTable({4, "sgd", "zeros", 5});
  Reader reader(table.get(), "a");
  std::atomic<int> running{3};
  RunThreads(4, [&](int thread) {
    if (thread == 3) {
      while (running > 0) reader.Read();
      return;
    }
    Random random(thread);
    for (int i = 0; i < 300; ++i) {
      std::vector<int64_t> keys(50);
      for (int64_t& key : keys) key = Below(&random, 5000);
      EXPECT_OK(Update(table.get(), keys));
    }
    --running;
  });
  reader.Read();
  EXPECT_EQ(reader.seen, testing::Snapshot(*table));
}

}  // namespace
}  // namespace het_tf
