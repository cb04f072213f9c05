// Lookup and Flush: the lines of a step, and the requests for what they lack.

#include <algorithm>
#include <cstring>
#include <functional>
#include <unordered_set>
#include <utility>

#include "ops/core/cache/cache.h"
#include "ops/core/memory/hash.h"
#include "ops/core/memory/index.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/wire/request.h"

namespace het_tf {

// Lines for the keys that have none. all_stay: rows that are trained alone come once.
// asks_in_full: (num_keys), out: whether the step asks for the whole row of a line that is not
// full. Returns how many ids have no full line.
int64_t Cache::MakeMissing(Ticket* ticket, bool all_stay, std::vector<char>* asks_in_full) {
  const UniqueIds& ids = ticket->ids();
  asks_in_full->resize(ids.num_keys());
  int64_t missed = 0;
  constexpr int64_t kAhead = 16;
  for (int64_t u = 0; u < ids.num_keys(); ++u) {
    if (u + kAhead < ids.num_keys() && ticket->slots_[u + kAhead] == Line::kNone) {
      admission_.Prefetch(ids.hashes[u + kAhead]);
    }
    uint32_t& slot = ticket->slots_[u];
    if (slot != Line::kNone && store_.line(slot)->has(Line::kFull)) continue;
    missed += ids.count(u);
    const int count = admission_.Missed(ids.hashes[u]);
    if (slot == Line::kNone) slot = store_.Make(ids.keys[u], ids.hashes[u], count);
    if (all_stay || admission_.Admits(count, store_.has_room())) {
      store_.line(slot)->set(Line::kStays);
    }
    // A row that nobody has updated costs nothing, so what stays need not be asked for in full.
    if (store_.line(slot)->has(Line::kStays) && (all_stay || admission_.Affords())) {
      (*asks_in_full)[u] = 1;
      admission_.Ask(1);
    }
  }
  return missed;
}

Status Cache::Lookup(const LookupIds& ids, bool fresh, const ParallelFor& parallel_for,
                     const AllocateRequest& allocate, std::shared_ptr<RowTicket>* ticket) {
  const auto made = std::make_shared<Ticket>(
      shared_from_this(),
      ids.unique != nullptr ? ids.unique : std::make_shared<const UniqueIds>(ids.ids, ids.num_ids));
  *ticket = made;
  MutexLock lock(&mutex_);
  HET_RETURN_IF_ERROR(own_.CheckNotFrozen());
  TakeReleased();
  LeaveClosure();
  const UniqueIds& keys = made->ids();
  admission_.BeginUse(keys.num_keys());
  const Store::Found found = store_.Find(keys, parallel_for, &made->slots_);
  if (!store_.has_room()) admission_.Fill(store_.capacity());
  std::vector<char> asks_in_full;  // (num_keys); empty: all lines are full
  // Whoever keeps updates trains alone, unless the steps of all count as one.
  const bool is_alone = keeps_updates_ && !config_.synchronous;
  int64_t missed = 0;
  if (found.full < keys.num_keys()) missed = MakeMissing(made.get(), is_alone, &asks_in_full);
  Trim();
  CountLookup(keys.num_ids(), keys.num_keys(), found.full, keys.num_ids() - missed, &counters_);

  int64_t read_bound = is_alone ? kUnbounded : config_.read_bound;
  if (fresh || config_.capacity == 0) read_bound = 0;
  std::vector<Questions> questions(num_shards());
  for (int s = 0; s < num_shards(); ++s) {
    questions[s].watches = !fresh && !is_alone && Watches(s);
    questions[s].checks.reserve(found.full / num_shards() + 16);
  }
  size_t u = 0;
  store_.ForEachAhead(made->slots_, [&](uint32_t slot) HET_REQUIRES(mutex_) {
    const bool in_full = !asks_in_full.empty() && asks_in_full[u++] != 0;
    Ask(slot, in_full, read_bound, &questions[store_.line(slot)->shard]);
  });
  for (int s = 0; s < num_shards(); ++s) {
    SendRequest(s, Link::Carry::kIdle, read_bound, std::move(questions[s]), allocate, made.get());
  }
  return Status();
}

// Whether a step counts on the watch of a shard.
bool Cache::Watches(int shard) {
  if (!config_.watches()) return false;
  Watching& watching = shards_[shard].watching;
  if (watching.may_begin()) {
    for (uint32_t slot = 0; slot < store_.end(); ++slot) {
      if (store_.line(slot)->shard == shard) store_.line(slot)->clear(Line::kWatched);
    }
    watching.Begin();
  }
  return watching.counts();
}

// The line leaves, or is to be checked. Its shard does not hear of it.
void Cache::Unwatch(Line* line) {
  if (!line->has(Line::kWatched)) return;
  line->clear(Line::kWatched);
  shards_[line->shard].watching.Left(1, store_.capacity() / num_shards());
}

// What a step must ask about one of its lines. in_full: MakeMissing's.
void Cache::Ask(uint32_t slot, bool in_full, int64_t read_bound, Questions* questions) {
  Line* line = store_.line(slot);
  // A value without slots takes no own update in, so it is enough only if the reply has them all:
  // those queued travel with the request, and no other step may make one before its own.
  const bool reply_has_all = line->holds == 1 && (line->pending == 0 || Travels(*line));
  if (line->has(Line::kFull)) {
    if (config_.capacity != 0) store_.SetResident(slot);
    if (read_bound == kUnbounded) {
      admission_.Spared(1);
    } else if (questions->watches && line->has(Line::kWatched)) {
      ++questions->num_spared;
      admission_.Spared(1);
    } else if (reply_has_all && !admission_.AffordsRefresh()) {
      questions->value_checks.push_back(slot);
    } else {
      questions->checks.push_back(slot);
    }
  } else if (in_full) {
    questions->full.push_back(slot);
  } else if (!reply_has_all) {
    admission_.Ask(1);
    questions->full.push_back(slot);
  } else {
    questions->values.push_back(slot);
  }
}

// What a check of the line says once the request's push is written.
int64_t Cache::BaseAfterCut(const Line& line) const {
  const int64_t base = std::max<int64_t>(line.base, 0);
  switch (config_.rows.clock) {
    case ClockRule::kCount:
      return Travels(line) ? Advance(base, line.pending) : base;
    case ClockRule::kLamport:
      return Advance(base, line.pending);
    case ClockRule::kDrift:
      return Travels(line) ? Advance(base, line.units) : base;
  }
  return base;
}

// Where pushed_rows_come_back.
void Cache::ForcePushedRows(const Shard& shard, Questions* questions, Ticket* ticket) {
  // A line that is checked is full and held, so it is forced if it is pushed.
  const auto is_pushed = [&](uint32_t slot) HET_REQUIRES(mutex_) {
    const Line& line = *store_.line(slot);
    return line.has(Line::kQueued);
  };
  for (auto* checks : {&questions->checks, &questions->value_checks}) {
    const auto first =
        std::stable_partition(checks->begin(), checks->end(), std::not_fn(is_pushed));
    questions->full.insert(questions->full.end(), first, checks->end());
    checks->erase(first, checks->end());
  }
  // Those of the pushed lines that the step asks about; an index takes no memory for each of them.
  const auto hash_of = [](uint32_t slot) { return HashKey(slot); };
  Index asked;
  asked.Reserve(static_cast<int64_t>(shard.outbox.size()), hash_of);
  for (const uint32_t slot : questions->full) {
    if (is_pushed(slot)) asked.Insert(hash_of(slot), slot, hash_of);
  }
  for (const uint32_t slot : shard.outbox) {
    Line* line = store_.line(slot);
    if (!line->has(Line::kFull) || (!line->has(Line::kResident) && line->holds == 0)) continue;
    const auto is_slot = [slot](uint32_t other) { return other == slot; };
    if (line->holds > 0 && asked.Find(hash_of(slot), is_slot) != Index::kNone) continue;
    ++line->holds;
    ticket->also_held_.push_back(slot);
    questions->full.push_back(slot);
  }
}

PushHeader Cache::CountOutbox(const Shard& shard) const {
  PushHeader header = {shard.link.NextSequence(), 0, 0};
  own_.Stamp(&header);
  for (size_t i = 0; i < shard.outbox.size(); ++i) {
    if (i + 8 < shard.outbox.size()) Prefetch(store_.line(shard.outbox[i + 8]));
    const Line& line = *store_.line(shard.outbox[i]);
    if (Unsent::TravelsAsGradients(line)) {
      header.num_gradients += static_cast<uint32_t>(line.pending);
    } else {
      ++header.num_contributions;
    }
  }
  return header;
}

// Moves the outbox into a push. bytes: (PushBytes(...)).
void Cache::WritePush(Shard* shard, const PushHeader& header, char* bytes) {
  const Optimizer& optimizer = *kit_.optimizer;
  PushWriter writer(bytes, header, asker_.format(), optimizer.contribution_dim());
  for (size_t i = 0; i < shard->outbox.size(); ++i) {
    if (i + 8 < shard->outbox.size()) store_.Prefetch(shard->outbox[i + 8]);
    if (i + 4 < shard->outbox.size()) {
      store_.unsent().PrefetchSent(*store_.line(shard->outbox[i + 4]));
    }
    const uint32_t slot = shard->outbox[i];
    Line* line = store_.line(slot);
    line->base = BaseAfterCut(*line);
    uint32_t clock = 0;
    if (config_.rows.clock == ClockRule::kLamport) clock = static_cast<uint32_t>(line->base);
    if (config_.rows.clock == ClockRule::kDrift) clock = line->units;
    if (Unsent::TravelsAsGradients(*line)) {
      store_.unsent().ForEachGradient(*line, [&](const float* gradient, float learning_rate) {
        writer.AddGradient(line->key, learning_rate, clock, gradient);
        if (config_.rows.clock == ClockRule::kDrift) clock = 0;  // the units of all of them, once
      });
    } else {
      const auto fill = [&](float* to) HET_REQUIRES(mutex_) {
        store_.unsent().GetContribution(*line, store_.row(slot), to);
      };
      writer.AddContribution(line->key, static_cast<uint32_t>(line->pending), clock, fill);
    }
    line->in_flight += static_cast<uint32_t>(line->pending);
    line->units_in_flight += line->units;
    store_.MakeClean(slot);
    line->clear(Line::kQueued);
  }
}

// The whole outbox, written when the request is.
NewPush Cache::CutPush(Shard* shard) {
  NewPush push = {CountOutbox(*shard), 0, {}, nullptr};
  push.rows.reserve(shard->outbox.size());
  for (const uint32_t slot : shard->outbox) {
    const Line& line = *store_.line(slot);
    push.updates += line.pending;
    push.rows.push_back({slot, static_cast<uint32_t>(line.pending), line.units});
  }
  counters_.Add(CacheCounter::kRowsPushed, static_cast<int64_t>(shard->outbox.size()));
  counters_.Add(CacheCounter::kUpdatesPushed, push.updates);
  push.write = [this, shard, header = push.header](char* bytes) HET_REQUIRES(mutex_) {
    WritePush(shard, header, bytes);
    shard->outbox.clear();
  };
  return push;
}

// A shard that has other rows now, or has forgotten the cache or what it watched for it, watches
// nothing. So the lines of the step that it was not asked about are asked for whole. A shard
// that did not have what a flush waits for is asked for it again.
Status Cache::AskAgain(RowTicket* row_ticket, const AllocateRequest& allocate) {
  auto* ticket = static_cast<Ticket*>(row_ticket);
  MutexLock lock(&mutex_);
  const bool lacks_rows = std::any_of(ticket->asked_.begin(), ticket->asked_.end(),
                                      [](const Asked& asked) { return asked.lacks_rows(); });
  if (lacks_rows)
    HET_RETURN_IF_ERROR(own_.CheckNotFrozen());  // what has been updated is still sent
  if (!ticket->installed_)
    return FailedPrecondition("ticket was not installed before more is asked");
  TakeReleased();
  std::unordered_set<uint32_t> answered;
  for (const Ticket::Asked& asked : ticket->asked_) {
    answered.insert(asked.slots.begin(), asked.slots.end());
  }
  std::vector<Questions> questions(num_shards());
  std::vector<int64_t> num_spared(num_shards());
  for (const uint32_t slot : ticket->slots_) {
    Line* line = store_.line(slot);
    const Ticket::Asked& asked = ticket->asked_[line->shard];
    // The row of a shard that started anew is there where another step has brought it.
    const bool is_there = line->has(Line::kFull) && !asked.unwatched;
    if (!asked.lacks_rows() || answered.count(slot) > 0 || is_there) {
      ++num_spared[line->shard];
      continue;
    }
    line->set(Line::kStays);
    admission_.Ask(1);
    questions[line->shard].full.push_back(slot);
  }
  ++ticket->asked_again_;
  std::vector<Link::Carry> carry(num_shards(), Link::Carry::kIdle);
  for (int s = 0; s < num_shards(); ++s) {
    if (ticket->asked_[s].overtook) carry[s] = CarryAfter(ticket->asked_again_);
  }
  ticket->asked_.assign(num_shards(), Ticket::Asked());
  ticket->installed_ = ticket->incomplete_ = false;
  for (int s = 0; s < num_shards(); ++s) {
    SendRequest(s, carry[s], config_.read_bound, std::move(questions[s]), allocate, ticket);
    ticket->asked_[s].num_spared = num_spared[s];
  }
  return Status();
}

void Cache::SendRequest(int shard, Link::Carry carry, int64_t read_bound, Questions questions,
                        const AllocateRequest& allocate, Ticket* ticket) {
  Shard& state = shards_[shard];
  Ticket::Asked& asked = ticket->asked_[shard];
  const bool pushes = !state.outbox.empty() && !own_.holds_back();
  if (pushes && config_.pushed_rows_come_back()) ForcePushedRows(state, &questions, ticket);
  Queries queries;
  queries.num_checks = static_cast<uint32_t>(questions.checks.size());
  queries.num_value_checks = static_cast<uint32_t>(questions.value_checks.size());
  queries.num_full = static_cast<uint32_t>(questions.full.size());
  queries.watches = questions.watches;
  queries.num_spared = questions.num_spared;
  const size_t num_bases = questions.checks.size() + questions.value_checks.size();
  asked.slots.reserve(num_bases + questions.full.size() + questions.values.size());
  for (const auto* slots :
       {&questions.checks, &questions.value_checks, &questions.full, &questions.values}) {
    asked.slots.insert(asked.slots.end(), slots->begin(), slots->end());
  }
  queries.keys.resize(asked.slots.size());
  queries.bases.resize(num_bases);
  for (size_t q = 0; q < asked.slots.size(); ++q) {
    const Line& line = *store_.line(asked.slots[q]);
    queries.keys[q] = line.key;
    if (q < num_bases) queries.bases[q] = BaseAfterCut(line);
  }
  NewPush push;
  if (pushes) push = CutPush(&state);
  const RequestBytes bytes =
      asker_.Send(shard, carry, read_bound, queries, pushes ? &push : nullptr, allocate,
                  &state.link, &state.watching, &asked);
  CountRequest(bytes, questions.num_spared, &counters_);
}

// Steps may overlap, so what is due may be on its way, or wait for the lookup that is to carry it,
// when another step comes to its update.
Status Cache::MakeRoom(const RowTicket& row_ticket, const AllocateRequest& allocate,
                       std::shared_ptr<RowTicket>* ticket) {
  const auto& step = static_cast<const Ticket&>(row_ticket);
  const auto made =
      std::make_shared<Ticket>(shared_from_this(), std::make_shared<UniqueIds>(nullptr, 0));
  *ticket = made;
  MutexLock lock(&mutex_);
  TakeReleased();
  std::vector<char> lacks_room(num_shards());
  if (config_.write_bound != kUnbounded && !keeps_updates_ && !own_.in_closure()) {
    const bool any = std::any_of(shards_.begin(), shards_.end(), [](const Shard& shard) {
      return !shard.outbox.empty() || shard.link.acknowledged() < shard.link.cut();
    });
    if (any) {
      store_.ForEachAhead(step.slots_, [&](uint32_t slot) HET_REQUIRES(mutex_) {
        const Line& line = *store_.line(slot);
        if (!HasRoom(line)) lacks_room[line.shard] = 1;
      });
    }
  }
  for (int s = 0; s < num_shards(); ++s) {
    if (lacks_room[s]) {
      SendRequest(s, Link::Carry::kAwaited, config_.read_bound, Questions(), allocate, made.get());
    } else {
      allocate(s, 0);
    }
  }
  return Status();
}

Status Cache::Flush(bool all, const AllocateRequest& allocate, std::shared_ptr<RowTicket>* ticket) {
  const auto made =
      std::make_shared<Ticket>(shared_from_this(), std::make_shared<UniqueIds>(nullptr, 0));
  *ticket = made;
  MutexLock lock(&mutex_);
  TakeReleased();
  LeaveClosure();
  if (own_.in_closure()) {
    for (int s = 0; s < num_shards(); ++s) allocate(s, 0);
    return Status();
  }
  Trim();
  if (all) {
    keeps_updates_ = false;
    for (const uint32_t slot : store_.dirty()) Enqueue(slot);
  }
  const Link::Carry carry = all ? Link::Carry::kAll : Link::Carry::kAwaited;
  for (int s = 0; s < num_shards(); ++s) {
    SendRequest(s, carry, config_.read_bound, Questions(), allocate, made.get());
  }
  return Status();
}

}  // namespace het_tf
