#ifndef HET_TF_OPS_CORE_TABLE_STEP_PART_H_
#define HET_TF_OPS_CORE_TABLE_STEP_PART_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/core/table/table.h"
#include "ops/core/wire/request.h"

namespace het_tf {

// The hash of every key of a request, computed once.
struct Table::HashedRequest {
  std::vector<std::vector<uint64_t>> pushes;  // (num_pushes), (rows) each
  std::vector<uint64_t> queries;              // (num_queries)
};

// A worker's part of a step: its request, until it is answered.
struct Table::StepPart {
  int64_t member = 0;
  std::shared_ptr<const void> owner;  // of the bytes that the request points into
  RequestView request;
  HashedRequest hashed;
  std::shared_ptr<Sessions::Session> session;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_STEP_PART_H_
