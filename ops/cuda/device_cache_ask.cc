// What the shards are asked: about a step's keys, and what travels with that.

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ops/core/wire/request.h"
#include "ops/cuda/device_cache.h"
#include "ops/cuda/error.h"

namespace het_tf {
namespace cuda {

std::vector<int64_t> DeviceCache::WaitingKeys() const {
  std::vector<int64_t> keys;
  for (const Shard& shard : shards_) {
    shard.outbox.ForEachKey([&](int64_t key) { keys.push_back(key); });
  }
  return keys;
}

std::vector<int64_t> DeviceCache::KeysToForce() const {
  const bool force = config_.pushed_rows_come_back() && !own_.holds_back();
  return force ? WaitingKeys() : std::vector<int64_t>();
}

// Asks for the whole rows of those that are among these keys.
int64_t DeviceCache::AskInFull(const std::unordered_set<int64_t>& keys,
                               std::vector<Subject>* subjects, std::vector<Subject>* full) {
  const auto first =
      std::stable_partition(subjects->begin(), subjects->end(),
                            [&](const Subject& subject) { return keys.count(subject.key) == 0; });
  const int64_t moved = subjects->end() - first;
  full->insert(full->end(), first, subjects->end());
  subjects->erase(first, subjects->end());
  return moved;
}

// A closure holds back what waits, so the shards will answer without it. A value without slots does
// not take it in, and the clocks of lines have it already. (Lines of what waits were made since,
// and never checked, so they are not watched.)
void DeviceCache::AskForWaiting(std::vector<Questions>* questions) {
  const std::vector<int64_t> waiting = WaitingKeys();
  const std::unordered_set<int64_t> keys(waiting.begin(), waiting.end());
  if (keys.empty()) return;
  for (Questions& each : *questions) {
    AskInFull(keys, &each.checks, &each.full);
    admission_.Ask(AskInFull(keys, &each.values, &each.full));
  }
}

// Has the rows of these keys come back, where they have a line. ticket->forced_: for so many.
Status DeviceCache::Force(const std::vector<int64_t>& keys, DeviceTicket* ticket,
                          std::vector<Questions>* questions) {
  std::unordered_set<int64_t> forced(keys.begin(), keys.end());
  for (Questions& each : *questions) {
    AskInFull(forced, &each.checks, &each.full);
    for (const auto* asked : {&each.full, &each.values}) {
      for (const Subject& subject : *asked) forced.erase(subject.key);
    }
  }
  if (forced.empty()) return Status();
  Found* found = ticket->forced_.get();
  const std::vector<int64_t> others(forced.begin(), forced.end());
  found->batch.num_ids = static_cast<int64_t>(others.size());
  HET_RETURN_IF_ERROR(Find(others.data(), false, found));
  for (int32_t c = 0; c < found->here.checks; ++c) {
    const int64_t key = found->check_keys[c];
    (*questions)[ShardOf(key)].full.push_back(
        {key, found->check_bases[c], List::kForced, found->check_index[c]});
  }
  return Status();
}

// What a step must ask about its keys. has_line: (misses)
void DeviceCache::Ask(const std::vector<char>& has_line, int64_t read_bound, DeviceTicket* ticket,
                      std::vector<Questions>* questions) {
  const Found& found = *ticket->found_;
  int64_t hits = 0;
  // A row that another step has, too. What that updates meanwhile, a value without slots does not
  // take in.
  const auto ask_of_known = [&](const Subject& row, Questions* each) HET_REQUIRES(mutex_) {
    if (row.base < 0) {  // it is still to come
      admission_.Ask(1);
      each->full.push_back(row);
      return;
    }
    ++hits;
    if (read_bound == kUnbounded) {
      admission_.Spared(1);
    } else {
      each->checks.push_back(row);
    }
  };
  for (int32_t j = 0; j < found.here.misses; ++j) {
    const uint32_t shard = ShardOf(found.miss_keys[j]);
    Questions& each = (*questions)[shard];
    ++ticket->keys_in_[shard];
    const Subject miss = {found.miss_keys[j], found.miss_bases[j], List::kStep,
                          found.miss_index[j]};
    // What is updated without a line would not be in it.
    if (!has_line[j]) host_rows_.Drop(miss.key);
    int64_t base;
    if (has_line[j] && host_rows_.is_enabled() && TakeKept(miss, ticket, &base)) {
      each.checks.push_back({miss.key, base, List::kStep, miss.at});
    } else if (has_line[j]) {
      each.full.push_back(miss);
    } else if (visitors_.shared(found.newcomers_here[j].visitor)) {
      ask_of_known(miss, &each);
      // Should its shard watch it, no line is there for that.
      if (each.watches && miss.base >= 0) {
        shards_[shard].watching.Left(1, config_.capacity / num_shards());
      }
    } else {
      each.values.push_back(miss);
    }
  }
  for (int32_t c = 0; c < found.here.checks; ++c) {
    const uint32_t shard = ShardOf(found.check_keys[c]);
    Questions& each = (*questions)[shard];
    ++ticket->keys_in_[shard];
    ask_of_known({found.check_keys[c], found.check_bases[c], List::kStep, found.check_index[c]},
                 &each);
  }
  const auto* spared = reinterpret_cast<const int32_t*>(shards_pinned_.get());
  for (int s = 0; s < num_shards(); ++s, spared += HET_SPREAD) {
    Questions& each = (*questions)[s];
    if (!each.watches) continue;
    each.num_spared = std::accumulate(spared, spared + HET_SPREAD, int64_t{0});
    admission_.Spared(each.num_spared);
    ticket->keys_in_[s] += each.num_spared;
    hits += each.num_spared;
  }
  const auto* read = reinterpret_cast<const Counts*>(counts_pinned_.get());
  CountLookup(found.batch.num_ids, found.here.keys, hits, found.batch.num_ids - read->missed_ids,
              &counters_);
}

void DeviceCache::SendRequest(int shard, Link::Carry carry, int64_t read_bound, Questions questions,
                              const AllocateRequest& allocate, DeviceTicket* ticket) {
  Shard& state = shards_[shard];
  Asked& asked = ticket->asked_[shard];
  Queries queries;
  queries.num_checks = static_cast<uint32_t>(questions.checks.size());
  queries.num_full = static_cast<uint32_t>(questions.full.size());
  queries.watches = questions.watches;
  queries.num_spared = questions.num_spared;
  for (const auto* subjects : {&questions.checks, &questions.full, &questions.values}) {
    asked.subjects.insert(asked.subjects.end(), subjects->begin(), subjects->end());
  }
  for (const Subject& subject : asked.subjects) queries.keys.push_back(subject.key);
  for (const Subject& check : questions.checks) queries.bases.push_back(check.base);
  NewPush push;
  const bool pushes = questions.pushes && state.outbox.num_rows() > 0 && !own_.holds_back();
  if (pushes) {
    push.header = state.outbox.Header(state.link.NextSequence());
    own_.Stamp(&push.header);
    push.updates = state.outbox.updates();
    push.write = [&state, &push](char* bytes) { state.outbox.Write(push.header, bytes); };
  }
  // Once the link has the push the outbox does not, whatever fails after that.
  const struct Cut {
    ~Cut() {
      if (state.link.cut() == before) return;
      counters.Add(CacheCounter::kRowsPushed, state.outbox.num_rows());
      counters.Add(CacheCounter::kUpdatesPushed, state.outbox.updates());
      state.outbox.Clear();
    }
    Shard& state;
    Counters<CacheCounter>& counters;
    const uint64_t before;
  } cut = {state, counters_, state.link.cut()};
  const RequestBytes bytes =
      asker_.Send(shard, carry, read_bound, queries, pushes ? &push : nullptr, allocate,
                  &state.link, &state.watching, &asked);
  if (bytes.all > 0) ++state.num_open;
  CountRequest(bytes, questions.num_spared, &counters_);
}

}  // namespace cuda
}  // namespace het_tf
