#include "ops/core/table.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "ops/core/hash.h"
#include "ops/core/prefetch.h"

namespace het_tf {
namespace {

constexpr size_t kClockOffset = sizeof(int64_t);
constexpr size_t kRowOffset = 2 * sizeof(int64_t);

// Records are packed to 4 bytes, so 8-byte fields are copied, not dereferenced.
int64_t LoadInt64(const char* at) {
  int64_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}
void StoreInt64(char* at, int64_t value) { std::memcpy(at, &value, sizeof(value)); }

int64_t KeyOf(const char* record) { return LoadInt64(record); }
int64_t ClockOf(const char* record) { return LoadInt64(record + kClockOffset); }
void SetClock(char* record, int64_t clock) { StoreInt64(record + kClockOffset, clock); }
float* RowOf(char* record) { return reinterpret_cast<float*>(record + kRowOffset); }
const float* RowOf(const char* record) {
  return reinterpret_cast<const float*>(record + kRowOffset);
}

// A client's numbers may be anything; wrapping is harmless, signed overflow is not.
int64_t WrappingAdd(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
int64_t WrappingSubtract(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

// Cycles that a stripe's share of the rows costs, for splitting work. Measured with perf on the
// workload of benchmarks/local_step.py: a probe is two to three cache misses, in part hidden.
constexpr int64_t kProbeCycles = 200;
int64_t StripeCost(int64_t rows, int64_t floats_a_row) {
  return rows * (kProbeCycles + 2 * floats_a_row) / Table::kNumStripes + 1;
}

}  // namespace

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

int64_t Table::size() const {
  std::shared_lock<std::shared_mutex> contents(contents_);
  int64_t size = 0;
  for (const auto& stripe : stripes_) {
    std::shared_lock<std::shared_mutex> lock(stripe->mutex);
    size += stripe->index.size();
  }
  return size;
}

int64_t Table::memory_bytes() const {
  std::shared_lock<std::shared_mutex> contents(contents_);
  int64_t bytes = 0;
  for (const auto& stripe : stripes_) {
    std::shared_lock<std::shared_mutex> lock(stripe->mutex);
    bytes += stripe->index.bytes() + stripe->records.bytes();
  }
  return bytes;
}

uint32_t Table::Find(const Stripe& stripe, uint64_t hash, int64_t key) const {
  return stripe.index.Find(hash,
                           [&](uint32_t slot) { return KeyOf(stripe.records[slot]) == key; });
}

char* Table::FindOrInsert(Stripe* stripe, uint64_t hash, int64_t key) {
  uint32_t slot = Find(*stripe, hash, key);
  if (slot != Index::kNone) return stripe->records[slot];
  slot = stripe->records.Allocate();
  char* record = stripe->records[slot];
  StoreInt64(record, key);
  SetClock(record, 0);
  kit_.InitRow(key, RowOf(record));
  stripe->index.Insert(hash, slot,
                       [&](uint32_t s) { return HashKey(KeyOf(stripe->records[s])); });
  return record;
}

Status Table::Lookup(const Batch& batch, const ParallelFor& parallel_for, float* out) const {
  std::shared_lock<std::shared_mutex> contents(contents_);
  const Groups groups(batch.num_keys(), kNumStripes, [&](int64_t u) {
    return StripeOfHash(batch.hashes[u], kNumStripes);
  });
  // All stripes at once, since rows are read in the order of the ids. Nobody locks two stripes in
  // another order, so this cannot deadlock.
  std::vector<std::shared_lock<std::shared_mutex>> locks;
  locks.reserve(kNumStripes);
  for (const auto& stripe : stripes_) locks.emplace_back(stripe->mutex);
  std::vector<const float*> rows(batch.num_keys(), nullptr);
  parallel_for(kNumStripes, StripeCost(batch.num_keys(), 0), [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const Stripe& stripe = *stripes_[s];
      const int32_t* keys = groups.order.data() + groups.begin[s];
      VisitAhead(
          stripe.index, groups.size(s), [&](int64_t i) { return batch.hashes[keys[i]]; },
          [&](uint32_t slot) {
            Prefetch(stripe.records[slot], kRowOffset + sizeof(float) * dim());
          },
          [&](int64_t i) {
            const int32_t u = keys[i];
            const uint32_t slot = Find(stripe, batch.hashes[u], batch.keys[u]);
            if (slot != Index::kNone) rows[u] = RowOf(stripe.records[slot]);
          });
    }
  });
  std::vector<int64_t> unknown;
  for (int64_t u = 0; u < batch.num_keys(); ++u) {
    if (rows[u] == nullptr) unknown.push_back(u);
  }
  std::vector<float> initial(unknown.size() * dim());
  parallel_for(unknown.size(), 10 * dim(), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      kit_.initializer.Fill(batch.keys[unknown[i]], dim(), &initial[i * dim()]);
      rows[unknown[i]] = &initial[i * dim()];
    }
  });
  batch.Gather(rows.data(), dim(), parallel_for, out);
  return Status();
}

