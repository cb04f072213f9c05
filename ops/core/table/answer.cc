// Answers to caches: the rows that they lack, and those that were watched for them.
//
// Where rows come and go, a check of a row that is not there is answered with its initial value: so
// a cache learns that it has expired, or that what it pushed was refused (lifetimes.h).

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>

#include "ops/core/memory/hash.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/table/record.h"
#include "ops/core/table/table.h"
#include "ops/core/wire/reply.h"
#include "ops/core/wire/request.h"

namespace het_tf {
namespace {

// In the place of a record: there is none any more.
constexpr char kGone = 0;

// As a read bound: no row is fresh enough.
constexpr int64_t kAlways = std::numeric_limits<int64_t>::min();

// A client's numbers may be anything; wrapping is harmless, signed overflow is not.
int64_t WrappingSubtract(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

// Of Table::reads_that_missed.
int MissedBucket(int64_t missed) {
  if (missed <= 0) return 0;
  return std::min(64 - __builtin_clzll(missed), Table::kMissedBuckets - 1);
}

// A row that goes without being asked for.
struct Unasked {
  int64_t key;
  int64_t base;
  const char* record;  // or kGone
};

}  // namespace

const char* Table::IfBeyond(const Stripe& stripe, uint64_t hash, int64_t key, int64_t base,
                            int64_t bound, int* bucket) const {
  const uint32_t slot = Find(stripe, hash, key);
  if (slot == Index::kNone) {
    // A line with a row that is not there, or not any more.
    const bool is_gone = lives_ && base > 0 && base != clocks_.gone();
    *bucket = is_gone ? 0 : -1;
    return is_gone ? &kGone : nullptr;
  }
  const char* record = stripe.records[slot];
  const int64_t missed = WrappingSubtract(ClockOf(record), base);
  const bool stays = bound == kUnbounded || (bound != kAlways && missed <= bound);
  *bucket = stays ? MissedBucket(missed) : 0;
  return stays ? nullptr : record;
}

void Table::SendWatched(const Stripe& stripe, int64_t bound, uint64_t reply,
                        WatchedRows* watched) const {
  const auto look = [&](WatchedRows::Row* row) {
    int bucket;
    if (IfBeyond(stripe, HashKey(row->key), row->key, row->base, bound, &bucket) != nullptr) {
      watched->Send(row, reply);
    }
  };
  std::vector<int64_t> changed;
  const bool saw_all =
      watched->size() == 0 ||
      stripe.log.ForEachFrom(watched->place, [&](int64_t key) { changed.push_back(key); });
  if (saw_all) {
    watched->ForEachFound(
        static_cast<int64_t>(changed.size()), [&](int64_t i) { return HashKey(changed[i]); },
        [&](int64_t i) { return changed[i]; }, [&](int64_t, WatchedRows::Row* row) { look(row); });
  } else {
    watched->ForEachWatched(look);
  }
  watched->place = stripe.log.end();
}

void Table::StartLogs(Watch* watch) {
  watches_ = true;
  for (int s = 0; s < kNumStripes; ++s) {
    const UniqueLock lock(stripes_[s]->mutex);
    stripes_[s]->log.Start();
    watch->stripe(s)->place = stripes_[s]->log.end();
  }
}

void Table::Answer(const RequestView& request, const std::vector<uint64_t>& hashes, bool restarted,
                   bool counted, Sessions::Session* session, const ParallelFor& parallel_for,
                   const std::function<char*(size_t)>& allocate) {
  const RequestHeader& header = request.header;
  const int64_t num_queries = header.num_queries();
  const Groups groups(num_queries, kNumStripes,
                      [&](int64_t q) { return StripeOfHash(hashes[q], kNumStripes); });
  // Pushes that the bases count, and that a value without slots would lack, are still to come.
  const bool behind = !restarted && session->sequence < header.cut;
  const auto sends_value = [&](int64_t q) { return !behind && request.wants_value(q); };
  const int64_t bound = behind ? kAlways : header.read_bound;

  uint64_t number = 0;
  if (header.watch != 0 && !restarted) {
    bool begins;
    number = session->watch.BeginReply(header.watch, kNumStripes, &begins);
    if (begins) StartLogs(&session->watch);
  }
  // Where rows come and go a base must also count no fewer: it would say that the cache knows of no
  // row, though of what it has pushed since something was refused.
  const bool watches = number != 0 && !behind && (!lives_ || session->sequence == header.cut);

  // First which rows go, then, once the reply has its memory, the rows themselves. Records never
  // move and are not freed while contents_ is held, so a pointer to one stays good in between.
  std::vector<const char*> found(num_queries, nullptr);
  std::array<std::vector<Unasked>, kNumStripes> unasked;
  const auto find_rows = [&](int64_t s) HET_REQUIRES(session->mutex) {
    const Stripe& stripe = *stripes_[s];
    const int32_t* queries = groups.order.data() + groups.begin[s];
    WatchedRows* watched = number != 0 ? session->watch.stripe(s) : nullptr;
    if (watched != nullptr) {
      watched->Seen(header.seen);
      SendWatched(stripe, header.read_bound, number, watched);
    }
    std::array<int32_t, kMissedBuckets> reads{};
    std::vector<int64_t> answered;  // keys that are watched
    VisitInBlocks(
        groups.size(s), [&](int64_t i) { return IndexedHash{&stripe.index, hashes[queries[i]]}; },
        [&](int64_t, uint32_t slot) { Prefetch(stripe.records[slot]); },
        [&](int64_t i, uint32_t) {
          const int32_t q = queries[i];
          const int64_t key = request.keys[q];
          if (request.is_check(q) && !restarted) {
            int bucket;
            found[q] = IfBeyond(stripe, hashes[q], key, request.bases[q], bound, &bucket);
            if (bucket >= 0 && !behind) ++reads[bucket];
          } else {
            const uint32_t slot = Find(stripe, hashes[q], key);
            if (slot != Index::kNone) found[q] = stripe.records[slot];
          }
          if (watched == nullptr) return;
          if (found[q] == nullptr) {
            if (watches && q < int64_t{header.num_checks})
              watched->Watch(hashes[q], key, request.bases[q]);
          } else if (WatchedRows::Row* row = watched->Find(hashes[q], key)) {
            watched->Send(row, number);
            answered.push_back(key);
          }
        });
    for (int b = 0; b < kMissedBuckets; ++b) {
      if (reads[b] > 0) missed_[b].fetch_add(reads[b], std::memory_order_relaxed);
    }
    if (watched == nullptr) return;
    std::sort(answered.begin(), answered.end());
    watched->ForEachSent([&](const WatchedRows::Row& row) {
      if (std::binary_search(answered.begin(), answered.end(), row.key)) return;
      const uint32_t slot = Find(stripe, HashKey(row.key), row.key);
      unasked[s].push_back(
          {row.key, row.base, slot == Index::kNone ? &kGone : stripe.records[slot]});
    });
  };
  ForEachStripe<SharedLock>(parallel_for, StripeCost(num_queries, 0), find_rows);

  ReplyHeader reply;
  std::vector<uint32_t> place(num_queries);
  for (int64_t q = 0; q < num_queries; ++q) {
    if (found[q] == nullptr) continue;
    place[q] = sends_value(q) ? reply.num_values++ : reply.num_full++;
  }
  std::array<uint32_t, kNumStripes> first_unasked;
  for (int s = 0; s < kNumStripes; ++s) {
    first_unasked[s] = reply.num_unasked;
    reply.num_unasked += static_cast<uint32_t>(unasked[s].size());
  }
  reply.flags = (restarted ? kRestarted : 0) | (header.format().half ? kHalfReply : 0) |
                (counted ? kCounted : 0) | (watches ? kWatches : 0);
  reply.incarnation = incarnation_;
  reply.session = session->number;
  reply.acknowledged = session->sequence;
  reply.number = number;
  reply.num_queries = static_cast<uint32_t>(num_queries);
  reply.dim = header.dim;
  reply.slot_dim = header.slot_dim;
  const size_t bytes = ReplyWriter::Size(reply);
  ReplyWriter writer(allocate(bytes), reply);
  const auto num_rows = static_cast<int64_t>(reply.num_rows());
  ForEachStripe<SharedLock>(parallel_for, StripeCost(num_rows, row_dim_), [&](int64_t s) {
    std::vector<float> unpacked(format_.half || lives_ ? row_dim_ : 0);
    // The row and its clock, of a record or of what is there in its place.
    const auto read = [&](const char* record, int64_t key, int64_t base, ReplyRow* row) {
      if (record == &kGone) {
        kit_.InitRow(key, unpacked.data());
        row->clock = std::min(std::max(clocks_.gone(), base), kMaxClock);
        return static_cast<const float*>(unpacked.data());
      }
      row->clock = ClockOf(record);
      if (!format_.half) return WordsOf(record);
      format_.Read(WordsOf(record), slot_dim(), unpacked.data());
      return static_cast<const float*>(unpacked.data());
    };
    for (int32_t i = groups.begin[s]; i < groups.begin[s + 1]; ++i) {
      const int32_t q = groups.order[i];
      if (found[q] == nullptr) continue;
      ReplyRow row = {0, q};
      const int64_t base = request.is_check(q) ? request.bases[q] : 0;
      const float* floats = read(found[q], request.keys[q], base, &row);
      if (sends_value(q)) {
        writer.SetValue(place[q], row, floats);
      } else {
        writer.SetFull(place[q], row, floats);
      }
    }
    for (size_t i = 0; i < unasked[s].size(); ++i) {
      const Unasked& each = unasked[s][i];
      ReplyRow row = {0, each.key};
      const float* floats = read(each.record, each.key, each.base, &row);
      writer.SetUnasked(first_unasked[s] + i, row, floats);
    }
  });
  if (number != 0) session->CountWatched();
  counters_.Add(TableCounter::kRowsChecked, header.num_bases());
  counters_.Add(TableCounter::kRowsSent, num_rows);
  counters_.Add(TableCounter::kBytesSent, bytes);
}

}  // namespace het_tf
