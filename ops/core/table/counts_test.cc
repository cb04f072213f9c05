// What is known of keys without a row, in snapshots and out of them.

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "ops/core/table/snapshot.h"
#include "ops/core/table/sweep.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::ApplyRows;
using testing::Below;
using testing::Random;
using testing::TableRows;

std::unique_ptr<Table> MakeTable(const std::string& lifetimes, int shard = 0, int num_shards = 1) {
  Lifetimes parsed;
  EXPECT_OK(Lifetimes::Parse(lifetimes, &parsed));
  RowConfig config = {1, "sgd", "zeros"};
  config.num_shards = num_shards;
  std::unique_ptr<Table> table;
  EXPECT_OK(Table::Create(config, shard, &table, parsed));
  return table;
}

// By key: updates, and how long ago the last one was.
using Counts = std::map<int64_t, std::pair<int64_t, int64_t>>;

// What a snapshot gave.
struct Saved {
  Counts counts;
  std::map<int64_t, int64_t> rows;               // clocks
  std::map<int, std::vector<int64_t>> sketches;  // by range
};

Saved Read(
    const Table& table, Table::Snapshot* snapshot, const std::function<void()>& between = [] {}) {
  constexpr int64_t kCapacity = 50;
  int64_t keys[kCapacity], clocks[kCapacity], of[kCapacity], counts[kCapacity], ages[kCapacity];
  float values[kCapacity];
  Saved saved;
  const Table::Snapshot::CountsSink sink = {
      kCapacity,
      of,
      counts,
      ages,
      [&](int64_t n) {
        for (int64_t k = 0; k < n; ++k) {
          EXPECT_TRUE(saved.counts.emplace(of[k], std::make_pair(counts[k], ages[k])).second);
        }
        between();
        return Status();
      },
      [&](int range, int64_t first, const std::vector<int64_t>& words) {
        std::vector<int64_t>& all = saved.sketches[range];
        EXPECT_EQ(first, static_cast<int64_t>(all.size()));
        all.insert(all.end(), words.begin(), words.end());
        between();
        return Status();
      }};
  EXPECT_OK(snapshot->Read(
      {keys, values, nullptr, clocks}, kCapacity,
      [&](int64_t n) {
        for (int64_t r = 0; r < n; ++r) saved.rows[keys[r]] = clocks[r];
        between();
        return Status();
      },
      &sink));
  EXPECT_EQ(snapshot->num_candidates(), static_cast<int64_t>(saved.counts.size()));
  for (const auto& [range, words] : saved.sketches) {
    EXPECT_EQ(table.sketch_words(range), static_cast<int64_t>(words.size()));
  }
  return saved;
}

Saved Save(Table* table) {
  std::unique_ptr<Table::Snapshot> snapshot;
  EXPECT_OK(table->Cut(&snapshot));
  return Read(*table, snapshot.get());
}

// The pieces of what several shards saved; sketches are cut where stripes are not.
struct Pieces {
  explicit Pieces(std::vector<Saved> of_shards) : saved(std::move(of_shards)) {
    for (const Saved& each : saved) {
      for (const auto& [key, count] : each.counts) {
        keys.push_back(key);
        counts.push_back(count.first);
        ages.push_back(count.second);
      }
    }
    Table::Piece of_counts;
    of_counts.kind = Table::Piece::kCandidates;
    of_counts.size = static_cast<int64_t>(keys.size());
    of_counts.rows = {keys.data(), nullptr, nullptr, counts.data(), ages.data()};
    if (of_counts.size > 0) pieces.push_back(of_counts);
    for (const Saved& each : saved) {
      for (const auto& [range, words] : each.sketches) {
        Table::Piece piece;
        piece.kind = Table::Piece::kSketch;
        piece.range = range;
        for (piece.first = 0; piece.first < static_cast<int64_t>(words.size());
             piece.first += piece.size) {
          piece.size = std::min<int64_t>(1000, words.size() - piece.first);
          piece.words = words.data() + piece.first;
          pieces.push_back(piece);
        }
      }
    }
  }

  Status CheckAndReplace(Table* table) const {
    for (const Table::Piece& piece : pieces) {
      int64_t owned;
      HET_RETURN_IF_ERROR(table->CheckPiece(piece, SerialFor, &owned));
    }
    size_t at = 0;
    return table->Replace(
        [&](Table::Piece* piece) {
          if (at < pieces.size()) *piece = pieces[at++];
          return Status();
        },
        SerialFor);
  }

