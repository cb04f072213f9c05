#include "ops/core/cache/store.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "ops/core/gradient_limit.h"
#include "ops/core/memory/hash.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/simd.h"

namespace het_tf {
namespace {

size_t RoundUpTo8(size_t bytes) { return (bytes + 7) & ~size_t{7}; }

// Index and list of dirty lines are made for all lines at once, those of steps under way included,
// so that they do not grow while a step waits (benchmarks/cache_memory.py, longest step); but for
// no more than this, since the index would take memory long before its lines do. A cache that takes
// what memory there is may be one of many small ones.
constexpr int64_t kMostExpected = int64_t{1} << 25, kExpectedOfShared = int64_t{1} << 14;
int64_t LinesExpected(const CacheConfig& config) {
  if (config.capacity == kSharedMemory) return kExpectedOfShared;
  return std::min(config.capacity + config.capacity / 8 + 4096, kMostExpected);
}

}  // namespace

Store::Store(const RowKit& kit, const CacheConfig& config, const RowFormat& wire)
    : kit_(kit),
      dim_(kit.optimizer->dim()),
      row_dim_(kit.optimizer->row_dim()),
      num_shards_(config.rows.num_shards),
      drift_(config.rows.clock == ClockRule::kDrift),
      lines_(RoundUpTo8(sizeof(Line) + sizeof(float) * row_dim_), &arena_),
      unsent_(*kit.optimizer, wire, config.synchronous, &arena_),
      eviction_(config.policy, config.capacity),
      memory_(config.capacity == kSharedMemory ? config.memory : nullptr),
      capacity_(memory_ ? CapacityNow() : config.capacity) {
  index_.Reserve(LinesExpected(config), [](uint32_t) { return uint64_t{0}; });
  dirty_.reserve(LinesExpected(config));
  known_scores_.reserve(LinesExpected(config));
}

// Of a cache with a part of the memory.
int64_t Store::CapacityNow() {
  // What a row takes with an update in no push yet (benchmarks/cache_memory.py: 2.6 times as much).
  const auto bytes = static_cast<int64_t>(3 * lines_.record_bytes());
  return std::clamp<int64_t>(memory_.Allowed(num_resident_ * bytes) / bytes, 1, kMostRows);
}

void Store::Prefetch(uint32_t slot) const { het_tf::Prefetch(lines_[slot], lines_.record_bytes()); }

Store::Found Store::Find(const UniqueIds& ids, const ParallelFor& parallel_for,
                         std::vector<uint32_t>* slots) {
  if (memory_) eviction_.SetCapacity(capacity_ = CapacityNow());
  eviction_.BeginUse(ids.num_keys());
  slots->resize(ids.num_keys());
  std::atomic<int64_t> num_lines{0}, num_full{0};
  parallel_for(ids.num_keys(), kKeyCycles, [&](int64_t first, int64_t last) {
    int64_t lines = 0, full = 0;
    VisitInBlocks(
        last - first, [&](int64_t i) { return IndexedHash{&index_, ids.hashes[first + i]}; },
        [&](int64_t, uint32_t slot) { PrefetchToWrite(line(slot)); },
        [&](int64_t i, uint32_t guess) {
          const int64_t u = first + i;
          const uint32_t slot = index_.Find(
              ids.hashes[u], guess, [&](uint32_t s) { return line(s)->key == ids.keys[u]; });
          (*slots)[u] = slot;
          if (slot == Index::kNone) return;
          Line* found = line(slot);
          found->score = eviction_.Used(found->score);
          ++found->holds;
          ++lines;
          full += found->has(Line::kFull);
        });
    num_lines.fetch_add(lines, std::memory_order_relaxed);
    num_full.fetch_add(full, std::memory_order_relaxed);
  });
  return {num_lines, num_full};
}

uint32_t Store::Make(int64_t key, uint64_t hash, int uses) {
  const uint32_t slot = lines_.Allocate();
  if (slot >= known_scores_.size()) known_scores_.resize(slot + 1, kNotResident);
  Line* made = line(slot);
  *made = Line{};
  made->key = key;
  made->base = -1;
  made->score = eviction_.New(uses);
  made->record = made->gradients = made->dirty_at = Line::kNone;
  made->holds = 1;
  made->shard = static_cast<uint16_t>(ShardOfHash(hash, num_shards_));
  index_.Insert(hash, slot, [&](uint32_t s) { return HashKey(line(s)->key); });
  return slot;
}

bool Store::Unhold(uint32_t slot) {
  Line* held = line(slot);
  if (--held->holds > 0) return false;
  if (!held->has(Line::kResident)) return true;
  if (held->has(Line::kPassedBy)) known_scores_[slot] = KnownScore(*held);
  held->clear(Line::kPassedBy);
  eviction_.LineMayGo();
  return false;
}

void Store::Free(uint32_t slot) {
  Line* freed = line(slot);
  index_.Erase(HashKey(freed->key), slot);
  freed->flags = 0;
  freed->dirty_at = kNoLine;
  lines_.Free(slot);
}

void Store::InstallFull(uint32_t slot, const float* row, int64_t base) {
  Line* installed = line(slot);
  float* mine = this->row(slot);
  if (installed->pending > 0) {
    static thread_local std::vector<float> old_row;
    old_row.assign(mine, mine + row_dim_);
    std::memcpy(mine, row, sizeof(float) * row_dim_);
    unsent_.MoveOnto(installed, old_row.data(), mine);
  } else {
    std::memcpy(mine, row, sizeof(float) * row_dim_);
  }
  installed->base = base;
  installed->set(Line::kFull | Line::kReadable);
}

void Store::InstallValue(uint32_t slot, const float* value, int64_t base) {
  Line* installed = line(slot);
  std::memcpy(row(slot), value, sizeof(float) * dim_);
  installed->base = base;
  installed->set(Line::kReadable);
}

std::vector<const float*> Store::RowsOf(const std::vector<uint32_t>& slots) const {
  std::vector<const float*> rows(slots.size());
  for (size_t u = 0; u < slots.size(); ++u) rows[u] = row(slots[u]);
  return rows;
}

void Store::Gather(const UniqueIds& ids, const std::vector<uint32_t>& slots,
                   const ParallelFor& parallel_for, float* out) const {
  ids.Gather(RowsOf(slots).data(), dim_, parallel_for, out);
}

int64_t Store::Update(const UniqueIds& ids, const std::vector<uint32_t>& slots,
                      const GradientSums& gradients, float learning_rate,
                      const ParallelFor& parallel_for,
                      const std::function<bool(const Line&)>& is_due, std::vector<uint32_t>* due) {
  const int64_t n = static_cast<int64_t>(slots.size());
  // For all, so that no look at the lines has to come before their update.
  unsent_.Reserve(n);
  if (const size_t most = dirty_.size() + n; most > dirty_.capacity()) dirty_.reserve(2 * most);

  std::atomic<int64_t> updates{0};
  std::vector<char> now_due(n), put_off(n);
  // visit(i, u) for a range of i, with the line of u and its gradient fetched.
  const auto for_each = [&](int64_t count, const auto& u_of, const auto& visit) {
    parallel_for(count, kKeyCycles + 4 * row_dim_, [&](int64_t first, int64_t last) {
      constexpr int64_t kAhead = 8;
      int64_t updated_here = 0;
      std::vector<float> before(drift_ ? dim_ : 0);
      GradientLimit limit(*kit_.optimizer, ids);
      for (int64_t i = first; i < last; ++i) {
        if (i + kAhead < last) {
          Prefetch(slots[u_of(i + kAhead)]);
          gradients.Prefetch(u_of(i + kAhead));
        }
        if (i + kAhead / 2 < last) unsent_.Prefetch(*line(slots[u_of(i + kAhead / 2)]));
        const int64_t u = u_of(i);
        if (!gradients.finite(u) || !visit(u)) continue;
        UpdateLine(slots[u], limit(u, gradients[u], row(slots[u])), learning_rate, before.data());
        now_due[u] = is_due(*line(slots[u]));
        ++updated_here;
      }
      updates.fetch_add(updated_here, std::memory_order_relaxed);
    });
  };
  for_each(
      n, [](int64_t i) { return i; },
      [&](int64_t u) {
        put_off[u] = Unsent::NeedsRoom(*line(slots[u]));
        return !put_off[u];
      });
  // Memory is handed out by one thread, to the lines that need some: the first update after a push.
  std::vector<int32_t> prepared;
  GradientLimit limit(*kit_.optimizer, ids);
  for (int64_t u = 0; u < n; ++u) {
    if (!put_off[u]) continue;
    prepared.push_back(static_cast<int32_t>(u));
    Line* updated = line(slots[u]);
    if (updated->has(Line::kFull)) {
      unsent_.Prepare(updated);
    } else {
      unsent_.Keep(updated, limit(u, gradients[u], row(slots[u])).values, learning_rate);
    }
    if (updated->pending == 0) MakeDirty(slots[u]);
  }
  for_each(
      static_cast<int64_t>(prepared.size()), [&](int64_t i) { return prepared[i]; },
      [](int64_t) { return true; });
  for (int64_t u = 0; u < n; ++u) {
    if (now_due[u]) due->push_back(slots[u]);
  }
  return updates;
}

// One update of a line that has room for it. before: (dim) scratch where the clock drifts.
void Store::UpdateLine(uint32_t slot, const Gradient& gradient, float learning_rate,
                       float* before) {
  Line* updated = line(slot);
  ++updated->pending;
  uint32_t units = 1;
  if (updated->has(Line::kFull)) {
    float* mine = row(slot);
    if (drift_) std::copy_n(mine, dim_, before);
    unsent_.Update(updated, mine, gradient, learning_rate);
    if (drift_) units = DriftUnits(Distance(mine, before, dim_));
  }
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  updated->units += std::min(units, kMost - updated->units);
}

void Store::MakeDirty(uint32_t slot) {
  line(slot)->dirty_at = static_cast<uint32_t>(dirty_.size());
  dirty_.push_back(slot);
}

void Store::MakeClean(uint32_t slot) {
  Line* cleaned = line(slot);
  if (cleaned->pending == 0) return;
  unsent_.Drop(cleaned);
  cleaned->pending = 0;
  cleaned->units = 0;
  const uint32_t last = dirty_.back();
  dirty_[cleaned->dirty_at] = last;
  line(last)->dirty_at = cleaned->dirty_at;
  dirty_.pop_back();
  cleaned->dirty_at = Line::kNone;
}

}  // namespace het_tf
