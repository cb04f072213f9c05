#include "ops/core/table/snapshot.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/table/record.h"
#include "ops/core/table/sweep.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::ApplyRows;
using testing::Below;
using testing::Buffer;
using testing::MakeTable;
using testing::Random;
using testing::RequestBuilder;
using testing::RunThreads;
using testing::TableRow;
using testing::TableRows;
using testing::ThreadedFor;

// Columns for so many rows.
struct Columns {
  Columns(const Table& table, int64_t capacity)
      : keys(capacity),
        clocks(capacity),
        values(capacity * table.dim()),
        slots(capacity * table.slot_dim()) {}

  Table::Rows rows() { return {keys.data(), values.data(), slots.data(), clocks.data()}; }
  Table::ConstRows const_rows() const {
    return {keys.data(), values.data(), slots.data(), clocks.data()};
  }

  std::vector<int64_t> keys, clocks;
  std::vector<float> values, slots;
};

std::unique_ptr<Table::Snapshot> Cut(Table* table) {
  std::unique_ptr<Table::Snapshot> snapshot;
  EXPECT_OK(table->Cut(&snapshot));
  return snapshot;
}

Status ReadInto(const Table& table, Table::Snapshot* snapshot, int64_t capacity, TableRows* rows) {
  Columns columns(table, capacity);
  return snapshot->Read(columns.rows(), capacity, [&](int64_t n) {
    EXPECT_LE(n, capacity);
    for (int64_t r = 0; r < n; ++r) {
      const float* value = &columns.values[r * table.dim()];
      const float* slots = columns.slots.data() + r * table.slot_dim();
      const bool is_new = rows->emplace(columns.keys[r], TableRow{{value, value + table.dim()},
                                                                  {slots, slots + table.slot_dim()},
                                                                  columns.clocks[r]})
                              .second;
      EXPECT_TRUE(is_new) << "key " << columns.keys[r] << " was read twice";
    }
    return Status();
  });
}

TableRows ReadRows(const Table& table, Table::Snapshot* snapshot, int64_t capacity = 100) {
  TableRows rows;
  EXPECT_OK(ReadInto(table, snapshot, capacity, &rows));
  return rows;
}

std::vector<int64_t> Keys(int64_t n) {
  std::vector<int64_t> keys(n);
  for (int64_t i = 0; i < n; ++i) keys[i] = i * 7 - 1000;
  return keys;
}

Status Update(Table* table, const std::vector<int64_t>& keys) {
  return ApplyRows(table, keys, std::vector<float>(keys.size() * table->dim(), 1.0f));
}

TEST(SnapshotTest, ReadsTheRowsAsTheyWereWhateverHappensBeforeItDoes) {
  for (const int64_t rows : {0, 1, 63, 64, 65, 5000}) {
    const auto table = MakeTable({3, "adam", "uniform", 5});
    ASSERT_OK(Update(table.get(), Keys(rows)));
    ASSERT_OK(Update(table.get(), Keys(rows / 2)));
    const TableRows expected = testing::Snapshot(*table);
    const auto snapshot = Cut(table.get());
    EXPECT_EQ(snapshot->num_rows(), rows);
    ASSERT_OK(Update(table.get(), Keys(rows + 1000)));  // new ones among them
    ASSERT_OK(Update(table.get(), Keys(rows / 3)));
    EXPECT_EQ(ReadRows(*table, snapshot.get()), expected);
    // The table itself has all of the updates.
    const auto again = Cut(table.get());
    EXPECT_EQ(ReadRows(*table, again.get(), 1), testing::Snapshot(*table));
  }
}