  const std::vector<Saved> saved;
  std::vector<int64_t> keys, counts, ages;
  std::vector<Table::Piece> pieces;
};

Status Update(Table* table, const std::vector<int64_t>& keys) {
  return ApplyRows(table, keys, std::vector<float>(keys.size(), -1));
}

TEST(CountsTest, ASnapshotHasThoseOfItsMomentWhateverComesNext) {
  for (const uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    Random random(seed);
    const auto table = MakeTable("given; admit count=4; expire age=3");
    // The plain model: counts and times of keys, and clocks of rows, of which none expires.
    Counts counts;
    std::map<int64_t, int64_t> rows;
    int64_t now = 0;
    const auto step = [&] {
      std::map<int64_t, bool> chosen;
      for (int i = 0; i < 40; ++i) chosen[Below(&random, 3000) * 1000003] = true;
      std::vector<int64_t> keys;
      for (const auto& [key, unused] : chosen) keys.push_back(key);
      ASSERT_OK(Update(table.get(), keys));
      for (const int64_t key : keys) {
        if (rows.count(key) != 0) {
          ++rows[key];
        } else if (counts[key].first == 3) {
          counts.erase(key);
          rows[key] = 1;
        } else {
          counts[key] = {counts[key].first + 1, now};
        }
      }
    };
    const auto sweep = [&] {
      // Rows of that age go, too.
      Table::Sweep pass(table.get());
      while (pass.Next()) {
      }
    };
    ASSERT_OK(table->SetTime(0));
    for (int i = 0; i < 150; ++i) step();
    ASSERT_OK(table->SetTime(now = 1));
    for (int i = 0; i < 50; ++i) step();
    for (auto& [key, count] : counts) count.second = now - count.second;
    std::unique_ptr<Table::Snapshot> snapshot;
    ASSERT_OK(table->Cut(&snapshot));
    const Counts expected = counts;
    const std::map<int64_t, int64_t> expected_rows = rows;
    ASSERT_GT(expected.size(), 500u);
    ASSERT_GT(expected_rows.size(), 500u);
    for (auto& [key, count] : counts) count.second = now - count.second;
    for (int i = 0; i < 20; ++i) step();
    int calls = 0;
    const Saved saved = Read(*table, snapshot.get(), [&] {
      step();
      if (++calls == 5) {
        ASSERT_OK(table->SetTime(now = 4));
        std::thread(sweep).join();
      }
    });
    EXPECT_EQ(saved.counts, expected);
    EXPECT_EQ(saved.rows, expected_rows);
    EXPECT_TRUE(saved.sketches.empty());
  }
}

TEST(CountsTest, AreRestoredToAnyNumberOfShards) {
  const std::string rules = "given; admit count=5; expire age=9";
  std::vector<Saved> saved;
  Counts expected;
  for (int shard = 0; shard < 3; ++shard) {
    const auto table = MakeTable(rules, shard, 3);
    std::vector<int64_t> mine;
    for (int64_t key = 0; key < 900; ++key) {
      if (ShardOfHash(HashKey(key), 3) == static_cast<uint32_t>(shard)) mine.push_back(key);
    }
    // As many updates as the remainder by 4, of ages 2 and 0.
    ASSERT_OK(table->SetTime(5));
    for (int64_t update = 1; update < 4; ++update) {
      if (update == 3) ASSERT_OK(table->SetTime(7));
      std::vector<int64_t> keys;
      for (const int64_t key : mine) {
        if (key % 4 >= update) keys.push_back(key);
      }
      ASSERT_OK(Update(table.get(), keys));
    }
    for (const int64_t key : mine) {
      if (key % 4 > 0) expected[key] = {key % 4, key % 4 == 3 ? 0 : 2};
    }
    saved.push_back(Save(table.get()));
  }
  for (const int num_shards : {1, 2, 3, 5}) {
    Counts found;
    for (int shard = 0; shard < num_shards; ++shard) {
      const auto table = MakeTable(rules, shard, num_shards);
      ASSERT_OK(Update(table.get(), {}));
      ASSERT_OK(Pieces(saved).CheckAndReplace(table.get()));
      const Saved again = Save(table.get());
      EXPECT_EQ(table->num_candidates(), static_cast<int64_t>(again.counts.size()));
      found.insert(again.counts.begin(), again.counts.end());
    }
    EXPECT_EQ(found, expected);
  }
}

