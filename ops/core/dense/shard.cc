#include "ops/core/dense/shard.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/core/memory/hash.h"
#include "ops/core/row/clock.h"

namespace het_tf {
namespace {

// Cycles that merging or copying a block takes.
constexpr int64_t kBlockCost = 1 << 14;

// Copies the part of a block that a vector has.
void CopyBlock(const std::vector<float>& from, int64_t begin, int64_t end, std::vector<float>* to) {
  const auto size = static_cast<int64_t>(from.size());
  std::copy(from.begin() + std::min(begin, size), from.begin() + std::min(end, size),
            to->begin() + std::min(begin, size));
}

}  // namespace

int64_t DenseShard::num_blocks() const {
  return (static_cast<int64_t>(state_.floats.size()) + kBlock - 1) / kBlock;
}

Status DenseShard::Set(State state, int num_workers, float total) {
  if (state.owed.size() > state.floats.size()) {
    return InvalidArgument("owed holds ", state.owed.size(), " numbers, more than the ",
                           state.floats.size(), " floats");
  }
  if (num_workers < 1) return InvalidArgument("num_workers = ", num_workers, " must be positive");
  if (!(total > 0 && total <= 1)) return InvalidArgument("total = ", total, " must be in (0, 1]");
  if (state.clock < 0 || state.clock > kMaxClock) {
    return InvalidArgument("clock = ", state.clock, " must be in [0, ", kMaxClock, "]");
  }
  const WriterLock contents(&contents_);
  state_ = std::move(state);
  num_workers_ = num_workers;
  total_ = num_workers == 1 ? 1 : total;
  merges_apart_ = num_workers > 1 || std::any_of(state_.owed.begin(), state_.owed.end(),
                                                 [](float owed) { return owed != 0; });
  locks_ = std::make_unique<Mutex[]>(num_blocks() + 1);
  clock_ = state_.clock;
  incarnation_ = RandomId();
  sessions_.Clear();
  MutexLock lock(&sent_mutex_);
  sent_.clear();
  return Status();
}

DenseShard::State DenseShard::Get() const {
  const ReaderLock contents(&contents_);
  State state;
  state.clock = clock_.load();
  state.floats.resize(state_.floats.size());
  state.owed.resize(state_.owed.size());
  for (int64_t b = 0; b < num_blocks(); ++b) {
    MutexLock lock(&locks_[b]);
    CopyBlock(state_.floats, b * kBlock, (b + 1) * kBlock, &state.floats);
    CopyBlock(state_.owed, b * kBlock, (b + 1) * kBlock, &state.owed);
  }
  if (incarnation_ == 0) return state;
  MutexLock lock(&locks_[num_blocks()]);
  state.counters = state_.counters;
  return state;
}

uint64_t DenseShard::incarnation() const {
  const ReaderLock contents(&contents_);
  return incarnation_;
}

int64_t DenseShard::memory_bytes() const {
  const ReaderLock contents(&contents_);
  return (state_.floats.size() + state_.owed.size()) * sizeof(float) +
         state_.counters.size() * sizeof(int64_t) + state_.rest.size();
}

Status DenseShard::CheckShape(const DenseRequestHeader& request) const {
  if (incarnation_ == 0) return FailedPrecondition("the dense variables were not set");
  // A replica that knows another state may know another shape; it is told what is there now.
  const bool knows = request.incarnation == incarnation_;
  if (knows && (request.num_floats != state_.floats.size() ||
                request.num_counters != state_.counters.size())) {
    return InvalidArgument("dense request has num_floats = ", request.num_floats,
                           ", num_counters = ", request.num_counters, ", here are ",
                           state_.floats.size(), " and ", state_.counters.size());
  }
  return Status();
}

void DenseShard::Merge(const DensePushView& push, const ParallelFor& parallel_for) {
  const DenseShares shares = SharesOf(push.steps, push.interval, num_workers_, total_);
  const auto merge_blocks = [&](int64_t first, int64_t last) HET_REQUIRES_SHARED(contents_) {
    for (int64_t b = first; b < last; ++b) {
      MutexLock lock(&locks_[b]);
      if (push.contributions.half()) {
        MergeBlock(push.contributions, shares, b);
      } else {
        MergeBlock(push.contributions.floats(), shares, b);
      }
    }
  };
  parallel_for(num_blocks(), kBlockCost, merge_blocks);
  {
    MutexLock lock(&locks_[num_blocks()]);
    for (size_t c = 0; c < state_.counters.size(); ++c) {
      state_.counters[c] = static_cast<int64_t>(static_cast<uint64_t>(state_.counters[c]) +
                                                static_cast<uint64_t>(push.counters[c]));
    }
  }
  // Last, so that whoever reads the clock before the values has values that hold all its steps.
  int64_t clock = clock_.load();
  while (!clock_.compare_exchange_weak(clock, Advance(clock, push.steps))) {
  }
}

template <typename Contributions>
void DenseShard::MergeBlock(const Contributions& contributions, const DenseShares& shares,
                            int64_t b) {
  const int64_t end = std::min((b + 1) * kBlock, static_cast<int64_t>(state_.floats.size()));
  const int64_t trained = std::clamp(num_trained(), b * kBlock, end);
  float* __restrict values = state_.floats.data();
  float* __restrict owed = state_.owed.data();
  for (int64_t i = b * kBlock; i < trained; ++i) {
    const float at_once = shares.at_once * contributions[i];
    const float rest = owed[i] + (total_ * contributions[i] - at_once);
    const float merged = shares.of_owed * rest;
    owed[i] = rest - merged;
    values[i] += at_once + merged;
  }
  const float average = 1.0f / static_cast<float>(num_workers_);
  for (int64_t i = trained; i < end; ++i) values[i] += average * contributions[i];
}

DenseShard::Sent* DenseShard::SentOf(uint64_t session) {
  MutexLock lock(&sent_mutex_);
  std::unique_ptr<Sent>& sent = sent_[session];
  if (sent == nullptr) sent = std::make_unique<Sent>();
  return sent.get();
}

void DenseShard::WriteValues(const DenseReplyHeader& header, Sent* sent,
                             const ParallelFor& parallel_for, char* counters) const {
  const auto num_floats = static_cast<int64_t>(state_.floats.size());
  const bool half = header.flags & kDenseHalf;
  {
    MutexLock lock(&locks_[num_blocks()]);
    std::copy(state_.counters.begin(), state_.counters.end(), reinterpret_cast<int64_t*>(counters));
  }
  char* numbers = counters + state_.counters.size() * sizeof(int64_t);
  const uint64_t used = num_floats * (half ? sizeof(uint16_t) : sizeof(float));
  std::memset(numbers + used, 0, NumbersBytes(num_floats, half) - used);
  if (sent != nullptr) sent->values.resize(num_floats);
  const auto write_blocks = [&](int64_t first, int64_t last) HET_REQUIRES_SHARED(contents_) {
    for (int64_t b = first; b < last; ++b) {
      MutexLock lock(&locks_[b]);
      const int64_t from = b * kBlock, to = std::min(from + kBlock, num_floats);
      const float* values = state_.floats.data();
      if (half) {
        auto* halves = reinterpret_cast<uint16_t*>(numbers);
        for (int64_t i = from; i < to; ++i) {
          halves[i] = ToBfloat16(values[i] - sent->values[i]);
          sent->values[i] += FromBfloat16(halves[i]);
        }
      } else {
        std::memcpy(numbers + from * sizeof(float), values + from, (to - from) * sizeof(float));
        if (sent != nullptr) std::copy(values + from, values + to, &sent->values[from]);
      }
    }
  };
  parallel_for(num_blocks(), kBlockCost, write_blocks);
}

Status DenseShard::Sync(const char* bytes, size_t size, const ParallelFor& parallel_for,
                        const std::function<char*(size_t)>& allocate) {
  DenseRequestView request;
  HET_RETURN_IF_ERROR(DenseRequestView::Parse(bytes, size, &request));
  const ReaderLock contents(&contents_);
  HET_RETURN_IF_ERROR(CheckShape(request.header));
  const std::shared_ptr<Sessions::Session> session = sessions_.Of(request.header.replica_id);
  MutexLock lock(&session->mutex);

  const bool starts =
      request.header.incarnation != incarnation_ || request.header.session != session->number;
  const bool restarted = starts && request.header.incarnation != 0;
  int64_t own_steps = 0;
  bool merged = false;
  for (const DensePushView& push : request.pushes) {
    if (starts || push.sequence != session->sequence + 1) continue;
    Merge(push, parallel_for);
    session->sequence = push.sequence;
    own_steps += push.steps;
    merged = true;
  }

  DenseReplyHeader reply;
  reply.incarnation = incarnation_;
  reply.session = session->number;
  reply.acknowledged = session->sequence;
  reply.clock = clock_.load();
  reply.num_floats = state_.floats.size();
  reply.num_counters = static_cast<uint32_t>(state_.counters.size());
  const int64_t missed = reply.clock - request.header.clock - own_steps;
  const bool stale = request.header.read_bound != kUnbounded && missed > request.header.read_bound;
  const bool asks = (request.header.flags & kDenseAsk) != 0;
  if (!asks && (starts || stale || (merged && merges_apart_))) reply.flags |= kDenseValues;
  if (restarted) reply.flags |= kDenseRestarted;
  if (starts && !asks) {
    reply.flags |= kDenseRest;
    reply.rest_bytes = state_.rest.size();
  }
  Sent* sent = nullptr;
  if (request.half() && (reply.flags & kDenseValues)) {
    sent = SentOf(session->number);
    if (!starts && request.header.known != 0 && request.header.known == sent->known) {
      reply.flags |= kDenseHalf;
    }
    reply.known = ++sent->known;
  }
  char* out = allocate(DenseReplyBytes(reply));
  std::memcpy(out, &reply, sizeof(reply));
  out += sizeof(reply);
  if (reply.flags & kDenseValues) {
    WriteValues(reply, sent, parallel_for, out);
    out += reply.num_counters * sizeof(int64_t) +
           NumbersBytes(reply.num_floats, reply.flags & kDenseHalf);
  }
  if (reply.flags & kDenseRest) std::copy(state_.rest.begin(), state_.rest.end(), out);
  return Status();
}

}  // namespace het_tf