// Threads add batches of which anybody knows what is in them, and a snapshot says how many of each
// thread's it holds. Every row must be that which so many updates give, and no other.
TEST(SnapshotTest, IsAStateThatTheTableHadWhileOthersUpdateIt) {
  constexpr int kThreads = 4, kSharedKeys = 3000, kBatch = 200;
  const int snapshots = testing::kSanitized ? 4 : 8;
  const auto table = MakeTable({4, "adam", "uniform", 5});
  const auto keys_of = [](int thread, int64_t batch) {
    Random random(thread * 1000003 + batch);
    std::vector<int64_t> keys = {-1 - thread};  // counts the thread's batches
    while (keys.size() < kBatch) keys.push_back(Below(&random, kSharedKeys) * 4 + keys.size() % 4);
    std::sort(keys.begin() + 1, keys.end());
    keys.erase(std::unique(keys.begin() + 1, keys.end()), keys.end());
    return keys;
  };
  const auto push = [&](int thread, int64_t batch, uint64_t incarnation, uint64_t session) {
    RequestBuilder request;
    request.header.cache_id = thread + 1;
    request.header.incarnation = incarnation;
    request.header.session = session;
    request.header.dim = 4;
    request.header.slot_dim = request.header.contribution_dim = table->slot_dim();
    request.header.contribution_dim = table->contribution_dim();
    RequestBuilder::Push rows = {static_cast<uint64_t>(batch), {}};
    for (const int64_t key : keys_of(thread, batch)) rows.rows.push_back({key, 0, {1, 1, 1, 1}});
    request.pushes = {rows};
    return request.Encode();
  };

  std::atomic<bool> done{false};
  std::vector<TableRows> seen;
  RunThreads(kThreads + 1, [&](int t) {
    if (t == kThreads) {
      for (int s = 0; s < snapshots; ++s) {
        const auto snapshot = Cut(table.get());
        seen.push_back(ReadRows(*table, snapshot.get(), 1000));
      }
      done = true;
      return;
    }
    if (t % 2 == 0) {  // in place
      for (int64_t batch = 1; !done; ++batch) EXPECT_OK(Update(table.get(), keys_of(t, batch)));
      return;
    }
    Buffer reply;
    RequestBuilder hello;
    hello.header.cache_id = t + 1;
    hello.header.dim = 4;
    hello.header.slot_dim = table->slot_dim();
    hello.header.contribution_dim = table->contribution_dim();
    hello.full = {1};
    EXPECT_OK(testing::Sync(table.get(), hello.Encode(), &reply));
    ReplyView view;
    EXPECT_OK(ReplyView::Parse(reply.data(), reply.size(), &view));
    for (int64_t batch = 1; !done; ++batch) {
      EXPECT_OK(testing::Sync(
          table.get(), push(t, batch, view.header.incarnation, view.header.session), &reply));
    }
  });

  // After n updates with a gradient of ones, computed once for each key and n.
  std::map<int64_t, std::vector<TableRow>> history;
  const auto row_after = [&](int64_t key, int64_t n) {
    std::vector<TableRow>& rows = history[key];
    if (static_cast<int64_t>(rows.size()) < n) {
      const auto alone = MakeTable({4, "adam", "uniform", 5});
      rows.clear();
      for (int64_t i = 0; i < 2 * n; ++i) {
        EXPECT_OK(Update(alone.get(), {key}));
        rows.push_back(testing::Snapshot(*alone).at(key));
      }
    }
    return rows[n - 1];
  };
  ASSERT_EQ(seen.size(), static_cast<size_t>(snapshots));
  for (const TableRows& rows : seen) {
    std::map<int64_t, int64_t> updates;
    for (int t = 0; t < kThreads; ++t) {
      const auto counter = rows.find(-1 - t);
      const int64_t batches = counter == rows.end() ? 0 : counter->second.clock;
      for (int64_t batch = 1; batch <= batches; ++batch) {
        for (const int64_t key : keys_of(t, batch)) ++updates[key];
      }
    }
    ASSERT_EQ(rows.size(), updates.size());
    for (const auto& [key, n] : updates) {
      ASSERT_EQ(rows.count(key), 1u) << key;
      ASSERT_EQ(rows.at(key).clock, n) << key;
      if (key < 200) {
        ASSERT_EQ(rows.at(key), row_after(key, n)) << key;
      }
    }
  }
}

TEST(SnapshotTest, WhoUpdatesMoreThanThereIsRoomForWaitsForTheReader) {
  // Rows of 16 KiB: 6,000 take three times the room.
  constexpr int64_t kRows = 6000;
  constexpr int kDim = 4092;
  const auto table = MakeTable({kDim, "sgd", "zeros"});
  ASSERT_OK(Update(table.get(), Keys(kRows)));
  auto snapshot = Cut(table.get());
  // A call that is larger than all of the room does not wait for more of it.
  ASSERT_OK(Update(table.get(), Keys(kRows - 1000)));
  std::vector<std::thread> waiting;
  for (int t = 0; t < 3; ++t) {
    waiting.emplace_back([&] { EXPECT_OK(Update(table.get(), Keys(kRows))); });
  }
  int64_t rows = 0;
  Columns columns(*table, 64);
  ASSERT_OK(snapshot->Read(columns.rows(), 64, [&](int64_t n) {
    for (int64_t r = 0; r < n; ++r) {
      EXPECT_EQ(columns.clocks[r], 1);
      EXPECT_EQ(columns.values[(r + 1) * kDim - 1], -1);
    }
    rows += n;
    return Status();
  }));
  EXPECT_EQ(rows, kRows);
  for (std::thread& thread : waiting) thread.join();

  // Those who wait go on, too, when the snapshot is given up.
  snapshot = Cut(table.get());
  ASSERT_OK(Update(table.get(), Keys(kRows - 1000)));
  std::thread last([&] { EXPECT_OK(Update(table.get(), Keys(kRows))); });
  snapshot.reset();
  last.join();
  EXPECT_EQ(testing::Snapshot(*table).at(Keys(kRows)[0]).clock, 7);
}

