#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/core/status.h"
#include "ops/cuda/scratch.h"
#include "ops/cuda/store.h"

namespace het_tf {
namespace cuda {
namespace {

constexpr int kInvalidValue = 1;                  // cudaErrorInvalidValue
constexpr int64_t kMostLines = int64_t{1} << 30;  // as many slots are left for visitors

int32_t RoundUpTo4(int32_t floats) { return (floats + 3) / 4 * 4; }

Status Check(const HetStoreConfig& config, AnyRule* rule) {
  if (config.lines < 1 || config.lines > kMostLines) {
    return InvalidArgument("lines = ", config.lines, " must be in [1, ", kMostLines, "]");
  }
  if (config.policy != HET_LRU && config.policy != HET_LFU) {
    return InvalidArgument("policy = ", config.policy, " must be HET_LRU or HET_LFU");
  }
  if (config.clock < HET_CLOCK_COUNT || config.clock > HET_CLOCK_DRIFT) {
    return InvalidArgument("clock = ", config.clock, " must be a HET_CLOCK_...");
  }
  HET_RETURN_IF_ERROR(ParseRule(config.optimizer, config.dim, rule));
  if (std::visit([](const auto& made) { return made.cowclip > 0; }, *rule)) {
    return InvalidArgument("optimizer = '", config.optimizer, "': there is no cowclip on a device");
  }
  return Status();
}

// The store's arrays in its memory, or, without memory, how much that takes.
size_t Place(void* memory, HetStore* store, float** table, int32_t table_floats, int32_t** gains) {
  StoreView& view = store->view;
  Scratch scratch(memory);
  view.tags = scratch.Take<uint8_t>(int64_t{view.buckets} * StoreView::kBucket);
  view.lines = scratch.Take<DeviceLine>(view.num_lines);
  view.rows = scratch.Take<float>(int64_t{view.num_lines} * view.row_stride);
  view.records = scratch.Take<float>(int64_t{view.num_lines} * view.record_stride);
  view.time = scratch.Take<double>(1);
  view.num_rows = scratch.Take<int64_t>(1);
  *gains = scratch.Take<int32_t>(Scoring::kGains);
  *table = scratch.Take<float>(table_floats);
  return scratch.bytes();
}

// The same of visitors.
size_t PlaceVisitors(void* memory, int64_t visitors, StoreView* view) {
  Scratch scratch(memory);
  view->visitors = scratch.Take<DeviceLine>(visitors);
  view->visitor_rows = scratch.Take<float>(visitors * view->row_stride);
  view->num_visitors = static_cast<int32_t>(visitors);
  return scratch.bytes();
}

// What a config makes of a store, before it has memory. table: out, the optimizer's.
void Describe(const HetStoreConfig& config, HetStore* store, std::vector<float>* table) {
  StoreView& view = store->view;
  constexpr int64_t kBucket = StoreView::kBucket;
  view.buckets = static_cast<uint32_t>((config.lines + kBucket - 1) / kBucket);
  view.ways = static_cast<int32_t>((config.lines + view.buckets - 1) / view.buckets);
  view.num_lines = static_cast<int32_t>(view.buckets * view.ways);
  view.clock = static_cast<ClockRule>(config.clock);
  std::visit(
      [&](const auto& rule) {
        const auto& algorithm = rule.algorithm;
        store->dim = rule.dim();
        store->row_dim = rule.row_dim();
        store->contribution_dim = algorithm.contribution_dim();
        view.row_stride = RoundUpTo4(rule.row_dim());
        view.record_stride = RoundUpTo4(algorithm.record_dim());
        if constexpr (std::decay_t<decltype(algorithm)>::kHasTable) *table = algorithm.MakeTable();
      },
      store->rule);
  float* table_there;
  int32_t* gains_there;
  store->bytes = static_cast<int64_t>(
      Place(nullptr, store, &table_there, static_cast<int32_t>(table->size()), &gains_there));
}

int Create(const HetStoreConfig& config, void* memory, HetStore* store, Stream stream) {
  StoreView& view = store->view;
  std::vector<float> table;
  Describe(config, store, &table);
  float* table_there;
  int32_t* gains_there;
  Place(memory, store, &table_there, static_cast<int32_t>(table.size()), &gains_there);
  std::visit(
      [&](auto& rule) {
        using Algorithm = typename std::decay_t<decltype(rule)>::Algorithm;
        if constexpr (Algorithm::kHasTable) rule.algorithm.table = table_there;
      },
      store->rule);
  view.scoring.policy = config.policy == HET_LRU ? Policy::kLru : Policy::kLfu;
  view.scoring.half_life = Scoring::kHalfLifeInCapacities * view.num_lines;
  view.scoring.gains = gains_there;
  const Scoring::Gains& gains = Scoring::HostGains();
  HET_CUDA_RETURN_IF_ERROR(Fill(0, int64_t{view.buckets} * StoreView::kBucket, view.tags, stream));
  HET_CUDA_RETURN_IF_ERROR(
      Fill(0, sizeof(DeviceLine) * int64_t{view.num_lines}, view.lines, stream));
  HET_CUDA_RETURN_IF_ERROR(Fill(0, sizeof(double), view.time, stream));
  HET_CUDA_RETURN_IF_ERROR(Fill(0, sizeof(int64_t), view.num_rows, stream));
  HET_CUDA_RETURN_IF_ERROR(Copy(gains.data(), sizeof(gains), gains_there, stream));
  HET_CUDA_RETURN_IF_ERROR(Copy(table.data(), sizeof(float) * table.size(), table_there, stream));
  return Synchronize(stream);
}

struct Unpin {
  StoreView store;
  const int32_t* num_keys;
  const int32_t* slots;

