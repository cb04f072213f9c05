// Rows on a disk: a table whose rows are in a file does what one in memory does, to the bit.

#include "ops/core/table/storage.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ops/core/table/snapshot.h"
#include "ops/core/table/sweep.h"
#include "ops/core/table/table.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::ApplyRows;
using testing::Below;
using testing::LookupRows;
using testing::Random;
using testing::RunThreads;
using testing::Snapshot;

constexpr int64_t kMemory = FileArena::kLeastPages * FileArena::kPage;

TEST(StorageTest, Parse) {
  Storage storage;
  ASSERT_OK(Storage::Parse("", &storage));
  EXPECT_FALSE(storage.on_disk());
  ASSERT_OK(Storage::Parse("memory=4096 path=/a folder/rows path=x", &storage));
  EXPECT_EQ(storage.memory, 4096);
  EXPECT_EQ(storage.path, "/a folder/rows path=x");
  ASSERT_OK(Storage::Parse("memory=auto path=a", &storage));
  EXPECT_EQ(storage.memory, 0);
  EXPECT_TRUE(storage.on_disk());
  for (const char* text :
       {"memory=0 path=a", "memory=autox path=a", "memory=-1 path=a", "memory=1",
        "memory=1 path=", "memory=1x path=a", "path=a memory=1", " memory=1 path=a"}) {
    EXPECT_REFUSED(Storage::Parse(text, &storage), text);
  }
}

// A table in memory, and one with a tenth of its rows there.
class BothTables {
 public:
  explicit BothTables(const RowConfig& config, const std::string& lifetimes = "") {
    Lifetimes rules;
    EXPECT_OK(Lifetimes::Parse(lifetimes, &rules));
    EXPECT_OK(Table::Create(config, 0, &in_memory, rules, [this] { return seconds; }));
    const Storage storage = {kMemory, "."};
    EXPECT_OK(Table::Create(config, 0, &on_disk, rules, [this] { return seconds; }, storage));
  }

  void Apply(const std::vector<int64_t>& ids, const std::vector<float>& gradients) {
    for (Table* table : {in_memory.get(), on_disk.get()}) {
      ASSERT_OK(ApplyRows(table, ids, gradients, 0.5));
    }
  }
  void Train(uint64_t seed, int64_t keys, int64_t steps) {
    Random random(seed);
    for (int64_t step = 0; step < steps; ++step) {
      std::vector<int64_t> ids(200);
      for (int64_t& id : ids) id = Below(&random, keys);
      std::vector<float> gradients(ids.size() * on_disk->dim());
      for (float& gradient : gradients) gradient = static_cast<float>(Below(&random, 9)) - 4;
      Apply(ids, gradients);
      ASSERT_EQ(LookupRows(*in_memory, ids), LookupRows(*on_disk, ids));
    }
  }
  void Check() const {
    ASSERT_EQ(in_memory->size(), on_disk->size());
    ASSERT_EQ(Snapshot(*in_memory), Snapshot(*on_disk));
    EXPECT_LE(on_disk->file()->memory_bytes(), kMemory + (1 << 20));
  }

  int64_t seconds = 0;
  std::unique_ptr<Table> in_memory, on_disk;
};

TEST(StorageTest, ATableOnADiskIsTheTableInMemory) {
  for (const char* optimizer : {"sgd", "adam"}) {
    for (const bool half : {false, true}) {
      RowConfig config = {24, optimizer, "uniform", 3};
      config.half = half;
      BothTables both(config);
      both.Train(1, 20'000, 120);
      both.Check();
      EXPECT_GT(both.on_disk->file()->file_bytes(), 6 * kMemory);
      EXPECT_GT(both.on_disk->file()->pages_read(), 1000);
      EXPECT_EQ(both.in_memory->file(), nullptr);
    }
  }
}

TEST(StorageTest, RowsOfADiskAreSavedWhileTheyAreTrained) {
  BothTables both({24, "adagrad", "uniform", 3});
  both.Train(1, 20'000, 100);
  const testing::TableRows expected = Snapshot(*both.in_memory);
  std::unique_ptr<Table::Snapshot> cut;
  ASSERT_OK(both.on_disk->Cut(&cut));
  testing::TableRows saved;
  std::vector<int64_t> keys(1000), clocks(1000);
  std::vector<float> values(24'000), slots(24'000);
  RunThreads(2, [&](int thread) {
    if (thread == 1) {
      both.Train(2, 20'000, 100);
      return;
    }
    const auto add = [&](int64_t rows) {
      for (int64_t r = 0; r < rows; ++r) {
        saved[keys[r]] = {{&values[r * 24], &values[r * 24] + 24},
                          {&slots[r * 24], &slots[r * 24] + 24},
                          clocks[r]};
      }
      return Status();
    };
    EXPECT_OK(cut->Read({keys.data(), values.data(), slots.data(), clocks.data()}, 1000, add));
  });
  EXPECT_EQ(saved, expected);
  both.Check();
}

TEST(StorageTest, RowsOfADiskExpireAndTheirPlacesAreTakenAgain) {
  BothTables both({24, "sgd", "zeros"}, "expire age=10");
  both.Train(1, 10'000, 100);
  both.seconds = 8;
  both.Train(2, 1000, 20);
  both.seconds = 12;
  for (Table* table : {both.in_memory.get(), both.on_disk.get()}) {
    Table::Sweep sweep(table);
    while (sweep.Next()) {
    }
    EXPECT_GT(sweep.num_expired(), 5000);
  }
  both.Check();
  const int64_t bytes = both.on_disk->file()->file_bytes();
  both.Train(3, 10'000, 100);
  both.Check();
  EXPECT_EQ(both.on_disk->file()->file_bytes(), bytes);
  both.on_disk->Clear();
  EXPECT_EQ(both.on_disk->file()->file_bytes(), 0);
  EXPECT_EQ(both.on_disk->size(), 0);
}

}  // namespace
}  // namespace het_tf
