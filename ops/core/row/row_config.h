// What a table's shards and caches must agree on.

#ifndef HET_TF_OPS_CORE_ROW_ROW_CONFIG_H_
#define HET_TF_OPS_CORE_ROW_ROW_CONFIG_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ops/core/row/clock.h"
#include "ops/core/row/initializer.h"
#include "ops/core/row/optimizer.h"
#include "ops/core/status.h"

namespace het_tf {

// What to do with a gradient that holds NaN or infinity.
enum class Nonfinite { kError, kSkip };

struct RowConfig {
  int dim = 0;
  std::string optimizer;    // Optimizer::Parse
  std::string initializer;  // Initializer::Parse
  int64_t seed = 0;
  ClockRule clock = ClockRule::kCount;
  int num_shards = 1;
  bool half = false;  // the table keeps values as bfloat16
};

// The parts that a config names.
struct RowKit {
  std::unique_ptr<Optimizer> optimizer;
  Initializer initializer;

  static Status Create(const RowConfig& config, RowKit* kit) {
    if (config.num_shards < 1) {
      return InvalidArgument("num_shards = ", config.num_shards, " must be at least 1");
    }
    HET_RETURN_IF_ERROR(Optimizer::Parse(config.optimizer, config.dim, &kit->optimizer));
    return Initializer::Parse(config.initializer, config.seed, &kit->initializer);
  }

  // A row that nobody has updated yet. row: (optimizer->row_dim())
  void InitRow(int64_t key, float* row) const {
    initializer.Fill(key, optimizer->dim(), row);
    optimizer->InitSlots(row + optimizer->dim());
  }
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_ROW_CONFIG_H_
