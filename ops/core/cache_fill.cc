// Fill: what the shards replied.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "ops/core/cache.h"

namespace het_tf {
namespace {

bool Contains(const std::vector<uint64_t>& items, uint64_t item) {
  return std::find(items.begin(), items.end(), item) != items.end();
}

}  // namespace

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

// Puts a row that came back into its line. cut: the last push before the request that it answers.
// Returns false if the row misses an own push made since: then it may be read, but not kept.
bool Cache::Install(uint32_t slot, int64_t clock, const float* row, uint64_t cut) {
  Line* line = LineAt(slot);
  float* mine = RowAt(slot);
  if (line->flags & kFilled && !config_.server_applies) {
    if (line->pushed > cut) return false;
    if (clock < line->base) return true;  // a later request was answered earlier
  }
  std::memcpy(mine, row, sizeof(float) * wire_width_);
  if (line->pending > 0 && !config_.server_applies) {
    kit_.optimizer->Merge(mine, DeltaAt(slot), line->learning_rate);
  }
  line->base = clock;
  line->flags |= kFilled;
  return true;
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
    const Status parsed = ReplyView::Parse(replies[s].data, replies[s].size, &views[s]);
    if (!parsed.ok()) return InvalidArgument("replies[", s, "]: ", parsed.message());
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
  std::mutex read_once_mutex;
  std::unordered_map<uint32_t, const float*> read_once;
  std::vector<uint32_t> outdated;  // lines asked for in requests whose reply is outdated
  for (size_t s = 0; s < replies.size(); ++s) {
    const Ticket::Request& request = ticket->requests_[s];
    if (!request.sent) continue;
    const ReplyView& view = views[s];
    Shard& shard = shards_[s];
    if (Contains(shard.past, view.header.incarnation)) {
      // Rows of the table before the present one: of use to this step only, and only where no line
      // has the present one's, which may hold own updates.
      for (int64_t r = 0; r < view.header.num_rows; ++r) {
        const uint32_t slot = request.slots[view.rows[r].query];
        if (!(LineAt(slot)->flags & kFilled)) read_once[slot] = view.data + r * wire_width_;
      }
      outdated.insert(outdated.end(), request.slots.begin(), request.slots.end());
      counters_.Add(CacheCounter::kBytesDown, replies[s].size);
      continue;
    }
    if (shard.incarnation != view.header.incarnation) {
      if (shard.incarnation != 0) {
        ForgetShard(s);
        shard.past.push_back(shard.incarnation);
      }
      shard.incarnation = view.header.incarnation;
    }
    Acknowledge(&shard, view.header.acknowledged);
    parallel_for(view.header.num_rows, 20 + 2 * wire_width_, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        if (r + 4 < last) {
          __builtin_prefetch(LineAt(request.slots[view.rows[r + 4].query]));
        }
        const uint32_t slot = request.slots[view.rows[r].query];
        const float* row = view.data + r * wire_width_;
        if (!Install(slot, view.rows[r].clock, row, request.cut)) {
          std::lock_guard<std::mutex> rows_lock(read_once_mutex);
          read_once[slot] = row;
        }
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
  std::vector<float> initial(outdated.size() * row_dim_);
  float* next_initial = initial.data();
  for (const uint32_t slot : outdated) {
    if ((LineAt(slot)->flags & kFilled) || !read_once.emplace(slot, next_initial).second) continue;
    kit_.InitRow(LineAt(slot)->key, next_initial);
    next_initial += row_dim_;
  }
  const Batch& batch = ticket->batch();
  std::vector<const float*> rows(batch.num_keys());
  for (int64_t u = 0; u < batch.num_keys(); ++u) rows[u] = RowAt(ticket->slots_[u]);
  if (!read_once.empty()) {
    for (int64_t u = 0; u < batch.num_keys(); ++u) {
      const auto row = read_once.find(ticket->slots_[u]);
      if (row != read_once.end()) rows[u] = row->second;
    }
  }
  batch.Gather(rows.data(), dim(), parallel_for, out);
  ticket->filled_ = true;
  return Status();
}

}  // namespace het_tf
