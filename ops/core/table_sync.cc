// Sync: a cache's pushes merged, its checks answered.

#include <algorithm>
#include <cstring>

#include "ops/core/hash.h"
#include "ops/core/prefetch.h"
#include "ops/core/table.h"
#include "ops/core/table_record.h"

namespace het_tf {
namespace {

// A client's numbers may be anything; wrapping is harmless, signed overflow is not.
int64_t WrappingAdd(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
int64_t WrappingSubtract(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

}  // namespace

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

  SharedLock contents(contents_);
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
      UniqueLock lock(stripe.mutex);
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
                   const ParallelFor& parallel_for, const std::function<char*(size_t)>& allocate) {
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
  parallel_for(kNumStripes, StripeCost(num_queries, 0), [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const Stripe& stripe = *stripes_[s];
      const int32_t* queries = groups.order.data() + groups.begin[s];
      SharedLock lock(stripe.mutex);
      VisitAhead(
          stripe.index, groups.size(s), [&](int64_t i) { return hashes[queries[i]]; },
          [&](uint32_t slot) { __builtin_prefetch(stripe.records[slot]); },
          [&](int64_t i) {
            const int32_t q = queries[i];
            const uint32_t slot = Find(stripe, hashes[q], request.query_key(q));
            if (slot == Index::kNone) return;
            const char* record = stripe.records[slot];
            if (q < header.num_checks && !restarted) {
              if (header.read_bound == kUnbounded) return;
              const int64_t missed = WrappingSubtract(ClockOf(record), request.checks[q].base);
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
  parallel_for(kNumStripes, StripeCost(num_rows, width), [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      SharedLock lock(stripes_[s]->mutex);
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

}  // namespace het_tf
