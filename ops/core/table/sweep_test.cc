// Rows that come and go: against plain maps, under the caches' requests, while the table is saved,
// and with threads.

#include "ops/core/table/sweep.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "ops/core/table/snapshot.h"
#include "ops/core/table/sweeper.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::ApplyRows;
using testing::Below;
using testing::Buffer;
using testing::LookupRows;
using testing::Random;
using testing::RequestBuilder;

std::unique_ptr<Table> MakeTable(const std::string& lifetimes,
                                 RowConfig config = {1, "sgd", "zeros"},
                                 SecondsClock seconds = SteadySeconds) {
  Lifetimes parsed;
  EXPECT_OK(Lifetimes::Parse(lifetimes, &parsed));
  std::unique_ptr<Table> table;
  EXPECT_OK(Table::Create(config, 0, &table, parsed, std::move(seconds)));
  return table;
}

int64_t SweepAll(Table* table) {
  Table::Sweep sweep(table);
  while (sweep.Next()) {
  }
  return sweep.num_expired();
}

// One update by -1 of each key.
Status Add(Table* table, const std::vector<int64_t>& keys) {
  return ApplyRows(table, keys, std::vector<float>(keys.size() * table->dim(), -1));
}

TEST(SweepTest, RowsGoByTheAgeOfTheirLastUpdate) {
  int64_t seconds = 1000;
  const auto table = MakeTable("expire age=10", {1, "sgd", "zeros"}, [&] { return seconds; });
  ASSERT_OK(Add(table.get(), {1, 2}));
  seconds += 6;
  ASSERT_OK(Add(table.get(), {2}));
  LookupRows(*table, {1});  // is no update
  seconds += 3;
  EXPECT_EQ(SweepAll(table.get()), 0);
  seconds += 1;
  EXPECT_EQ(SweepAll(table.get()), 1);
  EXPECT_EQ(LookupRows(*table, {1, 2}), (std::vector<float>{0, 2}));
  EXPECT_EQ(table->size(), 1);
  ASSERT_OK(Add(table.get(), {1}));
  EXPECT_EQ(LookupRows(*table, {1}), std::vector<float>{1}) << "begins as a new row does";
  EXPECT_EQ(table->counter(TableCounter::kRowsExpired), 1);
  EXPECT_EQ(table->counter(TableCounter::kRowsCreated), 3);
}

// While an export goes on, the index grows, and rows go and come again.
TEST(SweepTest, AnExportInPartsHasNoRowTwiceAndAllThatStay) {
  constexpr int64_t kParts = 50, kStay = 1000;
  const auto table = MakeTable("given; expire age=2");
  std::vector<int64_t> stay(kStay), visitors(300);
  std::iota(stay.begin(), stay.end(), 0);
  ASSERT_OK(Add(table.get(), stay));
  Random random(1);
  std::map<int64_t, int> seen;
  for (int64_t part = 0; part < kParts; ++part) {
    for (const auto& row : testing::Snapshot(*table, part, kParts)) ++seen[row.first];
    ASSERT_OK(table->SetTime(part + 1));
    ASSERT_OK(Add(table.get(), stay));
    for (int64_t& key : visitors) key = kStay + Below(&random, 100 * (part + 1));
    ASSERT_OK(Add(table.get(), {visitors.begin(), visitors.end()}));
    SweepAll(table.get());
  }
  for (const auto& [key, times] : seen) EXPECT_EQ(times, 1) << "key " << key;
  for (const int64_t key : stay) EXPECT_EQ(seen.count(key), 1u) << "key " << key;
  EXPECT_GT(seen.size(), size_t{kStay}) << "no visitor was seen";
  EXPECT_GT(table->counter(TableCounter::kRowsExpired), 10 * kParts);
}

