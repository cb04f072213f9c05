// Lookup and Apply: a table that is used where it is, without a cache.

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "ops/core/gradient_limit.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/table/record.h"
#include "ops/core/table/reservation.h"
#include "ops/core/table/table.h"

namespace het_tf {

// The record of each key, or nullptr. All stripes are locked.
void Table::FindRecords(const UniqueIds& ids, const ParallelFor& parallel_for,
                        FoundRows* found) const {
  found->incarnation = incarnation_;
  found->num_drops = num_drops_;
  found->records.resize(ids.num_keys());
  parallel_for(ids.num_keys(), kProbeCycles, [&](int64_t first, int64_t last) {
    const auto stripe_of = [&](int64_t i) -> const Stripe& {
      return *stripes_[StripeOfHash(ids.hashes[first + i], kNumStripes)];
    };
    VisitInBlocks(
        last - first,
        [&](int64_t i) { return IndexedHash{&stripe_of(i).index, ids.hashes[first + i]}; },
        [&](int64_t i, uint32_t slot) { Prefetch(stripe_of(i).records[slot]); },
        [&](int64_t i, uint32_t guess) {
          const Stripe& stripe = stripe_of(i);
          const uint32_t slot = Find(stripe, ids.hashes[first + i], ids.keys[first + i], guess);
          found->records[first + i] = slot == Index::kNone ? nullptr : stripe.records[slot];
        });
  });
}

Status Table::Lookup(const UniqueIds& ids, const ParallelFor& parallel_for, float* out,
                     FoundRows* found) const {
  const size_t row_bytes = sizeof(float) * dim();
  const size_t value_bytes = sizeof(float) * format_.words(0);
  const ReaderLock contents(&contents_);
  HET_RETURN_IF_ERROR(Warm(ids, parallel_for));
  const auto locks = LockStripes<SharedLock>(0, kNumStripes);
  FindRecords(ids, parallel_for, found);
  // In the order of the ids, so that `out` is written from front to back.
  parallel_for(ids.num_ids(), dim(), [&](int64_t first, int64_t last) {
    constexpr int64_t kAhead = 12;
    const auto record_of = [&](int64_t i) { return found->records[ids.key_of[i]]; };
    for (int64_t i = first; i < last; ++i) {
      if (i + kAhead < last) Prefetch(record_of(i + kAhead), kRowOffset + value_bytes);
      const char* record = record_of(i);
      if (record != nullptr) format_.Read(WordsOf(record), 0, out + i * dim());
    }
  });

  std::vector<int32_t> missing;
  for (int64_t u = 0; u < ids.num_keys(); ++u) {
    if (found->records[u] == nullptr) missing.push_back(static_cast<int32_t>(u));
  }
  parallel_for(missing.size(), 10 * dim(), [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; ++m) {
      const int32_t u = missing[m];
      const int32_t* place = &ids.positions[ids.begin[u]];
      const int32_t* end = ids.positions.data() + ids.begin[u + 1];
      float* initial = out + static_cast<int64_t>(*place) * dim();
      kit_.initializer.Fill(ids.keys[u], dim(), initial);
      while (++place != end) {
        std::memcpy(out + static_cast<int64_t>(*place) * dim(), initial, row_bytes);
      }
    }
  });
  return Status();
}

Status Table::Pool(const UniqueIds& ids, Pooling* pooling, const ParallelFor& parallel_for,
                   const std::vector<float*>& outputs, FoundRows* found) const {
  const int64_t num_keys = ids.num_keys();
  const ReaderLock contents(&contents_);
  HET_RETURN_IF_ERROR(Warm(ids, parallel_for));
  const auto locks = LockStripes<SharedLock>(0, kNumStripes);
  FindRecords(ids, parallel_for, found);
  std::vector<const float*> rows(num_keys);
  std::vector<int64_t> elsewhere;  // rows that no record holds as floats
  for (int64_t u = 0; u < num_keys; ++u) {
    if (found->records[u] == nullptr || format_.half) {
      elsewhere.push_back(u);
    } else {
      rows[u] = WordsOf(found->records[u]);
    }
  }
  const std::unique_ptr<float[]> made(new float[elsewhere.size() * dim()]);
  parallel_for(elsewhere.size(), 10 * dim(), [&](int64_t first, int64_t last) {
    for (int64_t e = first; e < last; ++e) {
      const int64_t u = elsewhere[e];
      float* row = &made[e * dim()];
      if (found->records[u] == nullptr) {
        kit_.initializer.Fill(ids.keys[u], dim(), row);
      } else {
        format_.Read(WordsOf(found->records[u]), 0, row);
      }
      rows[u] = row;
    }
  });
  pooling->Pool(ids, rows.data(), dim(), parallel_for, outputs);
  return Status();
}

