// Lookup: the lines of a batch, and the requests for what they lack.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "ops/core/cache.h"
#include "ops/core/hash.h"
#include "ops/core/prefetch.h"

namespace het_tf {
void Cache::FindLines(Ticket* ticket, const ParallelFor& parallel_for) {
  const Batch& batch = ticket->batch();
  const double decay = eviction_.BeginUse(batch.num_keys());
  if (decay != 1) {
    for (uint32_t slot = 0; slot < lines_.end(); ++slot) LineAt(slot)->score *= decay;
  }
  ticket->slots_.resize(batch.num_keys());
  std::atomic<int64_t> num_found{0}, num_hits{0};
  parallel_for(batch.num_keys(), kKeyCycles, [&](int64_t first, int64_t last) {
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

Status Cache::Lookup(std::shared_ptr<const Batch> batch, bool fresh,
                     const ParallelFor& parallel_for, const AllocateRequest& allocate,
                     std::shared_ptr<Ticket>* ticket) {
  *ticket = std::make_shared<Ticket>(shared_from_this(), std::move(batch));
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_ERROR(CheckNotFrozen());
  TakeReleased();
  FindLines(ticket->get(), parallel_for);
  Trim();
  std::vector<std::vector<uint32_t>> asked(num_shards());
  for (auto& slots : asked) slots.reserve((*ticket)->slots_.size() / num_shards() + 16);
  for (size_t u = 0; u < (*ticket)->slots_.size(); ++u) {
    asked[ShardOfHash((*ticket)->batch().hashes[u], num_shards())].push_back((*ticket)->slots_[u]);
  }
  const int64_t read_bound = fresh ? 0 : config_.read_bound;
  for (int s = 0; s < num_shards(); ++s) {
    CutRequest(s, ticket->get(), asked[s], read_bound, allocate);
  }
  return Status();
}

// The clock up to which the shard need not send the row, once it has merged what goes with or
// before this request.
int64_t Cache::CheckBase(const Line& line) const {
  const int64_t merged = line.base + line.sent;
  return config_.rows.clock == ClockRule::kCount ? merged : merged + line.pending;
}

bool Cache::PushHasOneRate() const {
  return config_.server_applies || kit_.optimizer->MergeUsesLearningRate();
}

// Moves the outbox, or what of it has one learning rate, into a push. forced takes the lines whose
// rows must come back.
void Cache::CutPush(int shard, std::vector<uint32_t>* forced) {
  Shard& state = shards_[shard];
  Push push;
  push.sequence = ++state.cut;
  const float learning_rate = LineAt(state.outbox.back())->learning_rate;
  auto first = state.outbox.begin();
  if (PushHasOneRate()) {
    // From the end of the outbox, which is in the order of the rates: the others wait for the next.
    auto last = state.outbox.end();
    while (last != first && LineAt(*(last - 1))->learning_rate == learning_rate) --last;
    first = last;
  }
  push.slots.assign(first, state.outbox.end());
  state.outbox.erase(first, state.outbox.end());
  const int64_t rows = push.slots.size();
  push.keys.resize(rows);
  push.pendings.resize(rows);
  push.bytes.resize(PushBytes(rows, wire_width_));
  const PushHeader header = {push.sequence, learning_rate, static_cast<uint32_t>(rows)};
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
    line->pushed = push.sequence;
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
                       int64_t read_bound, const AllocateRequest& allocate) {
  Shard& state = shards_[shard];
  Ticket::Request& request = ticket->requests_[shard];
  std::vector<uint32_t> forced;
  if (PushHasOneRate()) {
    const auto lower = [&](uint32_t a, uint32_t b) {
      return LineAt(a)->learning_rate < LineAt(b)->learning_rate;
    };
    if (!std::is_sorted(state.outbox.begin(), state.outbox.end(), lower)) {
      std::stable_sort(state.outbox.begin(), state.outbox.end(), lower);
    }
  }
  while (!state.outbox.empty()) CutPush(shard, &forced);
  request.cut = state.cut;

  // Checks first, then the keys whose row must come whatever its clock.
  std::vector<uint32_t>& slots = request.slots;
  std::vector<uint32_t> absent;
  for (const uint32_t slot : asked) {
    Line* line = LineAt(slot);
    if (!(line->flags & kFilled) || (line->flags & kForced) || config_.server_applies) {
      line->flags &= ~kForced;
      absent.push_back(slot);
    } else if (read_bound != kUnbounded) {
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
                                read_bound,
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

}  // namespace het_tf