TEST(SweepTest, AnExportLeavesOutWhatWasNotUpdatedForLonger) {
  const auto table = MakeTable("given; expire age=100");
  for (const int64_t now : {1, 2, 3}) {
    ASSERT_OK(table->SetTime(now));
    ASSERT_OK(Add(table.get(), {now}));
  }
  ASSERT_OK(table->SetTime(7));
  const auto exported = [&](int64_t max_age) {
    int64_t keys[3], clocks[3];
    float values[3];
    int64_t size = 0;
    EXPECT_OK(table->Export(
        0, 1,
        [&](int64_t rows) {
          size = rows;
          return Table::Rows{keys, values, nullptr, clocks};
        },
        max_age));
    return std::set<int64_t>(keys, keys + size);
  };
  EXPECT_EQ(exported(Table::kAnyAge), (std::set<int64_t>{1, 2, 3}));
  EXPECT_EQ(exported(5), (std::set<int64_t>{2, 3}));
  EXPECT_EQ(exported(4), std::set<int64_t>{3});
  EXPECT_EQ(exported(3), std::set<int64_t>());
}

TEST(SweepTest, CountAndNormNarrowARuleAndRulesAddUp) {
  const auto table =
      MakeTable("given; expire age=100; expire age=10 updates_below=3; expire age=20 norm_below=2",
                {2, "sgd", "zeros"});
  ASSERT_OK(table->SetTime(0));
  for (int i = 0; i < 2; ++i) ASSERT_OK(Add(table.get(), {1}));  // 2 updates
  for (int i = 0; i < 3; ++i) ASSERT_OK(Add(table.get(), {2}));  // norm 3 * sqrt(2)
  for (int i = 0; i < 3; ++i) ASSERT_OK(ApplyRows(table.get(), {3}, {.4, .4}));
  const auto left = [&](int64_t now) {
    EXPECT_OK(table->SetTime(now));
    SweepAll(table.get());
    std::set<int64_t> keys;
    for (const auto& [key, row] : testing::Snapshot(*table)) keys.insert(key);
    return keys;
  };
  EXPECT_EQ(left(9), (std::set<int64_t>{1, 2, 3}));
  EXPECT_EQ(left(10), (std::set<int64_t>{2, 3}));
  EXPECT_EQ(left(19), (std::set<int64_t>{2, 3}));
  EXPECT_EQ(left(20), (std::set<int64_t>{2}));
  EXPECT_EQ(left(99), (std::set<int64_t>{2}));
  EXPECT_EQ(left(100), std::set<int64_t>());
}

TEST(SweepTest, NeedsAClockThatCounts) {
  Lifetimes lifetimes;
  ASSERT_OK(Lifetimes::Parse("expire age=1 updates_below=2", &lifetimes));
  std::unique_ptr<Table> table;
  RowConfig config = {1, "sgd", "zeros"};
  config.clock = ClockRule::kDrift;
  EXPECT_REFUSED(Table::Create(config, 0, &table, lifetimes), "updates_below = 2 needs clock");
  config.clock = ClockRule::kLamport;
  EXPECT_REFUSED(Table::Create(config, 0, &table, lifetimes), "'lamport'");
}

TEST(SweepTest, AnUpdateAfterTheSweepIsOfANewRow) {
  const auto table = MakeTable("given; expire age=0");
  ASSERT_OK(Add(table.get(), {1}));
  const std::vector<int64_t> keys = {1};
  const UniqueIds ids(keys.data(), 1);
  FoundRows found;
  float value;
  ASSERT_OK(table->Lookup(ids, SerialFor, &value, &found));
  EXPECT_EQ(SweepAll(table.get()), 1);
  ASSERT_OK(Add(table.get(), {2}));  // in the place that was key 1's
  const float gradient = -10;
  ASSERT_OK(table->Apply(ids, found, &gradient, 1, Nonfinite::kError, SerialFor));
  EXPECT_EQ(LookupRows(*table, {1, 2}), (std::vector<float>{10, 1}));
}

