#include "ops/core/serving/manifest.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "ops/core/serving/crc32.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

std::string WithChecksum(const std::string& text) {
  char line[32];
  std::snprintf(line, sizeof(line), "crc32 %08x\n", Crc32(text.data(), text.size()));
  return text + line;
}

const char kText[] =
    "het_tf served 1\nversion 12\nwhole 1\nwritten 17\nothers 12.others\ntables 2\n"
    "rows 0 a.rows\nrows 1 c.rows\nrows 0 b.rows\n";

TEST(Manifest, SaysWhatAVersionConsistsOf) {
  Manifest manifest;
  ASSERT_OK(Manifest::Parse(WithChecksum(kText), &manifest));
  EXPECT_EQ(manifest.name.ToString(), "000000000012.whole");
  EXPECT_EQ(manifest.written_micros, 17);
  EXPECT_EQ(manifest.others, "12.others");
  ASSERT_EQ(manifest.tables.size(), 2);
  EXPECT_EQ(manifest.tables[0], (std::vector<std::string>{"a.rows", "b.rows"}));
  EXPECT_EQ(manifest.tables[1], (std::vector<std::string>{"c.rows"}));
}

TEST(Manifest, DamageIsRefused) {
  const std::string good = WithChecksum(kText);
  Manifest manifest;
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(Manifest::Parse(good.substr(0, size), &manifest).ok()) << size;
  }
  for (size_t at = 0; at < good.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[at] ^= static_cast<char>(1 << bit);
      EXPECT_FALSE(Manifest::Parse(bad, &manifest).ok()) << at;
    }
  }
}

TEST(Manifest, LinesThatDoNotBelongAreNamed) {
  const auto refused = [](const std::string& old, const std::string& line, const char* message) {
    std::string text = kText;
    text.replace(text.find(old), old.size(), line);
    Manifest manifest;
    EXPECT_REFUSED(Manifest::Parse(WithChecksum(text), &manifest), message);
  };
  refused("served 1", "served 2", "begins with 'het_tf served 2'");
  refused("version 12", "version x", "has a line 'version x', expected version");
  refused("version 12", "version -1", "says version -1");
  refused("whole 1", "whole 2", "whole 2");
  refused("others 12.others", "others ../x", "others ../x");
  refused("tables 2", "tables 99999999999", "tables 99999999999");
  refused("rows 1 c.rows", "rows 2 c.rows", "has a line 'rows 2 c.rows'");
  refused("rows 1 c.rows", "rows 1 /etc/c.rows", "has a line 'rows 1 /etc/c.rows'");
  refused("rows 1 c.rows", "rows 1 c.rows d", "has a line 'rows 1 c.rows d'");
}

TEST(Manifest, NamesAreVersions) {
  ManifestName name;
  EXPECT_TRUE(ManifestName::Parse("000000000305.delta", &name));
  EXPECT_EQ(name.version, 305);
  EXPECT_FALSE(name.whole);
  for (const char* other : {"", "305.delta", "000000000305.other", "00000000030x.delta",
                            "000000000305.delta.temp", "000000000305.rows"}) {
    EXPECT_FALSE(ManifestName::Parse(other, &name)) << other;
  }
}

TEST(Manifest, TheNextVersionsAreTheNewestWholeOneAndWhatFollows) {
  const auto next = [](std::vector<ManifestName> names, int64_t current) {
    std::string text;
    for (const ManifestName& name : NextVersions(names, current)) {
      text += StrCat(name.version, name.whole ? "w " : " ");
    }
    return text;
  };
  EXPECT_EQ(next({}, -1), "");
  EXPECT_EQ(next({{2, false}, {0, true}, {1, false}}, -1), "0w 1 2 ");
  EXPECT_EQ(next({{2, false}, {0, true}, {1, false}}, 1), "2 ");
  EXPECT_EQ(next({{2, false}, {0, true}, {1, false}}, 2), "");
  EXPECT_EQ(next({{1, false}}, -1), "");                             // nothing to change
  EXPECT_EQ(next({{0, true}, {1, false}, {3, false}}, 0), "1 ");     // 2 is not there yet
  EXPECT_EQ(next({{0, true}, {5, true}, {6, false}}, 1), "5w 6 ");   // those between are deleted
  EXPECT_EQ(next({{3, true}, {2, false}, {4, false}}, 1), "3w 4 ");  // rather than 2
}

}  // namespace
}  // namespace het_tf
