// A store and the steps on it, for tests: what stays on the device is in arrays of the exact size.

#ifndef HET_TF_OPS_CUDA_STORE_TESTING_H_
#define HET_TF_OPS_CUDA_STORE_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ops/cuda/het_cuda.h"
#include "ops/cuda/testing.h"
#include "ops/cuda/visitors.h"

namespace het_tf {
namespace testing {

class DeviceStore {
 public:
  DeviceStore(const std::string& optimizer, int32_t dim, int64_t lines, int32_t policy = HET_LRU,
              int32_t clock = HET_CLOCK_COUNT) {
    const HetStoreConfig config = {dim, optimizer.c_str(), lines, policy, clock};
    char message[200] = "";
    int64_t bytes = 0;
    EXPECT_CUDA(het_store_bytes(&config, &bytes, message, sizeof(message))) << message;
    memory_ = DeviceArray<char>(bytes);
    EXPECT_CUDA(
        het_store_create(&config, memory_.get(), &store_, message, sizeof(message), kStream))
        << message;
    het_store_info(store_, &info_);
  }
  ~DeviceStore() { het_store_destroy(store_); }
  DeviceStore(const DeviceStore&) = delete;
  DeviceStore& operator=(const DeviceStore&) = delete;

  HetStore* get() const { return store_; }
  const HetStoreInfo& info() const { return info_; }
  int32_t row_dim() const { return info_.row_dim; }

  // Has memory for so many visitors in all.
  void ReserveVisitors(int64_t visitors) const {
    if (visitors <= num_visitors_) return;
    num_visitors_ = visitors;
    DeviceArray<char> memory(static_cast<int64_t>(het_visitors_bytes(store_, visitors)));
    EXPECT_CUDA(het_set_visitors(store_, memory.get(), visitors, kStream));
    EXPECT_CUDA(cuda::Synchronize(kStream));
    visitor_memory_ = std::move(memory);
    het_store_info(store_, &info_);
  }
  // Those that steps under way have, as the host knows them.
  cuda::Visitors* visitors() const { return &visitors_; }

  // The row in a slot (row_dim).
  std::vector<float> Row(int32_t slot) const {
    std::vector<float> row(row_dim());
    EXPECT_CUDA(cuda::Copy(info_.rows + int64_t{slot} * info_.row_stride,
                           sizeof(float) * row.size(), row.data(), kStream));
    EXPECT_CUDA(cuda::Synchronize(kStream));
    return row;
  }

  int64_t CountLines() const {
    const DeviceArray<int64_t> num_lines(1);
    EXPECT_CUDA(het_count_lines(store_, num_lines.get(), kStream));
    return num_lines.Read()[0];
  }

  int64_t Forget(int32_t shard = 0, int32_t num_shards = 1) const {
    const DeviceArray<int64_t> lost(1);
    EXPECT_CUDA(het_forget(store_, shard, num_shards, lost.get(), kStream));
    return lost.Read()[0];
  }

 private:
  DeviceArray<char> memory_;
  HetStore* store_ = nullptr;
  mutable DeviceArray<char> visitor_memory_;
  mutable HetStoreInfo info_ = {};
  mutable cuda::Visitors visitors_;
  mutable int64_t num_visitors_ = 0;
};

// The arrays of a HetList, HetSlots or HetPush.
struct List {
  explicit List(int64_t n)
      : index(n),
        keys(n),
        bases(n),
        num(1),
        list{index.get(), keys.get(), bases.get(), num.get()} {}
  int64_t size() const { return num.Read()[0]; }

  DeviceArray<int32_t> index;
  DeviceArray<int64_t> keys, bases;
  DeviceArray<int32_t> num;
  HetList list;
};

struct Slots {
  explicit Slots(int64_t n) : slots(n), num(1), list{slots.get(), num.get()} {}
  int64_t size() const { return num.Read()[0]; }
  std::vector<int32_t> Read() const { return slots.Read(size()); }

  DeviceArray<int32_t> slots, num;
  HetSlots list;
};

// Rows of a push, on the host.
struct PushedRow {
  int64_t key;
  int32_t updates;
  uint32_t clock;
  bool gradient;
  std::vector<float> floats;
};

struct Push {
  Push(int64_t n, int64_t width)
      : keys(n),
        updates(n),
        clocks(n),
        floats(n * width),
        push{keys.get(), updates.get(), clocks.get(), floats.get()} {}