TEST(CountsTest, AreCountedByTheRulesOfWhoTakesThem) {
  const auto from = MakeTable("admit count=9");
  for (int i = 0; i < 4; ++i) ASSERT_OK(Update(from.get(), {1, 2, 3, 4}));
  ASSERT_OK(Update(from.get(), {2}));
  const Pieces pieces({Save(from.get())});
  const auto admitted = [&](const std::string& rules) {
    const auto table = MakeTable(rules);
    EXPECT_OK(pieces.CheckAndReplace(table.get()));
    EXPECT_OK(Update(table.get(), {1, 2, 3, 4}));
    std::vector<int64_t> keys;
    for (const auto& [key, row] : testing::Snapshot(*table)) keys.push_back(key);
    return keys;
  };
  EXPECT_EQ(admitted("admit count=6"), std::vector<int64_t>{2});
  EXPECT_EQ(admitted("admit count=6 sketch=100000"), std::vector<int64_t>{2});
  EXPECT_EQ(admitted("admit count=6; keys 3 4; admit count=3"), (std::vector<int64_t>{2, 3, 4}));
  EXPECT_EQ(admitted("admit probability=0"), std::vector<int64_t>());
  EXPECT_EQ(admitted("expire age=5"), (std::vector<int64_t>{1, 2, 3, 4}));
}

TEST(CountsTest, ASketchGoesOnAsIfItHadNotBeenSaved) {
  const std::string rules = "admit count=3 sketch=40000; keys 0 99; admit count=2 sketch=9000";
  const auto table = MakeTable(rules), other = MakeTable(rules);
  // Of keys without a row among `without`.
  const auto step = [&](Table* to, uint64_t seed, const TableRows& without) {
    Random random(seed);
    std::map<int64_t, bool> chosen;
    for (int i = 0; i < 100; ++i) chosen[Below(&random, 20000)] = true;
    std::vector<int64_t> keys;
    for (const auto& [key, unused] : chosen) {
      if (without.count(key) == 0) keys.push_back(key);
    }
    ASSERT_OK(Update(to, keys));
  };
  for (int i = 0; i < 100; ++i) step(table.get(), i, {});
  const Saved saved = Save(table.get());
  EXPECT_EQ(saved.sketches.size(), 2u);
  ASSERT_OK(Pieces({saved}).CheckAndReplace(other.get()));
  EXPECT_EQ(Save(other.get()).sketches, saved.sketches);
  // The rows are not in what was restored here.
  const TableRows before = testing::Snapshot(*table);
  ASSERT_GT(before.size(), 100u);
  for (int i = 100; i < 200; ++i) {
    step(table.get(), i, before);
    step(other.get(), i, before);
  }
  TableRows since = testing::Snapshot(*table);
  for (const auto& [key, row] : before) since.erase(key);
  EXPECT_GT(since.size(), 100u);
  EXPECT_EQ(testing::Snapshot(*other), since);
}

TEST(CountsTest, OfSeveralSketchesEachCounterIsTheLargest) {
  const std::string rules = "admit count=15 sketch=40000";
  std::vector<Saved> saved;
  for (int shard = 0; shard < 3; ++shard) {
    const auto table = MakeTable(rules, shard, 3);
    std::vector<int64_t> keys;
    for (int64_t key = 0; key < 3000; ++key) {
      if (ShardOfHash(HashKey(key), 3) == static_cast<uint32_t>(shard)) keys.push_back(key);
    }
    for (int i = 0; i < 2 + shard; ++i) ASSERT_OK(Update(table.get(), keys));
    saved.push_back(Save(table.get()));
  }
  const auto one = MakeTable(rules, 1, 2);
  ASSERT_OK(Pieces(saved).CheckAndReplace(one.get()));
  const std::vector<int64_t> merged = Save(one.get()).sketches[0];
  const int64_t of_stripe = merged.size() / Table::kNumStripes;
  int64_t larger = 0;
  for (size_t w = 0; w < merged.size(); ++w) {
    if (w % of_stripe < 2) continue;  // where halving goes on
    for (int shift = 0; shift < 64; shift += 4) {
      const auto counter = [&](int64_t word) { return static_cast<uint64_t>(word) >> shift & 15; };
      uint64_t largest = 0;
      for (Saved& each : saved) largest = std::max(largest, counter(each.sketches[0][w]));
      ASSERT_EQ(counter(merged[w]), largest);
      larger += counter(merged[w]) > counter(saved[0].sketches[0][w]);
    }
  }
  EXPECT_GT(larger, 1000);
}

