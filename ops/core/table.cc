#include "ops/core/table.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "ops/core/hash.h"
#include "ops/core/prefetch.h"
#include "ops/core/table_record.h"

namespace het_tf {
uint64_t RandomId() {
  std::random_device device;
  uint64_t id = 0;
  while (id == 0) id = (uint64_t{device()} << 32) | device();
  return id;
}

Status Table::Create(const RowConfig& config, int shard, std::unique_ptr<Table>* table) {
  RowKit kit;
  HET_RETURN_IF_ERROR(RowKit::Create(config, &kit));
  if (shard < 0 || shard >= config.num_shards) {
    return InvalidArgument("shard = ", shard, " must be in [0, num_shards = ", config.num_shards,
                           ")");
  }
  table->reset(new Table(config, shard, std::move(kit)));
  return Status();
}

Table::Table(const RowConfig& config, int shard, RowKit kit)
    : config_(config),
      shard_(shard),
      kit_(std::move(kit)),
      row_dim_(kit_.optimizer->row_dim()),
      record_bytes_(kRowOffset + sizeof(float) * row_dim_) {
  for (int s = 0; s < kNumStripes; ++s) {
    stripes_.push_back(std::make_unique<Stripe>(record_bytes_, &arena_));
  }
  NewIncarnation();
}

void Table::NewIncarnation() { incarnation_ = RandomId(); }

uint64_t Table::incarnation() const {
  SharedLock contents(contents_);
  return incarnation_;
}

int64_t Table::size() const {
  SharedLock contents(contents_);
  int64_t size = 0;
  for (const auto& stripe : stripes_) {
    SharedLock lock(stripe->mutex);
    size += stripe->index.size();
  }
  return size;
}

int64_t Table::memory_bytes() const {
  SharedLock contents(contents_);
  int64_t bytes = 0;
  for (const auto& stripe : stripes_) {
    SharedLock lock(stripe->mutex);
    bytes += stripe->index.bytes() + stripe->records.bytes();
  }
  return bytes;
}

uint32_t Table::Find(const Stripe& stripe, uint64_t hash, int64_t key) const {
  return stripe.index.Find(hash, [&](uint32_t slot) { return KeyOf(stripe.records[slot]) == key; });
}

char* Table::FindOrInsert(Stripe* stripe, uint64_t hash, int64_t key) {
  uint32_t slot = Find(*stripe, hash, key);
  if (slot != Index::kNone) return stripe->records[slot];
  slot = stripe->records.Allocate();
  char* record = stripe->records[slot];
  StoreInt64(record, key);
  SetClock(record, 0);
  kit_.InitRow(key, RowOf(record));
  stripe->index.Insert(hash, slot, [&](uint32_t s) { return HashKey(KeyOf(stripe->records[s])); });
  return record;
}

Status Table::Lookup(const Batch& batch, const ParallelFor& parallel_for, float* out) const {
  SharedLock contents(contents_);
  const Groups groups(batch.num_keys(), kNumStripes,
                      [&](int64_t u) { return StripeOfHash(batch.hashes[u], kNumStripes); });
  const size_t row_bytes = sizeof(float) * dim();
  // Nothing may wait for the pool with a stripe locked: its threads may wait for that lock.
  const int64_t cost = StripeCost(batch.num_ids(), dim());
  parallel_for(kNumStripes, cost, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const Stripe& stripe = *stripes_[s];
      const int32_t* keys = groups.order.data() + groups.begin[s];
      SharedLock lock(stripe.mutex);
      VisitAhead(
          stripe.index, groups.size(s), [&](int64_t i) { return batch.hashes[keys[i]]; },
          [&](uint32_t slot) { Prefetch(stripe.records[slot], kRowOffset + row_bytes); },
          [&](int64_t i) {
            const int32_t u = keys[i];
            const int32_t* place = &batch.positions[batch.begin[u]];
            const int32_t* end = batch.positions.data() + batch.begin[u + 1];
            float* copy = out + static_cast<int64_t>(*place) * dim();
            const uint32_t slot = Find(stripe, batch.hashes[u], batch.keys[u]);
            if (slot == Index::kNone) {
              kit_.initializer.Fill(batch.keys[u], dim(), copy);
            } else {
              std::memcpy(copy, RowOf(stripe.records[slot]), row_bytes);
            }
            while (++place != end) {
              std::memcpy(out + static_cast<int64_t>(*place) * dim(), copy, row_bytes);
            }
          });
    }
  });
  return Status();
}

