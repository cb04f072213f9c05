// What a version that is served consists of: a text file, which is written after all that it names.
//
//   het_tf served 1
//   version 12
//   publisher 0123456789abcdef                     16 hexadecimal digits, which nobody else has
//   whole 0                                        1: it stands alone; 0: it changes the version
//                                                  before it, of its publisher
//   written 1700000000000000                       microseconds since 1970
//   others 000000000012.0123456789abcdef.others    prefix of a tensor bundle with the variables
//   tables 2
//   rows 0 000000000012.0123456789abcdef.0.0.rows  table, file: the shards in their order
//   rows 1 000000000012.0123456789abcdef.1.0.rows
//   crc32 89abcdef                                 of all lines before

#ifndef HET_TF_OPS_CORE_SERVING_MANIFEST_H_
#define HET_TF_OPS_CORE_SERVING_MANIFEST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ops/core/status.h"

namespace het_tf {

// Of the name of a manifest's file: 12 digits, the publisher, and "whole" or "delta", with dots
// between them.
struct ManifestName {
  int64_t version = -1;
  std::string publisher;
  bool whole = false;

  // False: it is no such name.
  static bool Parse(const std::string& name, ManifestName* parsed);
  std::string ToString() const;
  bool operator==(const ManifestName& other) const {
    return version == other.version && publisher == other.publisher && whole == other.whole;
  }
};

struct Manifest {
  ManifestName name;
  int64_t written_micros = 0;
  std::string others;
  std::vector<std::vector<std::string>> tables;  // files by shard

  static Status Parse(const std::string& text, Manifest* manifest);
};

// Which versions to open next, in their order. names: of all manifests there are; current: of the
// version that is open, or its version is -1. The newest whole version is taken if it is newer, or
// of another publisher: then it is up to Served whether it follows. Then come the changes of the
// same publisher that follow one another.
std::vector<ManifestName> NextVersions(const std::vector<ManifestName>& names,
                                       const ManifestName& current);

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_SERVING_MANIFEST_H_