// What a cache is told. With a bound that hides a hundred updates.
struct Client {
  explicit Client(Table* table) : table(table) {
    builder.header.read_bound = 100;
    builder.header.incarnation = table->incarnation();
    builder.header.session = 1;  // the first that the table has
  }

  // (clock, value) of each row that came.
  std::vector<std::pair<int64_t, float>> Ask(std::vector<RequestBuilder::Check> checks,
                                             std::vector<RequestBuilder::Row> rows = {}) {
    builder.checks = std::move(checks);
    builder.pushes.clear();
    if (!rows.empty()) builder.pushes.push_back({++sequence, std::move(rows)});
    builder.header.cut = sequence;
    Buffer reply;
    EXPECT_OK(testing::Sync(table, builder.Encode(), &reply));
    ReplyView view;
    EXPECT_OK(ReplyView::Parse(reply.data(), reply.size(), &view));
    std::vector<std::pair<int64_t, float>> came;
    for (int64_t r = 0; r < view.header.num_full; ++r) {
      came.emplace_back(view.full_rows[r].clock, view.full[r * table->dim()]);
    }
    return came;
  }

  Table* table;
  RequestBuilder builder;
  uint64_t sequence = 0;
};

TEST(SweepTest, ACacheLearnsThatARowIsGoneOrAnother) {
  const auto table = MakeTable("given; expire age=5");
  ASSERT_OK(table->SetTime(0));
  Client client(table.get());
  EXPECT_TRUE(client.Ask({}, {{1, 3, {3}}}).empty());
  auto came = client.Ask({{1, 3}});  // the base of a row that was made by the cache's own push
  ASSERT_EQ(came.size(), 1);
  EXPECT_EQ(came[0].second, 3);
  const int64_t base = came[0].first;
  EXPECT_TRUE(client.Ask({{1, base}}).empty());
  EXPECT_TRUE(client.Ask({{2, 0}}).empty()) << "a row that nobody has updated";

  ASSERT_OK(table->SetTime(5));
  ASSERT_GE(SweepAll(table.get()), 1);
  came = client.Ask({{1, base}});
  ASSERT_EQ(came.size(), 1);
  EXPECT_EQ(came[0].second, 0) << "as a new row";
  EXPECT_GT(came[0].first, base + kMaxBound);
  const int64_t gone = came[0].first;
  EXPECT_TRUE(client.Ask({{1, gone}}).empty()) << "it has heard";

  // Another cache makes the row anew, by few updates.
  EXPECT_TRUE(client.Ask({}, {{1, 1, {1}}}).empty());
  for (const int64_t held : {base, gone, gone + 1}) {
    came = client.Ask({{1, held}});
    ASSERT_EQ(came.size(), 1) << held;
    EXPECT_EQ(came[0].second, 1);
    EXPECT_GT(came[0].first, gone + kMaxBound);
  }
}

TEST(SweepTest, ACacheLearnsThatItsPushWasRefused) {
  const auto table = MakeTable("admit count=4");
  Client client(table.get());
  EXPECT_TRUE(client.Ask({}, {{1, 3, {3}}}).empty());
  EXPECT_EQ(table->size(), 0);
  EXPECT_EQ(table->num_candidates(), 1);
  auto came = client.Ask({{1, 3}});
  ASSERT_EQ(came.size(), 1);
  EXPECT_EQ(came[0], std::make_pair(int64_t{3}, 0.f));
  came = client.Ask({{1, 4}}, {{1, 0, {-5}}});  // the fourth update, with its check
  ASSERT_EQ(came.size(), 1);
  EXPECT_EQ(came[0].second, 5) << "refused updates are not made up for";
  EXPECT_EQ(table->size(), 1);
  EXPECT_EQ(table->num_candidates(), 0);
  EXPECT_EQ(table->counter(TableCounter::kUpdatesRefused), 3);
  EXPECT_EQ(testing::Snapshot(*table).at(1).clock, 1) << "of the updates that it has";
}

