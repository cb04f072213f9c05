#include "ops/core/cache.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "ops/core/hash.h"
#include "ops/core/prefetch.h"

namespace het_tf {
namespace {

// Cycles a key costs, for splitting work: see kProbeCycles in table.cc.
constexpr int64_t kProbeCycles = 150;

size_t RoundUpTo8(size_t bytes) { return (bytes + 7) & ~size_t{7}; }

}  // namespace

Ticket::Ticket(std::shared_ptr<Cache> cache, std::shared_ptr<const Batch> batch)
    : cache_(std::move(cache)), batch_(std::move(batch)), requests_(cache_->num_shards()) {}

Ticket::~Ticket() {
  cache_->Release(slots_);
  cache_->Release(extra_);
}

Status Cache::Create(const CacheConfig& config, std::shared_ptr<Cache>* cache) {
  RowKit kit;
  HET_RETURN_IF_ERROR(RowKit::Create(config.rows, &kit));
  if (config.rows.num_shards > 0xffff) {
    return InvalidArgument("num_shards = ", config.rows.num_shards, " must be at most 65535");
  }
  if (config.capacity < 1 || config.capacity > 0x7fffffff) {
    return InvalidArgument("capacity = ", config.capacity, " rows must be in [1, 2147483647]");
  }
  if (config.read_bound < kUnbounded) {
    return InvalidArgument("read_bound = ", config.read_bound,
                           " must not be negative (-1: unbounded)");
  }
  if (config.write_bound < kUnbounded) {
    return InvalidArgument("write_bound = ", config.write_bound,
                           " must not be negative (-1: unbounded)");
  }
  cache->reset(new Cache(config, std::move(kit)));
  return Status();
}

Cache::Cache(const CacheConfig& config, RowKit kit)
    : config_(config),
      kit_(std::move(kit)),
      row_dim_(kit_.optimizer->row_dim()),
      wire_width_(config.server_applies ? kit_.optimizer->dim() : row_dim_),
      id_(RandomId()),
      lines_(RoundUpTo8(sizeof(Line) + 2 * sizeof(float) * row_dim_), &arena_),
      eviction_(config.policy, config.capacity),
      shards_(config.rows.num_shards) {}

// ---- Lines ----

void Cache::Release(const std::vector<uint32_t>& slots) {
  std::lock_guard<std::mutex> lock(released_mutex_);
  released_.insert(released_.end(), slots.begin(), slots.end());
}

void Cache::TakeReleased() {
  std::vector<uint32_t> released;
  {
    std::lock_guard<std::mutex> lock(released_mutex_);
    released.swap(released_);
  }
  for (const uint32_t slot : released) Unhold(slot);
}

uint32_t Cache::MakeLine(int64_t key, uint64_t hash) {
  const uint32_t slot = lines_.Allocate();
  Line* line = LineAt(slot);
  *line = {key, -1, 0, 0, 0, 0, static_cast<uint16_t>(ShardOfHash(hash, num_shards())), kResident};
  std::memset(DeltaAt(slot), 0, sizeof(float) * row_dim_);
  index_.Insert(hash, slot, [&](uint32_t s) { return HashKey(LineAt(s)->key); });
  return slot;
}

void Cache::RemoveFromIndex(uint32_t slot) {
  Line* line = LineAt(slot);
  index_.Erase(HashKey(line->key), slot);
  line->flags &= ~kResident;
  // A line with unsent updates lives on in the outbox until they are cut.
  if (line->pending > 0) {
    Enqueue(slot);
  } else {
    line->flags = 0;
    lines_.Free(slot);
  }
}

void Cache::Unhold(uint32_t slot) {
  Line* line = LineAt(slot);
  if (--line->holds > 0) return;
  if (config_.server_applies || !(line->flags & kFilled)) RemoveFromIndex(slot);
}

void Cache::Evict(uint32_t slot) {
  counters_.Add(CacheCounter::kEvictions, 1);
  if (LineAt(slot)->pending > 0) counters_.Add(CacheCounter::kDirtyEvictions, 1);
  RemoveFromIndex(slot);
}

void Cache::Trim() {
  const auto may_go = [](const Line& line) { return (line.flags & kResident) && line.holds == 0; };
  eviction_.Run(
      index_.size() - config_.capacity,
      [&](const auto& visit) {
        for (uint32_t slot = 0; slot < lines_.end(); ++slot) {
          const Line& line = *LineAt(slot);
          if (may_go(line)) visit(slot, line.score);
        }
      },
      [&](uint32_t slot, double score) {
        const Line& line = *LineAt(slot);
        return may_go(line) && line.score == score;
      },
      [&](uint32_t slot) { Evict(slot); });
}

void Cache::Enqueue(uint32_t slot) {
  Line* line = LineAt(slot);
  if (line->flags & kQueued) return;
  line->flags |= kQueued;
  shards_[line->shard].outbox.push_back(slot);
}

// Back to a line that nothing is known of, its place and its holders kept.
void Cache::Reset(uint32_t slot) {
  Line* line = LineAt(slot);
  line->base = -1;
  line->pending = 0;
  line->sent = 0;
  line->flags = kResident;
  std::memset(DeltaAt(slot), 0, sizeof(float) * row_dim_);
}

void Cache::ForgetShard(int shard) {
  Shard& state = shards_[shard];
  int64_t lost = 0;
  for (const Push& push : state.unacknowledged) {
    for (const int32_t pending : push.pendings) lost += pending;
  }
  state.unacknowledged.clear();
  state.outbox.clear();
  for (uint32_t slot = 0; slot < lines_.end(); ++slot) {
    Line* line = LineAt(slot);
    if (!(line->flags & (kResident | kQueued)) || line->shard != shard) continue;
    lost += line->pending;
    line->pending = 0;
    if (!(line->flags & kResident)) {  // only the outbox had it
      line->flags = 0;
      lines_.Free(slot);
    } else if (line->holds == 0) {
      RemoveFromIndex(slot);
    } else {
      Reset(slot);
    }
  }
  num_pending_ -= lost;
  counters_.Add(CacheCounter::kUpdatesLost, lost);
}

void Cache::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  TakeReleased();
  for (int s = 0; s < num_shards(); ++s) ForgetShard(s);
}

