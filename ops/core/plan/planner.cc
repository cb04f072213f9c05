#include "ops/core/plan/planner.h"

#include <algorithm>
#include <array>

#include "ops/core/memory/hash.h"
#include "ops/core/memory/prefetch.h"

namespace het_tf {
namespace {

// For each byte, its bits in the lowest bits of eight bytes: hits of eight workers are added at
// once.
constexpr int kLanes = 8;
constexpr int64_t kMostInLane = 255;
std::array<uint64_t, 256> SpreadBits() {
  std::array<uint64_t, 256> spread{};
  for (uint64_t bits = 0; bits < 256; ++bits) {
    for (int lane = 0; lane < kLanes; ++lane) spread[bits] |= (bits >> lane & 1) << (8 * lane);
  }
  return spread;
}

uint64_t HashOf(const Planner::TableKey& key) {
  return HashKey(key.key) + static_cast<uint64_t>(key.table) * 0x9e3779b97f4a7c15ULL;
}

}  // namespace

Status Planner::Check(const PlanConfig& config) {
  if (config.num_workers < 1 || config.num_workers > kMaxWorkers) {
    return InvalidArgument("num_workers = ", config.num_workers, " must be in [1, ", kMaxWorkers,
                           "]");
  }
  if (config.capacity < 0) {
    return InvalidArgument("capacity = ", config.capacity, " must not be negative");
  }
  return Status();
}

Planner::Planner(const PlanConfig& config)
    : config_(config),
      uses_(config.num_workers),
      num_cached_(config.num_workers),
      due_(config.num_workers) {}

int64_t Planner::memory_bytes() const {
  size_t uses = 0;
  for (const auto& of_worker : uses_) uses += of_worker.size() * sizeof(Use);
  return index_.bytes() + static_cast<int64_t>(rows_.capacity() * sizeof(Row) +
                                               used_at_.capacity() * sizeof(uint32_t) + uses);
}

void Planner::Plan(const Keys& keys, const ParallelFor& parallel_for, Step* step) {
  ++now_;
  Find(keys, parallel_for);
  Score(keys, parallel_for);
  Assign(keys, step);
  Advance(keys, step);
}

// The row of each key, or kNone.
void Planner::Find(const Keys& keys, const ParallelFor& parallel_for) {
  const auto columns = static_cast<int64_t>(keys.tables.size());
  found_.resize(keys.num_examples * columns);
  constexpr int64_t kCycles = 60;
  parallel_for(keys.num_examples, kCycles * columns, [&](int64_t first, int64_t last) {
    const auto key_at = [&](int64_t i) {
      return TableKey{keys.tables[i % columns], keys.keys[first * columns + i]};
    };
    VisitInBlocks((last - first) * columns,
                  [&](int64_t i) { return IndexedHash{&index_, HashOf(key_at(i))}; },
                  [&](int64_t, uint32_t row) { Prefetch(&rows_[row]); },
                  [&](int64_t i, uint32_t guess) {
                    const TableKey key = key_at(i);
                    found_[first * columns + i] = index_.Find(
                        HashOf(key), guess, [&](uint32_t row) { return rows_[row].key == key; });
                  });
  });
}

// How many rows of each example each worker has.
void Planner::Score(const Keys& keys, const ParallelFor& parallel_for) {
  static const std::array<uint64_t, 256> spread = SpreadBits();
  const int num_workers = config_.num_workers;
  scores_.assign(keys.num_examples * num_workers, 0);
  const auto cost = static_cast<int64_t>(keys.scored.size()) * 4;
  parallel_for(keys.num_examples, cost, [&](int64_t first, int64_t last) {
    for (int64_t e = first; e < last; ++e) {
      const uint32_t* rows = found_.data() + e * static_cast<int64_t>(keys.tables.size());
      for (int group = 0; group < num_workers; group += kLanes) {
        const int lanes = std::min(kLanes, num_workers - group);
        int32_t* scores = scores_.data() + e * num_workers + group;
        uint64_t sums = 0;
        int64_t in_lane = 0;
        const auto take = [&] {
          for (int lane = 0; lane < lanes; ++lane) scores[lane] += sums >> (8 * lane) & 0xff;
          sums = in_lane = 0;
        };
        for (const int32_t c : keys.scored) {
          if (rows[c] == Index::kNone) continue;
          sums += spread[HitsOf(rows_[rows[c]]) >> group & 0xff];
          if (++in_lane == kMostInLane) take();
        }
        take();
      }
    }
  });
}

// In the order of the examples: the worker with the highest score that has room; of several the
// first after the one that got the example before.
void Planner::Assign(const Keys& keys, Step* step) {
  const int num_workers = config_.num_workers;
  const int64_t num_examples = keys.num_examples;
  const auto columns = static_cast<int64_t>(keys.tables.size());
  std::vector<int64_t> room(num_workers);
  for (int w = 0; w < num_workers; ++w) {
    room[w] = num_examples / num_workers + (w < num_examples % num_workers ? 1 : 0);
  }
  step->worker_of.resize(num_examples);
  step->num_keys = num_examples * columns;
  step->num_hits = 0;
  for (int64_t e = 0; e < num_examples; ++e) {
    const int32_t* scores = scores_.data() + e * num_workers;
    int best = kNobody;
    for (int i = 0; i < num_workers; ++i) {
      const int w = rotation_ + i < num_workers ? rotation_ + i : rotation_ + i - num_workers;
      if (room[w] > 0 && (best == kNobody || scores[w] > scores[best])) best = w;
    }
    --room[best];
    step->worker_of[e] = best;
    for (int64_t i = e * columns; i < (e + 1) * columns; ++i) {
      if (found_[i] != Index::kNone) step->num_hits += HitsOf(rows_[found_[i]]) >> best & 1;
    }
    rotation_ = best + 1 == num_workers ? 0 : best + 1;
  }
}

// The shadows after the step, and what has to be pushed at the end of the step before.
void Planner::Advance(const Keys& keys, Step* step) {
  step->due = std::move(due_);
  due_.assign(config_.num_workers, {});
  trained_.clear();
  const auto columns = static_cast<int64_t>(keys.tables.size());
  for (int64_t e = 0; e < keys.num_examples; ++e) {
    const int worker = step->worker_of[e];
    const uint64_t bit = uint64_t{1} << worker;
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t i = e * columns + c;
      const uint32_t r =
          found_[i] != Index::kNone ? found_[i] : FindOrMake({keys.tables[c], keys.keys[i]});
      Row& row = rows_[r];
      if (row.trained_at != now_) {
        row.trained_at = now_;
        row.trainers = 0;
        trained_.push_back(r);
      }
      if ((row.trainers & bit) != 0) continue;
      row.trainers |= bit;
      if (row.owner != kNobody && row.owner != worker) {
        step->due[row.owner].push_back(row.key);
        row.owner = kNobody;
      }
      Cache(r, worker);
    }
  }
  for (const uint32_t r : trained_) {
    Row& row = rows_[r];
    if ((row.trainers & (row.trainers - 1)) == 0) {
      row.fresh = row.trainers;
      row.owner = __builtin_ctzll(row.trainers);
      continue;
    }
    row.fresh = 0;
    for (uint64_t trainers = row.trainers; trainers != 0; trainers &= trainers - 1) {
      due_[__builtin_ctzll(trainers)].push_back(row.key);
    }
  }
  if (config_.capacity == 0) return;
  for (int worker = 0; worker < config_.num_workers; ++worker) Evict(worker);
}