// The same rules over maps.
struct Model {
  struct Row {
    float value;
    int64_t updates, updated;
  };
  std::map<int64_t, Row> rows;
  std::map<int64_t, std::pair<int64_t, int64_t>> candidates;  // count, updated
  int64_t now = 0;

  static int64_t Count(int64_t key) { return key < 0 ? 1 : 3; }
  static int64_t Age(int64_t key) { return key < 0 ? 4 : 9; }

  void Add(int64_t key, float value, int64_t updates) {
    auto row = rows.find(key);
    if (row == rows.end()) {
      auto& [count, updated] = candidates[key];
      count += updates;
      updated = now;
      if (count < Count(key)) return;
      candidates.erase(key);
      row = rows.emplace(key, Row{0, 0, 0}).first;
    }
    row->second.value += value;
    row->second.updates += updates;
    row->second.updated = now;
  }

  int64_t Sweep() {
    for (auto it = candidates.begin(); it != candidates.end();) {
      const int64_t shortest = it->first < 0 ? 4 : 2;
      it = now - it->second.second >= shortest ? candidates.erase(it) : std::next(it);
    }
    int64_t expired = 0;
    for (auto it = rows.begin(); it != rows.end();) {
      const int64_t age = now - it->second.updated;
      const bool rare = it->first >= 0 && age >= 2 && it->second.updates < 5;
      const bool goes = age >= Age(it->first) || rare;
      expired += goes;
      it = goes ? rows.erase(it) : std::next(it);
    }
    return expired;
  }
};

TEST(SweepTest, RandomSchedulesAgreeWithPlainMaps) {
  for (int seed = 0; seed < 20; ++seed) {
    Random random(seed);
    const auto table = MakeTable(
        "given; admit count=3; expire age=9; expire age=2 updates_below=5;"
        "keys -9223372036854775808 -1; expire age=4");
    Model model;
    ASSERT_OK(table->SetTime(0));
    Client client(table.get());
    client.Ask({{1, 0}});
    std::unique_ptr<Table::Snapshot> snapshot;
    std::map<int64_t, Model::Row> cut;
    int64_t cut_now = 0;
    const auto read_snapshot = [&] {
      if (snapshot == nullptr) return;
      std::vector<int64_t> keys(64), clocks(64), ages(64);
      std::vector<float> values(64);
      const int64_t expected = static_cast<int64_t>(cut.size());
      ASSERT_EQ(snapshot->num_rows(), expected);
      ASSERT_OK(snapshot->Read({keys.data(), values.data(), nullptr, clocks.data(), ages.data()},
                               64, [&](int64_t n) {
                                 for (int64_t r = 0; r < n; ++r) {
                                   const auto row = cut.find(keys[r]);
                                   EXPECT_TRUE(row != cut.end()) << keys[r];
                                   if (row == cut.end()) continue;
                                   EXPECT_EQ(values[r], row->second.value);
                                   EXPECT_EQ(clocks[r], row->second.updates);
                                   EXPECT_EQ(ages[r], cut_now - row->second.updated);
                                   cut.erase(row);
                                 }
                                 return Status();
                               }));
      EXPECT_TRUE(cut.empty());
      snapshot.reset();
    };
    for (int event = 0; event < 600; ++event) {
      const int64_t key = (Below(&random, 2) ? int64_t{1} << 62 : -5) + Below(&random, 60);
      switch (Below(&random, 12)) {
        case 0:
          model.now += Below(&random, 4);
          ASSERT_OK(table->SetTime(model.now));
          break;
        case 1: {
          if (snapshot == nullptr && Below(&random, 4) == 0) {
            ASSERT_OK(table->Cut(&snapshot));
            cut = model.rows;
            cut_now = model.now;
          }
          break;
        }
        case 2:
          if (Below(&random, 4) == 0) read_snapshot();
          break;
        case 3:
        case 4:
          ASSERT_EQ(SweepAll(table.get()), model.Sweep());
          break;
        case 5:
        case 6:
        case 7:
          ASSERT_OK(Add(table.get(), {key}));
          model.Add(key, 1, 1);
          break;
        default: {
          const auto updates = static_cast<uint32_t>(Below(&random, 4));  // 0: a gradient
          const auto value = static_cast<float>(Below(&random, 9));
          client.Ask({}, {{key, updates, {updates == 0 ? -value : value}}});
          model.Add(key, value, std::max<int64_t>(updates, 1));
        }
      }
      ASSERT_EQ(table->num_candidates(), static_cast<int64_t>(model.candidates.size()));
    }
    read_snapshot();
    const auto rows = testing::Snapshot(*table);
    ASSERT_EQ(rows.size(), model.rows.size());
    for (const auto& [key, row] : model.rows) {
      ASSERT_EQ(rows.count(key), 1);
      EXPECT_EQ(rows.at(key).value[0], row.value);
      EXPECT_EQ(rows.at(key).clock, row.updates);
    }
  }
}

