#include "ops/core/serving/served.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "ops/core/memory/hash.h"
#include "ops/core/memory/prefetch.h"

namespace het_tf {

// Records of one size that never move. One thread adds and frees; others may read those that they
// were told of.
class Served::Records {
 public:
  explicit Records(size_t record_bytes) : record_bytes_(record_bytes), chunks_(kMaxChunks) {}

  const char* operator[](uint32_t slot) const {
    return chunks_[slot / kChunk].get() + slot % kChunk * record_bytes_;
  }
  char* at(uint32_t slot) { return const_cast<char*>((*this)[slot]); }
  size_t record_bytes() const { return record_bytes_; }

  // So that as many calls of Allocate do not throw. False: there is no place for so many.
  bool Reserve(size_t slots) {
    const size_t missing = slots - std::min(slots, free_.size());
    const size_t chunks = (end_ + missing + kChunk - 1) / kChunk;
    if (chunks > kMaxChunks) return false;
    for (; num_chunks_ < chunks; ++num_chunks_) {
      chunks_[num_chunks_].reset(new char[kChunk * record_bytes_]);
    }
    // So that freeing does not throw.
    free_.reserve(num_chunks_ * kChunk);
    return true;
  }
  uint32_t Allocate() {
    if (free_.empty()) return static_cast<uint32_t>(end_++);
    const uint32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void Free(uint32_t slot) { free_.push_back(slot); }

 private:
  static constexpr size_t kChunk = 1024;
  static constexpr size_t kMaxChunks = 1 << 20;  // 2^30 rows, with 8 MB for where they are

  const size_t record_bytes_;
  // Of a fixed size, since others read it while it is filled.
  std::vector<std::unique_ptr<char[]>> chunks_;
  size_t num_chunks_ = 0;
  size_t end_ = 0;
  std::vector<uint32_t> free_;
};

struct Served::TableSide {
  RowsFiles files;  // by shard
  StoredFormat format;
  std::shared_ptr<Records> records;  // of both sides
  Index index;                       // of records
};

struct Served::Side {
  int64_t version = -1;
  std::string publisher;
  int64_t written_micros = 0;
  std::shared_ptr<const void> others;
  std::vector<TableSide> tables;
};

Served::Served(std::vector<ServedTable> tables) : tables_(std::move(tables)) {
  for (auto& side : sides_) {
    side = std::make_unique<Side>();
    side->tables.resize(tables_.size());
  }
}

Served::~Served() = default;

void Served::Close() {
  {
    MutexLock lock(&mutex_);
    closed_ = true;
  }
  left_.NotifyAll();
}

Status Served::Check(const ServedChange& change, const Side& side) const {
  const bool same = change.publisher == side.publisher;
  const bool newer =
      change.version > side.version || (!same && change.written_micros > side.written_micros);
  const bool next = side.version >= 0 && same && change.version == side.version + 1;
  if (change.whole ? !newer : !next) {
    return FailedPrecondition(change.whole ? "whole version " : "a change to version ",
                              change.version, " cannot follow version ", side.version,
                              same ? "" : ", which is of another publisher",
                              change.whole && !same ? " and was not written before it" : "");
  }
  if (change.tables.size() != tables_.size()) {
    return InvalidArgument("version ", change.version, " has ", change.tables.size(),
                           " tables, the model has ", tables_.size());
  }
  for (size_t t = 0; t < tables_.size(); ++t) {
    const RowsFiles& files = change.tables[t];
    if (change.whole && files.empty()) {
      return InvalidArgument("version ", change.version, " has no rows of table ", t);
    }
    for (size_t f = 0; f < files.size(); ++f) {
      const RowsFile& file = *files[f];
      if (file.format().dim != tables_[t].dim) {
        return InvalidArgument(file.path(), ": has rows of ", file.format().dim,
                               " columns, the table ", tables_[t].dim);
      }
      const StoredFormat& format = change.whole ? files[0]->format() : side.tables[t].format;
      if (!(file.format() == format)) {
        return InvalidArgument(file.path(), ": its rows are stored in another way than others");
      }
      const bool in_place = file.shard() == static_cast<int>(f) &&
                            file.num_shards() == static_cast<int>(files.size());
      if (change.whole && !in_place) {
        return InvalidArgument(file.path(), ": is shard ", file.shard(), " of ", file.num_shards(),
                               ", expected shard ", f, " of ", files.size());
      }
    }
  }
  return Status();
}

Status Served::Apply(const ServedChange& change) {
  MutexLock applying(&applying_);
  int next;
  {
    MutexLock lock(&mutex_);
    next = 1 - current_;
  }
  // Nobody else changes current_ meanwhile.
  HET_RETURN_IF_ERROR(Check(change, *sides_[1 - next]));
  {
    MutexLock lock(&mutex_);
    while (!closed_ && views_[next] != 0) left_.Wait(&mutex_);
    if (closed_) return Cancelled("the model is closed");
  }
  Side& side = *sides_[next];
  try {
    HET_RETURN_IF_ERROR(CatchUp(next));
    std::vector<Places> places(tables_.size());
    if (change.whole) {
      std::vector<TableSide> tables(tables_.size());
      for (size_t t = 0; t < tables_.size(); ++t) {
        tables[t].files = change.tables[t];
        tables[t].format = change.tables[t][0]->format();
        tables[t].records = std::make_shared<Records>(tables[t].format.record_bytes());
      }
      side.tables.swap(tables);
    } else {
      // First all memory.
      for (size_t t = 0; t < tables_.size(); ++t) {
        TableSide& table = side.tables[t];
        size_t rows = 0;
        for (const auto& file : change.tables[t]) rows += file->num_rows();
        if (!table.records->Reserve(rows)) {
          return ResourceExhausted("table ", t, " has too many changed rows");
        }
        table.index.Reserve(table.index.size() + static_cast<int64_t>(rows), [&](uint32_t slot) {
          return HashKey(KeyOfStored((*table.records)[slot]));
        });
        places[t].reserve(rows);
      }
      for (size_t t = 0; t < tables_.size(); ++t) {
        TableSide& table = side.tables[t];
        for (const auto& file : change.tables[t]) {
          for (int64_t r = 0; r < file->num_rows(); ++r) {
            const uint32_t slot = table.records->Allocate();
            char* record = table.records->at(slot);
            std::memcpy(record, file->Record(r), table.records->record_bytes());
            places[t].emplace_back(HashKey(KeyOfStored(record)), slot);
          }
        }
        // The other side still reads the records that these replace.
        Lay(&table, places[t], /*frees=*/false);
      }
    }
    last_.swap(places);
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory for version ", change.version);
  }
  side.version = change.version;
  side.publisher = change.publisher;
  side.written_micros = change.written_micros;
  side.others = change.others;
  last_is_whole_ = change.whole;
  is_behind_ = true;
  MutexLock lock(&mutex_);
  current_ = next;
  return Status();
}

// Makes a side what the current one is.
Status Served::CatchUp(int s) {
  if (!is_behind_) return Status();
  Side& side = *sides_[s];
  const Side& current = *sides_[1 - s];
  for (size_t t = 0; t < tables_.size(); ++t) {
    TableSide& table = side.tables[t];
    if (last_is_whole_) {
      table.files = current.tables[t].files;
      table.format = current.tables[t].format;
      table.records = current.tables[t].records;
      table.index.Clear();
    } else {
      table.index.Reserve(
          table.index.size() + static_cast<int64_t>(last_[t].size()),
          [&](uint32_t slot) { return HashKey(KeyOfStored((*table.records)[slot])); });
      Lay(&table, last_[t], /*frees=*/true);
      last_[t].clear();  // should memory end with the next table
    }
  }
  side.version = current.version;
  side.others = current.others;
  is_behind_ = false;
  return Status();
}

void Served::Lay(TableSide* table, const Places& places, bool frees) const {
  const auto hash_of = [&](uint32_t slot) { return HashKey(KeyOfStored((*table->records)[slot])); };
  constexpr size_t kAhead = 8;
  for (size_t p = 0; p < places.size(); ++p) {
    if (p + kAhead < places.size()) table->index.HomeOf(places[p + kAhead].first).Prefetch();
    const auto [hash, slot] = places[p];
    // Hashes stand for keys: HashKey is a bijection.
    const uint32_t old = table->index.Find(
        hash, [&, hash = hash](uint32_t other) { return hash_of(other) == hash; });
    if (old == slot) continue;
    if (old != Index::kNone) {
      table->index.Erase(hash, old);
      if (frees) table->records->Free(old);
    }
    table->index.Insert(hash, slot, hash_of);
  }
}

Status Served::Pin(View* view) const {
  MutexLock lock(&mutex_);
  if (sides_[current_]->version < 0) return FailedPrecondition("the model has not been opened");
  ++views_[current_];
  View made;
  made.served_ = this;
  made.side_ = current_;
  *view = std::move(made);
  return Status();
}

Served::View::~View() {
  if (served_ == nullptr) return;
  bool last;
  {
    MutexLock lock(&served_->mutex_);
    last = --served_->views_[side_] == 0;
    // Under the lock: the Served may be gone after it.
    if (last) served_->left_.NotifyAll();
  }
}

int64_t Served::View::version() const { return served_->sides_[side_]->version; }
int64_t Served::View::written_micros() const { return served_->sides_[side_]->written_micros; }
const void* Served::View::others() const { return served_->sides_[side_]->others.get(); }
int Served::View::dim(int table) const { return served_->tables_[table].dim; }

int64_t Served::View::num_changed() const {
  int64_t rows = 0;
  for (const TableSide& table : served_->sides_[side_]->tables) rows += table.index.size();
  return rows;
}

void Served::View::Lookup(int t, const int64_t* keys, int64_t num_keys,
                          const ParallelFor& parallel_for, float* out) const {
  const ServedTable& what = served_->tables_[t];
  const TableSide& table = served_->sides_[side_]->tables[t];
  const auto num_files = static_cast<uint32_t>(table.files.size());
  const bool changed = table.index.size() > 0;
  const Records& records = *table.records;
  // Measured with benchmarks/serving.py.
  const int64_t cost = 200 + 2 * what.dim;
  parallel_for(num_keys, cost, [&](int64_t first, int64_t last) {
    // In blocks, so that the memory is asked for all of a block before any is waited for.
    constexpr int64_t kBlock = 32;
    uint64_t hashes[kBlock];
    Index::Home homes[kBlock];
    uint32_t guesses[kBlock];
    for (int64_t begin = first; begin < last; begin += kBlock) {
      const int64_t n = std::min(kBlock, last - begin);
      for (int64_t i = 0; i < n; ++i) {
        hashes[i] = HashKey(keys[begin + i]);
        homes[i] = table.index.HomeOf(hashes[i]);
        if (changed) homes[i].Prefetch();
        table.files[ShardOfHash(hashes[i], num_files)]->PrefetchIndex(hashes[i]);
      }
      for (int64_t i = 0; i < n; ++i) {
        guesses[i] = homes[i].Guess();
        if (guesses[i] != Index::kNone) {
          Prefetch(records[guesses[i]], records.record_bytes());
        } else {
          table.files[ShardOfHash(hashes[i], num_files)]->PrefetchRecord(hashes[i]);
        }
      }
      for (int64_t i = 0; i < n; ++i) {
        const int64_t key = keys[begin + i];
        const char* record = nullptr;
        if (changed) {
          const uint32_t slot = table.index.Find(hashes[i], guesses[i], [&](uint32_t other) {
            return KeyOfStored(records[other]) == key;
          });
          if (slot != Index::kNone) record = records[slot];
        }
        if (record == nullptr) {
          record = table.files[ShardOfHash(hashes[i], num_files)]->Find(hashes[i], key);
        }
        float* row = out + (begin + i) * what.dim;
        if (record != nullptr) {
          table.format.Read(record, row);
        } else {
          what.initializer.Fill(key, what.dim, row);
        }
      }
    }
  });
}

}  // namespace het_tf
