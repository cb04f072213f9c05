// What TensorFlow's resource managers hold: tables, caches, and the dense variables' shards and
// replicas.

#ifndef HET_TF_OPS_KERNELS_RESOURCES_H_
#define HET_TF_OPS_KERNELS_RESOURCES_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/cache/row_cache.h"
#include "ops/core/dense/replica.h"
#include "ops/core/dense/shard.h"
#include "ops/core/table/sweeper.h"
#include "ops/core/table/table.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_var.h"

namespace het_tf {

struct TableSnapshot;

class TableResource : public tensorflow::ResourceBase {
 public:
  // lifetimes, storage: as text, those of the table.
  TableResource(const RowConfig& config, int shard, std::string lifetimes, std::string storage,
                std::unique_ptr<Table> made)
      : config(config),
        shard(shard),
        lifetimes(std::move(lifetimes)),
        storage(std::move(storage)),
        table(std::move(made)) {
    const Lifetimes& rules = table->lifetimes();
    if (rules.expires() && !rules.time_is_given()) {
      sweeper_ = std::make_unique<Sweeper>(table.get(), Sweeper::PaceOf(rules));
    }
  }

  std::string DebugString() const override {
    return StrCat("Het>Table shard ", shard, " of ", config.num_shards, ", ", table->size(),
                  " rows");
  }
  int64_t MemoryUsed() const override { return table->memory_bytes(); }

  const RowConfig config;
  const int shard;
  const std::string lifetimes, storage;
  const std::unique_ptr<Table> table;

  // The last cut of a program, which has one at a time: it loses one whose op has ended here, and
  // with an error there, as TensorFlow may give an op the error of another server's.
  std::mutex cut_mutex;
  std::string cut_owner;             // guarded by cut_mutex
  std::weak_ptr<TableSnapshot> cut;  // guarded by cut_mutex

 private:
  std::unique_ptr<Sweeper> sweeper_;  // ends before the table
};

// Set when the process is about to end: what caches and replicas make from then on would be lost.
inline std::atomic<bool> process_ends{false};

class CacheResource : public tensorflow::ResourceBase {
 public:
  CacheResource(const CacheConfig& config, int64_t device_capacity, std::shared_ptr<RowCache> cache)
      : config(config), device_capacity(device_capacity), cache(std::move(cache)) {}

  std::string DebugString() const override {
    return StrCat("Het>Cache of ", cache->on_device() ? device_capacity : config.capacity, " rows");
  }

  const CacheConfig config;
  const int64_t device_capacity;  // CacheHandle's
  const std::shared_ptr<RowCache> cache;
};

class DenseResource : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override {
    return StrCat("Het>DenseShard of ", shard.memory_bytes(), " bytes");
  }
  int64_t MemoryUsed() const override { return shard.memory_bytes(); }

  DenseShard shard;
};

class ReplicaResource : public tensorflow::ResourceBase {
 public:
  // What becomes of a variable.
  enum class Kind { kFloat, kCounter, kOwn, kSeed };
  struct Variable {
    Kind kind;
    tensorflow::core::RefCountPtr<tensorflow::Var> var;
  };

  ReplicaResource(std::vector<Variable> variables, std::shared_ptr<Replica> replica)
      : variables(std::move(variables)), replica(std::move(replica)) {}
  std::string DebugString() const override {
    return StrCat("Het>Replica of ", variables.size(), " variables");
  }

  const std::vector<Variable> variables;
  const std::shared_ptr<Replica> replica;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_RESOURCES_H_
