// Fill: what the shards replied.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "ops/core/cache.h"

namespace het_tf {

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
        Install(request.slots[view.rows[r].query], view.rows[r].clock, view.data + r * wire_width_,
                outdated);
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
    const auto* stale_end =
        std::lower_bound(view.rows, rows_end, request.num_checks,
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

}  // namespace het_tf
