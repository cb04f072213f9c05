// Sync: a cache's pushes merged, its questions answered.
//
// Where rows come and go, a check of a row that is not there is answered with its initial value: so
// a cache learns that it has expired, or that what it pushed was refused (lifetimes.h).

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>

#include "ops/core/memory/hash.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/simd.h"
#include "ops/core/table/record.h"
#include "ops/core/table/reservation.h"
#include "ops/core/table/table.h"
#include "ops/core/wire/reply.h"
#include "ops/core/wire/request.h"

namespace het_tf {
namespace {

// A client's numbers may be anything; wrapping is harmless, signed overflow is not.
int64_t WrappingSubtract(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

// Of Table::reads_that_missed.
int MissedBucket(int64_t missed) {
  if (missed <= 0) return 0;
  return std::min(64 - __builtin_clzll(missed), Table::kMissedBuckets - 1);
}

}  // namespace

// The hash of every key of a request, computed once.
struct Table::HashedRequest {
  std::vector<std::vector<uint64_t>> pushes;  // (num_pushes), (rows) each
  std::vector<uint64_t> queries;              // (num_queries)
};

Status Table::CheckRequest(const RequestView& request, const ParallelFor& parallel_for,
                           HashedRequest* hashed) const {
  const RequestHeader& header = request.header;
  const Optimizer& optimizer = *kit_.optimizer;
  if (static_cast<int64_t>(header.dim) != dim() ||
      static_cast<int64_t>(header.slot_dim) != slot_dim() ||
      static_cast<int64_t>(header.contribution_dim) != optimizer.contribution_dim()) {
    return InvalidArgument(
        "request is of a cache with dim = ", header.dim, ", slot_dim = ", header.slot_dim,
        ", contribution_dim = ", header.contribution_dim, "; this table has dim = ", dim(),
        ", slot_dim = ", slot_dim(), ", contribution_dim = ", optimizer.contribution_dim(),
        " (optimizer '", config_.optimizer, "')");
  }
  if (static_cast<int64_t>(header.shard) != shard_) {
    return InvalidArgument("request is for shard ", header.shard, ", this is shard ", shard_);
  }
  if (!request.pushes.empty() && (header.incarnation == 0 || header.session == 0)) {
    return InvalidArgument("request pushes with incarnation = ", header.incarnation,
                           ", session = ", header.session, ", before it heard of this shard");
  }
  uint64_t sequence = 0;
  for (const PushView& push : request.pushes) {
    if (push.sequence <= sequence || push.sequence > header.cut) {
      return InvalidArgument("request has a push with sequence ", push.sequence, " after ",
                             sequence, ", the last cut is ", header.cut);
    }
    if (push.closure != 0 && push.closure <= push.closures_done) {
      return InvalidArgument("request has a push of closure ", push.closure, ", but all up to ",
                             push.closures_done, " are done");
    }
    sequence = push.sequence;
    hashed->pushes.emplace_back(push.num_rows());
    uint64_t* hashes = hashed->pushes.back().data();
    std::atomic<int64_t> bad{-1};
    parallel_for(push.num_rows(), 50 + row_dim_, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const PushRow& row = push.rows[r];
        hashes[r] = HashKey(row.key);
        bool good = Owns(hashes[r]);
        if (r < push.num_gradients) {
          good = good && optimizer.CheckLearningRate(row.learning_rate).ok() &&
                 std::isfinite(SumOfSquares(push.gradients + r * dim(), dim()));
        } else {
          const float* contribution =
              push.contributions + (r - push.num_gradients) * optimizer.contribution_dim();
          good = good && row.updates > 0 && optimizer.CheckContribution(contribution).ok();
        }
        if (!good) bad = r;
      }
    });
    if (bad < 0) continue;
    // Once more, to say what it was.
    const PushRow& row = push.rows[bad];
    HET_RETURN_IF_ERROR(CheckOwned("request", row.key, HashKey(row.key)));
    Status status;
    if (bad < push.num_gradients) {
      status = optimizer.CheckLearningRate(row.learning_rate);
      if (status.ok()) status = InvalidArgument("a gradient or its square holds NaN or infinity");
    } else if (row.updates == 0) {
      status = InvalidArgument("a contribution of 0 updates");
    } else {
      status = optimizer.CheckContribution(push.contributions + (bad - push.num_gradients) *
                                                                    optimizer.contribution_dim());
    }
    return InvalidArgument("request pushes key ", row.key, ": ", status.message());
  }
  hashed->queries.resize(header.num_queries());
  for (int64_t q = 0; q < header.num_queries(); ++q) {
    const int64_t key = request.keys[q];
    hashed->queries[q] = HashKey(key);
    HET_RETURN_IF_ERROR(CheckOwned("request", key, hashed->queries[q]));
  }
  return Status();
}

Status Table::Sync(const char* bytes, size_t size, const ParallelFor& parallel_for,
                   const std::function<char*(size_t)>& allocate) {
  try {
    return ExchangeMessages(bytes, size, parallel_for, allocate);
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory for a request of ", size, " bytes");
  }
}

