// What a version that is served consists of: a text file, which is written after all that it names.
//
//   het_tf served 1
//   version 12
//   whole 0                 1: it stands alone; 0: it changes the version before it
//   written 1700000000000000    microseconds since 1970
//   others 000000000012.others  prefix of a tensor bundle with what else belongs to it
//   tables 2
//   rows 0 000000000012.0.0.rows    table, file: for each table the shards in their order
//   rows 1 000000000012.1.0.rows
//   crc32 89abcdef          of all lines before

#ifndef HET_TF_OPS_CORE_SERVING_MANIFEST_H_
#define HET_TF_OPS_CORE_SERVING_MANIFEST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ops/core/status.h"

namespace het_tf {

// Of the name of a manifest's file: 12 digits, ".whole" or ".delta".
struct ManifestName {
  int64_t version = 0;
  bool whole = false;

  // False: it is no such name.
  static bool Parse(const std::string& name, ManifestName* parsed);
  std::string ToString() const;
};

struct Manifest {
  ManifestName name;
  int64_t written_micros = 0;
  std::string others;
  std::vector<std::vector<std::string>> tables;  // files by shard

  static Status Parse(const std::string& text, Manifest* manifest);
};

// Which versions to open next, in their order. names: of all manifests there are; current: the
// version that is open, or -1. A whole version is taken where there is one, the newest of them; and
// then the changes that follow one another.
std::vector<ManifestName> NextVersions(const std::vector<ManifestName>& names, int64_t current);

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_SERVING_MANIFEST_H_