// ---- Lookup ----

void Cache::FindLines(Ticket* ticket, const ParallelFor& parallel_for) {
  const Batch& batch = ticket->batch();
  const double decay = eviction_.BeginUse(batch.num_keys());
  if (decay != 1) {
    for (uint32_t slot = 0; slot < lines_.end(); ++slot) LineAt(slot)->score *= decay;
  }
  ticket->slots_.resize(batch.num_keys());
  std::atomic<int64_t> num_found{0}, num_hits{0};
  parallel_for(batch.num_keys(), kProbeCycles, [&](int64_t first, int64_t last) {
    int64_t found = 0, hits = 0;
    VisitAhead(
        index_, last - first, [&](int64_t i) { return batch.hashes[first + i]; },
        [&](uint32_t slot) { __builtin_prefetch(LineAt(slot)); },
        [&](int64_t i) {
          const int64_t u = first + i;
          const uint32_t slot = index_.Find(
              batch.hashes[u], [&](uint32_t s) { return LineAt(s)->key == batch.keys[u]; });
          ticket->slots_[u] = slot;
          if (slot == Index::kNone) return;
          Line* line = LineAt(slot);
          line->score = eviction_.Used(line->score);
          ++line->holds;
          ++found;
          hits += (line->flags & kFilled) && !config_.server_applies;
        });
    num_found.fetch_add(found, std::memory_order_relaxed);
    num_hits.fetch_add(hits, std::memory_order_relaxed);
  });
  if (num_found < batch.num_keys()) {
    for (int64_t u = 0; u < batch.num_keys(); ++u) {
      if (ticket->slots_[u] != Index::kNone) continue;
      const uint32_t slot = MakeLine(batch.keys[u], batch.hashes[u]);
      ticket->slots_[u] = slot;
      LineAt(slot)->score = eviction_.Used(0);
      Hold(slot);
    }
  }
  counters_.Add(CacheCounter::kLookups, 1);
  counters_.Add(CacheCounter::kIds, batch.num_ids());
  counters_.Add(CacheCounter::kKeys, batch.num_keys());
  counters_.Add(CacheCounter::kHits, num_hits);
  counters_.Add(CacheCounter::kMisses, batch.num_keys() - num_hits);
}

