#include "ops/core/serving/manifest.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <tuple>

#include "ops/core/serving/crc32.h"

namespace het_tf {
namespace {

constexpr size_t kDigits = 12;
constexpr size_t kPublisherDigits = 16;
constexpr int64_t kMaxTables = 1 << 20;

bool IsFileName(const std::string& name) {
  return !name.empty() && name[0] != '.' && name.find('/') == std::string::npos;
}

bool IsPublisher(const std::string& text) {
  return text.size() == kPublisherDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

}  // namespace

bool ManifestName::Parse(const std::string& name, ManifestName* parsed) {
  constexpr size_t kKind = kDigits + 1 + kPublisherDigits;
  if (name.size() != kKind + 6 || name[kDigits] != '.') return false;
  const std::string kind = name.substr(kKind);
  if (kind != ".whole" && kind != ".delta") return false;
  const std::string publisher = name.substr(kDigits + 1, kPublisherDigits);
  if (!IsPublisher(publisher)) return false;
  parsed->version = 0;
  for (size_t i = 0; i < kDigits; ++i) {
    if (name[i] < '0' || name[i] > '9') return false;
    parsed->version = 10 * parsed->version + (name[i] - '0');
  }
  parsed->publisher = publisher;
  parsed->whole = kind == ".whole";
  return true;
}

std::string ManifestName::ToString() const {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%012lld", static_cast<long long>(version));
  return StrCat(digits, ".", publisher, whole ? ".whole" : ".delta");
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
  HET_RETURN_IF_ERROR(field("publisher", &read.name.publisher));
  HET_RETURN_IF_ERROR(field("whole", &whole));
  HET_RETURN_IF_ERROR(field("written", &read.written_micros));
  HET_RETURN_IF_ERROR(field("others", &read.others));
  HET_RETURN_IF_ERROR(field("tables", &tables));
  if (read.name.version < 0 || !IsPublisher(read.name.publisher) || whole < 0 || whole > 1 ||
      !IsFileName(read.others) || tables < 0 || tables > kMaxTables) {
    return InvalidArgument("says version ", read.name.version, ", publisher ", read.name.publisher,
                           ", whole ", whole, ", others ", read.others, ", tables ", tables);
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

std::vector<ManifestName> NextVersions(const std::vector<ManifestName>& names,
                                       const ManifestName& current) {
  const ManifestName* newest = nullptr;
  for (const ManifestName& name : names) {
    if (!name.whole) continue;
    if (newest == nullptr ||
        std::tie(name.version, name.publisher) > std::tie(newest->version, newest->publisher)) {
      newest = &name;
    }
  }
  std::vector<ManifestName> next;
  ManifestName last = current;
  if (newest != nullptr &&
      (newest->version > current.version || newest->publisher != current.publisher)) {
    next.push_back(*newest);
    last = *newest;
  }
  std::vector<int64_t> changes;
  for (const ManifestName& name : names) {
    const bool follows = name.publisher == last.publisher && name.version > last.version;
    if (!name.whole && follows) changes.push_back(name.version);
  }
  std::sort(changes.begin(), changes.end());
  for (const int64_t version : changes) {
    if (version != last.version + 1) break;
    last = {version, last.publisher, false};
    next.push_back(last);
  }
  return next;
}

}  // namespace het_tf
