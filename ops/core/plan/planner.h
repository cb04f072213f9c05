// Assigns the examples of a step to the workers that cache most of their rows (Herald: Zeng et al.,
// NSDI 2024), and says which updates other workers need.
//
// Every worker replays the same plan over the keys of all examples, so that no worker has to tell
// another one what it trains. The planner keeps a shadow of every worker's cache: which rows it
// holds, and whether they are fresh, that is, whether no other worker has trained them since. A
// shadow that differs from the real cache costs a miss, and nothing else.

#ifndef HET_TF_OPS_CORE_PLAN_PLANNER_H_
#define HET_TF_OPS_CORE_PLAN_PLANNER_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "ops/core/memory/index.h"
#include "ops/core/parallel.h"
#include "ops/core/status.h"

namespace het_tf {

struct PlanConfig {
  int num_workers = 1;
  int64_t capacity = 0;     // rows that a worker caches; 0: as many as there are
  bool synchronous = true;  // a row is a hit only where it is fresh; else where it is cached
};

// Not safe for concurrent use.
class Planner {
 public:
  static constexpr int kMaxWorkers = 64;

  static Status Check(const PlanConfig& config);
  explicit Planner(const PlanConfig& config);

  struct TableKey {
    int32_t table;
    int64_t key;

    bool operator==(const TableKey& other) const {
      return table == other.table && key == other.key;
    }
  };

  // The keys of a step's examples.
  struct Keys {
    const int64_t* keys;  // (num_examples, tables.size())
    int64_t num_examples;
    const std::vector<int32_t>& tables;  // (columns)
    const std::vector<int32_t>& scored;  // columns whose rows decide
  };

  struct Step {
    std::vector<int32_t> worker_of;  // (num_examples); workers have as many, or the first one more
    int64_t num_keys = 0;
    int64_t num_hits = 0;  // of these: the worker has the row
    // Of the step before: by worker, the keys whose updates it pushes at its end. Another worker
    // trains them in the same step or in this one, or the worker's shadow has evicted them.
    std::vector<std::vector<TableKey>> due;  // (num_workers)
  };

  // Plans the next step.
  void Plan(const Keys& keys, const ParallelFor& parallel_for, Step* step);

  // Keys of which a shadow says anything.
  int64_t size() const { return index_.size(); }
  int64_t memory_bytes() const;

 private:
  struct Row {
    TableKey key = {};
    uint64_t cached = 0;  // workers, a bit each
    uint64_t fresh = 0;
    uint64_t trainers = 0;  // in step trained_at
    uint32_t trained_at = 0;
    int32_t owner = kNobody;  // who has updates of the row that it has not pushed
  };
  struct Use {
    uint32_t row, step;
  };
  static constexpr int32_t kNobody = -1;

  void Find(const Keys& keys, const ParallelFor& parallel_for);
  void Score(const Keys& keys, const ParallelFor& parallel_for);
  void Assign(const Keys& keys, Step* step);
  void Advance(const Keys& keys, Step* step);
  // Workers for which a row is a hit, a bit each.
  uint64_t HitsOf(const Row& row) const { return config_.synchronous ? row.fresh : row.cached; }
  uint32_t FindOrMake(const TableKey& key);
  void Cache(uint32_t row, int worker);
  void Evict(int worker);
  uint32_t& used_at(uint32_t row, int worker) {
    return used_at_[size_t{row} * config_.num_workers + worker];
  }

  const PlanConfig config_;
  Index index_;
  std::vector<Row> rows_;
  std::vector<uint32_t> free_;
  std::vector<uint32_t> used_at_;      // (rows, num_workers): the last step; 0: not cached
  std::vector<std::deque<Use>> uses_;  // (num_workers), the oldest first; a later use voids them
  std::vector<int64_t> num_cached_;    // (num_workers)
  uint32_t now_ = 0;
  int rotation_ = 0;
  // Of the step that is planned.
  std::vector<uint32_t> found_;    // (num_examples, columns)
  std::vector<int32_t> scores_;    // (num_examples, num_workers)
  std::vector<uint32_t> trained_;  // rows
  // Of the last step that was planned, without what the next one adds.
  std::vector<std::vector<TableKey>> due_;  // (num_workers)
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_PLAN_PLANNER_H_
