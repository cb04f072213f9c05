#include "ops/core/serving/served.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;

constexpr int kDim = 5;

// A row that says which version it is of, in every column.
std::shared_ptr<const RowsFile> FileOf(const std::map<int64_t, float>& rows, int shard = 0,
                                       int shards = 1, int dim = kDim,
                                       const std::string& dtype = "float32") {
  static std::atomic<int> number{0};
  const std::string path = StrCat(::testing::TempDir(), "served_test.", getpid(), ".", number++);
  std::ofstream out(path, std::ios::binary);
  StoredFormat format;
  EXPECT_OK(StoredFormat::Parse(dtype, dim, &format));
  RowsWriter writer(format, shard, shards, [&](const char* data, size_t size) {
    out.write(data, static_cast<std::streamsize>(size));
    return Status();
  });
  for (const auto& [key, value] : rows) {
    if (ShardOfHash(HashKey(key), shards) != static_cast<uint32_t>(shard)) continue;
    EXPECT_OK(writer.Add(key, std::vector<float>(dim, value).data()));
  }
  EXPECT_OK(writer.Finish());
  out.close();
  std::shared_ptr<const RowsFile> file;
  EXPECT_OK(RowsFile::Open(path, &file));
  std::remove(path.c_str());  // it stays mapped
  return file;
}

std::unique_ptr<Served> TablesOf(int num_tables) {
  ServedTable table;
  table.dim = kDim;
  EXPECT_OK(Initializer::Parse("constant value=-1", 0, &table.initializer));
  return std::make_unique<Served>(std::vector<ServedTable>(num_tables, table));
}

ServedChange Version(int64_t version, bool whole, std::vector<RowsFiles> tables) {
  ServedChange change;
  change.version = version;
  change.whole = whole;
  change.written_micros = 1000 + version;
  change.tables = std::move(tables);
  change.others = std::make_shared<const int64_t>(version);
  return change;
}

float Read(const Served::View& view, int table, int64_t key) {
  float row[kDim];
  view.Lookup(table, &key, 1, SerialFor, row);
  for (const float x : row) EXPECT_EQ(x, row[0]);
  return row[0];
}

TEST(Served, AVersionIsLaidOverAnother) {
  auto served = TablesOf(2);
  Served::View view;
  EXPECT_REFUSED(served->Pin(&view), "has not been opened");
  const std::map<int64_t, float> rows = {{1, 10}, {-2, 20}};
  ASSERT_OK(served->Apply(
      Version(3, true, {{FileOf(rows, 0, 2), FileOf(rows, 1, 2)}, {FileOf({{1, 5}})}})));
  ASSERT_OK(served->Pin(&view));
  EXPECT_EQ(Read(view, 0, 1), 10);
  EXPECT_EQ(Read(view, 0, -2), 20);
  EXPECT_EQ(Read(view, 0, 3), -1);
  EXPECT_EQ(Read(view, 1, 1), 5);
  ASSERT_OK(served->Apply(Version(4, false, {{FileOf({{1, 11}, {3, 30}})}, {}})));
  EXPECT_EQ(view.version(), 3);
  EXPECT_EQ(Read(view, 0, 1), 10);  // the view is of the version before
  EXPECT_EQ(*static_cast<const int64_t*>(view.others()), 3);
  Served::View next;
  ASSERT_OK(served->Pin(&next));
  EXPECT_EQ(next.version(), 4);
  EXPECT_EQ(next.written_micros(), 1004);
  EXPECT_EQ(*static_cast<const int64_t*>(next.others()), 4);
  EXPECT_EQ(next.num_changed(), 2);
  EXPECT_EQ(Read(next, 0, 1), 11);
  EXPECT_EQ(Read(next, 0, -2), 20);
  EXPECT_EQ(Read(next, 0, 3), 30);
  EXPECT_EQ(Read(next, 1, 1), 5);
}