Status Table::Apply(const Batch& batch, const float* gradients, float learning_rate,
                    Nonfinite nonfinite, const ParallelFor& parallel_for) {
  HET_RETURN_IF_ERROR(kit_.optimizer->CheckLearningRate(learning_rate));
  const GradientSums sums(batch, gradients, dim(), parallel_for);
  if (sums.num_nonfinite() > 0) {
    if (nonfinite == Nonfinite::kError) {
      return InvalidArgument("gradients, or their squares, hold NaN or infinity for ",
                             sums.num_nonfinite(), " of ", batch.num_keys(),
                             " keys; no row was updated");
    }
    counters_.Add(TableCounter::kNonfiniteSkipped, sums.num_nonfinite());
  }
  SharedLock contents(contents_);
  const Groups groups(batch.num_keys(), kNumStripes,
                      [&](int64_t u) { return StripeOfHash(batch.hashes[u], kNumStripes); });
  const int64_t cost = StripeCost(batch.num_keys(), 2 * row_dim_);
  parallel_for(kNumStripes, cost, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      Stripe& stripe = *stripes_[s];
      const int32_t* keys = groups.order.data() + groups.begin[s];
      UniqueLock lock(stripe.mutex);
      VisitAhead(
          stripe.index, groups.size(s), [&](int64_t i) { return batch.hashes[keys[i]]; },
          [&](uint32_t slot) { Prefetch(stripe.records[slot], record_bytes_); },
          [&](int64_t i) {
            const int32_t u = keys[i];
            if (sums[u] == nullptr) return;
            char* record = FindOrInsert(&stripe, batch.hashes[u], batch.keys[u]);
            kit_.optimizer->Update(RowOf(record), sums[u], learning_rate);
            SetClock(record, ClockOf(record) + 1);
          });
    }
  });
  return Status();
}

Status Table::CheckOwned(const char* what, int64_t key, uint64_t hash) const {
  const int owner = ShardOfHash(hash, config_.num_shards);
  if (owner == shard_) return Status();
  return InvalidArgument(what, " holds key ", key, " of shard ", owner, ", this is shard ", shard_,
                         " of ", config_.num_shards);
}

Status Table::Export(int first, int last, const std::function<Rows(int64_t)>& allocate) const {
  if (first < 0 || last < first || last > kNumStripes) {
    return InvalidArgument("stripes = [", first, ", ", last, ") must lie in [0, ", kNumStripes,
                           ")");
  }
  UniqueLock contents(contents_);
  int64_t num_rows = 0;
  for (int s = first; s < last; ++s) num_rows += stripes_[s]->index.size();
  const Rows rows = allocate(num_rows);
  int64_t r = 0;
  for (int s = first; s < last; ++s) {
    stripes_[s]->index.ForEach([&](uint32_t slot) {
      const char* record = stripes_[s]->records[slot];
      rows.keys[r] = KeyOf(record);
      rows.clocks[r] = ClockOf(record);
      std::memcpy(rows.values + r * dim(), RowOf(record), sizeof(float) * dim());
      std::copy_n(RowOf(record) + dim(), slot_dim(), rows.slots + r * slot_dim());
      ++r;
    });
  }
  return Status();
}

Status Table::Import(const ConstRows& rows, int64_t num_rows) {
  for (int64_t r = 0; r < num_rows; ++r) {
    HET_RETURN_IF_ERROR(CheckOwned("keys", rows.keys[r], HashKey(rows.keys[r])));
    if (rows.clocks[r] < 0) {
      return InvalidArgument("clocks holds ", rows.clocks[r], " for key ", rows.keys[r]);
    }
  }
  UniqueLock contents(contents_);
  for (int64_t r = 0; r < num_rows; ++r) {
    const uint64_t hash = HashKey(rows.keys[r]);
    Stripe& stripe = *stripes_[StripeOfHash(hash, kNumStripes)];
    char* record = FindOrInsert(&stripe, hash, rows.keys[r]);
    SetClock(record, rows.clocks[r]);
    std::memcpy(RowOf(record), rows.values + r * dim(), sizeof(float) * dim());
    std::copy_n(rows.slots + r * slot_dim(), slot_dim(), RowOf(record) + dim());
  }
  NewIncarnation();
  return Status();
}

void Table::Clear() {
  UniqueLock contents(contents_);
  for (const auto& stripe : stripes_) {
    stripe->index.Clear();
    stripe->records.Clear();
  }
  arena_.Clear();
  NewIncarnation();
}

}  // namespace het_tf