  void AppendTo(std::vector<PushedRow>* rows, int64_t n, int64_t width, bool gradient) const {
    const auto keys_here = keys.Read(n);
    const auto updates_here = updates.Read(n);
    const auto clocks_here = clocks.Read(n);
    const auto floats_here = floats.Read(n * width);
    for (int64_t i = 0; i < n; ++i) {
      rows->push_back({keys_here[i],
                       updates_here[i],
                       clocks_here[i],
                       gradient,
                       {floats_here.begin() + i * width, floats_here.begin() + (i + 1) * width}});
    }
  }

  DeviceArray<int64_t> keys;
  DeviceArray<int32_t> updates;
  DeviceArray<uint32_t> clocks;
  DeviceArray<float> floats;
  HetPush push;
};

inline std::vector<PushedRow> Collect(const DeviceStore& store, const Slots& lines) {
  const int64_t n = lines.size(), width = store.info().contribution_dim;
  const Push push(n, width);
  std::vector<PushedRow> rows;
  EXPECT_CUDA(het_collect(store.get(), &lines.list, n, &push.push, kStream));
  push.AppendTo(&rows, n, width, false);
  EXPECT_CUDA(het_clean(store.get(), &lines.list, nullptr, n, kStream));
  return rows;
}

inline std::vector<PushedRow> CollectDirty(const DeviceStore& store) {
  const Slots dirty(store.info().lines);
  const DeviceArray<char> scratch(het_list_dirty_scratch_bytes(store.get()));
  EXPECT_CUDA(het_list_dirty(store.get(), &dirty.list, scratch.get(), kStream));
  return Collect(store, dirty);
}

// One step. The verbs are to be called in the order in which they stand here.
class Step {
 public:
  Step(const DeviceStore& store, int32_t dim, const std::vector<int64_t>& ids)
      : store_(store),
        dim_(dim),
        batch_(ids),
        n_(batch_.num_ids()),
        slots_(n_),
        misses_(n_),
        checks_(n_),
        sums_(n_ * dim),
        squares_(n_) {
    const DeviceArray<char> scratch(het_list_scratch_bytes(n_));
    EXPECT_CUDA(het_find(store.get(), batch_.get(), slots_.get(), kStream));
    EXPECT_CUDA(het_list(store.get(), batch_.get(), slots_.get(), nullptr, nullptr, &misses_.list,
                         &checks_.list, scratch.get(), kStream));
    num_misses_ = misses_.size();
    num_checks_ = checks_.size();
  }

  const Batch& batch() const { return batch_; }
  std::vector<int64_t> miss_keys() const { return misses_.keys.Read(num_misses_); }
  std::vector<int32_t> miss_index() const { return misses_.index.Read(num_misses_); }
  std::vector<int64_t> check_keys() const { return checks_.keys.Read(num_checks_); }
  std::vector<int32_t> check_index() const { return checks_.index.Read(num_checks_); }
  std::vector<int64_t> check_bases() const { return checks_.bases.Read(num_checks_); }
  std::vector<int32_t> slots() const { return slots_.Read(batch_.num_keys()); }  // of the keys

  // Of the checks, the shards with a 1 watch their rows from now on.
  void Watch(const std::vector<uint8_t>& shards) const {
    const DeviceArray<uint8_t> marked(shards);
    const HetShards watching = {static_cast<int32_t>(shards.size()), marked.get()};
    EXPECT_CUDA(
        het_watch(store_.get(), slots_.get(), &checks_.list, num_checks_, &watching, kStream));
  }

  // Keys of the step that lack rows, by the marks of their shards.
  std::vector<int64_t> Lacking(const std::vector<uint8_t>& shards) const {
    const DeviceArray<uint8_t> marked(shards);
    const HetShards restarted = {static_cast<int32_t>(shards.size()), marked.get()};
    const DeviceArray<char> scratch(het_list_scratch_bytes(n_));
    const List lacking(n_);
    EXPECT_CUDA(het_list_lacking(store_.get(), batch_.get(), slots_.get(), &restarted,
                                 &lacking.list, scratch.get(), kStream));
    return lacking.keys.Read(lacking.size());
  }

