#include "ops/core/dense/replica.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "ops/core/memory/hash.h"
#include "ops/core/row/clock.h"

namespace het_tf {
namespace {

// Servers spread what N workers push over at most N pushes of each (shares.h). A young network
// moves fast, so that for a fifth of its steps it has what was trained: an interval is at most one
// step for so many steps of a worker, times N.
constexpr int64_t kStepsPerStepOfInterval = 5;

// Calls visit(data, position, n) for the parts of arrays that lie in [first, last) of them all.
template <typename T, typename Visit>
void ForEachPart(const std::vector<Replica::Array<T>>& arrays, int64_t first, int64_t last,
                 const Visit& visit) HET_NO_THREAD_SAFETY_ANALYSIS {
  int64_t begin = 0;
  for (const auto& array : arrays) {
    const int64_t end = begin + array.size;
    const int64_t from = std::max(begin, first), to = std::min(end, last);
    if (from < to) visit(array.data + (from - begin), from, to - from);
    begin = end;
  }
}

template <typename T>
int64_t TotalSize(const std::vector<Replica::Array<T>>& arrays) {
  return std::accumulate(arrays.begin(), arrays.end(), int64_t{0},
                         [](int64_t n, const auto& array) { return n + array.size; });
}

}  // namespace

ReplicaTicket::~ReplicaTicket() {
  std::vector<std::function<void()>> waiting;
  {
    MutexLock lock(&replica_->mutex_);
    replica_->CloseRequests(this);
    waiting = replica_->TakeWaiting();
  }
  for (const auto& callback : waiting) callback();
}

Status Replica::Create(const ReplicaConfig& config, std::shared_ptr<Replica>* replica) {
  if (config.num_floats < 0 || config.num_counters < 0 || config.rest_bytes < 0) {
    return InvalidArgument("num_floats = ", config.num_floats,
                           ", num_counters = ", config.num_counters,
                           ", rest_bytes = ", config.rest_bytes, " must not be negative");
  }
  if (config.num_shards < 1 || config.num_workers < 1) {
    return InvalidArgument("num_shards = ", config.num_shards,
                           ", num_workers = ", config.num_workers, " must be at least 1");
  }
  if (config.num_phases < 1 || config.num_shards % config.num_phases != 0) {
    return InvalidArgument("num_phases = ", config.num_phases,
                           " must divide num_shards = ", config.num_shards);
  }
  if (config.staleness < 0 || config.staleness > kMaxBound) {
    return InvalidArgument("staleness = ", config.staleness, " must be in [0, ", kMaxBound, "]");
  }
  replica->reset(new Replica(config));
  return Status();
}

Replica::Replica(const ReplicaConfig& config)
    : config_(config),
      id_(RandomId()),
      shards_(config.num_shards),
      base_(config.num_floats),
      counter_base_(config.num_counters),
      shift_(config.num_floats),
      counter_shift_(config.num_counters) {
  if (config.half) known_.resize(config.num_floats);
  for (int s = 0; s < config.num_shards; ++s) {
    Shard& shard = shards_[s];
    const auto first = [&](int64_t n) { return FirstOfShard(n, s, config_.num_shards); };
    const auto last = [&](int64_t n) { return FirstOfShard(n, s + 1, config_.num_shards); };
    shard.first = first(config.num_floats), shard.last = last(config.num_floats);
    shard.first_counter = first(config.num_counters);
    shard.last_counter = last(config.num_counters);
    shard.first_byte = first(config.rest_bytes), shard.last_byte = last(config.rest_bytes);
    shard.due = DueSteps(shard, true);
  }
}

bool Replica::started() const {
  return std::all_of(shards_.begin(), shards_.end(), [](const Shard& s) { return s.started; });
}

int64_t Replica::Unmerged() const {
  int64_t unmerged = 0;
  for (const Shard& shard : shards_) unmerged = std::max(unmerged, shard.unmerged());
  return unmerged;
}

int64_t Replica::Interval(const Shard& shard) const {
  // Half of what may be unsent travels while the other half is made.
  const int64_t longest = std::max<int64_t>(1, (config_.staleness + 1) / 2);
  if (config_.num_workers == 1 || config_.num_floats == 0) return longest;
  const int64_t steps = shard.clock / config_.num_workers;
  return std::clamp<int64_t>(steps / (kStepsPerStepOfInterval * config_.num_workers), 1, longest);
}

int64_t Replica::DueSteps(const Shard& shard, bool aligned) const {
  const int64_t due = Interval(shard);
  const int64_t phase = (&shard - shards_.data()) % config_.num_phases;
  return std::max<int64_t>(1, due - (aligned ? due * phase / config_.num_phases : 0));
}

std::vector<uint64_t> Replica::incarnations() {
  MutexLock lock(&mutex_);
  std::vector<uint64_t> incarnations;
  for (const Shard& shard : shards_) incarnations.push_back(shard.link.epoch().incarnation);
  return incarnations;
}

bool Replica::holds_back() {
  MutexLock lock(&mutex_);
  return std::any_of(shards_.begin(), shards_.end(), [](const Shard& s) { return s.holds_back(); });
}

Status Replica::CheckVariables(const Variables& variables) const {
  const int64_t floats = TotalSize(variables.floats), rest = TotalSize(variables.rest);
  const auto counters = static_cast<int64_t>(variables.counters.size());
  if (floats == config_.num_floats && counters == config_.num_counters &&
      rest == config_.rest_bytes) {
    return Status();
  }
  return InvalidArgument("variables hold ", floats, " floats, ", counters, " counters and ", rest,
                         " other bytes, the replica has ", config_.num_floats, ", ",
                         config_.num_counters, " and ", config_.rest_bytes);
}

// The variables of a shard become what it has, plus own steps since.
void Replica::TakeOver(const Variables& variables, Shard* shard) {
  if (!shard->starts && !shard->has_shift) return;  // shift_ is 0 there
  if (shard->starts) {
    const auto copy_base = [&](float* values, int64_t f, int64_t n) HET_REQUIRES(mutex_) {
      std::copy(&base_[f], &base_[f] + n, values);
    };
    ForEachPart(variables.floats, shard->first, shard->last, copy_base);
    for (int64_t c = shard->first_counter; c < shard->last_counter; ++c) {
      *variables.counters[c] = counter_base_[c];
    }
    const auto copy_rest = [&](char* bytes, int64_t b, int64_t n) HET_REQUIRES(mutex_) {
      const char* begin = &rest_[b];
      std::copy(begin, begin + n, bytes);
    };
    ForEachPart(variables.rest, shard->first_byte, shard->last_byte, copy_rest);
  } else {
    const auto add_shift = [&](float* values, int64_t f, int64_t n) HET_REQUIRES(mutex_) {
      for (int64_t i = 0; i < n; ++i) values[i] += shift_[f + i];
    };
    ForEachPart(variables.floats, shard->first, shard->last, add_shift);
    for (int64_t c = shard->first_counter; c < shard->last_counter; ++c) {
      *variables.counters[c] += counter_shift_[c];
    }
  }
  std::fill(shift_.begin() + shard->first, shift_.begin() + shard->last, 0.0f);
  std::fill(counter_shift_.begin() + shard->first_counter,
            counter_shift_.begin() + shard->last_counter, 0);
  shard->starts = shard->has_shift = false;
}

// What own steps added since the last cut becomes a push; whole: with all that rounding took off.
void Replica::Cut(const Variables& variables, bool whole, Shard* shard) {
  const bool half = config_.half && !whole;
  const auto num_counters = static_cast<uint32_t>(shard->num_counters());
  const size_t size = DensePushWriter::Size(shard->num_floats(), num_counters, half);
  // As uint64_t for the alignment.
  std::shared_ptr<uint64_t[]> memory(new uint64_t[size / sizeof(uint64_t)]);
  auto* bytes = reinterpret_cast<char*>(memory.get());
  Link::Push push;
  push.sequence = shard->link.NextSequence();
  push.updates = shard->pending;
  push.memory = std::shared_ptr<const char>(memory, bytes);
  push.bytes = bytes;
  push.size = size;
  const DensePushHeader header = {push.sequence, shard->pending,
                                  static_cast<uint32_t>(half ? kDenseHalf : 0),
                                  static_cast<uint32_t>(Interval(*shard))};
  DensePushWriter writer(bytes, header, shard->num_floats(), num_counters);
  const auto write = [&](const float* values, int64_t f, int64_t n) HET_REQUIRES(mutex_) {
    // Moved by what is sent, so that what rounding takes off is sent later.
    for (int64_t i = 0; i < n; ++i) {
      base_[f + i] += writer.Set(f + i - shard->first, values[i] - base_[f + i]);
    }
  };
  ForEachPart(variables.floats, shard->first, shard->last, write);
  for (int64_t c = shard->first_counter; c < shard->last_counter; ++c) {
    writer.counters()[c - shard->first_counter] = *variables.counters[c] - counter_base_[c];
    counter_base_[c] = *variables.counters[c];
  }
  shard->unacknowledged += shard->pending;
  shard->pending = 0;
  shard->rounded = half;
  shard->link.AddPush(std::move(push));
  counters_.Add(ReplicaCounter::kPushes, 1);
}

Status Replica::Settle(const Variables& variables, int64_t steps, bool reads, bool all, Must* must,
                       bool* started) {
  MutexLock lock(&mutex_);
  HET_RETURN_IF_ERROR(CheckVariables(variables));
  if (steps < 0) return InvalidArgument("steps = ", steps, " must not be negative");
  counters_.Add(ReplicaCounter::kSteps, steps);
  *started = false;
  for (Shard& shard : shards_) {
    shard.pending += steps;
    *started |= shard.starts;
    TakeOver(variables, &shard);
  }
  if (*started) {
    rest_.clear();
    rest_.shrink_to_fit();
  }
  if (this->started()) {
    for (Shard& shard : shards_) {
      const bool due = all ? shard.pending > 0 || shard.rounded : shard.pending >= shard.due;
      if (!due || !shard.all_merged()) continue;
      Cut(variables, all, &shard);
      shard.due = DueSteps(shard, all);
    }
  }
  counters_.Set(ReplicaCounter::kPending, Unmerged());
  const bool read = reads && config_.staleness == 0 && config_.num_workers > 1;
  *must = Must::kNothing;
  for (const Shard& shard : shards_) {
    // Who has done nothing here has nothing to send.
    const bool write = all ? shard.holds_back() : shard.unmerged() > config_.staleness;
    const bool start = reads && !shard.started;
    if (!(write || read || start || IsStale(shard))) continue;
    *must = std::max(*must, shard.open ? Must::kWait : Must::kExchange);
  }
  const auto waiting = TakeWaiting();
  lock.Unlock();
  for (const auto& callback : waiting) callback();
  return Status();
}

bool Replica::IsStale(const Shard& shard) const {
  return shard.replaced || shard.seen - (shard.clock - shard.own) > config_.staleness;
}

bool Replica::IsDue(const Shard& shard) const {
  return IsStale(shard) || !shard.link.ToCarry(Link::Carry::kIdle).empty();
}

bool Replica::AnyIsUrgent() const {
  const auto is_urgent = [this](const Shard& shard) HET_REQUIRES(mutex_) {
    const int64_t interval = Interval(shard);
    const int64_t time = std::min(config_.staleness, 2 * interval) - interval;
    return !shard.open && IsDue(shard) && (IsStale(shard) || 2 * shard.pending >= time);
  };
  return std::any_of(shards_.begin(), shards_.end(), is_urgent);
}

bool Replica::AnyIsOpen() const {
  return std::any_of(shards_.begin(), shards_.end(), [](const Shard& shard) { return shard.open; });
}

Status Replica::Request(bool asks, const AllocateRequest& allocate,
                        std::shared_ptr<ReplicaTicket>* ticket) {
  *ticket = std::make_shared<ReplicaTicket>(shared_from_this());
  MutexLock lock(&mutex_);
  const bool has_others = config_.num_workers > 1;
  (*ticket)->requests_.resize(shards_.size());
  (*ticket)->asks_.resize(shards_.size());
  for (size_t s = 0; s < shards_.size(); ++s) {
    Shard& shard = shards_[s];
    const bool reads = has_others && config_.staleness == 0;
    const bool opens = !shard.open && (!shard.started || IsDue(shard) || reads);
    const bool only_asks = !opens && asks && shard.started && has_others;
    if (!opens && !only_asks) {
      allocate(static_cast<int>(s), 0);
      continue;
    }
    std::vector<const Link::Push*> carried;
    if (opens) carried = shard.link.ToCarry(Link::Carry::kIdle);
    DenseRequestHeader header;
    header.flags = (config_.half ? kDenseHalf : 0) | (only_asks ? kDenseAsk : 0);
    header.replica_id = id_;
    header.incarnation = shard.link.epoch().incarnation;
    header.session = shard.link.epoch().session;
    header.known = shard.known;
    header.clock = shard.clock;
    header.read_bound = config_.staleness;
    header.num_floats = shard.num_floats();
    header.num_counters = static_cast<uint32_t>(shard.num_counters());
    header.num_pushes = static_cast<uint32_t>(carried.size());
    size_t size = sizeof(header);
    for (const Link::Push* push : carried) size += push->size;
    char* out = allocate(static_cast<int>(s), size);
    std::memcpy(out, &header, sizeof(header));
    out += sizeof(header);
    for (const Link::Push* push : carried) {
      std::memcpy(out, push->bytes, push->size);
      out += push->size;
    }
    (*ticket)->asks_[s] = only_asks;
    if (opens) {
      (*ticket)->requests_[s] = shard.link.Open(Link::Carry::kIdle);
      shard.open = true;
      shard.seen_since = 0;
    }
    counters_.Add(ReplicaCounter::kBytesUp, size);
  }
  return Status();
}

std::vector<std::function<void()>> Replica::TakeWaiting() {
  std::vector<std::function<void()>> taken;
  if (!AnyIsOpen()) taken = std::exchange(waiting_, {});
  if (closed_ || AnyIsUrgent()) {
    for (auto& callback : std::exchange(waiting_for_urgent_, {})) {
      taken.push_back([callback = std::move(callback), urgent = !closed_] { callback(urgent); });
    }
  }
  return taken;
}

void Replica::WhenUrgent(std::function<void(bool)> callback) {
  std::vector<std::function<void()>> waiting;
  {
    MutexLock lock(&mutex_);
    waiting_for_urgent_.push_back(std::move(callback));
    waiting = TakeWaiting();
  }
  for (const auto& each : waiting) each();
}

void Replica::SetClosed(bool closed) {
  std::vector<std::function<void()>> waiting;
  {
    MutexLock lock(&mutex_);
    closed_ = closed;
    waiting = TakeWaiting();
  }
  for (const auto& each : waiting) each();
}

void Replica::WhenIdle(std::function<void()> callback) {
  {
    MutexLock lock(&mutex_);
    if (AnyIsOpen()) {
      waiting_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

}  // namespace het_tf
