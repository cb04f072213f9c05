// Install: what the shards replied.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "ops/core/cache/cache.h"
#include "ops/core/cache/pushes_since.h"
#include "ops/core/memory/hash.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/wire/reply.h"

namespace het_tf {

// counted: the shard has another run's updates in the place of those that were pushed.
void Cache::Acknowledge(Shard* shard, uint64_t number, uint64_t sequence, bool counted) {
  shard->link.Acknowledge(number, sequence, [&](const Link::Push& push) HET_REQUIRES(mutex_) {
    own_.Merge(push.updates);
    for (const Link::Row& row : push.rows) {
      if (counted) ForgetRow(row.slot);
      Line* line = store_.line(row.slot);
      line->in_flight -= row.updates;
      line->units_in_flight -= row.units;
      const bool done = line->in_flight == 0 && line->pending == 0;
      if (done && line->holds == 0 && !line->has(Line::kResident)) store_.Free(row.slot);
    }
  });
}

// A reply about rows that the shard has no more: it serves its own step, and only where nothing
// newer is known.
void Cache::InstallOld(const Ticket::Asked& asked, const ReplyView& reply) {
  const auto show = [&](uint32_t slot, const float* value) HET_REQUIRES(mutex_) {
    if (!store_.line(slot)->has(Line::kReadable)) store_.InstallValue(slot, value, 0);
  };
  const int row_dim = kit_.optimizer->row_dim();
  for (int64_t r = 0; r < reply.header.num_full; ++r) {
    show(asked.slots[reply.full_rows[r].query], reply.full + r * row_dim);
  }
  for (int64_t r = 0; r < reply.header.num_values; ++r) {
    show(asked.slots[reply.value_rows[r].query], reply.values + r * dim());
  }
  std::vector<float> initial(dim());
  for (const uint32_t slot : asked.slots) {
    if (store_.line(slot)->has(Line::kReadable)) continue;
    kit_.initializer.Fill(store_.line(slot)->key, dim(), initial.data());
    show(slot, initial.data());
  }
}

void Cache::InstallReply(int shard, const Ticket::Asked& asked, bool watches,
                         const ReplyView& reply, const ParallelFor& parallel_for) {
  Link& link = shards_[shard].link;
  const ReplyHeader& header = reply.header;
  const Optimizer& optimizer = *kit_.optimizer;
  const int row_dim = optimizer.row_dim();
  const PushesSince since(link, header.acknowledged, optimizer, config_.rows.clock, config_.half);
  const bool restarted = header.flags & kRestarted;

  const auto keep = [&](uint32_t slot, const float* row, int64_t clock) HET_REQUIRES(mutex_) {
    Line* line = store_.line(slot);
    // A later request was answered earlier.
    if (line->has(Line::kFull) && clock < line->base) return;
    store_.InstallFull(slot, row, clock);
  };
  const auto needs_merging = [&](const Line& line) {
    return since.Has(line.key) || (line.pending > 0 && line.record == Line::kNone);
  };
  std::vector<float> merged(row_dim);
  const auto merge_and_keep = [&](uint32_t slot, const float* row,
                                  int64_t clock) HET_REQUIRES(mutex_) {
    std::copy_n(row, row_dim, merged.data());
    clock = since.MergeOnto(store_.line(slot)->key, merged.data(), clock);
    keep(slot, merged.data(), clock);
  };

  std::vector<char> answered(asked.slots.size());
  const auto stay = [&](uint32_t slot) HET_REQUIRES(mutex_) {
    if (store_.line(slot)->has(Line::kStays)) store_.SetResident(slot);
    store_.line(slot)->clear(Line::kStays);
  };
  int64_t refreshed = 0;  // by rows with slots, and by values
  std::vector<int64_t> to_merge;
  Mutex to_merge_mutex;
  for (int64_t r = 0; r < header.num_full; ++r) {
    const int64_t query = reply.full_rows[r].query;
    answered[query] = 1;
    Line* line = store_.line(asked.slots[query]);
    line->clear(Line::kWatched);
    stay(asked.slots[query]);
    refreshed += query < asked.num_bases();
  }
  const auto keep_rows = [&](int64_t first, int64_t last) HET_REQUIRES(mutex_) {
    for (int64_t r = first; r < last; ++r) {
      if (r + 4 < last) Prefetch(store_.line(asked.slots[reply.full_rows[r + 4].query]));
      const uint32_t slot = asked.slots[reply.full_rows[r].query];
      if (needs_merging(*store_.line(slot))) {
        MutexLock lock(&to_merge_mutex);
        to_merge.push_back(r);
      } else {
        keep(slot, reply.full + r * row_dim, reply.full_rows[r].clock);
      }
    }
  };
  parallel_for(header.num_full, 20 + 2 * row_dim, keep_rows);
  admission_.Ask(refreshed);  // with slots, which were not reckoned with
  for (const int64_t r : to_merge) {
    merge_and_keep(asked.slots[reply.full_rows[r].query], reply.full + r * row_dim,
                   reply.full_rows[r].clock);
  }
  for (int64_t r = 0; r < header.num_values; ++r) {
    const int64_t query = reply.value_rows[r].query;
    answered[query] = 1;
    Line* line = store_.line(asked.slots[query]);
    line->clear(Line::kWatched);
    if (query < asked.num_bases()) {
      // The slots are out of date, and not worth what they cost. But where a step that came later
      // has the line too, they stay: each is to see what the other updates.
      ++refreshed;
      if (line->pending == 0 && !since.Has(line->key)) {
        if (line->holds == 1) {
          store_.ClearResident(asked.slots[query]);
          line->clear(Line::kFull);
        } else if (line->has(Line::kFull) && reply.value_rows[r].clock > line->base) {
          store_.InstallValue(asked.slots[query], reply.values + r * dim(), line->base);
        }
      }
    }
    // A step that came later has updated the line. So it was asked for later, and is as fresh.
    if (line->has(Line::kFull)) continue;
    store_.InstallValue(asked.slots[query], reply.values + r * dim(), reply.value_rows[r].clock);
  }
  int64_t num_came = 0;  // unasked, and of use
  for (int64_t r = 0; r < header.num_unasked; ++r) {
    const int64_t key = reply.unasked_rows[r].query;
    const uint32_t slot = store_.Find(HashKey(key), key);
    if (slot == Line::kNone || !store_.line(slot)->has(Line::kFull)) continue;
    ++num_came;
    store_.line(slot)->clear(Line::kWatched);
    merge_and_keep(slot, reply.unasked + r * row_dim, reply.unasked_rows[r].clock);
  }
  admission_.Came(header.num_full + header.num_unasked, header.num_values);

  // A row that is watched now need not be checked again.
  for (int64_t q = 0; watches && q < asked.num_checks; ++q) {
    Line* line = store_.line(asked.slots[q]);
    if (!answered[q] && line->has(Line::kFull)) line->set(Line::kWatched);
  }

  // No row for a key whose row must come: nobody has updated it, and the whole of it is known here.
  int64_t initialized = 0;
  std::vector<float> initial(row_dim);
  for (int64_t q = restarted ? 0 : asked.num_bases(); q < header.num_queries; ++q) {
    if (answered[q]) continue;
    if (q >= asked.num_bases() && q < asked.first_value()) admission_.GiveBack(1);
    const uint32_t slot = asked.slots[q];
    Line* line = store_.line(slot);
    if (line->has(Line::kFull)) continue;
    ++initialized;
    if (config_.capacity == 0 && line->holds == 1 && line->pending == 0 && !since.Has(line->key)) {
      kit_.initializer.Fill(line->key, dim(), initial.data());
      store_.InstallValue(slot, initial.data(), 0);
      continue;
    }
    kit_.InitRow(line->key, initial.data());
    merge_and_keep(slot, initial.data(), 0);
    stay(slot);
  }
  if (!restarted) admission_.Spared(asked.num_bases() - refreshed);
  counters_.Add(CacheCounter::kStaleHits, refreshed);
  counters_.Add(CacheCounter::kRowsUnasked, num_came);
  counters_.Add(CacheCounter::kInitialized, initialized);
  counters_.Add(CacheCounter::kVisitors, header.num_values);
}

Status Cache::Install(RowTicket* row_ticket, const std::vector<ReplyBytes>& replies,
                      const ParallelFor& parallel_for, int64_t* rows) {
  auto* ticket = static_cast<Ticket*>(row_ticket);
  std::vector<ReplyView> views;
  HET_RETURN_IF_ERROR(ReadReplies(asker_, ticket->asked_, replies, &views));
  MutexLock lock(&mutex_);
  if (ticket->installed_) return FailedPrecondition("ticket was installed before");
  TakeReleased();
  HET_RETURN_IF_ERROR(CheckReplies(ticket->asked_, views, shards_));
  *rows = 0;
  for (size_t s = 0; s < replies.size(); ++s) {
    Ticket::Asked& asked = ticket->asked_[s];
    if (asked.request.number == 0) continue;
    const ReplyHeader& header = views[s].header;
    Link& link = shards_[s].link;
    const Link::Epoch epoch = {header.incarnation, header.session};
    const Link::Standing standing = link.StandingOf(asked.request, epoch);
    if (standing == Link::Standing::kNew) RestartShard(static_cast<int>(s), epoch);
    if (standing == Link::Standing::kOld) {
      InstallOld(asked, views[s]);
    } else {
      Acknowledge(&shards_[s], asked.request.number, header.acknowledged,
                  (header.flags & kCounted) != 0);
      const bool watches = TakeReplyHeader(header, standing, &asked, &shards_[s].watching);
      InstallReply(static_cast<int>(s), asked, watches, views[s], parallel_for);
      ticket->incomplete_ |= asked.lacks_rows() || asked.overtook;
    }
    link.Close(asked.request.number);
    *rows += static_cast<int64_t>(header.num_rows());
    counters_.Add(CacheCounter::kBytesDown, static_cast<int64_t>(replies[s].size));
  }
  ticket->installed_ = true;
  Trim();
  return Status();
}

Status Cache::Gather(const RowTicket& row_ticket, const ParallelFor& parallel_for, float* out) {
  const auto& ticket = static_cast<const Ticket&>(row_ticket);
  MutexLock lock(&mutex_);
  if (!ticket.installed_) return FailedPrecondition("ticket was not installed before its rows");
  store_.Gather(ticket.ids(), ticket.slots_, parallel_for, out);
  return Status();
}

}  // namespace het_tf