  // Lines for the misses. uses: (misses). Returns the contributions of the rows that gave way.
  std::vector<PushedRow> MakeLines(const std::vector<int32_t>& uses) {
    cuda::Visitors* visitors = store_.visitors();
    visitors->Reserve(num_misses_);
    store_.ReserveVisitors(visitors->end());
    std::vector<HetNewcomer> newcomers(num_misses_);
    const std::vector<int64_t> keys = miss_keys();
    for (int64_t j = 0; j < num_misses_; ++j) newcomers[j] = {uses[j], visitors->Take(keys[j])};
    const DeviceArray<HetNewcomer> newcomers_there(newcomers);
    const DeviceArray<int64_t> evicted(1);
    const DeviceArray<char> scratch(het_evict_scratch_bytes(store_.get(), num_misses_));
    EXPECT_CUDA(het_evict(store_.get(), &misses_.list, num_misses_, newcomers_there.get(),
                          slots_.get(), evicted.get(), scratch.get(), kStream));
    num_evicted_ = evicted.Read()[0];
    const std::vector<int32_t> slots = this->slots(), index = miss_index();
    for (int64_t j = 0; j < num_misses_; ++j) {
      const int32_t visitor = newcomers[j].visitor;
      if (slots[index[j]] < store_.info().lines) {
        visitors->LetGo(visitor);
      } else {
        EXPECT_EQ(slots[index[j]], store_.info().lines + visitor);
        visitors->Keep(visitor);
        visitors_.push_back(visitor);
      }
    }
    ListEvicted();
    const Slots victims(num_misses_);
    const DeviceArray<char> list_scratch(het_list_victims_scratch_bytes(num_misses_));
    EXPECT_CUDA(het_list_victims(store_.get(), &misses_.list, num_misses_, slots_.get(),
                                 &victims.list, list_scratch.get(), kStream));
    const std::vector<PushedRow> pushed = Collect(store_, victims);
    EXPECT_CUDA(het_make(store_.get(), &misses_.list, num_misses_, newcomers_there.get(),
                         slots_.get(), kStream));
    return pushed;
  }
  std::vector<PushedRow> MakeLines() { return MakeLines(std::vector<int32_t>(num_misses_, 1)); }

  int64_t num_visitors() const { return static_cast<int64_t>(visitors_.size()); }
  int64_t num_evicted() const { return num_evicted_; }
  // The rows that gave way and how often they were asked for lately.
  const std::map<int64_t, float>& evicted() const { return evicted_; }

  // Rows of the misses, in their order. rows: (misses) of (row_dim).
  void InstallMisses(const std::vector<std::vector<float>>& rows,
                     const std::vector<int64_t>& bases) const {
    Install(misses_.index, rows, bases);
  }
  // Without slots. values: (misses) of (dim).
  void InstallMissesValues(const std::vector<std::vector<float>>& values,
                           const std::vector<int64_t>& bases) const {
    std::vector<float> flat;
    for (const auto& value : values) flat.insert(flat.end(), value.begin(), value.end());
    const DeviceArray<float> there(flat);
    const DeviceArray<int64_t> bases_there(bases);
    EXPECT_CUDA(het_install_values(store_.get(), misses_.index.get(), slots_.get(), there.get(),
                                   bases_there.get(), static_cast<int64_t>(bases.size()), kStream));
  }
  // Rows of other keys. index: which of the batch's.
  void InstallChecked(const std::vector<int32_t>& index,
                      const std::vector<std::vector<float>>& rows,
                      const std::vector<int64_t>& bases) const {
    Install(DeviceArray<int32_t>(index), rows, bases);
  }

  std::vector<float> Gather() const {
    const DeviceArray<float> out(n_ * dim_);
    const HetStoreInfo& info = store_.info();
    FindLate();
    EXPECT_CUDA(het_gather(batch_.get(), slots_.get(), info.rows, info.row_stride, info.lines,
                           info.visitors, info.row_stride, dim_, out.get(), kStream));
    return out.Read();
  }