TEST(CountsTest, WhatIsNoneIsRefused) {
  const auto table =
      MakeTable("given; admit count=3; expire age=1; keys 5 9; admit count=2 sketch=9000");
  ASSERT_OK(Update(table.get(), {1, 6}));
  const Saved saved = Save(table.get());
  const auto refused = [&](const std::function<void(Table::Piece*, std::vector<int64_t>*)>& change,
                           const char* message) {
    const Pieces of_saved({saved});
    for (const Table::Piece& good : of_saved.pieces) {
      Table::Piece piece = good;
      const bool sketch = piece.kind == Table::Piece::kSketch;
      std::vector<int64_t> numbers(piece.size);
      const int64_t* source = sketch ? piece.words : nullptr;
      if (sketch) numbers.assign(source, source + piece.size);
      change(&piece, &numbers);
      int64_t owned;
      const Status status = table->CheckPiece(piece, SerialFor, &owned);
      if (!status.ok()) {
        EXPECT_NE(status.message().find(message), std::string::npos) << status.message();
        return true;
      }
    }
    return false;
  };
  const auto with_counts = [](int64_t count, int64_t age) {
    return [count, age](Table::Piece* piece, std::vector<int64_t>*) {
      static int64_t counts[1], ages[1], keys[1];
      if (piece->kind != Table::Piece::kCandidates) return;
      keys[0] = 1;
      counts[0] = count;
      ages[0] = age;
      piece->rows = {keys, nullptr, nullptr, counts, ages};
    };
  };
  EXPECT_FALSE(refused(with_counts(1, 0), ""));
  EXPECT_TRUE(refused(with_counts(0, 0), "counts holds 0 for key 1"));
  EXPECT_TRUE(refused(with_counts(-3, 0), "counts holds -3"));
  EXPECT_TRUE(refused(with_counts(int64_t{1} << 31, 0), "counts holds 2147483648"));
  EXPECT_TRUE(refused(with_counts(1, -1), "candidate_ages holds -1"));
  const auto with_word = [](int64_t at, int64_t word) {
    return [at, word](Table::Piece* piece, std::vector<int64_t>* numbers) {
      if (piece->kind != Table::Piece::kSketch || at >= piece->size) return;
      (*numbers)[at] = word;
      piece->words = numbers->data();
    };
  };
  EXPECT_FALSE(refused(with_word(2, -1), ""));
  EXPECT_TRUE(refused(with_word(0, -1), "sketch_1 holds -1 at 0"));
  EXPECT_TRUE(refused(with_word(0, 1 << 20), "sketch_1 holds 1048576 at 0"));
  EXPECT_TRUE(refused(with_word(1, -1), "sketch_1 holds -1 at 1"));
  EXPECT_TRUE(refused([](Table::Piece* piece, auto) { piece->range = 0; }, "sketch_0 has"));
  EXPECT_TRUE(refused([](Table::Piece* piece, auto) { piece->range = 2; }, "sketch_2 has"));
  EXPECT_TRUE(refused([](Table::Piece* piece, auto) { piece->first += 1 << 20; }, "words after"));
}

TEST(CountsTest, AreReadWhileThreadsUpdate) {
  const auto table = MakeTable("admit count=3; keys 0 10000; admit count=2 sketch=60000");
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      Random random(t);
      while (!done) EXPECT_OK(Update(table.get(), {static_cast<int64_t>(Below(&random, 40000))}));
    });
  }
  Saved saved;
  for (int i = 0; i < 20; ++i) saved = Save(table.get());
  done = true;
  for (std::thread& thread : threads) thread.join();
  const auto other = MakeTable("admit count=3; keys 0 10000; admit count=2 sketch=60000");
  ASSERT_OK(Pieces({saved}).CheckAndReplace(other.get()));
  EXPECT_EQ(other->num_candidates(), static_cast<int64_t>(saved.counts.size()));
}

}  // namespace
}  // namespace het_tf