Status Table::ExchangeMessages(const char* bytes, size_t size, const ParallelFor& parallel_for,
                               const std::function<char*(size_t)>& allocate) {
  RequestView request;
  HashedRequest hashed;
  HET_RETURN_IF_ERROR(RequestView::Parse(bytes, size, &request));
  HET_RETURN_IF_ERROR(CheckRequest(request, parallel_for, &hashed));
  counters_.Add(TableCounter::kRequests, 1);
  counters_.Add(TableCounter::kBytesReceived, size);

  SharedLock contents(contents_);
  const std::shared_ptr<Sessions::Session> session = sessions_.Of(request.header.cache_id);
  std::lock_guard<std::mutex> lock(session->mutex);
  // The cache knows rows that are no longer here, or what it has pushed was forgotten: what it
  // pushes belongs to them, and what it holds must be replaced.
  const bool restarted =
      request.header.incarnation != 0 &&
      (request.header.incarnation != incarnation_ || request.header.session != session->number);
  bool counted = false;
  if (!restarted) {
    for (size_t p = 0; p < request.pushes.size(); ++p) {
      const PushView& push = request.pushes[p];
      if (push.sequence <= session->sequence) {
        counters_.Add(TableCounter::kPushesRepeated, 1);
      } else if (push.sequence > session->sequence + 1) {
        counters_.Add(TableCounter::kPushesSkipped, 1);
      } else {
        HET_RETURN_IF_ERROR(MergeNext(push, hashed.pushes[p], parallel_for, &counted));
        session->sequence = push.sequence;
      }
    }
  }
  Answer(request, hashed.queries, restarted, counted, *session, parallel_for, allocate);
  return Status();
}

Status Table::MergeNext(const PushView& push, const std::vector<uint64_t>& hashes,
                        const ParallelFor& parallel_for, bool* counted) {
  std::shared_ptr<Closures::Entry> closure;
  std::unique_lock<std::mutex> lock;
  if (push.closure != 0) {
    closure = closures_.Of(push.closure, push.closures_done);
    lock = std::unique_lock<std::mutex>(closure->mutex);
    if (closure->merged) {
      *counted = true;
      counters_.Add(TableCounter::kPushesCounted, 1);
      return Status();
    }
  }
  const Groups groups(push.num_rows(), kNumStripes,
                      [&](int64_t r) { return StripeOfHash(hashes[r], kNumStripes); });
  const Reservation reservation(this, groups);
  HET_RETURN_IF_ERROR(reservation.status());
  const KeptRows::Room room(&kept_, push.num_rows() * record_bytes_);
  Merge(push, hashes, groups, parallel_for);
  if (closure != nullptr) closure->merged = true;
  return Status();
}

void Table::MergeRow(char* record, const PushRow& row, const float* floats, bool is_gradient) {
  const int64_t clock = ClockOf(record);
  const bool drift = config_.clock == ClockRule::kDrift;
  float* merged = Open(record);
  if (is_gradient) {
    UpdateRow(record, merged, Gradient::Of(floats, dim()), row.learning_rate,
              drift ? row.clock : 0);
  } else if (!drift) {
    kit_.optimizer->Merge(merged, floats, row.updates);
    Close(record, merged);
  } else {
    static thread_local std::vector<float> before;
    before.assign(merged, merged + dim());
    kit_.optimizer->Merge(merged, floats, row.updates);
    Close(record, merged);
    const int64_t moved = DriftUnits(Distance(before.data(), merged, dim()));
    SetClock(record, Advance(clock, std::max<int64_t>(row.clock, moved)));
  }
  switch (config_.clock) {
    case ClockRule::kCount:
      SetClock(record, Advance(clock, is_gradient ? 1 : row.updates));
      break;
    case ClockRule::kLamport:
      SetClock(record, std::max(clock, ClockNear(clock, row.clock)));
      break;
    case ClockRule::kDrift:
      break;
  }
}

void Table::Merge(const PushView& push, const std::vector<uint64_t>& hashes, const Groups& groups,
                  const ParallelFor& parallel_for) {
  const int contribution_dim = kit_.optimizer->contribution_dim();
  const uint32_t now = time_.now();
  ForEachStripe<UniqueLock>(parallel_for, StripeCost(push.num_rows(), row_dim_), [&](int64_t s) {
    Stripe& stripe = *stripes_[s];
    const int32_t* rows = groups.order.data() + groups.begin[s];
    Newcomers newcomers;
    if (!stripe.unread.empty()) {
      for (int32_t i = 0; i < groups.size(s); ++i) {
        KeepRecord(&stripe, hashes[rows[i]], push.rows[rows[i]].key);
      }
    }
    VisitAhead(
        groups.size(s), [&](int64_t i) { return IndexedHash{&stripe.index, hashes[rows[i]]}; },
        [&](int64_t, uint32_t slot) { Prefetch(stripe.records[slot], record_bytes_); },
        [&](int64_t i) {
          const int64_t r = rows[i];
          const bool is_gradient = r < push.num_gradients;
          const float* floats =
              is_gradient ? push.gradients + r * dim()
                          : push.contributions + (r - push.num_gradients) * contribution_dim;
          char* record = FindOrAdmit(&stripe, hashes[r], push.rows[r].key,
                                     is_gradient ? 1 : push.rows[r].updates, now, &newcomers);
          if (record != nullptr) MergeRow(record, push.rows[r], floats, is_gradient);
        });
    Note(newcomers);
  });
  counters_.Add(TableCounter::kPushesMerged, 1);
  counters_.Add(TableCounter::kRowsMerged, push.num_rows());
}

