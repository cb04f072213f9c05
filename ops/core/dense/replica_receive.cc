// Receive: what the servers answered.

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "ops/core/dense/replica.h"

namespace het_tf {

Status Replica::CheckReply(const Shard& shard, const Link::Request& request,
                           const DenseReplyView& reply) const {
  const DenseReplyHeader& header = reply.header;
  if (header.num_floats != static_cast<uint64_t>(shard.num_floats()) ||
      header.num_counters != static_cast<uint32_t>(shard.num_counters())) {
    return InvalidArgument("it has num_floats = ", header.num_floats,
                           ", num_counters = ", header.num_counters, ", expected ",
                           shard.num_floats(), " and ", shard.num_counters());
  }
  const Link::Epoch epoch = {header.incarnation, header.session};
  HET_RETURN_IF_ERROR(shard.link.Check(request, {epoch, header.acknowledged}));
  const bool starts = epoch != shard.link.epoch();
  const bool whole = reply.has(kDenseValues) && reply.has(kDenseRest) && !reply.has(kDenseHalf);
  if (starts && !whole) return InvalidArgument("it is of a new state, and does not hold it all");
  if (starts && header.rest_bytes != static_cast<uint64_t>(shard.last_byte - shard.first_byte)) {
    return InvalidArgument("it has rest_bytes = ", header.rest_bytes, ", expected ",
                           shard.last_byte - shard.first_byte);
  }
  if (reply.has(kDenseHalf) && !config_.half) return InvalidArgument("it holds bfloat16");
  return Status();
}

bool Replica::Install(Shard* shard, uint64_t request, const DenseReplyView& reply) {
  const DenseReplyHeader& header = reply.header;
  const Link::Epoch epoch = {header.incarnation, header.session};
  const bool starts = epoch != shard->link.epoch();
  if (starts) {
    shard->link.Restart(epoch, [](const Link::Push&) {});
    shard->unacknowledged = shard->own = shard->seen_since = 0;
    shard->starts = shard->started = true;
    rest_.resize(config_.rest_bytes);
    std::copy_n(reply.rest, header.rest_bytes, rest_.begin() + shard->first_byte);
  }
  shard->replaced = false;
  const auto count_merged = [&](const Link::Push& push) HET_REQUIRES(mutex_) {
    shard->unacknowledged -= push.updates;
    shard->clock += push.updates;
    shard->own += push.updates;
    if (shard == &shards_[0]) counters_.Add(ReplicaCounter::kStepsSent, push.updates);
  };
  shard->link.Acknowledge(request, header.acknowledged, count_merged);
  // An answer to a question that was asked meanwhile may be newer.
  shard->seen = std::max(shard->seen_since, header.clock - shard->own);
  if (!reply.has(kDenseValues)) return starts;

  counters_.Add(ReplicaCounter::kValues, 1);
  shard->clock = header.clock;
  shard->known = header.known;
  shard->has_shift = true;
  // base_ becomes what the server has and the pushes that it has not, and shift_ says how far that
  // moved it.
  for (int64_t i = 0; i < shard->num_floats(); ++i) {
    const int64_t f = shard->first + i;
    float value = reply.values[i];
    if (reply.has(kDenseHalf)) value += known_[f];
    if (config_.half) known_[f] = value;
    shift_[f] += value - base_[f];
    base_[f] = value;
  }
  for (int64_t c = shard->first_counter; c < shard->last_counter; ++c) {
    const int64_t value = reply.counters[c - shard->first_counter];
    counter_shift_[c] += value - counter_base_[c];
    counter_base_[c] = value;
  }
  const auto add_push = [&](const Link::Push& push) HET_REQUIRES(mutex_) {
    const DensePushView view =
        ViewDensePush(push.bytes, static_cast<uint32_t>(shard->num_counters()));
    for (int64_t i = 0; i < shard->num_floats(); ++i) {
      shift_[shard->first + i] += view.contributions[i];
      base_[shard->first + i] += view.contributions[i];
    }
    for (int64_t c = 0; c < shard->num_counters(); ++c) {
      counter_shift_[shard->first_counter + c] += view.counters[c];
      counter_base_[shard->first_counter + c] += view.counters[c];
    }
  };
  shard->link.ForEachPushAfter(header.acknowledged, add_push);
  return starts;
}

Status Replica::Receive(ReplicaTicket* ticket, const std::vector<Frame>& replies) {
  if (replies.size() != static_cast<size_t>(config_.num_shards)) {
    return InvalidArgument("replies holds ", replies.size(), " messages for ", config_.num_shards,
                           " shards");
  }
  std::vector<std::function<void()>> waiting;
  {
    MutexLock lock(&mutex_);
    HET_RETURN_IF_ERROR(ReceiveAll(ticket, replies));
    waiting = TakeWaiting();
  }
  for (const auto& callback : waiting) callback();
  return Status();
}

Status Replica::CheckAnswer(const DenseReplyView& reply) {
  if (!reply.has(kDenseValues) && !reply.has(kDenseRest)) return Status();
  return InvalidArgument("it holds values, which were not asked for");
}

void Replica::TakeAnswer(Shard* shard, const DenseReplyHeader& reply) {
  const Link::Epoch epoch = {reply.incarnation, reply.session};
  shard->replaced |= epoch != shard->link.epoch();
  // An answer that knows fewer pushes than have been acknowledged is older than that reply.
  if (shard->replaced || reply.acknowledged < shard->link.acknowledged()) return;
  int64_t own = shard->own + shard->unacknowledged;
  shard->link.ForEachPushAfter(reply.acknowledged,
                               [&](const Link::Push& push) { own -= push.updates; });
  shard->seen = std::max(shard->seen, reply.clock - own);
  shard->seen_since = std::max(shard->seen_since, reply.clock - own);
}

Status Replica::ReceiveAll(ReplicaTicket* ticket, const std::vector<Frame>& replies) {
  std::vector<DenseReplyView> views(replies.size());
  for (size_t s = 0; s < replies.size(); ++s) {
    const Link::Request& request = ticket->requests_[s];
    const bool asks = ticket->asks_[s];
    if (request.number == 0 && !asks) {
      if (replies[s].size == 0) continue;
      return InvalidArgument("replies[", s, "] answers a request that was not made");
    }
    Status status = DenseReplyView::Parse(replies[s].bytes, replies[s].size, &views[s]);
    if (status.ok()) {
      status = asks ? CheckAnswer(views[s]) : CheckReply(shards_[s], request, views[s]);
    }
    if (!status.ok()) return InvalidArgument("replies[", s, "]: ", status.message());
  }
  int64_t lost = 0;
  for (size_t s = 0; s < replies.size(); ++s) {
    Shard& shard = shards_[s];
    const uint64_t request = ticket->requests_[s].number;
    if (ticket->asks_[s]) TakeAnswer(&shard, views[s].header);
    const int64_t unmerged = shard.unmerged();
    if (request != 0 && Install(&shard, request, views[s])) {
      // What was made on the state before is void.
      lost = std::max(lost, unmerged);
      shard.pending = 0;
      shard.rounded = false;
      shard.due = DueSteps(shard, true);
    }
    counters_.Add(ReplicaCounter::kBytesDown, replies[s].size);
  }
  counters_.Add(ReplicaCounter::kStepsLost, lost);
  counters_.Set(ReplicaCounter::kPending, Unmerged());
  CloseRequests(ticket);
  return Status();
}

void Replica::GiveUpRequests() {
  std::vector<std::function<void()>> waiting;
  {
    MutexLock lock(&mutex_);
    for (Shard& shard : shards_) {
      shard.link.CloseAll();
      shard.open = false;
    }
    waiting = TakeWaiting();
  }
  for (const auto& callback : waiting) callback();
}

void Replica::CloseRequests(ReplicaTicket* ticket) {
  for (size_t s = 0; s < ticket->requests_.size(); ++s) {
    const uint64_t number = std::exchange(ticket->requests_[s].number, 0);
    ticket->asks_[s] = false;
    if (number == 0) continue;
    shards_[s].link.Close(number);
    shards_[s].open = false;
  }
}

}  // namespace het_tf
