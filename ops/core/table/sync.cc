// Sync: a cache's pushes merged, its questions answered (answer.cc).

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
#include "ops/core/table/step_part.h"
#include "ops/core/table/table.h"
#include "ops/core/wire/reply.h"
#include "ops/core/wire/request.h"

namespace het_tf {

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
    if (push.closure < 0 || push.closures_done < 0) {
      return InvalidArgument("request has a push of closure ", push.closure,
                             ", closures_done = ", push.closures_done, ": neither may be negative");
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

  int64_t num_pushed = 0;
  for (const PushView& push : request.pushes) num_pushed += push.num_rows();
  const ReaderLockWithRoom held(this, num_pushed * record_bytes_);
  for (size_t p = 0; p < request.pushes.size(); ++p) {
    HET_RETURN_IF_ERROR(Warm(request.pushes[p], hashed.pushes[p], parallel_for));
  }
  HET_RETURN_IF_ERROR(Warm(request, hashed.queries, parallel_for));
  const std::shared_ptr<Sessions::Session> session = sessions_.Of(request.header.cache_id);
  MutexLock lock(&session->mutex);
  const bool restarted = IsRestarted(request.header, *session);
  bool counted = false;
  if (!restarted) {
    for (size_t p = 0; p < request.pushes.size(); ++p) {
      const PushView& push = request.pushes[p];
      if (push.sequence <= session->sequence) {
        counters_.Add(TableCounter::kPushesRepeated, 1);
        counted |= push.sequence == session->counted;
      } else if (push.sequence > session->sequence + 1) {
        counters_.Add(TableCounter::kPushesSkipped, 1);
      } else {
        bool is_counted = false;
        HET_RETURN_IF_ERROR(
            MergeNext(push, hashed.pushes[p], &session->watch, parallel_for, &is_counted));
        session->sequence = push.sequence;
        if (is_counted) session->counted = push.sequence;
        counted |= is_counted;
      }
    }
  }
  Answer(request, hashed.queries, restarted, counted, session.get(), parallel_for, allocate);
  return Status();
}

Status Table::MergeNext(const PushView& push, const std::vector<uint64_t>& hashes, Watch* watch,
                        const ParallelFor& parallel_for, bool* counted) {
  if (push.closure == 0) return MergeRows(push, hashes, watch, parallel_for);
  const std::shared_ptr<Closures::Entry> closure = closures_.Of(push.closure, push.closures_done);
  MutexLock lock(&closure->mutex);
  if (closure->merged) {
    *counted = true;
    counters_.Add(TableCounter::kPushesCounted, 1);
    return Status();
  }
  HET_RETURN_IF_ERROR(MergeRows(push, hashes, watch, parallel_for));
  closure->merged = true;
  return Status();
}

Status Table::MergeRows(const PushView& push, const std::vector<uint64_t>& hashes, Watch* watch,
                        const ParallelFor& parallel_for) {
  const Groups groups(push.num_rows(), kNumStripes,
                      [&](int64_t r) { return StripeOfHash(hashes[r], kNumStripes); });
  const Reservation reservation(this, groups);
  HET_RETURN_IF_ERROR(reservation.status());
  Merge(push, hashes, groups, watch, parallel_for);
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
                  Watch* watch, const ParallelFor& parallel_for) {
  const int contribution_dim = kit_.optimizer->contribution_dim();
  const uint32_t now = time_.now();
  ForEachStripe<UniqueLock>(parallel_for, StripeCost(push.num_rows(), row_dim_), [&](int64_t s) {
    Stripe& stripe = *stripes_[s];
    const int32_t* rows = groups.order.data() + groups.begin[s];
    WatchedRows* watched = watch->stripe(s);
    Newcomers newcomers;
    if (!stripe.unread.empty()) {
      for (int32_t i = 0; i < groups.size(s); ++i) {
        KeepRecord(&stripe, hashes[rows[i]], push.rows[rows[i]].key);
      }
    }
    VisitInBlocks(
        groups.size(s), [&](int64_t i) { return IndexedHash{&stripe.index, hashes[rows[i]]}; },
        [&](int64_t, uint32_t slot) { Prefetch(stripe.records[slot], record_bytes_); },
        [&](int64_t i, uint32_t) {
          const int64_t r = rows[i];
          const bool is_gradient = r < push.num_gradients;
          const float* floats =
              is_gradient ? push.gradients + r * dim()
                          : push.contributions + (r - push.num_gradients) * contribution_dim;
          const PushRow& row = push.rows[r];
          const uint32_t updates = is_gradient ? 1 : row.updates;
          char* record = FindOrAdmit(&stripe, hashes[r], row.key, updates, now, &newcomers);
          if (record != nullptr) MergeRow(record, row, floats, is_gradient);
        });
    Note(newcomers);
    if (watched == nullptr) return;
    // What the cache did itself it does not miss.
    watched->ForEachFound(
        groups.size(s), [&](int64_t i) { return hashes[rows[i]]; },
        [&](int64_t i) { return push.rows[rows[i]].key; },
        [&](int64_t i, WatchedRows::Row* row) {
          const PushRow& pushed = push.rows[rows[i]];
          const int64_t updates = rows[i] < push.num_gradients ? 1 : pushed.updates;
          const bool drifts = config_.clock == ClockRule::kDrift;
          row->base = Advance(row->base, drifts ? pushed.clock : updates);
        });
  });
  counters_.Add(TableCounter::kPushesMerged, 1);
  counters_.Add(TableCounter::kRowsMerged, push.num_rows());
}

}  // namespace het_tf
