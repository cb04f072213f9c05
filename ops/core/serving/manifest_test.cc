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
    "het_tf served 1\nversion 12\npublisher 0123456789abcdef\nwhole 1\nwritten 17\n"
    "others 12.others\ntables 2\nrows 0 a.rows\nrows 1 c.rows\nrows 0 b.rows\n";

TEST(Manifest, SaysWhatAVersionConsistsOf) {
  Manifest manifest;
  ASSERT_OK(Manifest::Parse(WithChecksum(kText), &manifest));
  EXPECT_EQ(manifest.name.ToString(), "000000000012.0123456789abcdef.whole");
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
  for (const char* bad :
       {"0123456789abcde", "0123456789abcdef0", "0123456789abcdeF", "../..", "."}) {
    refused("0123456789abcdef", bad, bad);
  }
  refused("publisher 0123456789abcdef\n", "", "has a line 'whole 1', expected publisher");
  refused("whole 1", "whole 2", "whole 2");
  refused("others 12.others", "others ../x", "others ../x");
  refused("tables 2", "tables 99999999999", "tables 99999999999");
  refused("rows 1 c.rows", "rows 2 c.rows", "has a line 'rows 2 c.rows'");
  refused("rows 1 c.rows", "rows 1 /etc/c.rows", "has a line 'rows 1 /etc/c.rows'");
  refused("rows 1 c.rows", "rows 1 c.rows d", "has a line 'rows 1 c.rows d'");
}

TEST(Manifest, NamesAreVersionsAndPublishers) {
  ManifestName name;
  EXPECT_TRUE(ManifestName::Parse("000000000305.00ff00ff00ff00ff.delta", &name));
  EXPECT_EQ(name.version, 305);
  EXPECT_EQ(name.publisher, "00ff00ff00ff00ff");
  EXPECT_FALSE(name.whole);
  for (const char* other :
       {"", "305.00ff00ff00ff00ff.delta", "000000000305.delta",
        "000000000305.00ff00ff00ff00ff.other", "00000000030x.00ff00ff00ff00ff.delta",
        "000000000305.00ff00ff00ff00fg.delta", "000000000305-00ff00ff00ff00ff.delta",
        "000000000305.00ff00ff00ff00ff.delta.temp", "000000000305.00ff00ff00ff00ff.rows"}) {
    EXPECT_FALSE(ManifestName::Parse(other, &name)) << other;
  }
}

// "7aw": the whole version 7 of publisher a; "8a": what changes it.
std::string Next(const std::vector<ManifestName>& names, const ManifestName& current) {
  std::string text;
  for (const ManifestName& name : NextVersions(names, current)) {
    text += StrCat(name.version, name.publisher, name.whole ? "w " : " ");
  }
  return text;
}

TEST(Manifest, TheNextVersionsAreTheNewestWholeOneAndWhatFollows) {
  const auto next = [](std::vector<ManifestName> names, int64_t current) {
    for (ManifestName& name : names) name.publisher = "a";
    return Next(names, {current, current < 0 ? "" : "a", false});
  };
  EXPECT_EQ(next({}, -1), "");
  const ManifestName zero{0, "", true}, one{1, "", false}, two{2, "", false};
  EXPECT_EQ(next({two, zero, one}, -1), "0aw 1a 2a ");
  EXPECT_EQ(next({two, zero, one}, 1), "2a ");
  EXPECT_EQ(next({two, zero, one}, 2), "");
  EXPECT_EQ(next({one}, -1), "");                          // nothing to change
  EXPECT_EQ(next({zero, one, {3, "", false}}, 0), "1a ");  // 2 is not there yet
  // Those between are deleted.
  EXPECT_EQ(next({zero, {5, "", true}, {6, "", false}}, 1), "5aw 6a ");
  // Rather than 2.
  EXPECT_EQ(next({{3, "", true}, two, {4, "", false}}, 1), "3aw 4a ");
}

TEST(Manifest, ChangesFollowVersionsOfTheirPublisher) {
  const std::vector<ManifestName> names = {{0, "a", true},  {1, "a", false}, {2, "a", false},
                                           {2, "b", true},  {3, "b", false}, {3, "a", false},
                                           {4, "b", false}, {1, "b", false}};
  EXPECT_EQ(Next(names, {}), "2bw 3b 4b ");
  EXPECT_EQ(Next(names, {1, "a", false}), "2bw 3b 4b ");
  EXPECT_EQ(Next(names, {3, "b", false}), "4b ");
  EXPECT_EQ(Next(names, {4, "b", false}), "");
}

TEST(Manifest, AFolderThatWasBegunAnewHasSmallerNumbers) {
  const std::vector<ManifestName> anew = {{0, "b", true}, {1, "b", false}, {8, "b", false}};
  EXPECT_EQ(Next(anew, {7, "a", false}), "0bw 1b ");
  // Not where the publisher's own whole version is newer than others.
  EXPECT_EQ(Next({{0, "b", true}, {5, "a", true}, {8, "a", false}}, {7, "a", false}), "8a ");
}

}  // namespace
}  // namespace het_tf