void Table::Answer(const RequestView& request, const std::vector<uint64_t>& hashes, bool restarted,
                   bool counted, const Sessions::Session& session, const ParallelFor& parallel_for,
                   const std::function<char*(size_t)>& allocate) {
  const RequestHeader& header = request.header;
  const int64_t num_queries = header.num_queries();
  const Groups groups(num_queries, kNumStripes,
                      [&](int64_t q) { return StripeOfHash(hashes[q], kNumStripes); });
  // Pushes that the bases count, and that a value without slots would lack, are still to come.
  const bool behind = !restarted && session.sequence < header.cut;
  const auto sends_value = [&](int64_t q) { return !behind && request.wants_value(q); };

  // First which rows go, then, once the reply has its memory, the rows themselves. Records never
  // move and are not freed while contents_ is held, so a pointer to one stays good in between.
  static const char gone = 0;
  std::vector<const char*> found(num_queries, nullptr);
  ForEachStripe<SharedLock>(parallel_for, StripeCost(num_queries, 0), [&](int64_t s) {
    const Stripe& stripe = *stripes_[s];
    const int32_t* queries = groups.order.data() + groups.begin[s];
    std::array<int32_t, kMissedBuckets> reads{};
    VisitAhead(
        groups.size(s), [&](int64_t i) { return IndexedHash{&stripe.index, hashes[queries[i]]}; },
        [&](int64_t, uint32_t slot) { __builtin_prefetch(stripe.records[slot]); },
        [&](int64_t i) {
          const int32_t q = queries[i];
          const uint32_t slot = Find(stripe, hashes[q], request.keys[q]);
          if (slot == Index::kNone) {
            // A line with a row that is not there, or not any more.
            if (lives_ && !restarted && request.is_check(q) && request.bases[q] > 0 &&
                request.bases[q] != clocks_.gone()) {
              ++reads[0];
              found[q] = &gone;
            }
            return;
          }
          const char* record = stripe.records[slot];
          if (request.is_check(q) && !restarted && !behind) {
            const int64_t missed = WrappingSubtract(ClockOf(record), request.bases[q]);
            const bool stays = header.read_bound == kUnbounded || missed <= header.read_bound;
            ++reads[stays ? MissedBucket(missed) : 0];
            if (stays) return;
          }
          found[q] = record;
        });
    for (int b = 0; b < kMissedBuckets; ++b) {
      if (reads[b] > 0) missed_[b].fetch_add(reads[b], std::memory_order_relaxed);
    }
  });

  ReplyHeader reply;
  std::vector<uint32_t> place(num_queries);
  for (int64_t q = 0; q < num_queries; ++q) {
    if (found[q] == nullptr) continue;
    place[q] = sends_value(q) ? reply.num_values++ : reply.num_full++;
  }
  reply.flags = (restarted ? kRestarted : 0) | (header.format().half ? kHalfReply : 0) |
                (counted ? kCounted : 0);
  reply.incarnation = incarnation_;
  reply.session = session.number;
  reply.acknowledged = session.sequence;
  reply.num_queries = static_cast<uint32_t>(num_queries);
  reply.dim = header.dim;
  reply.slot_dim = header.slot_dim;
  const size_t bytes = ReplyWriter::Size(reply);
  ReplyWriter writer(allocate(bytes), reply);
  const int64_t num_rows = int64_t{reply.num_full} + reply.num_values;
  ForEachStripe<SharedLock>(parallel_for, StripeCost(num_rows, row_dim_), [&](int64_t s) {
    std::vector<float> unpacked(format_.half || lives_ ? row_dim_ : 0);
    for (int32_t i = groups.begin[s]; i < groups.begin[s + 1]; ++i) {
      const int32_t q = groups.order[i];
      if (found[q] == nullptr) continue;
      const bool value = sends_value(q);
      ReplyRow row = {0, q};
      const float* floats = unpacked.data();
      if (found[q] == &gone) {
        kit_.InitRow(request.keys[q], unpacked.data());
        row.clock = std::min(std::max(clocks_.gone(), request.bases[q]), kMaxClock);
      } else {
        row.clock = ClockOf(found[q]);
        floats = WordsOf(found[q]);
      }
      if (format_.half && found[q] != &gone) {
        format_.Read(floats, slot_dim(), unpacked.data());
        floats = unpacked.data();
      }
      if (value) {
        writer.SetValue(place[q], row, floats);
      } else {
        writer.SetFull(place[q], row, floats);
      }
    }
  });
  counters_.Add(TableCounter::kRowsChecked, header.num_bases());
  counters_.Add(TableCounter::kRowsSent, num_rows);
  counters_.Add(TableCounter::kBytesSent, bytes);
}

}  // namespace het_tf
