// Steps of several workers that count as one (docs/protocol.md, 9): what the workers push is merged
// together, and only then is anyone answered.
//
// The gradients that workers have of one row in one step are added up, and the row takes one step
// with the sum. A worker that trained a row alone has made that very step on its own copy, so its
// copy stays good; the clock counts the gradients, so that all other copies are known to be old.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/memory/index.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/simd.h"
#include "ops/core/table/record.h"
#include "ops/core/table/reservation.h"
#include "ops/core/table/step_part.h"
#include "ops/core/table/table.h"

namespace het_tf {
namespace {

constexpr int32_t kEnd = -1;

// The updates of a key in a stripe: a chain through the rows of the pushes.
struct Chain {
  int64_t key;
  uint64_t hash;
  int32_t first, last;
  uint32_t updates;
};

}  // namespace

struct Table::PushedRow {
  int32_t push, row;
};

// The rows of several pushes, one push after the other.
struct Table::PushedTogether {
  struct Push {
    const PushView* view;
    const uint64_t* hashes;
    Sessions::Session* session;
  };
  bool is_gradient(PushedRow row) const { return row.row < pushes[row.push].view->num_gradients; }
  const PushRow& pushed(PushedRow row) const { return pushes[row.push].view->rows[row.row]; }
  uint64_t hash(PushedRow row) const { return pushes[row.push].hashes[row.row]; }
  uint32_t updates(PushedRow row) const { return is_gradient(row) ? 1 : pushed(row).updates; }
  const float* floats(PushedRow row, int dim, int contribution_dim) const {
    const PushView& view = *pushes[row.push].view;
    return is_gradient(row)
               ? view.gradients + int64_t{row.row} * dim
               : view.contributions + (row.row - view.num_gradients) * contribution_dim;
  }
  void Add(const Push& push) {
    const auto number = static_cast<int32_t>(pushes.size());
    pushes.push_back(push);
    for (int64_t r = 0; r < push.view->num_rows(); ++r) {
      rows.push_back({number, static_cast<int32_t>(r)});
    }
  }

  std::vector<Push> pushes;
  std::vector<PushedRow> rows;
};

Status Table::Collect(int64_t member, const char* bytes, size_t size,
                      std::shared_ptr<const void> owner, const ParallelFor& parallel_for,
                      std::shared_ptr<StepPart>* part) try {
  const auto made = std::make_shared<StepPart>();
  made->member = member;
  made->owner = std::move(owner);
  HET_RETURN_IF_ERROR(RequestView::Parse(bytes, size, &made->request));
  if (config_.clock != ClockRule::kCount) {
    return InvalidArgument("clock must be 'count' where the steps of several workers count as one");
  }
  for (const PushView& push : made->request.pushes) {
    if (push.closure == 0) continue;
    return InvalidArgument("request has a push of closure ", push.closure,
                           ", where the steps of several workers count as one");
  }
  HET_RETURN_IF_ERROR(CheckRequest(made->request, parallel_for, &made->hashed));
  counters_.Add(TableCounter::kRequests, 1);
  counters_.Add(TableCounter::kBytesReceived, static_cast<int64_t>(size));
  made->session = sessions_.Of(made->request.header.cache_id);
  MutexLock lock(&step_mutex_);
  step_parts_.push_back(made);
  *part = made;
  return Status();
} catch (const std::bad_alloc&) {
  return ResourceExhausted("out of memory for a request of ", size, " bytes");
}

Status Table::MergeStep(const ParallelFor& parallel_for) try {
  std::vector<std::shared_ptr<StepPart>> parts;
  {
    MutexLock lock(&step_mutex_);
    parts.swap(step_parts_);
  }
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& a, const auto& b) { return a->member < b->member; });
  int64_t num_pushed = 0;
  for (const auto& part : parts) {
    for (const PushView& push : part->request.pushes) num_pushed += push.num_rows();
  }
  if (num_pushed == 0) return Status();
  const ReaderLockWithRoom held(this, num_pushed * record_bytes_);
  for (const auto& part : parts) {
    for (size_t p = 0; p < part->request.pushes.size(); ++p) {
      HET_RETURN_IF_ERROR(Warm(part->request.pushes[p], part->hashed.pushes[p], parallel_for));
    }
  }
  return MergeTogether(parts, parallel_for);
} catch (const std::bad_alloc&) {
  return ResourceExhausted("out of memory for the pushes of a step");
}

