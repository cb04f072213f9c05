#include "ops/core/serving/rows_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "ops/core/serving/crc32.h"
#include "ops/core/serving/half.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;

struct TemporaryFile {
  TemporaryFile() {
    static int number = 0;
    path = StrCat(::testing::TempDir(), "rows_file_test.", getpid(), ".", number++);
  }
  ~TemporaryFile() { std::remove(path.c_str()); }

  void Write(const std::string& bytes) const {
    std::remove(path.c_str());  // a file that is mapped is not changed
    std::ofstream(path, std::ios::binary) << bytes;
  }
  std::string path;
};

StoredFormat FormatOf(const std::string& dtype, int dim) {
  StoredFormat format;
  EXPECT_OK(StoredFormat::Parse(dtype, dim, &format));
  return format;
}

using Rows = std::map<int64_t, std::vector<float>>;

Rows RandomRows(int64_t n, int dim, Random* random) {
  Rows rows;
  while (static_cast<int64_t>(rows.size()) < n) {
    std::vector<float> row(dim);
    for (float& x : row) x = static_cast<float>(Below(random, 2001) - 1000) / 100;
    rows[static_cast<int64_t>((*random)())] = row;
  }
  return rows;
}

std::string BytesOf(const StoredFormat& format, const Rows& rows, int shard = 0, int shards = 1) {
  std::string bytes;
  RowsWriter writer(format, shard, shards, [&](const char* data, size_t size) {
    bytes.append(data, size);
    return Status();
  });
  for (const auto& [key, row] : rows) EXPECT_OK(writer.Add(key, row.data()));
  EXPECT_OK(writer.Finish());
  EXPECT_EQ(writer.num_bytes(), static_cast<int64_t>(bytes.size()));
  return bytes;
}

// Looks for keys of a file, and for others. Values of a damaged file may be any.
void LookEverywhere(const RowsFile& file, const Rows& rows) {
  std::vector<float> row(file.format().dim);
  for (const auto& [key, expected] : rows) {
    for (const int64_t k : {key, key + 1}) {
      file.PrefetchIndex(HashKey(k));
      file.PrefetchRecord(HashKey(k));
      const char* record = file.Find(HashKey(k), k);
      if (record != nullptr) file.format().Read(record, row.data());
    }
  }
}

TEST(Crc32, IsThatOfZlib) {
  EXPECT_EQ(Crc32("123456789", 9), 0xcbf43926u);
  EXPECT_EQ(Crc32("", 0), 0u);
  const std::string text = "a text that is longer than eight bytes, in two pieces";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    const uint32_t first = Crc32(text.data(), cut);
    EXPECT_EQ(Crc32(text.data() + cut, text.size() - cut, first), Crc32(text.data(), text.size()));
  }
}

TEST(Half, EveryHalfIsItselfAndBetweenThemTheNearestIsTaken) {
  for (uint32_t h = 0; h < 0x7bff; ++h) {
    const float low = FromHalf(static_cast<uint16_t>(h)), high = FromHalf(h + 1);
    ASSERT_LT(low, high);
    ASSERT_EQ(ToHalf(low), h);
    ASSERT_EQ(ToHalf(-low), h | 0x8000);
    const float middle = low + (high - low) / 2;  // exact
    ASSERT_EQ(ToHalf(middle), h % 2 == 0 ? h : h + 1);
    ASSERT_EQ(ToHalf(std::nextafter(middle, high)), h + 1);
    ASSERT_EQ(ToHalf(std::nextafter(middle, low)), h);
  }
  EXPECT_EQ(FromHalf(0x7bff), 65504.0f);
  EXPECT_EQ(ToHalf(std::nextafter(kHalfEnd, 0.0f)), 0x7bff);
  std::vector<uint16_t> all;
  for (uint32_t h = 0; h < 0x7c00; h += 7) all.push_back(static_cast<uint16_t>(h));
  std::vector<float> read(all.size());
  FromHalf(reinterpret_cast<const char*>(all.data()), static_cast<int>(all.size()), read.data());
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(read[i], FromHalf(all[i]));
}

class RowsFileTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, RowsFileTest, ::testing::Values("float32", "float16", "int8"));

TEST_P(RowsFileTest, HasTheRowsWithinTheBoundsOfItsDtype) {
  Random random(1);
  for (const int dim : {1, 3, 8, 17}) {
    for (const int64_t n : {0, 1, 7, 5000}) {
      const StoredFormat format = FormatOf(GetParam(), dim);
      const Rows rows = RandomRows(n, dim, &random);
      const TemporaryFile file;
      file.Write(BytesOf(format, rows, 2, 5));
      std::shared_ptr<const RowsFile> opened;
      ASSERT_OK(RowsFile::Open(file.path, &opened));
      EXPECT_OK(opened->Verify());
      EXPECT_EQ(opened->num_rows(), n);
      EXPECT_EQ(opened->shard(), 2);
      EXPECT_EQ(opened->num_shards(), 5);
      for (const auto& [key, row] : rows) {
        const char* record = opened->Find(HashKey(key), key);
        ASSERT_NE(record, nullptr);
        std::vector<float> read(dim);
        format.Read(record, read.data());
        float most = 0;
        for (const float x : row) most = std::max(most, std::fabs(x));
        for (int i = 0; i < dim; ++i) {
          const float error = std::fabs(read[i] - row[i]);
          if (format.dtype == StoredDtype::kFloat32) {
            ASSERT_EQ(error, 0);
          }
          if (format.dtype == StoredDtype::kFloat16) {
            ASSERT_LE(error, std::fabs(row[i]) * 0x1p-11f);
          }
          if (format.dtype == StoredDtype::kInt8) {
            ASSERT_LE(error, most / 254 * 1.0001f);
          }
        }
        const int64_t unknown = key + 1;
        if (rows.count(unknown) == 0) {
          ASSERT_EQ(opened->Find(HashKey(unknown), unknown), nullptr);
        }
      }
    }
  }
}