uint32_t Planner::FindOrMake(const TableKey& key) {
  const uint64_t hash = HashOf(key);
  uint32_t r = index_.Find(hash, [&](uint32_t row) { return rows_[row].key == key; });
  if (r != Index::kNone) return r;
  if (free_.empty()) {
    r = static_cast<uint32_t>(rows_.size());
    rows_.emplace_back();
    used_at_.resize(used_at_.size() + config_.num_workers);
  } else {
    r = free_.back();
    free_.pop_back();
    rows_[r] = Row();
  }
  rows_[r].key = key;
  index_.Insert(hash, r, [&](uint32_t row) { return HashOf(rows_[row].key); });
  return r;
}

void Planner::Cache(uint32_t row, int worker) {
  uint32_t& used_at = this->used_at(row, worker);
  if (used_at == 0) {
    rows_[row].cached |= uint64_t{1} << worker;
    ++num_cached_[worker];
  }
  used_at = now_;
  if (config_.capacity != 0) uses_[worker].push_back({row, now_});
}

// Rows leave that were not used for the longest time.
void Planner::Evict(int worker) {
  std::deque<Use>& uses = uses_[worker];
  const uint64_t bit = uint64_t{1} << worker;
  while (num_cached_[worker] > config_.capacity) {
    const Use use = uses.front();
    uses.pop_front();
    if (used_at(use.row, worker) != use.step) continue;  // used since
    Row& row = rows_[use.row];
    used_at(use.row, worker) = 0;
    --num_cached_[worker];
    row.cached &= ~bit;
    row.fresh &= ~bit;
    if (row.owner == worker) {
      // The real cache may keep the row, and nothing is known here of who reads it next.
      due_[worker].push_back(row.key);
      row.owner = kNobody;
    }
    if (row.cached != 0) continue;
    index_.Erase(HashOf(row.key), use.row);
    free_.push_back(use.row);
  }
  if (static_cast<int64_t>(uses.size()) <= 4 * config_.capacity) return;
  uses.erase(std::remove_if(uses.begin(), uses.end(),
                            [&](const Use& use) { return used_at(use.row, worker) != use.step; }),
             uses.end());
}

}  // namespace het_tf