  HET_DEVICE void operator()(int64_t u) const {
    if (u < *num_keys && slots[u] >= 0) store.Unpin(slots[u]);
  }
};

struct Forget {
  StoreView store;
  int32_t shard, num_shards;
  int64_t* updates_lost;

  HET_DEVICE void operator()(int64_t item) const {
    const auto slot = static_cast<int32_t>(item);
    DeviceLine& line = store.line(slot);
    if (ShardOfHash(HashKey(line.key), num_shards) != static_cast<uint32_t>(shard)) return;
    if (line.base > 0) line.base = 0;  // the clock of a row that is no more
    if (!line.full) return;
    line.full = 0;
    if (!store.is_line(slot)) return;
    if (line.pins == 0) store.tag(slot) = StoreView::kNoTag;
    AtomicAddEach(store.num_rows, -1);
    if (line.pending > 0) AtomicAdd(updates_lost, line.pending);
    line.pending = 0;
    line.units = 0;
    line.watched = 0;
  }
};

}  // namespace

extern "C" {

int het_store_bytes(const HetStoreConfig* config, int64_t* bytes, char* message,
                    size_t message_bytes) {
  HetStore described;
  const Status status = Check(*config, &described.rule);
  if (!status.ok()) {
    std::snprintf(message, message_bytes, "%s", status.message().c_str());
    return kInvalidValue;
  }
  std::vector<float> table;
  Describe(*config, &described, &table);
  *bytes = described.bytes;
  return 0;
}

int het_store_create(const HetStoreConfig* config, void* memory, HetStore** store, char* message,
                     size_t message_bytes, HetStream stream) {
  auto made = std::make_unique<HetStore>();
  const Status status = Check(*config, &made->rule);
  if (!status.ok()) {
    std::snprintf(message, message_bytes, "%s", status.message().c_str());
    return kInvalidValue;
  }
  if (const int error = Create(*config, memory, made.get(), stream)) {
    std::snprintf(message, message_bytes, "%s", ErrorString(error));
    return error;
  }
  *store = made.release();
  return 0;
}

void het_store_destroy(HetStore* store) { delete store; }

void het_store_info(const HetStore* store, HetStoreInfo* info) {
  *info = {store->view.num_lines,   store->row_dim, store->view.row_stride,
           store->contribution_dim, store->bytes,   store->view.rows,
           store->view.visitor_rows};
}

size_t het_visitors_bytes(const HetStore* store, int64_t visitors) {
  StoreView view = store->view;
  return PlaceVisitors(nullptr, visitors, &view);
}

int het_set_visitors(HetStore* store, void* memory, int64_t visitors, HetStream stream) {
  const StoreView old = store->view;
  StoreView& view = store->view;
  PlaceVisitors(memory, visitors, &view);
  HET_CUDA_RETURN_IF_ERROR(Fill(0, sizeof(DeviceLine) * visitors, view.visitors, stream));
  HET_CUDA_RETURN_IF_ERROR(
      Fill(0, sizeof(float) * visitors * view.row_stride, view.visitor_rows, stream));
  const int64_t kept = old.num_visitors;
  HET_CUDA_RETURN_IF_ERROR(Copy(old.visitors, sizeof(DeviceLine) * kept, view.visitors, stream));
  return Copy(old.visitor_rows, sizeof(float) * kept * view.row_stride, view.visitor_rows, stream);
}

int het_count_lines(HetStore* store, int64_t* num_lines, HetStream stream) {
  return Copy(store->view.num_rows, sizeof(int64_t), num_lines, stream);
}

int het_unpin(HetStore* store, const HetBatch* batch, const int32_t* slots, HetStream stream) {
  return Launch(Unpin{store->view, batch->num_keys, slots}, batch->num_ids, stream);
}

int het_forget(HetStore* store, int32_t shard, int32_t num_shards, int64_t* updates_lost,
               HetStream stream) {
  HET_CUDA_RETURN_IF_ERROR(Fill(0, sizeof(int64_t), updates_lost, stream));
  const StoreView& view = store->view;
  return Launch(Forget{view, shard, num_shards, updates_lost},
                int64_t{view.num_lines} + view.num_visitors, stream);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