// keys: those of ids that may have no record; groups: of these, by stripe, with memory reserved.
void Table::InsertRecords(const UniqueIds& ids, const std::vector<int32_t>& keys,
                          const Groups& groups, const ParallelFor& parallel_for,
                          std::vector<char*>* records) {
  const int64_t cost = StripeCost(keys.size(), 5 * row_dim_);
  parallel_for(kNumStripes, cost, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      Stripe& stripe = *stripes_[s];
      const int32_t* order = groups.order.data() + groups.begin[s];
      Newcomers newcomers;
      VisitInBlocks(
          groups.size(s),
          [&](int64_t i) { return IndexedHash{&stripe.index, ids.hashes[keys[order[i]]]}; },
          [&](int64_t, uint32_t slot) { Prefetch(stripe.records[slot]); },
          [&](int64_t i, uint32_t) {
            const int32_t u = keys[order[i]];
            (*records)[u] =
                FindOrAdmit(&stripe, ids.hashes[u], ids.keys[u], 1, time_.now(), &newcomers);
          });
      Note(newcomers);
    }
  });
}

Status Table::Apply(const UniqueIds& ids, const FoundRows& found, const GradientSums& sums,
                    float learning_rate, Nonfinite nonfinite, const ParallelFor& parallel_for) {
  HET_RETURN_IF_ERROR(kit_.optimizer->CheckLearningRate(learning_rate));
  if (sums.num_nonfinite() > 0) {
    if (nonfinite == Nonfinite::kError) {
      return InvalidArgument("gradients, or their squares, hold NaN or infinity for ",
                             sums.num_nonfinite(), " of ", ids.num_keys(),
                             " keys; no row was updated");
    }
    counters_.Add(TableCounter::kNonfiniteSkipped, sums.num_nonfinite());
  }
  const ReaderLockWithRoom held(this, ids.num_keys() * record_bytes_);
  HET_RETURN_IF_ERROR(Warm(ids, parallel_for));
  // What else takes a record away begins an incarnation.
  std::vector<char*> records;
  if (found.incarnation == incarnation_ && found.num_drops == num_drops_) records = found.records;
  records.resize(ids.num_keys());
  std::vector<int32_t> missing;
  for (int64_t u = 0; u < ids.num_keys(); ++u) {
    if (records[u] == nullptr && sums.finite(u)) missing.push_back(static_cast<int32_t>(u));
  }
  const Groups groups(missing.size(), kNumStripes,
                      [&](int64_t m) { return StripeOfHash(ids.hashes[missing[m]], kNumStripes); });
  const Reservation reservation(this, groups);
  HET_RETURN_IF_ERROR(reservation.status());
  const auto locks = LockStripes<UniqueLock>(0, kNumStripes);
  if (kept_.open() || notes_changes() || watches_) {
    for (int64_t u = 0; u < ids.num_keys(); ++u) {
      if (!sums.finite(u)) continue;
      Stripe* stripe = stripes_[StripeOfHash(ids.hashes[u], kNumStripes)].get();
      KeepRecord(stripe, ids.hashes[u], ids.keys[u]);
      stripe->log.Add(ids.keys[u]);
    }
  }
  if (!missing.empty()) InsertRecords(ids, missing, groups, parallel_for, &records);
  const uint32_t now = time_.now();
  parallel_for(ids.num_keys(), kProbeCycles / 2 + 4 * row_dim_, [&](int64_t first, int64_t last) {
    constexpr int64_t kAhead = 8;
    GradientLimit limit(*kit_.optimizer, ids);
    for (int64_t u = first; u < last; ++u) {
      if (u + kAhead < last) {
        Prefetch(records[u + kAhead], record_bytes_);
        sums.Prefetch(u + kAhead);
      }
      if (!sums.finite(u) || records[u] == nullptr) continue;
      SetRowTime(records[u], now);
      float* row = Open(records[u]);
      UpdateRow(records[u], row, limit(u, sums[u], row), learning_rate, 0);
      if (config_.clock != ClockRule::kDrift) {
        SetClock(records[u], Advance(ClockOf(records[u]), 1));
      }
    }
  });
  return Status();
}

}  // namespace het_tf