Status Cache::Lookup(std::shared_ptr<const Batch> batch, const ParallelFor& parallel_for,
                     const AllocateRequest& allocate, std::shared_ptr<Ticket>* ticket) {
  *ticket = std::make_shared<Ticket>(shared_from_this(), std::move(batch));
  std::lock_guard<std::mutex> lock(mutex_);
  TakeReleased();
  FindLines(ticket->get(), parallel_for);
  Trim();
  std::vector<std::vector<uint32_t>> asked(num_shards());
  for (auto& slots : asked) slots.reserve((*ticket)->slots_.size() / num_shards() + 16);
  for (size_t u = 0; u < (*ticket)->slots_.size(); ++u) {
    asked[ShardOfHash((*ticket)->batch().hashes[u], num_shards())].push_back((*ticket)->slots_[u]);
  }
  for (int s = 0; s < num_shards(); ++s) CutRequest(s, ticket->get(), asked[s], allocate);
  return Status();
}

// The clock up to which the shard need not send the row, once it has merged what goes with or
// before this request.
int64_t Cache::CheckBase(const Line& line) const {
  const int64_t merged = line.base + line.sent;
  return config_.rows.clock == ClockRule::kCount ? merged : merged + line.pending;
}

// Moves the outbox into a push. forced takes the lines whose rows must come back.
void Cache::CutPush(int shard, std::vector<uint32_t>* forced) {
  Shard& state = shards_[shard];
  const int64_t rows = state.outbox.size();
  Push push;
  push.sequence = ++state.cut;
  push.slots.swap(state.outbox);
  push.keys.resize(rows);
  push.pendings.resize(rows);
  push.bytes.resize(PushBytes(rows, wire_width_));
  const PushHeader header = {push.sequence, learning_rate_, static_cast<uint32_t>(rows)};
  std::memcpy(push.bytes.data(), &header, sizeof(header));
  char* wire_rows = push.bytes.data() + sizeof(header);
  char* data = wire_rows + rows * sizeof(PushRow);
  const bool counts = config_.rows.clock == ClockRule::kCount || config_.server_applies;
  int64_t updates = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (r + 4 < rows) {
      Prefetch(lines_[push.slots[r + 4]], lines_.record_bytes());
    }
    const uint32_t slot = push.slots[r];
    Line* line = LineAt(slot);
    push.keys[r] = line->key;
    push.pendings[r] = line->pending;
    updates += line->pending;
    const PushRow row = {line->key, counts ? line->pending : CheckBase(*line)};
    std::memcpy(wire_rows + r * sizeof(row), &row, sizeof(row));
    std::memcpy(data + r * wire_width_ * sizeof(float), DeltaAt(slot), wire_width_ * sizeof(float));
    std::memset(DeltaAt(slot), 0, sizeof(float) * row_dim_);
    line->sent += line->pending;
    line->pending = 0;
    line->flags &= ~kQueued;
    if (!(line->flags & kResident)) {
      line->flags = 0;
      lines_.Free(slot);
    } else if (!counts) {
      line->flags |= kForced;
      forced->push_back(slot);
    }
  }
  state.unacknowledged.push_back(std::move(push));
  counters_.Add(CacheCounter::kRowsPushed, rows);
  counters_.Add(CacheCounter::kUpdatesPushed, updates);
}

