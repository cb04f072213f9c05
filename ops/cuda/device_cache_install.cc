// Install, AskAgain and Gather: what the shards replied, and what they are asked then.

#include <algorithm>
#include <utility>
#include <vector>

#include "ops/cuda/device_cache.h"
#include "ops/cuda/error.h"
#include "ops/cuda/memory.h"
#include "ops/cuda/scratch.h"

namespace het_tf {
namespace cuda {
namespace {

// arrays: Arriving's. unasked: of the rows.
template <typename Arrays>
size_t PlaceRows(void* memory, int64_t rows, int64_t row_stride, int64_t unasked, int64_t values,
                 int64_t dim, Arrays* arrays) {
  Scratch scratch(memory);
  arrays->rows = scratch.Take<float>(rows * row_stride);
  arrays->bases = scratch.Take<int64_t>(rows);
  arrays->index = scratch.Take<int32_t>(rows);
  arrays->keys = scratch.Take<int64_t>(unasked);
  arrays->values = scratch.Take<float>(values * dim);
  arrays->value_bases = scratch.Take<int64_t>(values);
  arrays->value_index = scratch.Take<int32_t>(values);
  return scratch.bytes();
}

// Whether a row comes of a query. full: the reply's row, or -1. (A check without one: fresh enough;
// or the shard has other rows now, and then nobody has updated it.)
bool Comes(const Asked& asked, const ReplyView& reply, int64_t q, int64_t full) {
  return q >= asked.num_checks || full >= 0 || (reply.header.flags & kRestarted);
}

// Calls visit(query, full row or -1, value row or -1) for each query of a reply, in their order.
template <typename Visit>
void ForEachQuery(const ReplyView& reply, const Visit& visit) HET_NO_THREAD_SAFETY_ANALYSIS {
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

// Whether a row that the host had kept is what a check's key has: its shard sends none.
bool DeviceCache::FillsIn(const DeviceTicket& ticket, const Asked& asked, const ReplyView& reply,
                          int64_t q, int64_t full) const {
  const Subject& subject = asked.subjects[q];
  return !Comes(asked, reply, q, full) && subject.list == List::kStep && !ticket.kept_of_.empty() &&
         ticket.kept_of_[subject.at] >= 0;
}

// Memory for the rows that came.
Status DeviceCache::Reserve(DeviceTicket* ticket, const std::vector<ReplyView>& replies,
                            Arriving* arriving) {
  int64_t rows[DeviceTicket::kNumLists] = {};
  for (size_t s = 0; s < replies.size(); ++s) {
    const Asked& asked = ticket->asked_[s];
    if (asked.request.number == 0) continue;
    ForEachQuery(replies[s], [&](int64_t q, int64_t full, int64_t value) {
      rows[asked.subjects[q].list] += value < 0 && (Comes(asked, replies[s], q, full) ||
                                                    FillsIn(*ticket, asked, replies[s], q, full));
    });
    rows[List::kUnasked] += replies[s].header.num_unasked;
    arriving->num_values += replies[s].header.num_values;
  }
  int64_t n = 0;
  for (int list = 0; list < DeviceTicket::kNumLists; ++list) {
    arriving->first[list] = arriving->next[list] = n;
    n += rows[list];
  }
  arriving->first[DeviceTicket::kNumLists] = n;
  if (n + arriving->num_values == 0) return Status();
  const auto place = [&](void* memory, Arriving::Arrays* arrays) HET_REQUIRES(mutex_) {
    return PlaceRows(memory, n, info_.row_stride, rows[List::kUnasked], arriving->num_values, dim(),
                     arrays);
  };
  arriving->bytes = place(nullptr, &arriving->here);
  // A flush's rows are those that it forced.
  Found* found = (ticket->found_ == nullptr ? ticket->forced_ : ticket->found_).get();
  HET_RETURN_IF_ERROR(arriving_.Reserve(arriving->bytes));
  HET_RETURN_IF_ERROR(found->rows.Reserve(arriving->bytes));
  place(arriving_.get(), &arriving->there);
  place(found->rows.get(), &arriving->here);
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
  Came came = {0, 0, 0, 0};
  // Rows that were kept are of the shard as it was when they were looked up, with all own pushes.
  const bool counted = (reply.header.flags & kCounted) != 0;
  const bool keeps = current && !counted && ticket.num_forgets_ == num_forgets_;
  ForEachQuery(reply, [&](int64_t q, int64_t full, int64_t value) HET_REQUIRES(mutex_) {
    const Subject& subject = asked.subjects[q];
    if (FillsIn(ticket, asked, reply, q, full)) {
      const int64_t at = arriving->next[subject.list]++;
      const int32_t kept = ticket.kept_of_[subject.at];
      arriving->here.index[at] = subject.at;
      arriving->here.bases[at] = keeps ? ticket.kept_bases_[kept] : -1;
      std::copy_n(ticket.kept_rows_.data() + int64_t{kept} * row_dim, row_dim,
                  arriving->here.rows + at * info_.row_stride);
      ++came.kept;
      return;
    }
    if (!Comes(asked, reply, q, full)) return;
    if (value >= 0) {
      // Without slots it takes no push in; the shard sends it only if it has all of them.
      const int64_t at = arriving->next_value++;
      arriving->here.value_index[at] = subject.at;
      arriving->here.value_bases[at] = old ? -1 : reply.value_rows[value].clock;
      std::copy_n(reply.values + value * dim(), dim(), arriving->here.values + at * dim());
      return;
    }
    const int64_t at = arriving->next[subject.list]++;
    arriving->here.index[at] = subject.at;
    float* row = arriving->here.rows + at * info_.row_stride;
    int64_t clock = 0;
    if (full >= 0) {
      clock = reply.full_rows[full].clock;
      std::copy_n(reply.full + full * row_dim, row_dim, row);
    } else {  // nobody has updated it
      kit_.InitRow(subject.key, row);
    }
    clock = since.MergeOnto(subject.key, row, clock);
    arriving->here.bases[at] = old ? -1 : clock;
    came.refreshed += q < asked.num_checks && full >= 0;
    if (full >= 0) return;
    ++came.initialized;
    came.unused +=
        q >= asked.num_checks && q < asked.first_value() && subject.list != List::kForced;
  });
  for (int64_t r = 0; r < reply.header.num_unasked; ++r) {
    const int64_t at = arriving->next[List::kUnasked]++, key = reply.unasked_rows[r].query;
    float* row = arriving->here.rows + at * info_.row_stride;
    std::copy_n(reply.unasked + r * row_dim, row_dim, row);
    const int64_t clock = since.MergeOnto(key, row, reply.unasked_rows[r].clock);
    arriving->here.bases[at] = old ? -1 : clock;
    arriving->here.keys[at - arriving->first[List::kUnasked]] = key;
  }
  return came;
}

// The lines of checks that the marked shards answered with nothing need no other check. Those whose
// rows came are among them, until these are installed.
Status DeviceCache::WatchChecked(const DeviceTicket& ticket) {
  if (std::count(marked_.begin(), marked_.end(), 1) == 0) return Status();
  const Found& found = *ticket.found_;
  // Nobody waits for the copy, so it is of the step's own memory. (The next step that has this
  // writes there after its lookup, which waits.)
  std::copy(marked_.begin(), marked_.end(), found.marked_here);
  HET_RETURN_IF_ERROR(MarkShards(found.marked_here));
  return ToStatus(
      het_watch(store_, found.slots, &found.checks, found.here.checks, &shards_there_, stream_),
      "het_watch");
}

Status DeviceCache::Upload(const DeviceTicket& ticket, const Arriving& arriving) {
  if (arriving.bytes == 0) return Status();
  const Arriving::Arrays& to = arriving.there;
  HET_RETURN_IF_CUDA_ERROR(ToDevice(arriving.here.rows, arriving.bytes, to.rows));
  HetStore* const store = store_;
  const int64_t row_stride = info_.row_stride;
  const auto install = [&](List list, const int32_t* index, const int32_t* slots) {
    const int64_t first = arriving.first[list];
    return het_install(store, index == nullptr ? nullptr : index + first, slots,
                       to.rows + first * row_stride, to.bases + first, arriving.count(list),
                       stream_);
  };
  if (arriving.count(List::kStep) > 0) {
    HET_RETURN_IF_CUDA_ERROR(install(List::kStep, to.index, ticket.found_->slots));
  }
  if (arriving.num_values > 0) {
    HET_RETURN_IF_CUDA_ERROR(het_install_values(store_, to.value_index, ticket.found_->slots,
                                                to.values, to.value_bases, arriving.num_values,
                                                stream_));
  }
  if (arriving.count(List::kForced) > 0) {
    HET_RETURN_IF_CUDA_ERROR(install(List::kForced, to.index, ticket.forced_->slots));
  }
  const int64_t unasked = arriving.count(List::kUnasked);
  if (unasked == 0) return Status();
  int32_t* slots = to.index + arriving.first[List::kUnasked];
  auto* counts = reinterpret_cast<Counts*>(counts_device_.get());
  HET_RETURN_IF_CUDA_ERROR(het_find_unasked(store_, to.keys,
                                            to.bases + arriving.first[List::kUnasked], unasked,
                                            slots, &counts->unasked, stream_));
  return ToStatus(install(List::kUnasked, nullptr, slots), "het_install");
}

Status DeviceCache::Install(RowTicket* row_ticket, const std::vector<ReplyBytes>& replies,
                            const ParallelFor&, int64_t* rows) {
  return OrOutOfMemory([&]() -> Status {
    auto* ticket = static_cast<DeviceTicket*>(row_ticket);
    std::vector<ReplyView> views;
    HET_RETURN_IF_ERROR(ReadReplies(asker_, ticket->asked_, replies, &views));

    MutexLock lock(&mutex_);
    if (ticket->taken_) return FailedPrecondition("ticket was installed before");
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
    std::fill(marked_.begin(), marked_.end(), 0);
    for (size_t s = 0; s < views.size(); ++s) {
      if (ticket->asked_[s].request.number == 0) continue;
      HET_RETURN_IF_ERROR(TakeReply(static_cast<int>(s), ticket, views[s], came[s]));
      *rows += static_cast<int64_t>(views[s].header.num_rows());
      counters_.Add(CacheCounter::kBytesDown, static_cast<int64_t>(replies[s].size));
    }
    ticket->taken_ = true;
    Status status = WatchChecked(*ticket);
    if (status.ok()) status = Upload(*ticket, arriving);
    ticket->installed_ = status.ok();
    if (!status.ok()) GiveUpWatches();
    return status;
  });
}

// The shards believe that the cache has rows which are not there. As where a reply was lost, all is
// checked until they have forgotten what they watch.
void DeviceCache::GiveUpWatches() {
  for (Shard& shard : shards_) {
    shard.watching.Open();
    shard.watching.GiveUp(shard.watching.epoch());
  }
}

// What a reply says of its shard, its pushes and what was asked. Marks the shard if it watches what
// was checked.
Status DeviceCache::TakeReply(int shard, DeviceTicket* ticket, const ReplyView& reply,
                              const Came& came) {
  Asked& asked = ticket->asked_[shard];
  const ReplyHeader& header = reply.header;
  Link& link = shards_[shard].link;
  const Link::Epoch epoch = {header.incarnation, header.session};
  const Link::Standing standing = link.StandingOf(asked.request, epoch);
  if (standing == Link::Standing::kNew) HET_RETURN_IF_ERROR(RestartShard(shard, epoch));
  if (standing != Link::Standing::kOld) {
    int64_t merged = 0;
    link.Acknowledge(asked.request.number, header.acknowledged,
                     [&](const Link::Push& push) { merged += push.updates; });
    own_.Merge(merged);
    if (header.flags & kCounted) {
      // The shard has another run's updates in the place of those that were pushed.
      int64_t unsent = 0;
      HET_RETURN_IF_ERROR(ForgetShard(shard, num_shards(), &unsent));
      shards_[shard].watching.Left(info_.lines, config_.capacity / num_shards());
      own_.Lose(unsent);
    }
    marked_[shard] = TakeReplyHeader(header, standing, &asked, &shards_[shard].watching);
    ticket->lacks_rows_ |= asked.lacks_rows();
    ticket->overtook_ |= asked.overtook;
    admission_.Came(int64_t{header.num_full} + header.num_unasked, header.num_values);
    admission_.GiveBack(came.unused + came.kept);
    if (!(header.flags & kRestarted)) admission_.Spared(asked.num_checks - came.refreshed);
    counters_.Add(CacheCounter::kStaleHits, came.refreshed);
    counters_.Add(CacheCounter::kInitialized, came.initialized);
    counters_.Add(CacheCounter::kRowsFromHost, came.kept);
    counters_.Add(CacheCounter::kVisitors, header.num_values);
  }
  link.Close(asked.request.number);
  --shards_[shard].num_open;
  return Status();
}

// Asks for the rows of shards that watch nothing any longer which the step did not ask about.
Status DeviceCache::AskForLacking(const DeviceTicket& ticket, std::vector<Questions>* questions) {
  Found& found = *ticket.found_;
  HET_RETURN_IF_ERROR(scratch_.Reserve(het_list_scratch_bytes(found.batch.num_ids)));
  for (int s = 0; s < num_shards(); ++s) {
    const Asked& asked = ticket.asked_[s];
    marked_[s] = !asked.lacks_rows() ? 0 : asked.unwatched ? HET_ALL_LINES : HET_LINES_WITHOUT_ROW;
  }
  HET_RETURN_IF_ERROR(MarkShards(marked_.data()));
  HET_RETURN_IF_CUDA_ERROR(het_list_lacking(store_, &found.batch, found.slots, &shards_there_,
                                            &found.checks, scratch_.get(), stream_));
  HET_RETURN_IF_CUDA_ERROR(FromDevice(found.nums, sizeof(Found::Nums), found.nums_here));
  HET_RETURN_IF_ERROR(Wait());
  const int64_t n = found.nums_here->checks;
  HET_RETURN_IF_CUDA_ERROR(FromDevice(found.checks.keys, sizeof(int64_t) * n, found.check_keys));
  HET_RETURN_IF_CUDA_ERROR(FromDevice(found.checks.index, sizeof(int32_t) * n, found.check_index));
  HET_RETURN_IF_ERROR(Wait());
  for (int64_t c = 0; c < n; ++c) {
    const int64_t key = found.check_keys[c];
    (*questions)[ShardOf(key)].full.push_back({key, -1, List::kStep, found.check_index[c]});
  }
  admission_.Ask(n);
  return Status();
}

Status DeviceCache::AskAgain(RowTicket* row_ticket, const AllocateRequest& allocate) {
  return OrOutOfMemory([&]() -> Status {
    auto* ticket = static_cast<DeviceTicket*>(row_ticket);
    MutexLock lock(&mutex_);
    if (ticket->lacks_rows_) HET_RETURN_IF_ERROR(own_.CheckNotFrozen());
    HET_RETURN_IF_ERROR(Begin());
    if (!ticket->installed_) {
      return FailedPrecondition("ticket was not installed before more is asked");
    }
    HET_RETURN_IF_ERROR(TakeReleased());
    std::vector<Questions> questions(num_shards());
    if (ticket->lacks_rows_) HET_RETURN_IF_ERROR(AskForLacking(*ticket, &questions));
    ++ticket->asked_again_;
    // Where memory is short, the requests are given up with this.
    DeviceTicket asking(shared_from_this());
    for (int s = 0; s < num_shards(); ++s) {
      const auto num_asked = static_cast<int64_t>(questions[s].full.size());
      questions[s].pushes = false;
      const bool overtook = ticket->asked_[s].overtook;
      if (num_asked == 0 && !overtook) {
        allocate(s, 0);
        continue;
      }
      SendRequest(s, overtook ? CarryAfter(ticket->asked_again_) : Link::Carry::kIdle,
                  config_.read_bound, std::move(questions[s]), allocate, &asking);
      if (num_asked > 0) asking.asked_[s].num_spared = ticket->keys_in_[s] - num_asked;
    }
    ticket->asked_.swap(asking.asked_);
    asking.taken_ = true;
    ticket->taken_ = ticket->installed_ = false;
    ticket->lacks_rows_ = ticket->overtook_ = false;
    return Status();
  });
}

Status DeviceCache::Gather(const RowTicket& row_ticket, const ParallelFor&, float* out) {
  const auto& ticket = static_cast<const DeviceTicket&>(row_ticket);
  MutexLock lock(&mutex_);
  HET_RETURN_IF_ERROR(Begin());
  if (!ticket.installed_) return FailedPrecondition("ticket was not installed before its rows");
  if (ticket.num_ids() == 0) return Status();
  const Found& found = *ticket.found_;
  HET_RETURN_IF_ERROR(FindLate(found));
  return ToStatus(het_gather(&found.batch, found.slots, info_.rows, info_.row_stride, info_.lines,
                             info_.visitors, info_.row_stride, dim(), out, stream_),
                  "het_gather");
}

}  // namespace cuda
}  // namespace het_tf
