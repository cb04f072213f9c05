#include "ops/core/table/table.h"

#include <algorithm>
#include <cstring>

#include "ops/core/memory/free_memory.h"
#include "ops/core/memory/hash.h"
#include "ops/core/simd.h"
#include "ops/core/table/record.h"
#include "ops/core/table/reservation.h"

namespace het_tf {

Status Table::Create(const RowConfig& config, int shard, std::unique_ptr<Table>* table,
                     const Lifetimes& lifetimes, SecondsClock seconds, const Storage& storage) {
  RowKit kit;
  HET_RETURN_IF_ERROR(RowKit::Create(config, &kit));
  if (shard < 0 || shard >= config.num_shards) {
    return InvalidArgument("shard = ", shard, " must be in [0, num_shards = ", config.num_shards,
                           ")");
  }
  if (lifetimes.any() && config.clock == ClockRule::kLamport) {
    return InvalidArgument("clock = 'lamport' has no lifetimes: rows must come at once and stay");
  }
  for (int r = 0; r < lifetimes.num_ranges(); ++r) {
    for (const ExpiryRule& rule : lifetimes.range(r).expiries) {
      if (config.clock == ClockRule::kCount || rule.updates_below == ExpiryRule().updates_below) {
        continue;
      }
      return InvalidArgument("updates_below = ", rule.updates_below,
                             " needs clock = 'count': other clocks do not count updates");
    }
  }
  std::unique_ptr<FileArena> file;
  if (storage.on_disk()) {
    const int64_t memory = storage.memory > 0 ? storage.memory : FreeMemory() / 4;
    if (memory <= 0) {
      return InvalidArgument("memory = None of a storage: how much memory is free is not known");
    }
    HET_RETURN_IF_ERROR(FileArena::Create(storage.path, memory, &file));
  }
  table->reset(
      new Table(config, shard, std::move(kit), lifetimes, std::move(seconds), std::move(file)));
  return Status();
}

Table::Table(const RowConfig& config, int shard, RowKit kit, const Lifetimes& lifetimes,
             SecondsClock seconds, std::unique_ptr<FileArena> file)
    : config_(config),
      shard_(shard),
      kit_(std::move(kit)),
      row_dim_(kit_.optimizer->row_dim()),
      format_{kit_.optimizer->dim(), config.half},
      lifetimes_(lifetimes),
      lives_(lifetimes.any()),
      expires_(lifetimes.expires()),
      record_bytes_(kRowOffset + sizeof(float) * format_.words(kit_.optimizer->slot_dim()) +
                    (expires_ ? sizeof(uint32_t) : 0)),
      time_(lifetimes.time_is_given() || !expires_ ? nullptr : std::move(seconds)),
      file_(std::move(file)) {
  Arena* records = file_ == nullptr ? &arena_ : file_.get();
  for (int s = 0; s < kNumStripes; ++s) {
    stripes_.push_back(std::make_unique<Stripe>(record_bytes_, records));
    if (!lifetimes_.admits_some()) continue;
    const uint64_t seed = static_cast<uint64_t>(config.seed) * kNumStripes + s;
    stripes_[s]->gate =
        std::make_unique<Gate>(lifetimes_, 1.0 / kNumStripes, HashKey(seed), &arena_, &kept_);
  }
  NewIncarnation();
}

void Table::NewIncarnation() {
  incarnation_ = RandomId();
  sessions_.Clear();
  closures_.Clear();
}

uint64_t Table::incarnation() const {
  const ReaderLock contents(&contents_);
  return incarnation_;
}

int64_t Table::size() const {
  const ReaderLock contents(&contents_);
  int64_t size = 0;
  for (const auto& stripe : stripes_) {
    SharedLock lock(stripe->mutex);
    size += stripe->index.size();
  }
  return size;
}

int64_t Table::memory_bytes() const {
  const ReaderLock contents(&contents_);
  int64_t bytes = sessions_.watch_bytes();
  for (const auto& stripe : stripes_) {
    SharedLock lock(stripe->mutex);
    bytes += stripe->index.bytes();
    bytes += file_ == nullptr ? stripe->records.bytes()
                              : static_cast<int64_t>(stripe->keys.capacity() * sizeof(int64_t));
    if (stripe->gate != nullptr) bytes += stripe->gate->bytes();
  }
  if (file_ != nullptr) bytes += file_->memory_bytes();
  return bytes;
}

int64_t Table::num_candidates() const {
  const ReaderLock contents(&contents_);
  int64_t candidates = 0;
  for (const auto& stripe : stripes_) {
    SharedLock lock(stripe->mutex);
    if (stripe->gate != nullptr) candidates += stripe->gate->num_candidates();
  }
  return candidates;
}

Table::Reservation::Reservation(Table* table, const Groups& groups) : table_(table) {
  try {
    for (; reserved_.size() < kNumStripes;) {
      Stripe& stripe = *table->stripes_[reserved_.size()];
      const size_t rows = groups.size(static_cast<int32_t>(reserved_.size()));
      if (rows == 0) {
        reserved_.push_back(0);
        continue;
      }
      UniqueLock lock(stripe.mutex);
      stripe.records.Reserve(stripe.reserved + rows);
      stripe.index.Reserve(stripe.index.size() + stripe.reserved + rows,
                           [&](uint32_t s) { return HashKey(table->KeyAt(stripe, s)); });
      if (table->file_ != nullptr) {
        const size_t needed = stripe.records.end() + stripe.reserved + rows;
        if (needed > stripe.keys.capacity()) {
          stripe.keys.reserve(std::max(needed, stripe.keys.capacity() * 3 / 2));
        }
      }
      if (stripe.gate != nullptr) stripe.gate->Reserve(stripe.reserved + rows);
      stripe.reserved += rows;
      reserved_.push_back(rows);
    }
  } catch (const DiskFull& error) {
    status_ = ResourceExhausted("no room on the disk of the storage: ", error.bytes(),
                                " bytes for rows were asked for; the shard keeps its rows");
  } catch (const OutOfMemory& error) {
    status_ =
        ResourceExhausted("out of memory: ", error.bytes(), " bytes for rows were asked for; ",
                          "the shard keeps the rows that it has");
  }
}

Table::Reservation::~Reservation() {
  for (size_t s = 0; s < reserved_.size(); ++s) {
    if (reserved_[s] == 0) continue;
    UniqueLock lock(table_->stripes_[s]->mutex);
    table_->stripes_[s]->reserved -= reserved_[s];
  }
}

char* Table::FindOrAdmit(Stripe* stripe, uint64_t hash, int64_t key, uint32_t updates, uint32_t now,
                         Newcomers* newcomers) {
  if (stripe->gate != nullptr && Find(*stripe, hash, key) == Index::kNone &&
      !stripe->gate->Admits(hash, key, updates, now)) {
    newcomers->refused += updates;
    stripe->log.Add(key);  // whoever pushed it has a row that is not here
    return nullptr;
  }
  bool is_new;
  char* record = FindOrAdd(stripe, hash, key, &is_new);
  if (is_new) {
    ++newcomers->created;
    SetClock(record, lives_ ? clocks_.born() : 0);
    static thread_local std::vector<float> row;
    row.resize(row_dim_);
    kit_.InitRow(key, row.data());
    format_.Write(row.data(), slot_dim(), WordsOf(record));
  }
  SetRowTime(record, now);
  return record;
}

void Table::Note(const Newcomers& newcomers) {
  if (newcomers.created > 0) counters_.Add(TableCounter::kRowsCreated, newcomers.created);
  if (newcomers.refused > 0) counters_.Add(TableCounter::kUpdatesRefused, newcomers.refused);
}

char* Table::FindOrAdd(Stripe* stripe, uint64_t hash, int64_t key, bool* is_new) {
  uint32_t slot = Find(*stripe, hash, key);
  *is_new = slot == Index::kNone;
  if (*is_new) slot = stripe->records.Allocate();
  // Nobody asks for a record here that he does not change.
  NoteChange(stripe, slot);
  stripe->log.Add(key);
  if (!*is_new) return stripe->records[slot];
  char* record = stripe->records[slot];
  if (file_ != nullptr) {
    if (slot >= stripe->keys.size()) stripe->keys.resize(slot + 1);  // there is room
    stripe->keys[slot] = key;
    file_->Want(record, record_bytes_, [](uint32_t) {});
  }
  StoreInt64(record, key);
  stripe->index.Insert(hash, slot, [&](uint32_t s) { return HashKey(KeyAt(*stripe, s)); });
  return record;
}

Status Table::WarmOnce(const std::vector<const char*>& records) const {
  if (file_ == nullptr) return Status();
  FileArena::Pages pages;
  for (const char* record : records) {
    file_->Want(record, record_bytes_, [&](uint32_t page) { pages.push_back(page); });
  }
  HET_RETURN_IF_ERROR(file_->Trim());
  file_->Read(pages, SerialFor);
  return Status();
}

Status Table::Warm(const UniqueIds& ids, const ParallelFor& parallel_for) const {
  return Warm(
      ids.num_keys(), [&](int64_t u) { return ids.hashes[u]; },
      [&](int64_t u) { return ids.keys[u]; }, parallel_for);
}

Status Table::Warm(const PushView& push, const std::vector<uint64_t>& hashes,
                   const ParallelFor& parallel_for) const {
  return Warm(
      push.num_rows(), [&](int64_t r) { return hashes[r]; },
      [&](int64_t r) { return push.rows[r].key; }, parallel_for);
}

Status Table::Warm(const RequestView& request, const std::vector<uint64_t>& hashes,
                   const ParallelFor& parallel_for) const {
  return Warm(
      request.header.num_queries(), [&](int64_t q) { return hashes[q]; },
      [&](int64_t q) { return request.keys[q]; }, parallel_for);
}

float* Table::Open(char* record) const {
  if (!format_.half) return WordsOf(record);
  static thread_local std::vector<float> row;
  row.resize(row_dim_);
  format_.Read(WordsOf(record), slot_dim(), row.data());
  return row.data();
}

void Table::Close(char* record, float* row) const {
  if (!format_.half) return;
  // Another number for each update of each row, and the same in each run. (Where a clock stands
  // still, two updates round alike, each of them with the right mean.)
  const uint64_t of_row = HashKey(static_cast<int64_t>(HashKey(KeyOf(record)) + config_.seed));
  format_.Write(row, slot_dim(), HashKey(static_cast<int64_t>(of_row + ClockOf(record))),
                WordsOf(record));
  format_.Read(WordsOf(record), slot_dim(), row);
}

// One update of a row that is open, which is closed; and of its clock, if that drifts, by at least
// so many units.
void Table::UpdateRow(char* record, float* row, const Gradient& gradient, float learning_rate,
                      int64_t units) {
  if (config_.clock != ClockRule::kDrift) {
    kit_.optimizer->Update(row, gradient, learning_rate);
    Close(record, row);
    return;
  }
  static thread_local std::vector<float> before;
  before.assign(row, row + dim());
  kit_.optimizer->Update(row, gradient, learning_rate);
  Close(record, row);
  const int64_t moved = DriftUnits(Distance(before.data(), row, dim()));
  SetClock(record, Advance(ClockOf(record), std::max(units, moved)));
}

Status Table::CheckOwned(const char* what, int64_t key, uint64_t hash) const {
  const int owner = ShardOfHash(hash, config_.num_shards);
  if (owner == shard_) return Status();
  return InvalidArgument(what, " holds key ", key, " of shard ", owner, ", this is shard ", shard_,
                         " of ", config_.num_shards);
}

}  // namespace het_tf