// As a push that came while a row that had expired was about to go: each waited for what the other
// held, and all others for both, until the snapshot ended.
TEST(SnapshotTest, WhoWaitsForRoomHoldsNobodyUp) {
  constexpr int kDim = 1 << 18;  // rows of 1 MiB
  constexpr int kRows = 40, kFit = 31;
  Lifetimes lifetimes;
  ASSERT_OK(Lifetimes::Parse("given; expire age=9", &lifetimes));
  std::unique_ptr<Table> table;
  ASSERT_OK(Table::Create({kDim, "sgd", "zeros", 0, ClockRule::kCount, 1}, 0, &table, lifetimes));
  const auto update = [&](int64_t key) {
    return ApplyRows(table.get(), {key}, std::vector<float>(kDim, 1));
  };
  for (int key = 0; key < kRows; ++key) ASSERT_OK(update(key));
  auto snapshot = Cut(table.get());
  std::atomic<int> updated{0};
  std::thread updates([&] {
    for (int key = 0; key < kRows; ++key) {
      EXPECT_OK(update(key));
      ++updated;
    }
  });
  while (updated < kFit) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the next one waits by now
  EXPECT_OK(table->SetTime(5));
  EXPECT_EQ(testing::LookupRows(*table, {0})[0], -2);
  EXPECT_EQ(updated, kFit);
  Table::Sweep sweep(table.get());
  while (sweep.Next()) continue;
  snapshot.reset();
  updates.join();
  EXPECT_EQ(testing::LookupRows(*table, {kRows - 1})[0], -2);
}

TEST(SnapshotTest, EndsWithTheWritersErrorAndAnotherOneMayFollow) {
  const auto table = MakeTable({1, "sgd", "zeros"});
  ASSERT_OK(Update(table.get(), Keys(1000)));
  auto snapshot = Cut(table.get());
  std::unique_ptr<Table::Snapshot> second;
  EXPECT_REFUSED(table->Cut(&second), "already being saved");
  Columns columns(*table, 100);
  int writes = 0;
  EXPECT_REFUSED(snapshot->Read(columns.rows(), 100,
                                [&](int64_t) {
                                  return ++writes == 3 ? FailedPrecondition("disk full") : Status();
                                }),
                 "disk full");
  EXPECT_EQ(writes, 3);
  EXPECT_REFUSED(snapshot->Read(columns.rows(), 100, [](int64_t) { return Status(); }), "ended");
  second = Cut(table.get());
  snapshot.reset();  // which ended, and does not end the second
  ASSERT_OK(Update(table.get(), Keys(10)));
  EXPECT_EQ(ReadRows(*table, second.get()).at(Keys(10)[0]).clock, 1);
}

TEST(SnapshotTest, WhatReplacesRowsWaitsForItsEnd) {
  const auto table = MakeTable({1, "sgd", "zeros"});
  ASSERT_OK(Update(table.get(), Keys(1000)));
  const TableRows expected = testing::Snapshot(*table);
  const auto snapshot = Cut(table.get());
  std::thread clear([&] { table->Clear(); });
  std::thread import([&] { EXPECT_OK(testing::Restore(table.get(), {{5, {{1}, {}, 1}}})); });
  EXPECT_EQ(ReadRows(*table, snapshot.get()), expected);
  clear.join();
  import.join();
  EXPECT_LE(table->size(), 1);
}

// A source of blocks for Replace.
std::function<Status(Table::Piece*)> Blocks(const std::vector<Columns>& blocks, bool slots = true) {
  return [&blocks, slots, b = size_t{0}](Table::Piece* piece) mutable {
    if (b == blocks.size()) return Status();
    piece->rows = blocks[b].const_rows();
    if (!slots) piece->rows.slots = nullptr;
    piece->size = blocks[b++].keys.size();
    return Status();
  };
}

Table::Piece PieceOf(const Table::ConstRows& rows, int64_t size) {
  Table::Piece piece;
  piece.rows = rows;
  piece.size = size;
  return piece;
}