void Cache::CutRequest(int shard, Ticket* ticket, const std::vector<uint32_t>& asked,
                       const AllocateRequest& allocate) {
  Shard& state = shards_[shard];
  Ticket::Request& request = ticket->requests_[shard];
  std::vector<uint32_t> forced;
  if (!state.outbox.empty()) CutPush(shard, &forced);
  request.cut = state.cut;

  // Checks first, then the keys whose row must come whatever its clock.
  std::vector<uint32_t>& slots = request.slots;
  std::vector<uint32_t> absent;
  for (const uint32_t slot : asked) {
    Line* line = LineAt(slot);
    if (!(line->flags & kFilled) || (line->flags & kForced) || config_.server_applies) {
      line->flags &= ~kForced;
      absent.push_back(slot);
    } else if (config_.read_bound != kUnbounded) {
      slots.push_back(slot);
    }
  }
  request.num_checks = slots.size();
  for (const uint32_t slot : forced) {
    if (!(LineAt(slot)->flags & kForced)) continue;  // asked for above
    LineAt(slot)->flags &= ~kForced;
    Hold(slot);
    ticket->extra_.push_back(slot);
    absent.push_back(slot);
  }
  slots.insert(slots.end(), absent.begin(), absent.end());

  request.sent = !slots.empty() || !state.unacknowledged.empty();
  if (!request.sent) {
    allocate(shard, 0);
    return;
  }
  size_t push_bytes = 0;
  for (const Push& push : state.unacknowledged) push_bytes += push.bytes.size();
  const size_t bytes = sizeof(RequestHeader) + push_bytes + request.num_checks * sizeof(Check) +
                       absent.size() * sizeof(int64_t);
  char* at = allocate(shard, bytes);
  const RequestHeader header = {kRequestMagic,
                                kMessageVersion,
                                static_cast<uint16_t>(config_.server_applies ? kServerApplies : 0),
                                id_,
                                state.incarnation,
                                config_.read_bound,
                                static_cast<uint32_t>(dim()),
                                static_cast<uint32_t>(kit_.optimizer->slot_dim()),
                                static_cast<uint32_t>(shard),
                                static_cast<uint32_t>(state.unacknowledged.size()),
                                request.num_checks,
                                static_cast<int64_t>(absent.size())};
  std::memcpy(at, &header, sizeof(header));
  at += sizeof(header);
  for (const Push& push : state.unacknowledged) {
    std::memcpy(at, push.bytes.data(), push.bytes.size());
    at += push.bytes.size();
  }
  for (int64_t q = 0; q < request.num_checks; ++q) {
    const Line& line = *LineAt(slots[q]);
    const Check check = {line.key, CheckBase(line)};
    std::memcpy(at, &check, sizeof(check));
    at += sizeof(check);
  }
  for (const uint32_t slot : absent) {
    std::memcpy(at, &LineAt(slot)->key, sizeof(int64_t));
    at += sizeof(int64_t);
  }
  counters_.Add(CacheCounter::kMessages, 1);
  counters_.Add(CacheCounter::kBytesUp, bytes);
  counters_.Add(CacheCounter::kBytesUpPush, push_bytes);
}

// ---- Fill ----

void Cache::Acknowledge(Shard* shard, uint64_t sequence) {
  while (!shard->unacknowledged.empty() && shard->unacknowledged.front().sequence <= sequence) {
    const Push& push = shard->unacknowledged.front();
    for (size_t r = 0; r < push.keys.size(); ++r) {
      num_pending_ -= push.pendings[r];
      // The line may be gone, or another key's, or the same key's made anew from a reply that
      // has this push merged: then it has nothing sent.
      Line* line = LineAt(push.slots[r]);
      if ((line->flags & kResident) && line->key == push.keys[r] &&
          line->sent >= push.pendings[r]) {
        line->base += push.pendings[r];
        line->sent -= push.pendings[r];
      }
    }
    shard->unacknowledged.pop_front();
  }
}

// outdated: pushes were cut after the request that this row answers.
void Cache::Install(uint32_t slot, int64_t clock, const float* row, bool outdated) {
  Line* line = LineAt(slot);
  float* mine = RowAt(slot);
  if (config_.server_applies) {
    std::memcpy(mine, row, sizeof(float) * wire_width_);
  } else if (!(line->flags & kFilled)) {
    std::memcpy(mine, row, sizeof(float) * row_dim_);
  } else {
    if (outdated || clock < line->base) return;
    std::memcpy(mine, row, sizeof(float) * row_dim_);
    if (line->pending > 0) kit_.optimizer->Merge(mine, DeltaAt(slot), learning_rate_);
  }
  line->base = clock;
  line->flags |= kFilled;
}