TEST(Served, AWholeVersionReplacesChanges) {
  auto served = TablesOf(1);
  ASSERT_OK(served->Apply(Version(0, true, {{FileOf({{1, 1}})}})));
  ASSERT_OK(served->Apply(Version(1, false, {{FileOf({{1, 2}, {2, 2}})}})));
  ASSERT_OK(served->Apply(Version(2, true, {{FileOf({{1, 3}})}})));
  for (int64_t version = 3; version < 6; ++version) {
    Served::View view;
    ASSERT_OK(served->Pin(&view));
    EXPECT_EQ(Read(view, 0, 1), static_cast<float>(version));
    EXPECT_EQ(Read(view, 0, 2), -1);
    view = Served::View();
    const auto value = static_cast<float>(version + 1);
    ASSERT_OK(served->Apply(Version(version, false, {{FileOf({{1, value}})}})));
  }
}

TEST(Served, WhatDoesNotFollowOrFitIsRefusedAndChangesNothing) {
  auto served = TablesOf(1);
  const auto good = FileOf({{1, 1}});
  EXPECT_REFUSED(served->Apply(Version(1, false, {{good}})), "cannot follow version -1");
  ASSERT_OK(served->Apply(Version(1, true, {{good}})));
  const auto other = FileOf({{1, 2}}, 0, 1, kDim + 1);
  const auto half = FileOf({{1, 2}}, 0, 1, kDim, "float16");
  const auto second = FileOf({{1, 2}}, 1, 2);
  EXPECT_REFUSED(served->Apply(Version(3, false, {{good}})), "version 3 cannot follow version 1");
  EXPECT_REFUSED(served->Apply(Version(1, true, {{good}})), "version 1 cannot follow version 1");
  EXPECT_REFUSED(served->Apply(Version(2, false, {{good}, {good}})), "2 tables");
  EXPECT_REFUSED(served->Apply(Version(2, true, {{}})), "has no rows of table 0");
  EXPECT_REFUSED(served->Apply(Version(2, false, {{other}})), other->path());
  EXPECT_REFUSED(served->Apply(Version(2, false, {{half}})), half->path());
  const auto first = FileOf({{1, 2}}, 0, 2), last = FileOf({{1, 2}}, 1, 2, kDim, "int8");
  EXPECT_REFUSED(served->Apply(Version(2, true, {{first, last}})), last->path());
  EXPECT_REFUSED(served->Apply(Version(2, true, {{second}})), "is shard 1 of 2");
  Served::View view;
  ASSERT_OK(served->Pin(&view));
  EXPECT_EQ(view.version(), 1);
  EXPECT_EQ(Read(view, 0, 1), 1);
}

TEST(Served, VersionsOfTwoPublishersAreNeverMixed) {
  auto served = TablesOf(1);
  // Written at 1000 + version.
  const auto of = [](const char* publisher, ServedChange change) {
    change.publisher = publisher;
    return change;
  };
  const auto file = FileOf({{1, 1}});
  const auto read = [&] {
    Served::View view;
    EXPECT_OK(served->Pin(&view));
    return Read(view, 0, 1);
  };
  ASSERT_OK(served->Apply(of("a", Version(5, true, {{file}}))));
  EXPECT_REFUSED(served->Apply(of("b", Version(6, false, {{FileOf({{1, 2}})}}))),
                 "a change to version 6 cannot follow version 5, which is of another publisher");
  EXPECT_EQ(read(), 1);
  // Whole versions with smaller numbers: in their publisher's order, and that of time.
  for (const char* publisher : {"a", "b"}) {
    EXPECT_REFUSED(served->Apply(of(publisher, Version(0, true, {{file}}))),
                   "whole version 0 cannot follow version 5");
  }
  ServedChange anew = of("b", Version(0, true, {{FileOf({{1, 3}})}}));
  anew.written_micros = 2000;
  ASSERT_OK(served->Apply(anew));
  EXPECT_EQ(read(), 3);
  EXPECT_REFUSED(served->Apply(of("a", Version(1, false, {{file}}))), "another publisher");
  ASSERT_OK(served->Apply(of("b", Version(1, false, {{FileOf({{1, 4}})}}))));
  EXPECT_EQ(read(), 4);
  ASSERT_OK(served->Apply(of("a", Version(6, true, {{file}}))));
  EXPECT_EQ(read(), 1);
}

TEST(Served, ClosingEndsAChangeThatWaitsForAView) {
  auto served = TablesOf(1);
  ASSERT_OK(served->Apply(Version(0, true, {{FileOf({{1, 0}})}})));
  Served::View view;
  ASSERT_OK(served->Pin(&view));
  ASSERT_OK(served->Apply(Version(1, false, {{FileOf({{1, 1}})}})));
  Status waited;
  std::thread waits([&] { waited = served->Apply(Version(2, false, {{FileOf({{1, 2}})}})); });
  served->Close();
  waits.join();
  EXPECT_REFUSED(waited, "closed");
  EXPECT_EQ(Read(view, 0, 1), 0);
}

