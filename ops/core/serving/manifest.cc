#include "ops/core/serving/manifest.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "ops/core/serving/crc32.h"

namespace het_tf {
namespace {

constexpr size_t kDigits = 12;
constexpr int64_t kMaxTables = 1 << 20;

bool IsFileName(const std::string& name) {
  return !name.empty() && name[0] != '.' && name.find('/') == std::string::npos;
}

}  // namespace

bool ManifestName::Parse(const std::string& name, ManifestName* parsed) {
  if (name.size() != kDigits + 6) return false;
  const std::string kind = name.substr(kDigits);
  if (kind != ".whole" && kind != ".delta") return false;
  parsed->version = 0;
  for (size_t i = 0; i < kDigits; ++i) {
    if (name[i] < '0' || name[i] > '9') return false;
    parsed->version = 10 * parsed->version + (name[i] - '0');
  }
  parsed->whole = kind == ".whole";
  return true;
}

std::string ManifestName::ToString() const {
  char text[kDigits + 16];
  std::snprintf(text, sizeof(text), "%012lld.%s", static_cast<long long>(version),
                whole ? "whole" : "delta");
  return text;
}

Status Manifest::Parse(const std::string& text, Manifest* manifest) {
  const size_t end = text.rfind("crc32 ");
  if (end == std::string::npos || (end > 0 && text[end - 1] != '\n')) {
    return InvalidArgument("has no checksum: its end is missing");
  }
  char expected[16];
  std::snprintf(expected, sizeof(expected), "crc32 %08x\n", Crc32(text.data(), end));
  if (text.substr(end) != expected) {
    return InvalidArgument("is damaged: ends with '", text.substr(end), "', expected '", expected,
                           "'");
  }
  std::istringstream lines(text.substr(0, end));
  std::string line;
  std::getline(lines, line);
  if (line != "het_tf served 1") {
    return InvalidArgument("begins with '", line, "', expected 'het_tf served 1'");
  }
  Manifest read;
  int whole = 0;
  int64_t tables = 0;
  const auto field = [&](const char* name, auto* value) {
    if (!std::getline(lines, line)) line.clear();
    std::istringstream words(line);
    std::string word, more;
    if (words >> word && word == name && words >> *value && !(words >> more)) return Status();
    return InvalidArgument("has a line '", line, "', expected ", name, " and its value");
  };
  HET_RETURN_IF_ERROR(field("version", &read.name.version));
  HET_RETURN_IF_ERROR(field("whole", &whole));
  HET_RETURN_IF_ERROR(field("written", &read.written_micros));
  HET_RETURN_IF_ERROR(field("others", &read.others));
  HET_RETURN_IF_ERROR(field("tables", &tables));
  if (read.name.version < 0 || whole < 0 || whole > 1 || !IsFileName(read.others) || tables < 0 ||
      tables > kMaxTables) {
    return InvalidArgument("says version ", read.name.version, ", whole ", whole, ", others ",
                           read.others, ", tables ", tables);
  }
  read.name.whole = whole == 1;
  read.tables.resize(tables);
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string word, file, more;
    int64_t table = -1;
    if (!(words >> word >> table >> file) || words >> more || word != "rows" || table < 0 ||
        table >= tables || !IsFileName(file)) {
      return InvalidArgument("has a line '", line, "', expected rows, a table below ", tables,
                             " and a file");
    }
    read.tables[table].push_back(file);
  }
  *manifest = std::move(read);
  return Status();
}

std::vector<ManifestName> NextVersions(const std::vector<ManifestName>& names, int64_t current) {
  std::vector<ManifestName> next;
  for (const ManifestName& name : names) {
    if (!name.whole || name.version <= current) continue;
    if (next.empty()) next.push_back(name);
    if (name.version > next[0].version) next[0] = name;
  }
  if (!next.empty()) current = next[0].version;
  std::vector<int64_t> changes;
  for (const ManifestName& name : names) {
    if (!name.whole && name.version > current) changes.push_back(name.version);
  }
  std::sort(changes.begin(), changes.end());
  for (const int64_t version : changes) {
    if (version != current + 1) break;
    next.push_back({++current, false});
  }
  return next;
}

}  // namespace het_tf