// The analysis does not follow the locks of several sessions, which are taken in the order of their
// numbers. Nobody else takes more than one.
Status Table::MergeTogether(const std::vector<std::shared_ptr<StepPart>>& parts,
                            const ParallelFor& parallel_for) HET_NO_THREAD_SAFETY_ANALYSIS {
  std::map<uint64_t, Sessions::Session*> sessions;
  for (const auto& part : parts) sessions[part->session->number] = part->session.get();
  std::vector<std::unique_lock<Mutex>> locks;
  for (const auto& entry : sessions) locks.emplace_back(entry.second->mutex);

  PushedTogether together;
  std::map<Sessions::Session*, uint64_t> sequences;
  for (const auto& part : parts) {
    if (IsRestarted(part->request.header, *part->session)) continue;
    uint64_t& sequence =
        sequences.emplace(part->session.get(), part->session->sequence).first->second;
    for (size_t p = 0; p < part->request.pushes.size(); ++p) {
      const PushView& push = part->request.pushes[p];
      if (push.sequence == sequence + 1) {
        ++sequence;
        together.Add({&push, part->hashed.pushes[p].data(), part->session.get()});
      } else {
        const bool again = push.sequence <= sequence;
        counters_.Add(again ? TableCounter::kPushesRepeated : TableCounter::kPushesSkipped, 1);
      }
    }
  }
  const auto& rows = together.rows;
  const Groups groups(static_cast<int64_t>(rows.size()), kNumStripes,
                      [&](int64_t r) { return StripeOfHash(together.hash(rows[r]), kNumStripes); });
  const Reservation reservation(this, groups);
  HET_RETURN_IF_ERROR(reservation.status());
  const int64_t cost = StripeCost(static_cast<int64_t>(rows.size()), row_dim_);
  ForEachStripe<UniqueLock>(parallel_for, cost, [&](int64_t s) {
    MergeStripe(together, groups.order.data() + groups.begin[s], groups.size(s), s);
  });
  for (const auto& [session, sequence] : sequences) session->sequence = sequence;
  counters_.Add(TableCounter::kPushesMerged, static_cast<int64_t>(together.pushes.size()));
  counters_.Add(TableCounter::kRowsMerged, static_cast<int64_t>(rows.size()));
  return Status();
}