  // gradients: (num_ids, dim). Returns how many keys had none that is finite.
  int64_t Update(const std::vector<float>& gradients, float learning_rate = 1,
                 bool refuse_nonfinite = false) const {
    const DeviceArray<float> there(gradients);
    const DeviceArray<int64_t> nonfinite(1);
    const DeviceArray<char> sum_scratch(het_segment_sum_scratch_bytes(n_, dim_));
    EXPECT_CUDA(het_segment_sum(batch_.get(), there.get(), dim_, sums_.get(), squares_.get(),
                                nonfinite.get(), sum_scratch.get(), kStream));
    FindLate();
    const DeviceArray<char> scratch(het_update_scratch_bytes(store_.get(), n_));
    EXPECT_CUDA(het_update(store_.get(), batch_.get(), slots_.get(), sums_.get(), squares_.get(),
                           learning_rate, refuse_nonfinite ? nonfinite.get() : nullptr,
                           scratch.get(), kStream));
    return nonfinite.Read()[0];
  }

  std::vector<PushedRow> CollectDue(int64_t write_bound) const {
    const Slots gradients(n_), lines(n_);
    const DeviceArray<char> scratch(het_list_due_scratch_bytes(n_));
    EXPECT_CUDA(het_list_due(store_.get(), batch_.get(), slots_.get(), squares_.get(), write_bound,
                             &gradients.list, &lines.list, scratch.get(), kStream));
    const int64_t num_gradients = gradients.size();
    const Push push(num_gradients, dim_);
    EXPECT_CUDA(het_collect_gradients(store_.get(), batch_.get(), slots_.get(), sums_.get(),
                                      &gradients.list, num_gradients, &push.push, kStream));
    std::vector<PushedRow> rows;
    push.AppendTo(&rows, num_gradients, dim_, true);
    EXPECT_CUDA(het_clean(store_.get(), &gradients.list, slots_.get(), num_gradients, kStream));
    for (PushedRow& row : Collect(store_, lines)) rows.push_back(std::move(row));
    return rows;
  }

  void Unpin() const {
    EXPECT_CUDA(het_unpin(store_.get(), batch_.get(), slots_.get(), kStream));
    for (const int32_t visitor : visitors_) store_.visitors()->LetGo(visitor);
  }

 private:
  void FindLate() const {
    EXPECT_CUDA(het_find_late(store_.get(), batch_.get(), slots_.get(), kStream));
  }

  void ListEvicted() {
    const DeviceArray<int64_t> keys(num_misses_);
    const DeviceArray<float> uses(num_misses_);
    EXPECT_CUDA(het_list_evicted(store_.get(), &misses_.list, num_misses_, slots_.get(), keys.get(),
                                 uses.get(), kStream));
    const std::vector<int64_t> keys_here = keys.Read();
    const std::vector<float> uses_here = uses.Read();
    for (int64_t j = 0; j < num_misses_; ++j) {
      if (uses_here[j] > 0) evicted_[keys_here[j]] = uses_here[j];
    }
    EXPECT_EQ(static_cast<int64_t>(evicted_.size()), num_evicted_);
  }

  void Install(const DeviceArray<int32_t>& index, const std::vector<std::vector<float>>& rows,
               const std::vector<int64_t>& bases) const {
    const int64_t n = static_cast<int64_t>(rows.size()), stride = store_.info().row_stride;
    std::vector<float> flat(n * stride);
    for (int64_t r = 0; r < n; ++r) {
      std::copy(rows[r].begin(), rows[r].end(), flat.begin() + r * stride);
    }
    const DeviceArray<float> there(flat);
    const DeviceArray<int64_t> bases_there(bases);
    EXPECT_CUDA(het_install(store_.get(), index.get(), slots_.get(), there.get(), bases_there.get(),
                            n, kStream));
  }

  const DeviceStore& store_;
  const int32_t dim_;
  const Batch batch_;
  const int64_t n_;
  const DeviceArray<int32_t> slots_;
  const List misses_, checks_;
  const DeviceArray<float> sums_, squares_;
  int64_t num_misses_, num_checks_, num_evicted_ = 0;
  std::map<int64_t, float> evicted_;
  std::vector<int32_t> visitors_;
};

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_STORE_TESTING_H_