Status Table::Apply(const Batch& batch, const float* gradients, float learning_rate,
                    Nonfinite nonfinite, const ParallelFor& parallel_for) {
  HET_RETURN_IF_ERROR(kit_.optimizer->CheckLearningRate(learning_rate));
  const GradientSums sums(batch, gradients, dim(), parallel_for);
  if (sums.num_nonfinite() > 0) {
    if (nonfinite == Nonfinite::kError) {
      return InvalidArgument("gradients hold NaN or infinity for ", sums.num_nonfinite(), " of ",
                             batch.num_keys(), " keys; no row was updated");
    }
    counters_.Add(TableCounter::kNonfiniteSkipped, sums.num_nonfinite());
  }
  std::shared_lock<std::shared_mutex> contents(contents_);
  const Groups groups(batch.num_keys(), kNumStripes, [&](int64_t u) {
    return StripeOfHash(batch.hashes[u], kNumStripes);
  });
  const int64_t cost = StripeCost(batch.num_keys(), 2 * row_dim_);
  parallel_for(kNumStripes, cost, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      Stripe& stripe = *stripes_[s];
      const int32_t* keys = groups.order.data() + groups.begin[s];
      std::unique_lock<std::shared_mutex> lock(stripe.mutex);
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

Status Table::CheckRequest(const RequestView& request) const {
  const RequestHeader& header = request.header;
  if (static_cast<int64_t>(header.dim) != dim() ||
      static_cast<int64_t>(header.slot_dim) != slot_dim()) {
    return InvalidArgument("request is of a cache with dim = ", header.dim,
                           ", slot_dim = ", header.slot_dim, "; this table has dim = ", dim(),
                           ", slot_dim = ", slot_dim(), " (optimizer '", config_.optimizer, "')");
  }
  if (static_cast<int64_t>(header.shard) != shard_) {
    return InvalidArgument("request is for shard ", header.shard, ", this is shard ", shard_);
  }
  for (const PushView& push : request.pushes) {
    if (push.sequence == 0) return InvalidArgument("request has a push with sequence 0");
    HET_RETURN_IF_ERROR(kit_.optimizer->CheckLearningRate(push.learning_rate));
    for (int64_t r = 0; r < push.num_rows; ++r) {
      const PushRow& row = push.rows[r];
      HET_RETURN_IF_ERROR(CheckOwned("request", row.key, HashKey(row.key)));
      if (row.clock < 1) {
        return InvalidArgument("request pushes key ", row.key, " with clock ", row.clock);
      }
    }
  }
  for (int64_t q = 0; q < request.num_queries(); ++q) {
    const int64_t key = request.query_key(q);
    HET_RETURN_IF_ERROR(CheckOwned("request", key, HashKey(key)));
  }
  return Status();
}

Table::Session* Table::SessionOf(uint64_t cache_id) {
  std::lock_guard<std::mutex> lock(sessions_mutex_);
  auto& session = sessions_[cache_id];
  if (!session) session = std::make_unique<Session>();
  return session.get();
}

Status Table::Sync(const char* bytes, size_t size, const ParallelFor& parallel_for,
                   const std::function<char*(size_t)>& allocate) {
  RequestView request;
  HET_RETURN_IF_ERROR(RequestView::Parse(bytes, size, &request));
  HET_RETURN_IF_ERROR(CheckRequest(request));
  counters_.Add(TableCounter::kRequests, 1);
  counters_.Add(TableCounter::kBytesReceived, size);

  std::shared_lock<std::shared_mutex> contents(contents_);
  // The cache knows rows that are no longer here: what it pushes belongs to them, and what it
  // holds must be replaced.
  const bool restarted =
      request.header.incarnation != 0 && request.header.incarnation != incarnation_;
  uint64_t acknowledged = 0;
  if (!request.pushes.empty() && !restarted) {
    Session* session = SessionOf(request.header.cache_id);
    // Held over the merge, so that a repeat is not answered before the first is merged.
    std::lock_guard<std::mutex> lock(session->mutex);
    for (const PushView& push : request.pushes) {
      if (push.sequence <= session->sequence) {
        counters_.Add(TableCounter::kPushesRepeated, 1);
        continue;
      }
      Merge(push, request.header.flags & kServerApplies, parallel_for);
      session->sequence = push.sequence;
    }
    acknowledged = session->sequence;
  }
  Answer(request, restarted, acknowledged, parallel_for, allocate);
  return Status();
}

void Table::Merge(const PushView& push, bool server_applies, const ParallelFor& parallel_for) {
  const int width = server_applies ? dim() : row_dim_;
  std::vector<uint64_t> hashes(push.num_rows);
  for (int64_t r = 0; r < push.num_rows; ++r) hashes[r] = HashKey(push.rows[r].key);
  const Groups groups(push.num_rows, kNumStripes,
                      [&](int64_t r) { return StripeOfHash(hashes[r], kNumStripes); });
  parallel_for(kNumStripes, StripeCost(push.num_rows, row_dim_), [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      Stripe& stripe = *stripes_[s];
      const int32_t* rows = groups.order.data() + groups.begin[s];
      std::unique_lock<std::shared_mutex> lock(stripe.mutex);
      VisitAhead(
          stripe.index, groups.size(s), [&](int64_t i) { return hashes[rows[i]]; },
          [&](uint32_t slot) { Prefetch(stripe.records[slot], record_bytes_); },
          [&](int64_t i) {
            const PushRow& push_row = push.rows[rows[i]];
            const float* data = push.data + static_cast<int64_t>(rows[i]) * width;
            char* record = FindOrInsert(&stripe, hashes[rows[i]], push_row.key);
            if (server_applies) {
              kit_.optimizer->Update(RowOf(record), data, push.learning_rate);
            } else {
              kit_.optimizer->Merge(RowOf(record), data, push.learning_rate);
            }
            const int64_t clock = ClockOf(record);
            if (config_.clock == ClockRule::kCount || server_applies) {
              SetClock(record, WrappingAdd(clock, push_row.clock));
            } else {
              SetClock(record, std::max(clock, push_row.clock));
            }
          });
    }
  });
  counters_.Add(TableCounter::kPushesMerged, 1);
  counters_.Add(TableCounter::kRowsMerged, push.num_rows);
}

void Table::Answer(const RequestView& request, bool restarted, uint64_t acknowledged,
                   const ParallelFor& parallel_for,
                   const std::function<char*(size_t)>& allocate) {
  const RequestHeader& header = request.header;
  const int64_t num_queries = request.num_queries();
  const int width = (header.flags & kServerApplies) ? dim() : row_dim_;
  std::vector<uint64_t> hashes(num_queries);
  for (int64_t q = 0; q < num_queries; ++q) hashes[q] = HashKey(request.query_key(q));
  const Groups groups(num_queries, kNumStripes,
                      [&](int64_t q) { return StripeOfHash(hashes[q], kNumStripes); });

  // First which rows go, then, once the reply has its memory, the rows themselves. Records never
  // move and are not freed while contents_ is held, so a pointer to one stays good in between.
  std::vector<const char*> found(num_queries, nullptr);
  parallel_for(kNumStripes, StripeCost(num_queries, 0),
               [&](int64_t first, int64_t last) {
                 for (int64_t s = first; s < last; ++s) {
                   const Stripe& stripe = *stripes_[s];
                   const int32_t* queries = groups.order.data() + groups.begin[s];
                   std::shared_lock<std::shared_mutex> lock(stripe.mutex);
                   VisitAhead(
                       stripe.index, groups.size(s),
                       [&](int64_t i) { return hashes[queries[i]]; },
                       [&](uint32_t slot) { __builtin_prefetch(stripe.records[slot]); },
                       [&](int64_t i) {
                         const int32_t q = queries[i];
                         const uint32_t slot = Find(stripe, hashes[q], request.query_key(q));
                         if (slot == Index::kNone) return;
                         const char* record = stripe.records[slot];
                         if (q < header.num_checks && !restarted) {
                           if (header.read_bound == kUnbounded) return;
                           const int64_t missed =
                               WrappingSubtract(ClockOf(record), request.checks[q].base);
                           if (missed <= header.read_bound) return;
                         }
                         found[q] = record;
                       });
                 }
               });

  std::vector<int64_t> row_of(num_queries);
  int64_t num_rows = 0;
  for (int64_t q = 0; q < num_queries; ++q) {
    row_of[q] = num_rows;
    num_rows += found[q] != nullptr;
  }
  const size_t bytes = sizeof(ReplyHeader) + num_rows * (sizeof(ReplyRow) + sizeof(float) * width);
  char* reply = allocate(bytes);
  const uint16_t flags = restarted ? kRestarted : 0;
  const ReplyHeader reply_header = {kReplyMagic,  kMessageVersion, flags,    incarnation_,
                                    acknowledged, num_queries,     num_rows, width};
  std::memcpy(reply, &reply_header, sizeof(reply_header));
  auto* rows = reinterpret_cast<ReplyRow*>(reply + sizeof(ReplyHeader));
  auto* data = reinterpret_cast<float*>(rows + num_rows);
  parallel_for(kNumStripes, StripeCost(num_rows, width),
               [&](int64_t first, int64_t last) {
                 for (int64_t s = first; s < last; ++s) {
                   std::shared_lock<std::shared_mutex> lock(stripes_[s]->mutex);
                   for (int32_t i = groups.begin[s]; i < groups.begin[s + 1]; ++i) {
                     const int32_t q = groups.order[i];
                     if (found[q] == nullptr) continue;
                     rows[row_of[q]] = {ClockOf(found[q]), q};
                     std::memcpy(data + row_of[q] * width, RowOf(found[q]), sizeof(float) * width);
                   }
                 }
               });
  counters_.Add(TableCounter::kRowsChecked, header.num_checks);
  counters_.Add(TableCounter::kRowsSent, num_rows);
  counters_.Add(TableCounter::kBytesSent, bytes);
}

Status Table::Export(int first, int last, const std::function<Rows(int64_t)>& allocate) const {
  if (first < 0 || last < first || last > kNumStripes) {
    return InvalidArgument("stripes = [", first, ", ", last, ") must lie in [0, ", kNumStripes,
                           ")");
  }
  std::unique_lock<std::shared_mutex> contents(contents_);
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
      std::memcpy(rows.slots + r * slot_dim(), RowOf(record) + dim(), sizeof(float) * slot_dim());
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
  std::unique_lock<std::shared_mutex> contents(contents_);
  for (int64_t r = 0; r < num_rows; ++r) {
    const uint64_t hash = HashKey(rows.keys[r]);
    Stripe& stripe = *stripes_[StripeOfHash(hash, kNumStripes)];
    char* record = FindOrInsert(&stripe, hash, rows.keys[r]);
    SetClock(record, rows.clocks[r]);
    std::memcpy(RowOf(record), rows.values + r * dim(), sizeof(float) * dim());
    std::memcpy(RowOf(record) + dim(), rows.slots + r * slot_dim(), sizeof(float) * slot_dim());
  }
  NewIncarnation();
  return Status();
}

void Table::Clear() {
  std::unique_lock<std::shared_mutex> contents(contents_);
  for (const auto& stripe : stripes_) {
    stripe->index.Clear();
    stripe->records.Clear();
  }
  arena_.Clear();
  NewIncarnation();
}

}  // namespace het_tf