void Table::MergeStripe(const PushedTogether& together, const int32_t* rows, int64_t num_rows,
                        int64_t s) HET_NO_THREAD_SAFETY_ANALYSIS {
  Stripe& stripe = *stripes_[s];
  const auto row_at = [&](int64_t i) { return together.rows[rows[i]]; };
  std::vector<Chain> chains;
  std::vector<int32_t> next(num_rows, kEnd);
  Index index;
  const auto hash_of = [&](uint32_t c) { return chains[c].hash; };
  index.Reserve(num_rows, hash_of);
  for (int64_t i = 0; i < num_rows; ++i) {
    const auto row = row_at(i);
    const int64_t key = together.pushed(row).key;
    const uint64_t hash = together.hash(row);
    const auto place = static_cast<int32_t>(i);
    const uint32_t c = index.Find(hash, [&](uint32_t c) { return chains[c].key == key; });
    if (c == Index::kNone) {
      chains.push_back({key, hash, place, place, together.updates(row)});
      index.Insert(hash, static_cast<uint32_t>(chains.size() - 1), hash_of);
    } else {
      next[chains[c].last] = place;
      chains[c].last = place;
      chains[c].updates += together.updates(row);
    }
  }
  if (!stripe.unread.empty()) {
    for (const Chain& chain : chains) KeepRecord(&stripe, chain.hash, chain.key);
  }
  const uint32_t now = time_.now();
  Newcomers newcomers;
  std::vector<PushedRow> of_key;
  VisitInBlocks(
      static_cast<int64_t>(chains.size()),
      [&](int64_t c) { return IndexedHash{&stripe.index, chains[c].hash}; },
      [&](int64_t, uint32_t slot) { Prefetch(stripe.records[slot], record_bytes_); },
      [&](int64_t c, uint32_t) {
        const Chain& chain = chains[c];
        char* record = FindOrAdmit(&stripe, chain.hash, chain.key, chain.updates, now, &newcomers);
        if (record == nullptr) return;
        of_key.clear();
        for (int32_t i = chain.first; i != kEnd; i = next[i]) of_key.push_back(row_at(i));
        MergeRows(record, together, of_key);
      });
  Note(newcomers);
  // What a cache did itself it does not miss.
  for (int64_t first = 0, last = 0; first < num_rows; first = last) {
    const int32_t push = row_at(first).push;
    while (last < num_rows && row_at(last).push == push) ++last;
    WatchedRows* watched = together.pushes[push].session->watch.stripe(s);
    if (watched == nullptr) continue;
    watched->ForEachFound(
        last - first, [&](int64_t i) { return together.hash(row_at(first + i)); },
        [&](int64_t i) { return together.pushed(row_at(first + i)).key; },
        [&](int64_t i, WatchedRows::Row* row) {
          row->base = Advance(row->base, together.updates(row_at(first + i)));
        });
  }
}

// What was pushed of one row, push by push. Only the last gradient of a push is of this step: what
// comes before it is of earlier steps, in which no other worker trained the row.
void Table::MergeRows(char* record, const PushedTogether& together,
                      const std::vector<PushedRow>& rows) {
  static thread_local std::vector<PushedRow> of_step;
  of_step.clear();
  const int contribution_dim = kit_.optimizer->contribution_dim();
  const auto merge = [&](PushedRow row) {
    MergeRow(record, together.pushed(row), together.floats(row, dim(), contribution_dim),
             together.is_gradient(row));
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool is_last = i + 1 == rows.size() || rows[i + 1].push != rows[i].push;
    if (is_last && together.is_gradient(rows[i])) {
      of_step.push_back(rows[i]);
    } else {
      merge(rows[i]);
    }
  }
  static thread_local std::vector<float> sum;
  while (!of_step.empty()) {
    // Those with one learning rate, nearly always all.
    const float rate = together.pushed(of_step[0]).learning_rate;
    const auto end = std::stable_partition(of_step.begin(), of_step.end(), [&](PushedRow row) {
      return together.pushed(row).learning_rate == rate;
    });
    const auto count = end - of_step.begin();
    sum.assign(dim(), 0);
    for (auto row = of_step.begin(); row != end; ++row) {
      const float* gradient = together.floats(*row, dim(), contribution_dim);
      for (int d = 0; d < dim(); ++d) sum[d] += gradient[d];
    }
    const Gradient gradient = Gradient::Of(sum.data(), dim());
    if (count == 1 || !std::isfinite(gradient.squares)) {
      std::for_each(of_step.begin(), end, merge);
    } else {
      UpdateRow(record, Open(record), gradient, rate, 0);
      SetClock(record, Advance(ClockOf(record), count));
    }
    of_step.erase(of_step.begin(), end);
  }
}

Status Table::AnswerStep(const StepPart& part, const ParallelFor& parallel_for,
                         const std::function<char*(size_t)>& allocate) try {
  const ReaderLockWithRoom held(this, 0);
  HET_RETURN_IF_ERROR(Warm(part.request, part.hashed.queries, parallel_for));
  MutexLock lock(&part.session->mutex);
  Answer(part.request, part.hashed.queries, IsRestarted(part.request.header, *part.session),
         /*counted=*/false, part.session.get(), parallel_for, allocate);
  return Status();
} catch (const std::bad_alloc&) {
  return ResourceExhausted("out of memory for the answer to a step");
}

}  // namespace het_tf
