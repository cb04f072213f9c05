// Install and Gather: what the shards replied.

#include <algorithm>
#include <vector>

#include "ops/cuda/device_cache.h"
#include "ops/cuda/error.h"
#include "ops/cuda/memory.h"
#include "ops/cuda/scratch.h"

namespace het_tf {
namespace cuda {
namespace {

struct RowBlock {
  float* rows;     // (n, stride)
  int64_t* bases;  // (n)
  int32_t* index;  // (n)
};

size_t PlaceRows(void* memory, int64_t n, int64_t stride, RowBlock* block) {
  Scratch scratch(memory);
  block->rows = scratch.Take<float>(n * stride);
  block->bases = scratch.Take<int64_t>(n);
  block->index = scratch.Take<int32_t>(n);
  return scratch.bytes();
}

// Whether a row comes of a query. full: the reply's row, or -1. (A check without one: fresh enough;
// or the shard has other rows now, and then nobody has updated it.)
bool Comes(const Asked& asked, const ReplyView& reply, int64_t q, int64_t full) {
  return q >= asked.num_checks || full >= 0 || (reply.header.flags & kRestarted);
}

// Calls visit(query, full row or -1, value row or -1) for each query of a reply, in their order.
template <typename Visit>
void ForEachQuery(const ReplyView& reply, const Visit& visit) {
  const ReplyHeader& header = reply.header;
  int64_t full = 0, value = 0;
  for (int64_t q = 0; q < header.num_queries; ++q) {
    const bool is_full = full < header.num_full && reply.full_rows[full].query == q;
    const bool is_value = value < header.num_values && reply.value_rows[value].query == q;
    visit(q, is_full ? full : -1, is_value ? value : -1);
    full += is_full;
    value += is_value;
  }
}

}  // namespace

// Memory for the rows that a step gets: one for each miss, and what came of the others.
Status DeviceCache::Reserve(DeviceTicket* ticket, const std::vector<ReplyView>& replies,
                            Arriving* arriving) {
  int64_t rows[3] = {0, 0, 0};
  if (ticket->found_ != nullptr) rows[Subject::kMiss] = ticket->found_->here.misses;
  for (size_t s = 0; s < replies.size(); ++s) {
    const Asked& asked = ticket->asked_[s];
    if (asked.request.number == 0) continue;
    ForEachQuery(replies[s], [&](int64_t q, int64_t full, int64_t) {
      const Subject::List list = asked.subjects[q].list;
      rows[list] += list != Subject::kMiss && Comes(asked, replies[s], q, full);
    });
  }
  int64_t n = 0;
  for (int list = 0; list < 3; ++list) {
    arriving->first[list] = arriving->next[list] = n;
    n += rows[list];
    arriving->end[list] = n;
  }
  // A flush's rows are those that it forced.
  Found* found = ticket->found_ != nullptr ? ticket->found_.get() : ticket->forced_.get();
  if (found == nullptr) return Status();
  RowBlock block;
  const size_t bytes = PlaceRows(nullptr, n, info_.row_stride, &block);
  HET_RETURN_IF_ERROR(found->rows_device.Reserve(bytes));
  HET_RETURN_IF_ERROR(found->rows_pinned.Reserve(bytes));
  PlaceRows(found->rows_device.get(), n, info_.row_stride, &block);
  found->rows = block.rows;
  found->bases = block.bases;
  found->index = block.index;
  PlaceRows(found->rows_pinned.get(), n, info_.row_stride, &block);
  arriving->rows = block.rows;
  arriving->bases = block.bases;
  arriving->index = block.index;
  return Status();
}

// Writes the rows that came to arriving; changes nothing else. kOld: the reply is about rows that
// the shard has no more. The lines of its step are forgotten, so it serves the step and no other,
// and own pushes are of another epoch than what it acknowledges.
DeviceCache::Came DeviceCache::FillRows(int shard, const DeviceTicket& ticket,
                                        const ReplyView& reply, Link::Standing standing,
                                        Arriving* arriving) const {
  const Shard& state = shards_[shard];
  const Asked& asked = ticket.asked_[shard];
  const int row_dim = kit_.optimizer->row_dim();
  const bool old = standing == Link::Standing::kOld;
  // A shard that started again has none of the own pushes, nor is it to have them.
  const Link none;
  const bool current = standing == Link::Standing::kCurrent;
  PushesSince since(current ? state.link : none, reply.header.acknowledged, *kit_.optimizer,
                    config_.rows.clock, config_.half);
  if (current) state.outbox.AddTo(&since);
  Came came = {0, 0, 0};
  ForEachQuery(reply, [&](int64_t q, int64_t full, int64_t value) {
    if (!Comes(asked, reply, q, full)) return;
    const Subject& subject = asked.subjects[q];
    const int64_t at =
        subject.list == Subject::kMiss ? int64_t{subject.at} : arriving->next[subject.list]++;
    if (subject.list == Subject::kCheck) {
      arriving->index[at] = ticket.found_->check_index[subject.at];
    } else if (subject.list == Subject::kForced) {
      arriving->index[at] = ticket.forced_->check_index[subject.at];
    }
    float* row = arriving->rows + at * info_.row_stride;
    const int64_t key = ticket.KeyOf(subject);
    int64_t clock = 0;
    if (value >= 0) {
      // Without slots it takes no push in; the shard sends it only if it has all of them.
      clock = reply.value_rows[value].clock;
      std::copy_n(reply.values + value * dim(), dim(), row);
    } else {
      if (full >= 0) {
        clock = reply.full_rows[full].clock;
        std::copy_n(reply.full + full * row_dim, row_dim, row);
      } else {  // nobody has updated it
        kit_.InitRow(key, row);
      }
      clock = since.MergeOnto(key, row, clock);
    }
    arriving->bases[at] = old ? -1 : clock;
    came.refreshed += q < asked.num_checks && full >= 0;
    if (full >= 0 || value >= 0) return;
    ++came.initialized;
    came.unused +=
        q >= asked.num_checks && q < asked.first_value() && subject.list != Subject::kForced;
  });
  return came;
}

Status DeviceCache::Upload(const DeviceTicket& ticket, const Arriving& arriving) {
  const Found* found = ticket.found_ != nullptr ? ticket.found_.get() : ticket.forced_.get();
  const int64_t n = arriving.end[2];
  if (n == 0) return Status();
  const int64_t stride = info_.row_stride;
  HET_RETURN_IF_CUDA_ERROR(Copy(arriving.rows, sizeof(float) * n * stride, found->rows, stream_));
  HET_RETURN_IF_CUDA_ERROR(Copy(arriving.bases, sizeof(int64_t) * n, found->bases, stream_));
  const int64_t misses = arriving.end[Subject::kMiss];
  HET_RETURN_IF_CUDA_ERROR(Copy(arriving.index + misses, sizeof(int32_t) * (n - misses),
                                found->index + misses, stream_));
  const auto install = [&](Subject::List list, const int32_t* index, int32_t* slots) {
    const int64_t first = arriving.first[list];
    return het_install(store_, index, slots, found->rows + first * stride, found->bases + first,
                       arriving.end[list] - first, ticket.forgets_ != forgets_, stream_);
  };
  if (ticket.found_ != nullptr) {
    HET_RETURN_IF_CUDA_ERROR(install(Subject::kMiss, found->misses.index, found->slots));
    HET_RETURN_IF_CUDA_ERROR(
        install(Subject::kCheck, found->index + arriving.first[Subject::kCheck], found->slots));
  }
  if (ticket.forced_ == nullptr) return Status();
  return ToStatus(install(Subject::kForced, found->index + arriving.first[Subject::kForced],
                          ticket.forced_->slots),
                  "het_install");
}

Status DeviceCache::Install(RowTicket* row_ticket, const std::vector<ReplyBytes>& replies,
                            const ParallelFor&, int64_t* rows) {
  return OrOutOfMemory([&]() -> Status {
    auto* ticket = static_cast<DeviceTicket*>(row_ticket);
    std::vector<ReplyView> views;
    HET_RETURN_IF_ERROR(ReadReplies(asker_, ticket->asked_, replies, &views));

    std::lock_guard<std::mutex> lock(mutex_);
    if (ticket->installed_) return FailedPrecondition("ticket was installed before");
    HET_RETURN_IF_ERROR(Begin());
    HET_RETURN_IF_ERROR(CheckReplies(ticket->asked_, views, shards_));
    Arriving arriving;
    HET_RETURN_IF_ERROR(Reserve(ticket, views, &arriving));
    // What takes memory comes before what changes something.
    std::vector<Came> came(views.size());
    for (size_t s = 0; s < views.size(); ++s) {
      const Asked& asked = ticket->asked_[s];
      if (asked.request.number == 0) continue;
      const ReplyHeader& header = views[s].header;
      const Link::Standing standing =
          shards_[s].link.StandingOf(asked.request, {header.incarnation, header.session});
      came[s] = FillRows(static_cast<int>(s), *ticket, views[s], standing, &arriving);
    }
    HET_RETURN_IF_ERROR(TakeReleased());
    *rows = 0;
    for (size_t s = 0; s < views.size(); ++s) {
      if (ticket->asked_[s].request.number == 0) continue;
      HET_RETURN_IF_ERROR(TakeReply(static_cast<int>(s), *ticket, views[s], came[s]));
      *rows += int64_t{views[s].header.num_full} + views[s].header.num_values;
      counters_.Add(CacheCounter::kBytesDown, static_cast<int64_t>(replies[s].size));
    }
    ticket->installed_ = true;
    return Upload(*ticket, arriving);
  });
}

// What a reply says of its shard, its pushes and what was asked.
Status DeviceCache::TakeReply(int shard, const DeviceTicket& ticket, const ReplyView& reply,
                              const Came& came) {
  const Asked& asked = ticket.asked_[shard];
  const ReplyHeader& header = reply.header;
  Link& link = shards_[shard].link;
  const Link::Epoch epoch = {header.incarnation, header.session};
  const Link::Standing standing = link.StandingOf(asked.request, epoch);
  if (standing == Link::Standing::kNew) HET_RETURN_IF_ERROR(RestartShard(shard, epoch));
  if (standing != Link::Standing::kOld) {
    link.Acknowledge(asked.request.number, header.acknowledged,
                     [&](const Link::Push& push) { num_pending_ -= push.updates; });
    if (header.flags & kCounted) {
      // The shard has another run's updates in the place of those that were pushed.
      int64_t unsent = 0;
      HET_RETURN_IF_ERROR(ForgetShard(shard, num_shards(), &unsent));
      Lose(unsent);
    }
    admission_.Came(header.num_full, header.num_values);
    admission_.GiveBack(came.unused);
    if (!(header.flags & kRestarted)) admission_.Spared(asked.num_checks - came.refreshed);
    counters_.Add(CacheCounter::kStaleHits, came.refreshed);
    counters_.Add(CacheCounter::kInitialized, came.initialized);
    counters_.Add(CacheCounter::kVisitors, header.num_values);
  }
  link.Close(asked.request.number);
  --shards_[shard].num_open;
  return Status();
}

Status DeviceCache::Gather(const RowTicket& row_ticket, const ParallelFor&, float* out) {
  const auto& ticket = static_cast<const DeviceTicket&>(row_ticket);
  std::lock_guard<std::mutex> lock(mutex_);
  HET_RETURN_IF_ERROR(Begin());
  if (!ticket.installed_) return FailedPrecondition("ticket was not installed before its rows");
  if (ticket.num_ids() == 0) return Status();
  const Found& found = *ticket.found_;
  return ToStatus(het_gather(&found.batch, found.slots, info_.rows, info_.row_stride, info_.lines,
                             found.rows, info_.row_stride, dim(), out, stream_),
                  "het_gather");
}

}  // namespace cuda
}  // namespace het_tf