TEST(SweepTest, FlatMemoryWhateverComes) {
  const auto table = MakeTable("given; admit count=2; expire age=4");
  int64_t next = 0, most = 0;
  for (int64_t now = 0; now < 200; ++now) {
    ASSERT_OK(table->SetTime(now));
    std::vector<int64_t> keys(2000);
    for (int64_t& key : keys) key = next++;
    ASSERT_OK(Add(table.get(), keys));
    keys.resize(20);  // one in a hundred returns
    ASSERT_OK(Add(table.get(), keys));
    SweepAll(table.get());
    EXPECT_LE(table->size(), 20 * 5);
    if (now == 20) most = table->memory_bytes();
    if (now > 20) {
      EXPECT_LE(table->memory_bytes(), most * 11 / 10);
    }
  }
  EXPECT_EQ(table->counter(TableCounter::kRowsCreated), 200 * 20);
}

TEST(SweepTest, TenMillionKeysAreNeverMixedUp) {
  const int64_t n = testing::kSanitized ? 200000 : 10000000;
  const auto table = MakeTable("given; expire age=2");
  // Odd multiples are distinct modulo 2^64; a key's value tells it from its neighbours.
  const auto key_of = [](int64_t i) {
    return static_cast<int64_t>(static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15ULL);
  };
  const auto value_of = [](int64_t i) { return static_cast<float>(i & 0xffffff); };
  constexpr int64_t kBatch = 100000;
  const auto update = [&](int64_t first, int64_t last, int64_t step) {
    std::vector<int64_t> keys;
    std::vector<float> gradients;
    for (int64_t i = first; i < last; i += step) {
      keys.push_back(key_of(i));
      gradients.push_back(-value_of(i));
    }
    ASSERT_OK(ApplyRows(table.get(), keys, gradients));
  };
  const auto check = [&](const std::function<float(int64_t)>& expected) {
    for (int64_t first = 0; first < n; first += kBatch) {
      std::vector<int64_t> keys(kBatch);
      for (int64_t i = 0; i < kBatch; ++i) keys[i] = key_of(first + i);
      const std::vector<float> values = LookupRows(*table, keys);
      for (int64_t i = 0; i < kBatch; ++i) ASSERT_EQ(values[i], expected(first + i)) << first + i;
    }
  };
  ASSERT_OK(table->SetTime(0));
  for (int64_t first = 0; first < n; first += kBatch) update(first, first + kBatch, 1);
  EXPECT_EQ(table->size(), n);
  check(value_of);
  ASSERT_OK(table->SetTime(1));
  for (int64_t first = 0; first < n; first += kBatch) update(first, first + kBatch, 4);
  ASSERT_OK(table->SetTime(2));
  EXPECT_EQ(SweepAll(table.get()), n - n / 4);
  EXPECT_EQ(table->size(), n / 4);
  for (int64_t first = 1; first < n; first += kBatch) update(first, first + kBatch - 1, 2);
  check([&](int64_t i) { return i % 4 == 0 ? 2 * value_of(i) : i % 2 == 1 ? value_of(i) : 0; });
}