// A plain map of each version, under random changes and whole versions.
TEST(Served, EveryVersionIsWhatAMapHas) {
  Random random(5);
  auto served = TablesOf(2);
  std::vector<std::map<int64_t, float>> tables(2);
  std::map<int64_t, std::vector<std::map<int64_t, float>>> versions;
  std::map<int64_t, Served::View> views;
  for (int64_t version = 0; version < 100; ++version) {
    const bool whole = version == 0 || Below(&random, 40) == 0;
    std::vector<RowsFiles> files(2);
    for (int t = 0; t < 2; ++t) {
      std::map<int64_t, float> changed;
      for (int64_t n = Below(&random, 300); n > 0; --n) {
        changed[Below(&random, 2000)] = static_cast<float>(version);
      }
      for (const auto& [key, value] : changed) tables[t][key] = value;
      const auto& rows = whole ? tables[t] : changed;
      files[t] = {FileOf(rows, 0, 2), FileOf(rows, 1, 2)};
    }
    // Whoever is to change a side waits for the views of it.
    views.erase(version - 2);
    ASSERT_OK(served->Apply(Version(version, whole, files)));
    versions[version] = tables;
    ASSERT_OK(served->Pin(&views[version]));
    for (const auto& [of, view] : views) {
      ASSERT_EQ(view.version(), of);
      std::vector<int64_t> keys;
      for (int64_t key = 0; key < 2100; ++key) keys.push_back(key);
      std::vector<float> out(keys.size() * kDim);
      for (int t = 0; t < 2; ++t) {
        view.Lookup(t, keys.data(), keys.size(), SerialFor, out.data());
        for (const int64_t key : keys) {
          const auto found = versions[of][t].find(key);
          const float expected = found == versions[of][t].end() ? -1 : found->second;
          for (int i = 0; i < kDim; ++i) ASSERT_EQ(out[key * kDim + i], expected);
        }
      }
    }
  }
}

// 300 changes in a row; every key's row says by which change it was made, and changes when the
// version is a multiple of what its key leaves.
TEST(Served, ReadersSeeWholeVersionsThatNeverGoBack) {
  constexpr int64_t kVersions = testing::kSanitized ? 100 : 300;
  constexpr int64_t kKeys = 64;
  const auto row_of = [](int64_t key, int64_t version) {
    return static_cast<float>(version - version % (key % 7 + 1));
  };
  auto served = TablesOf(1);
  std::map<int64_t, float> rows;
  for (int64_t key = 0; key < kKeys; ++key) rows[key] = 0;
  ASSERT_OK(served->Apply(Version(0, true, {{FileOf(rows)}})));
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (int r = 0; r < 3; ++r) {
    readers.emplace_back([&] {
      std::vector<int64_t> keys(kKeys);
      for (int64_t key = 0; key < kKeys; ++key) keys[key] = key;
      std::vector<float> out(kKeys * kDim);
      for (int64_t last = 0; !done;) {
        Served::View view;
        ASSERT_OK(served->Pin(&view));
        ASSERT_GE(view.version(), last);
        last = view.version();
        ASSERT_EQ(*static_cast<const int64_t*>(view.others()), last);
        view.Lookup(0, keys.data(), kKeys, SerialFor, out.data());
        for (int64_t i = 0; i < kKeys * kDim; ++i) ASSERT_EQ(out[i], row_of(i / kDim, last));
      }
    });
  }
  for (int64_t version = 1; version <= kVersions; ++version) {
    std::map<int64_t, float> changed;
    for (int64_t key = 0; key < kKeys; ++key) {
      if (version % (key % 7 + 1) == 0) changed[key] = static_cast<float>(version);
      rows[key] = row_of(key, version);
    }
    const bool whole = version % 97 == 0;
    EXPECT_OK(served->Apply(Version(version, whole, {{FileOf(whole ? rows : changed)}})));
  }
  done = true;
  for (auto& reader : readers) reader.join();
}

}  // namespace
}  // namespace het_tf