std::vector<Columns> BlocksOf(Table* table, int64_t capacity) {
  std::vector<Columns> blocks;
  Columns columns(*table, capacity);
  const auto snapshot = Cut(table);
  EXPECT_OK(snapshot->Read(columns.rows(), capacity, [&](int64_t n) {
    blocks.push_back(columns);
    blocks.back().keys.resize(n);
    return Status();
  }));
  return blocks;
}

TEST(ReplaceTest, EveryShardTakesItsRows) {
  const RowConfig config = {3, "adam", "uniform", 5};
  const auto whole = MakeTable(config);
  ASSERT_OK(Update(whole.get(), Keys(2000)));
  const TableRows expected = testing::Snapshot(*whole);
  const std::vector<Columns> blocks = BlocksOf(whole.get(), 300);
  for (const int num_shards : {1, 2, 5}) {
    TableRows rows;
    RowConfig of_shard = config;
    of_shard.num_shards = num_shards;
    for (int shard = 0; shard < num_shards; ++shard) {
      const auto table = MakeTable(of_shard, shard);
      int64_t owned = 0;
      for (const Columns& block : blocks) {
        int64_t of_block;
        const Table::Piece piece = PieceOf(block.const_rows(), block.keys.size());
        ASSERT_OK(table->CheckPiece(piece, ThreadedFor, &of_block));
        owned += of_block;
      }
      const uint64_t incarnation = table->incarnation();
      ASSERT_OK(table->Replace(Blocks(blocks), ThreadedFor));
      EXPECT_NE(table->incarnation(), incarnation);
      EXPECT_EQ(table->size(), owned);
      const TableRows mine = testing::Snapshot(*table);
      rows.insert(mine.begin(), mine.end());
    }
    EXPECT_EQ(rows, expected);
  }
}

TEST(ReplaceTest, DropsWhatWasThereAndCanLeaveTheSlotsOut) {
  const auto from = MakeTable({2, "sgd", "uniform", 5});
  ASSERT_OK(Update(from.get(), {1, 2, 3}));
  const auto to = MakeTable({2, "adagrad initial_accumulator_value=0.5", "uniform", 5});
  ASSERT_OK(Update(to.get(), {3, 4}));
  ASSERT_OK(to->Replace(Blocks(BlocksOf(from.get(), 2), false), SerialFor));
  TableRows expected = testing::Snapshot(*from);
  for (auto& [key, row] : expected) row.slots = {0.5f, 0.5f};
  EXPECT_EQ(testing::Snapshot(*to), expected);
}

TEST(ReplaceTest, AfterAnErrorTheTableIsEmpty) {
  const auto table = MakeTable({1, "sgd", "zeros"});
  ASSERT_OK(Update(table.get(), Keys(100)));
  const std::vector<Columns> blocks = BlocksOf(table.get(), 30);
  const auto next = Blocks(blocks);
  int calls = 0;
  EXPECT_REFUSED(table->Replace(
                     [&](Table::Piece* piece) {
                       return ++calls == 3 ? FailedPrecondition("a file is gone") : next(piece);
                     },
                     ThreadedFor),
                 "a file is gone");
  EXPECT_EQ(table->size(), 0);
  ASSERT_OK(Update(table.get(), Keys(100)));
  EXPECT_EQ(table->size(), 100);
}

TEST(ReplaceTest, RowsAreCheckedBefore) {
  const auto table = MakeTable({1, "momentum", "zeros"});
  ASSERT_OK(Update(table.get(), {1, 2}));
  Columns block = BlocksOf(table.get(), 2)[0];
  int64_t owned;
  const auto check = [&](const Table::ConstRows& rows) {
    return table->CheckPiece(PieceOf(rows, 2), ThreadedFor, &owned);
  };
  ASSERT_OK(check(block.const_rows()));
  EXPECT_EQ(owned, 2);
  block.clocks[1] = -1;
  EXPECT_REFUSED(check(block.const_rows()), "clocks holds -1");
  block.clocks[1] = kMaxClock + 1;
  EXPECT_REFUSED(check(block.const_rows()), "clocks holds");
  block.clocks[1] = 0;
  block.slots[0] = std::numeric_limits<float>::infinity();
  EXPECT_REFUSED(check(block.const_rows()), "NaN or infinity");
  Table::ConstRows without = block.const_rows();
  without.slots = nullptr;
  EXPECT_OK(check(without));
}

}  // namespace
}  // namespace het_tf