TEST_P(RowsFileTest, DamageIsNamedOrHarmless) {
  Random random(2);
  const StoredFormat format = FormatOf(GetParam(), 5);
  const Rows rows = RandomRows(300, 5, &random);
  const std::string good = BytesOf(format, rows);
  const TemporaryFile file;
  for (int round = 0; round < 600; ++round) {
    std::string bad = good;
    const int64_t size = static_cast<int64_t>(bad.size());
    switch (round % 4) {
      case 0:
        bad.resize(Below(&random, size));
        break;
      case 1:  // near the end, where the footer is
        bad[size - 1 - Below(&random, 80)] ^= static_cast<char>(1 << Below(&random, 8));
        break;
      case 2:
        bad[Below(&random, size)] ^= static_cast<char>(1 << Below(&random, 8));
        break;
      case 3:
        for (int64_t at = Below(&random, size), n = Below(&random, 200); n > 0 && at < size; --n) {
          bad[at++] = static_cast<char>(random());
        }
        break;
    }
    file.Write(bad);
    std::shared_ptr<const RowsFile> opened;
    const Status status = RowsFile::Open(file.path, &opened);
    if (!status.ok()) {
      EXPECT_REFUSED(status, file.path);
      continue;
    }
    LookEverywhere(*opened, rows);
    if (bad != good) {
      EXPECT_REFUSED(opened->Verify(), file.path);
    }
  }
}

TEST(RowsFile, FootersThatLieAreRefused) {
  Random random(3);
  const std::string good = BytesOf(FormatOf("float32", 4), RandomRows(100, 4, &random));
  const TemporaryFile file;
  const size_t footer = good.size() - 56;
  for (const size_t field : {8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48}) {
    for (const uint32_t value : {0u, 1u, 2u, 3u, 4u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
      std::string bad = good;
      std::memcpy(&bad[footer + field], &value, sizeof(value));
      const uint32_t crc = Crc32(&bad[footer], 52);  // as a liar would
      std::memcpy(&bad[footer + 52], &crc, sizeof(crc));
      if (bad == good) continue;
      file.Write(bad);
      std::shared_ptr<const RowsFile> opened;
      const Status status = RowsFile::Open(file.path, &opened);
      // Which shard it says it is, the file cannot tell.
      if (field == 20 || field == 24) continue;
      EXPECT_REFUSED(status, file.path);
    }
  }
}

TEST(RowsFile, AnIndexThatLiesGivesNoRowOutsideOfTheFile) {
  Random random(4);
  const Rows rows = RandomRows(100, 4, &random);
  const std::string good = BytesOf(FormatOf("float32", 4), rows);
  const size_t index = (100 * 24 + 63) / 64 * 64, entries = 161;
  const TemporaryFile file;
  for (const uint64_t row : {uint64_t{0}, uint64_t{101}, uint64_t{0xfffffffe}}) {
    std::string bad = good;
    for (size_t e = 0; e < entries; ++e) {
      uint64_t entry;
      std::memcpy(&entry, &bad[index + 8 * e], 8);
      // Every entry is taken, so that nothing ends a search.
      entry = (entry >> 32 << 32) | (row + 1);
      std::memcpy(&bad[index + 8 * e], &entry, 8);
    }
    file.Write(bad);
    std::shared_ptr<const RowsFile> opened;
    ASSERT_OK(RowsFile::Open(file.path, &opened));
    LookEverywhere(*opened, rows);
    EXPECT_REFUSED(opened->Verify(), "damaged between bytes 0 and");
  }
}

TEST(RowsFile, WhatIsNoFileOfRowsIsNamed) {
  const TemporaryFile file;
  std::shared_ptr<const RowsFile> opened;
  EXPECT_REFUSED(RowsFile::Open(file.path, &opened), file.path + ": cannot be opened");
  EXPECT_REFUSED(RowsFile::Open(::testing::TempDir(), &opened), "is no file of rows");
  file.Write("");
  EXPECT_REFUSED(RowsFile::Open(file.path, &opened), "has 0 bytes");
  file.Write(std::string(1000, 'x'));
  EXPECT_REFUSED(RowsFile::Open(file.path, &opened), "is no file of rows, or its end is missing");
}

TEST(RowsFile, NumbersThatDoNotFitAndFailuresOfTheDiskAreErrors) {
  RowsWriter writer(FormatOf("float16", 2), 0, 1,
                    [](const char*, size_t) { return ResourceExhausted("the disk is full"); });
  const float large[] = {1, -70000};
  EXPECT_REFUSED(writer.Add(7, large), "float16 cannot hold 70000 of key 7");
  const float small[] = {1, 2};
  EXPECT_OK(writer.Add(7, small));
  EXPECT_REFUSED(writer.Finish(), "the disk is full");
  StoredFormat format;
  EXPECT_REFUSED(StoredFormat::Parse("float64", 2, &format), "not float64");
  EXPECT_REFUSED(StoredFormat::Parse("int8", 0, &format), "dim = 0");
}

}  // namespace
}  // namespace het_tf