void Cache::Initialize(uint32_t slot) {
  Line* line = LineAt(slot);
  kit_.InitRow(line->key, RowAt(slot));
  line->base = 0;
  line->flags |= kFilled;
}

Status Cache::Fill(Ticket* ticket, const std::vector<Bytes>& replies,
                   const ParallelFor& parallel_for, float* out) {
  if (replies.size() != shards_.size()) {
    return InvalidArgument("replies holds ", replies.size(), " messages for ", shards_.size(),
                           " shards");
  }
  std::vector<ReplyView> views(replies.size());
  for (size_t s = 0; s < replies.size(); ++s) {
    const Ticket::Request& request = ticket->requests_[s];
    if (!request.sent) continue;
    HET_RETURN_IF_ERROR(ReplyView::Parse(replies[s].data, replies[s].size, &views[s]));
    const ReplyHeader& header = views[s].header;
    if (header.num_queries != static_cast<int64_t>(request.slots.size()) ||
        header.width != wire_width_) {
      return InvalidArgument("replies[", s, "] answers ", header.num_queries,
                             " queries with rows of width ", header.width, ", not ",
                             request.slots.size(), " with width ", wire_width_);
    }
  }

  std::lock_guard<std::mutex> lock(mutex_);
  TakeReleased();
  for (size_t s = 0; s < replies.size(); ++s) {
    const Ticket::Request& request = ticket->requests_[s];
    if (!request.sent) continue;
    const ReplyView& view = views[s];
    Shard& shard = shards_[s];
    if (shard.incarnation != view.header.incarnation) {
      if (shard.incarnation != 0) ForgetShard(s);
      shard.incarnation = view.header.incarnation;
    }
    Acknowledge(&shard, view.header.acknowledged);
    const bool outdated = shard.cut > request.cut;
    parallel_for(view.header.num_rows, 20 + 2 * wire_width_, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        if (r + 4 < last) {
          __builtin_prefetch(LineAt(request.slots[view.rows[r + 4].query]));
        }
        Install(request.slots[view.rows[r].query], view.rows[r].clock,
                view.data + r * wire_width_, outdated);
      }
    });
    // No answer to an absent key: nobody has updated the row.
    const int64_t first_absent = view.header.flags & kRestarted ? 0 : request.num_checks;
    std::atomic<int64_t> initialized{0};
    parallel_for(request.slots.size() - first_absent, 4 * dim(), [&](int64_t first, int64_t last) {
      int64_t count = 0;
      for (int64_t q = first_absent + first; q < first_absent + last; ++q) {
        if (LineAt(request.slots[q])->flags & kFilled) continue;
        Initialize(request.slots[q]);
        ++count;
      }
      initialized.fetch_add(count, std::memory_order_relaxed);
    });
    const auto* rows_end = view.rows + view.header.num_rows;
    const auto* stale_end = std::lower_bound(
        view.rows, rows_end, request.num_checks,
        [](const ReplyRow& row, int64_t query) { return row.query < query; });
    counters_.Add(CacheCounter::kStaleHits, stale_end - view.rows);
    counters_.Add(CacheCounter::kInitialized, initialized);
    counters_.Add(CacheCounter::kBytesDown, replies[s].size);
  }
  const Batch& batch = ticket->batch();
  std::vector<const float*> rows(batch.num_keys());
  for (int64_t u = 0; u < batch.num_keys(); ++u) rows[u] = RowAt(ticket->slots_[u]);
  batch.Gather(rows.data(), dim(), parallel_for, out);
  ticket->filled_ = true;
  return Status();
}

// ---- Update and flush ----

