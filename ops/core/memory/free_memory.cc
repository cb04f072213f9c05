#include "ops/core/memory/free_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>

namespace het_tf {
namespace {

// The number behind a name in lines of "name number" or "name: number"; -1: there is none.
int64_t NumberOf(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  int64_t number;
  while (file >> word) {
    if (word == name && file >> number) return number;
  }
  return -1;
}

// The number that a file starts with; -1: there is none, as in "max".
int64_t NumberIn(const std::string& path) {
  std::ifstream file(path);
  int64_t number;
  return file >> number ? number : -1;
}

// What a control group may still take. Pages of files that were not used lately count as used
// there, but the kernel gives them up. -1: there is no limit.
int64_t FreeIn(const std::string& limit_file, const std::string& used_file,
               const std::string& stat_file, const std::string& inactive) {
  const int64_t limit = NumberIn(limit_file), used = NumberIn(used_file);
  if (limit < 0 || used < 0) return -1;
  const int64_t files = std::max<int64_t>(NumberOf(stat_file, inactive), 0);
  return std::max<int64_t>(limit - std::max<int64_t>(used - files, 0), 0);
}

}  // namespace

int64_t FreeMemory(const std::string& root) {
  const std::string v2 = root + "sys/fs/cgroup/", v1 = v2 + "memory/";
  const int64_t kilobytes = NumberOf(root + "proc/meminfo", "MemAvailable:");
  int64_t least = kilobytes < 0 ? -1 : kilobytes * 1024;
  for (const int64_t free :
       {FreeIn(v2 + "memory.max", v2 + "memory.current", v2 + "memory.stat", "inactive_file"),
        FreeIn(v1 + "memory.limit_in_bytes", v1 + "memory.usage_in_bytes", v1 + "memory.stat",
               "total_inactive_file")}) {
    if (free >= 0) least = least < 0 ? free : std::min(least, free);
  }
  return least;
}

}  // namespace het_tf