// Threads of every kind. Each row's value is its number of updates in this life, whoever comes and
// goes, also in what is saved.
TEST(SweepTest, ThreadsUpdateSaveAndSweep) {
  const auto table = MakeTable("given; admit count=2; expire age=1", {3, "sgd", "zeros"});
  std::atomic<bool> ended{false};
  std::atomic<int64_t> now{0};
  ASSERT_OK(table->SetTime(0));
  Sweeper sweeper(table.get(), {std::chrono::milliseconds(0), std::chrono::milliseconds(0)});
  const int rounds = testing::kSanitized ? 50 : 150;
  std::atomic<int> working{4};
  const auto is_row = [](const float* value, int64_t clock) {
    return value[0] == static_cast<float>(clock) && value[1] == value[0] && value[2] == value[0];
  };
  testing::RunThreads(7, [&](int t) {
    Random random(t);
    if (t == 6) {
      while (!ended) {
        ASSERT_OK(table->SetTime(++now));
        std::this_thread::yield();
      }
      return;
    }
    if (t >= 4) {
      while (!ended) {
        std::unique_ptr<Table::Snapshot> snapshot;
        if (!table->Cut(&snapshot).ok()) continue;
        std::vector<int64_t> keys(100), clocks(100), ages(100);
        std::vector<float> values(300);
        ASSERT_OK(snapshot->Read({keys.data(), values.data(), nullptr, clocks.data(), ages.data()},
                                 100, [&](int64_t n) {
                                   for (int64_t r = 0; r < n; ++r)
                                     EXPECT_TRUE(is_row(&values[r * 3], clocks[r]));
                                   return Status();
                                 }));
      }
      return;
    }
    for (int round = 0; round < rounds; ++round) {
      std::vector<int64_t> keys(50);
      for (int64_t& key : keys) key = Below(&random, 400);
      const UniqueIds ids(keys.data(), keys.size());
      std::vector<float> out(keys.size() * 3);
      FoundRows found;
      ASSERT_OK(table->Lookup(ids, SerialFor, out.data(), &found));
      std::vector<float> gradients(out.size());
      for (int64_t u = 0; u < ids.num_keys(); ++u) {  // one update a key: of its first id
        std::fill_n(&gradients[ids.positions[ids.begin[u]] * 3], 3, -1.f);
      }
      ASSERT_OK(
          table->Apply(ids, found, gradients.data(), 1, Nonfinite::kError, testing::ThreadedFor));
    }
    if (--working == 0) ended = true;
  });
  for (const auto& [key, row] : testing::Snapshot(*table)) {
    EXPECT_TRUE(is_row(row.value.data(), row.clock)) << key << ": " << row;
  }
  EXPECT_GT(table->counter(TableCounter::kRowsExpired), 0);
}

TEST(SweeperTest, SweepsUntilItEnds) {
  std::atomic<int64_t> seconds{0};
  const auto table = MakeTable("expire age=1", {1, "sgd", "zeros"}, [&] { return seconds.load(); });
  ASSERT_OK(Add(table.get(), {1, 2, 3}));
  const Sweeper sweeper(table.get(), {std::chrono::milliseconds(1), std::chrono::milliseconds(0)});
  seconds = 1;
  while (table->size() > 0) std::this_thread::yield();
}

TEST(SweeperTest, AnEndIsNotWaitedFor) {
  const auto table = MakeTable("expire age=1");
  const Sweeper sweeper(table.get(), {std::chrono::hours(10), std::chrono::hours(10)});
}

}  // namespace
}  // namespace het_tf