Status Cache::Update(Ticket* ticket, const float* gradients, float learning_rate,
                     const ParallelFor& parallel_for) {
  HET_RETURN_IF_ERROR(kit_.optimizer->CheckLearningRate(learning_rate));
  const Batch& batch = ticket->batch();
  const GradientSums sums(batch, gradients, dim(), parallel_for);
  if (sums.num_nonfinite() > 0 && config_.nonfinite == Nonfinite::kError) {
    return InvalidArgument("gradients hold NaN or infinity for ", sums.num_nonfinite(), " of ",
                           batch.num_keys(), " keys; no row was updated");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  TakeReleased();
  if (!ticket->filled_) return FailedPrecondition("ticket was not filled before its update");
  learning_rate_ = learning_rate;
  const int32_t due = config_.server_applies ? 1
                      : config_.write_bound == kUnbounded
                          ? INT32_MAX
                          : static_cast<int32_t>(
                                std::clamp<int64_t>(config_.write_bound, 1, INT32_MAX));
  std::atomic<int64_t> updates{0}, lost{0}, num_due{0};
  parallel_for(batch.num_keys(), kProbeCycles + 4 * row_dim_, [&](int64_t first, int64_t last) {
    constexpr int64_t kAhead = 3;
    std::vector<float> old(row_dim_);
    int64_t my_updates = 0, my_lost = 0, my_due = 0;
    for (int64_t u = first; u < last; ++u) {
      if (u + kAhead < last) {
        Prefetch(lines_[ticket->slots_[u + kAhead]], lines_.record_bytes());
      }
      const float* gradient = sums[u];
      if (gradient == nullptr) continue;
      const uint32_t slot = ticket->slots_[u];
      Line* line = LineAt(slot);
      if (!(line->flags & kFilled)) {  // its shard was cleared or restored since the lookup
        ++my_lost;
        continue;
      }
      float* row = RowAt(slot);
      float* delta = DeltaAt(slot);
      if (config_.server_applies) {
        for (int i = 0; i < dim(); ++i) delta[i] += gradient[i];
      } else {
        std::memcpy(old.data(), row, sizeof(float) * row_dim_);
        kit_.optimizer->Update(row, gradient, learning_rate);
        for (int i = 0; i < row_dim_; ++i) delta[i] += row[i] - old[i];
      }
      my_due += ++line->pending >= due;
      ++my_updates;
    }
    updates.fetch_add(my_updates, std::memory_order_relaxed);
    lost.fetch_add(my_lost, std::memory_order_relaxed);
    num_due.fetch_add(my_due, std::memory_order_relaxed);
  });
  if (num_due > 0) {
    for (const uint32_t slot : ticket->slots_) {
      if (LineAt(slot)->pending >= due) Enqueue(slot);
    }
  }
  num_pending_ += updates;
  counters_.Add(CacheCounter::kUpdates, updates);
  counters_.Add(CacheCounter::kUpdatesLost, lost);
  counters_.Add(CacheCounter::kNonfiniteSkipped, sums.num_nonfinite());
  return Status();
}

Status Cache::Flush(bool all, const AllocateRequest& allocate, std::shared_ptr<Ticket>* ticket) {
  *ticket = std::make_shared<Ticket>(shared_from_this(), std::make_shared<Batch>(nullptr, 0));
  std::lock_guard<std::mutex> lock(mutex_);
  TakeReleased();
  Trim();
  if (all) {
    for (uint32_t slot = 0; slot < lines_.end(); ++slot) {
      const Line& line = *LineAt(slot);
      if ((line.flags & kResident) && line.pending > 0) Enqueue(slot);
    }
  }
  for (int s = 0; s < num_shards(); ++s) CutRequest(s, ticket->get(), {}, allocate);
  return Status();
}

int64_t Cache::counter(CacheCounter counter) {
  std::lock_guard<std::mutex> lock(mutex_);
  TakeReleased();
  Trim();
  counters_.Set(CacheCounter::kRows, index_.size());
  counters_.Set(CacheCounter::kPending, num_pending_);
  return counters_.Get(counter);
}

}  // namespace het_tf
