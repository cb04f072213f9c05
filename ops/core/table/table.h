// A shard of an embedding table: rows with their optimizer slots and clocks, merged into by many
// caches at once.
//
// Rows are spread over stripes, each with its own lock, index and storage. What caches ask takes
// one stripe after the other, its keys grouped by stripe; Lookup and Apply hold all stripes at once
// and work in the order of the ids, which suits the memory better. A pool's threads never wait for
// a lock: who holds one may be waiting for them. Every public function may run concurrently with
// every other.
//
// Where there is no memory, every function returns kResourceExhausted, and the rows stay as they
// were.
//
// Where rows come and go (lifetimes.h), a record ends with the time of its last update.

#ifndef HET_TF_OPS_CORE_TABLE_TABLE_H_
#define HET_TF_OPS_CORE_TABLE_TABLE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/core/link/closures.h"
#include "ops/core/link/sessions.h"
#include "ops/core/memory/arena.h"
#include "ops/core/memory/file_arena.h"
#include "ops/core/memory/hash.h"
#include "ops/core/memory/index.h"
#include "ops/core/memory/slab.h"
#include "ops/core/parallel.h"
#include "ops/core/pooling.h"
#include "ops/core/row/row_config.h"
#include "ops/core/row/row_format.h"
#include "ops/core/shared_mutex.h"
#include "ops/core/stats.h"
#include "ops/core/status.h"
#include "ops/core/table/gate.h"
#include "ops/core/table/kept_rows.h"
#include "ops/core/table/lifetimes.h"
#include "ops/core/table/storage.h"
#include "ops/core/table/table_time.h"
#include "ops/core/table/unread.h"
#include "ops/core/thread_annotations.h"
#include "ops/core/unique_ids.h"
#include "ops/core/wire/request.h"

namespace het_tf {

enum class TableCounter {
  kRequests,
  kBytesReceived,
  kBytesSent,
  kPushesMerged,
  kPushesRepeated,  // arrived again after an answer was lost, and were not merged again
  kPushesSkipped,   // overtook one before them, and were not merged: they come again
  kPushesCounted,   // of closures of which another run was merged
  kRowsMerged,
  kRowsChecked,
  kRowsSent,
  kNonfiniteSkipped,
  kRowsCreated,     // by updates
  kUpdatesRefused,  // of keys that were not admitted
  kRowsExpired,
  kNumCounters
};
inline constexpr std::array<const char*, Counters<TableCounter>::kSize> kTableCounterNames = {
    "requests",          "bytes_received", "bytes_sent",      "pushes_merged", "pushes_repeated",
    "pushes_skipped",    "pushes_counted", "rows_merged",     "rows_checked",  "rows_sent",
    "nonfinite_skipped", "rows_created",   "updates_refused", "rows_expired"};

// Where a lookup found rows. Records never move, so an update may go straight to them, as long as
// the table has lost no row since.
struct FoundRows {
  uint64_t incarnation = 0;
  int64_t num_drops = 0;       // of rows that expired, until then
  std::vector<char*> records;  // (num_keys); nullptr: there was none
};

class Table {
 public:
  static constexpr int kNumStripes = 32;
  static constexpr int64_t kAnyAge = std::numeric_limits<int64_t>::max();

  // seconds: what the ages of rows are measured by, unless their time is given.
  static Status Create(const RowConfig& config, int shard, std::unique_ptr<Table>* table,
                       const Lifetimes& lifetimes = Lifetimes(),
                       SecondsClock seconds = SteadySeconds, const Storage& storage = Storage());

  int dim() const { return kit_.optimizer->dim(); }
  int slot_dim() const { return kit_.optimizer->slot_dim(); }
  int contribution_dim() const { return kit_.optimizer->contribution_dim(); }
  int num_shards() const { return config_.num_shards; }
  // What a key reads as that has no row. value: (dim).
  void InitialValue(int64_t key, float* value) const { kit_.initializer.Fill(key, dim(), value); }
  // Names the rows since the table was made, imported or cleared.
  uint64_t incarnation() const;

  // ---- Lookup and update of ids, without messages

  // Reads rows; unknown keys read as their initial value and do not enter the table.
  // out: (ids.num_ids(), dim). found: for Apply to the same ids.
  Status Lookup(const UniqueIds& ids, const ParallelFor& parallel_for, float* out,
                FoundRows* found) const;

  // Lookup, pooled. pooling: of ids. outputs: as Pooling::Pool.
  Status Pool(const UniqueIds& ids, Pooling* pooling, const ParallelFor& parallel_for,
              const std::vector<float*>& outputs, FoundRows* found) const;

  // One update of each key. found: what Lookup said for these ids, in this table or another;
  // FoundRows() where nobody has looked. gradients: of ids.
  Status Apply(const UniqueIds& ids, const FoundRows& found, const GradientSums& gradients,
               float learning_rate, Nonfinite nonfinite, const ParallelFor& parallel_for);
  // gradients: (ids.num_ids(), dim).
  Status Apply(const UniqueIds& ids, const FoundRows& found, const float* gradients,
               float learning_rate, Nonfinite nonfinite, const ParallelFor& parallel_for) {
    return Apply(ids, found, GradientSums(ids, gradients, dim(), parallel_for), learning_rate,
                 nonfinite, parallel_for);
  }

  // ---- Messages

  // Answers a cache: merges what it pushes, then sends the rows it lacks (wire/). allocate(bytes)
  // provides the memory of the reply, aligned to 8, once, if all is well.
  Status Sync(const char* request, size_t bytes, const ParallelFor& parallel_for,
              const std::function<char*(size_t)>& allocate);

  // ---- Steps of several workers that count as one (step.cc, step/barrier.h)

  // A worker's part of a step.
  struct StepPart;
  // Takes a worker's request, and merges nothing yet. member: of the workers; the order in which
  // gradients are added up. bytes: (size), aligned to 8, live as long as the owner. Only with
  // clocks that count.
  Status Collect(int64_t member, const char* bytes, size_t size, std::shared_ptr<const void> owner,
                 const ParallelFor& parallel_for, std::shared_ptr<StepPart>* part);
  // Merges what all requests push that were collected since the last step.
  Status MergeStep(const ParallelFor& parallel_for);
  // Answers a worker's request, as Sync does.
  Status AnswerStep(const StepPart& part, const ParallelFor& parallel_for,
                    const std::function<char*(size_t)>& allocate);

  // ---- Snapshots

  // Rows of one of so many parts of about the same size, in no particular order, as of one moment;
  // others may be read and updated meanwhile. A key's part depends on the key and num_parts alone:
  // of parts read one after the other no two have it, whatever happens between them, and one has it
  // if its row stays. All parts together cost what one of everything does. allocate(rows) says how
  // many come and returns where to put them. max_age: rows that were not updated for longer are
  // left out.
  template <typename Integer, typename Float>
  struct RowArrays {
    Integer* keys;            // (rows)
    Float* values;            // (rows, dim)
    Float* slots;             // (rows, slot_dim)
    Integer* clocks;          // (rows)
    Integer* ages = nullptr;  // (rows), since the last update; nullptr: not wanted, or 0
  };
  using Rows = RowArrays<int64_t, float>;
  using ConstRows = RowArrays<const int64_t, const float>;
  Status Export(int64_t part, int64_t num_parts, const std::function<Rows(int64_t)>& allocate,
                int64_t max_age = kAnyAge) const;

  // The rows as they are now, to be read while others update them (snapshot.h). One at a time; what
  // sets or drops rows waits until it has ended.
  class Snapshot;
  Status Cut(std::unique_ptr<Snapshot>* snapshot);

  // Cut, of the rows that were changed since an earlier one: for whoever reads them again and
  // again. reader: a name for that; the table notes what changes from its first call on, a bit a
  // row. since: the number of the last cut whose rows the reader has, or 0. Where the table does
  // not know what changed since, because it is another's or all rows were replaced or dropped
  // meanwhile, the cut is of all rows, and *whole is set. If not, Snapshot::dropped has the keys
  // that had a row then, and now have none. A cut whose rows were lost is none: the
  // next one has them, too.
  Status CutChanged(const std::string& reader, uint64_t since, std::unique_ptr<Snapshot>* snapshot,
                    uint64_t* number, bool* whole);
  // Notes no more for that reader.
  void Forget(const std::string& reader);

  // ---- Import and restore

  // Sets rows, replacing those that exist, all or none. Without slots (nullptr) they get those of a
  // new row. Starts a new incarnation.
  Status Import(const ConstRows& rows, int64_t num_rows);

  // A piece of what was saved of a table.
  struct Piece {
    enum Kind {
      kRows,        // rows; without slots as for Import
      kDropped,     // rows.keys: they have no row any longer
      kCandidates,  // rows.keys: they have no row, and rows.clocks updates; rows.ages since the
                    // last
      kSketch,      // words of the sketches of a range, those of the stripes one after the other
    };
    Kind kind = kRows;
    int64_t size = 0;  // of all arrays; 0: there is no more
    ConstRows rows = {};
    int range = 0;
    int64_t first = 0;  // the number of words[0] among those of the range
    const int64_t* words = nullptr;
  };

  // Whether Replace would take a piece, and of how many of its keys the rows or counts are this
  // shard's.
  Status CheckPiece(const Piece& piece, const ParallelFor& parallel_for, int64_t* owned) const;

  // Puts what is this shard's of the pieces that next(&piece) gives into the table's place. A key
  // that comes again replaces its row. Sketches may come from several shards, and are merged.
  // Others wait meanwhile. Starts a new incarnation. After an error the table is empty. time: that
  // of SetTime when the rows were saved; negative: not known.
  Status Replace(const std::function<Status(Piece*)>& next, const ParallelFor& parallel_for,
                 int64_t time = -1);
  // Words of a range's sketches in all stripes together; 0: it has none.
  int64_t sketch_words(int range) const;

  // Drops all rows. Starts a new incarnation.
  void Clear();

  // ---- Lifetimes: rows that come and go (lifetimes.h)

  const Lifetimes& lifetimes() const { return lifetimes_; }
  // The time that ages are measured by, where it is given. Must not go back.
  Status SetTime(int64_t now);
  // A pass over all rows that drops those that have expired (sweep.h).
  class Sweep;

  // ---- Statistics

  // Rows that have been updated or imported.
  int64_t size() const;
  // Bytes of rows and index in memory.
  int64_t memory_bytes() const;
  // The file of the rows; nullptr: they are in memory.
  const FileArena* file() const { return file_.get(); }
  int64_t counter(TableCounter counter) const { return counters_.Get(counter); }
  // Reads of cached rows by what they missed of the other caches' updates, in the clock's unit:
  // bucket 0 missed nothing, bucket b from 2^(b - 1) to 2^b - 1; those of the last are not bounded.
  static constexpr int kMissedBuckets = 32;
  int64_t reads_that_missed(int bucket) const {
    return missed_[bucket].load(std::memory_order_relaxed);
  }
  // Keys that are counted exactly and have no row yet.
  int64_t num_candidates() const;
  // Caches that it remembers.
  int64_t num_sessions() const { return sessions_.size(); }
  // Rows that it watches for caches, those of every cache counted.
  int64_t num_watched() const { return sessions_.num_watched(); }
  // Closures that it remembers.
  int64_t num_closures() const { return closures_.size(); }

 private:
  // ---- Stripes, and who reads their changes

  // A bit for each record of a stripe.
  struct Bits {
    std::vector<uint64_t> words;
    std::vector<int64_t> dropped;  // keys that have lost their row; some have another one
    bool complete = true;          // there was room for all of them

    void Set(uint32_t slot);
    // most: keys that there is room for.
    void Drop(int64_t key, size_t most);
    void Add(const Bits& other);
  };
  struct Stripe {
    Stripe(size_t record_bytes, Arena* arena) : records(record_bytes, arena) {}

    // Guards all of the stripe. The analysis does not follow that: calls try locks, and hold those
    // of all stripes at once.
    mutable SharedMutex mutex;
    Index index;
    Slab records;
    // By slot, if the rows are in a file: nobody looks for a key on the disk.
    std::vector<int64_t, BlockAllocator<int64_t>> keys;
    std::unique_ptr<Gate> gate;  // nullptr: every key gets a row
    size_t reserved = 0;         // rows that calls under way may insert; there is memory for them
    Unread unread;               // records
    std::vector<Bits> changed;   // by the place of a reader
    ChangeLog log;
  };
  // Who reads what has changed.
  struct Reader {
    size_t place = 0;
    uint64_t number = 0, before = 0;  // of its last cut, and what that one came after
    bool whole = true;                // its last cut
    std::vector<Bits> taken;          // by that one, of each stripe, if it was not whole
  };

  // Memory for rows that a call may insert, for as long as it runs.
  class Reservation;

  Table(const RowConfig& config, int shard, RowKit kit, const Lifetimes& lifetimes,
        SecondsClock seconds, std::unique_ptr<FileArena> file);

  // ---- Rows on a disk

  // Has the rows of n keys read that are not in memory, all at once. hash_of(i), key_of(i): of a
  // key. To be called with no stripe locked, before the rows are needed.
  template <typename HashOf, typename KeyOfPlace>
  Status Warm(int64_t n, const HashOf& hash_of, const KeyOfPlace& key_of,
              const ParallelFor& parallel_for) const HET_REQUIRES_SHARED(contents_);
  // The same of records that are read once.
  Status WarmOnce(const std::vector<const char*>& records) const;
  Status Warm(const UniqueIds& ids, const ParallelFor& parallel_for) const
      HET_REQUIRES_SHARED(contents_);
  Status Warm(const PushView& push, const std::vector<uint64_t>& hashes,
              const ParallelFor& parallel_for) const HET_REQUIRES_SHARED(contents_);
  Status Warm(const RequestView& request, const std::vector<uint64_t>& hashes,
              const ParallelFor& parallel_for) const HET_REQUIRES_SHARED(contents_);

  // ---- Records

  int64_t KeyAt(const Stripe& stripe, uint32_t slot) const;
  // guess: of Index::Home.
  uint32_t Find(const Stripe& stripe, uint64_t hash, int64_t key,
                uint32_t guess = Index::kNone) const;
  // What became of keys without a row.
  struct Newcomers {
    int64_t created = 0, refused = 0;  // rows, updates
  };
  // The row of a key that is updated so many times now; nullptr: it has none, and gets none. The
  // stripe is locked, and has memory for the row.
  char* FindOrAdmit(Stripe* stripe, uint64_t hash, int64_t key, uint32_t updates, uint32_t now,
                    Newcomers* newcomers);
  // The same, whatever the rules; a new record has its key and nothing else.
  char* FindOrAdd(Stripe* stripe, uint64_t hash, int64_t key, bool* is_new);
  void Note(const Newcomers& newcomers);

  // When a record was last updated; kFree: it has no row. Only where rows expire.
  static constexpr uint32_t kFree = ~uint32_t{0};
  uint32_t TimeOf(const char* record) const {
    uint32_t time;
    std::memcpy(&time, record + record_bytes_ - sizeof(time), sizeof(time));
    return time;
  }
  void SetRowTime(char* record, uint32_t time) const {
    if (expires_) std::memcpy(record + record_bytes_ - sizeof(time), &time, sizeof(time));
  }
  static uint32_t AgeOf(uint32_t time, uint32_t now);
  int64_t AgeOf(const char* record, uint32_t now) const {
    return expires_ ? AgeOf(TimeOf(record), now) : 0;
  }
  bool IsExpired(const char* record, uint32_t now) const;

  bool Owns(uint64_t hash) const {
    return ShardOfHash(hash, config_.num_shards) == static_cast<uint32_t>(shard_);
  }
  Status CheckOwned(const char* what, int64_t key, uint64_t hash) const;
  // The stripe is locked, and has memory to take note of a free slot.
  void Erase(Stripe* stripe, uint64_t hash, uint32_t slot);
  // A record's row (row_dim), to be changed; until Close, or this thread's next Open.
  float* Open(char* record) const;
  // The row has changed: into the record with it. Where values are bfloat16 this is where they are
  // rounded, and the row becomes what was stored.
  void Close(char* record, float* row) const;

  // ---- Locks

  // The contents locked alone, and without a snapshot.
  class HET_SCOPED_CAPABILITY LockWithoutSnapshot {
   public:
    explicit LockWithoutSnapshot(Table* table) HET_ACQUIRE(table->contents_);
    ~LockWithoutSnapshot() HET_RELEASE() {}

   private:
    UniqueLock contents_;
  };
  // The contents locked, with room for the bytes of the rows that the call may change; 0: none.
  //
  // Room is waited for first, because the reader of a snapshot may take long to make some. The
  // order in which a call takes what it may wait for is: room, contents_, a session, a closure, a
  // stripe.
  template <typename Lock>
  struct WithRoom {
    WithRoom(Table* table, size_t bytes) HET_NO_THREAD_SAFETY_ANALYSIS {
      while (true) {
        if (bytes > 0) room.emplace(&table->kept_, bytes);
        contents = Lock(table->contents_);
        if (bytes == 0 || !table->kept_.open() || room->held()) return;
        contents.unlock();  // a snapshot was cut since
        room.reset();
      }
    }

    std::optional<KeptRows::Room> room;
    Lock contents;
  };
  class HET_SCOPED_CAPABILITY ReaderLockWithRoom {
   public:
    ReaderLockWithRoom(Table* table, size_t bytes) HET_ACQUIRE_SHARED(table->contents_)
        : held_(table, bytes) {}
    ~ReaderLockWithRoom() HET_RELEASE() {}

   private:
    const WithRoom<SharedLock> held_;
  };
  class HET_SCOPED_CAPABILITY WriterLockWithRoom {
   public:
    WriterLockWithRoom(Table* table, size_t bytes) HET_ACQUIRE(table->contents_)
        : held_(table, bytes) {}
    ~WriterLockWithRoom() HET_RELEASE() {}

   private:
    const WithRoom<UniqueLock> held_;
  };

  // Calls body(s) for each stripe, with it locked. One that another call holds is left to the
  // calling thread.
  template <typename Lock, typename Body>
  void ForEachStripe(const ParallelFor& parallel_for, int64_t cost,
                     const Body& body) const HET_NO_THREAD_SAFETY_ANALYSIS {
    std::array<bool, kNumStripes> later{};
    parallel_for(kNumStripes, cost, [&](int64_t first, int64_t last) HET_NO_THREAD_SAFETY_ANALYSIS {
      for (int64_t s = first; s < last; ++s) {
        const Lock lock(stripes_[s]->mutex, std::try_to_lock);
        later[s] = !lock.owns_lock();
        if (!later[s]) body(s);
      }
    });
    for (int64_t s = 0; s < kNumStripes; ++s) {
      if (!later[s]) continue;
      const Lock lock(stripes_[s]->mutex);
      body(s);
    }
  }
  // Locks the stripes [first, last).
  template <typename Lock>
  std::vector<Lock> LockStripes(int first, int last) const {
    std::vector<Lock> locks;
    for (int s = first; s < last; ++s) locks.emplace_back(stripes_[s]->mutex);
    return locks;
  }

  // ---- Lookup and update of ids

  void FindRecords(const UniqueIds& ids, const ParallelFor& parallel_for, FoundRows* found) const
      HET_REQUIRES_SHARED(contents_);
  // All stripes are locked. records: (num_keys).
  void InsertRecords(const UniqueIds& ids, const std::vector<int32_t>& keys, const Groups& groups,
                     const ParallelFor& parallel_for, std::vector<char*>* records)
      HET_REQUIRES_SHARED(contents_);
  void UpdateRow(char* record, float* row, const Gradient& gradient, float learning_rate,
                 int64_t units);

  // ---- Messages

  struct HashedRequest;
  Status CheckRequest(const RequestView& request, const ParallelFor& parallel_for,
                      HashedRequest* hashed) const;
  Status ExchangeMessages(const char* bytes, size_t size, const ParallelFor& parallel_for,
                          const std::function<char*(size_t)>& allocate);
  void Merge(const PushView& push, const std::vector<uint64_t>& hashes, const Groups& groups,
             Watch* watch, const ParallelFor& parallel_for) HET_REQUIRES_SHARED(contents_);
  void MergeRow(char* record, const PushRow& row, const float* floats, bool is_gradient);
  // Merges a push that is the next of its session, which is locked. counted: out, whether instead
  // another run of its closure was.
  Status MergeNext(const PushView& push, const std::vector<uint64_t>& hashes, Watch* watch,
                   const ParallelFor& parallel_for, bool* counted) HET_REQUIRES_SHARED(contents_);
  // The same, whatever its closure. Its rows get memory first.
  Status MergeRows(const PushView& push, const std::vector<uint64_t>& hashes, Watch* watch,
                   const ParallelFor& parallel_for) HET_REQUIRES_SHARED(contents_);

  // Whether a cache knows rows that are no longer here, or what it has pushed was forgotten: what
  // it pushes belongs to them, and what it holds must be replaced.
  bool IsRestarted(const RequestHeader& header, const Sessions::Session& session) const
      HET_REQUIRES_SHARED(contents_) {
    return header.incarnation != 0 &&
           (header.incarnation != incarnation_ || header.session != session.number);
  }

  struct PushedTogether;
  struct PushedRow;
  Status MergeTogether(const std::vector<std::shared_ptr<StepPart>>& parts,
                       const ParallelFor& parallel_for) HET_REQUIRES_SHARED(contents_);
  // Those of a stripe, which is locked. rows: (num_rows), numbers of the rows.
  void MergeStripe(const PushedTogether& together, const int32_t* rows, int64_t num_rows,
                   int64_t stripe);
  void MergeRows(char* record, const PushedTogether& together, const std::vector<PushedRow>& rows);

  // Answers a request (answer.cc). session: of the cache.
  void Answer(const RequestView& request, const std::vector<uint64_t>& hashes, bool restarted,
              bool counted, Sessions::Session* session, const ParallelFor& parallel_for,
              const std::function<char*(size_t)>& allocate) HET_REQUIRES_SHARED(contents_)
      HET_REQUIRES(session->mutex);
  // What must go to a cache for a row that has this clock there: its record, kGone, or nullptr if
  // it stays. bucket: out, of reads_that_missed; -1: there is no row. The stripe is locked.
  const char* IfBeyond(const Stripe& stripe, uint64_t hash, int64_t key, int64_t base,
                       int64_t bound, int* bucket) const;
  // Rows that are watched and changed since the last reply, and are beyond the bound, go with this
  // one. The stripe is locked.
  void SendWatched(const Stripe& stripe, int64_t bound, uint64_t reply, WatchedRows* watched) const;
  // Begins to watch for a cache.
  void StartLogs(Watch* watch);

  // ---- Snapshots

  // To be called before a row is changed while the stripe has rows to be read. The stripe is
  // locked.
  void KeepRecord(Stripe* stripe, uint64_t hash, int64_t key);
  // A record is about to change. The stripe is locked.
  static void NoteChange(Stripe* stripe, uint32_t slot) {
    for (Bits& bits : stripe->changed) bits.Set(slot);
  }
  // A row has expired, or begins anew. The contents are locked. Who has not read for so long that
  // many more keys have gone than there are places gets all rows.
  static void NoteDrop(Stripe* stripe, int64_t key) {
    for (Bits& bits : stripe->changed) bits.Drop(key, stripe->records.end() + size_t{1024});
  }
  // Whether somebody wants to know.
  bool notes_changes() const HET_REQUIRES_SHARED(contents_) { return !readers_.empty(); }
  // Begins a snapshot, if no other is open. Takes the bits, of each stripe; those of slots without
  // a row do not count.
  Status CutBits(std::vector<std::vector<uint64_t>> unread, std::unique_ptr<Snapshot>* snapshot)
      HET_REQUIRES(contents_);
  // Row r of rows. now: what its age is counted to.
  void CopyOut(const char* record, uint32_t now, const Rows& rows, int64_t r) const;

  // ---- Import and restore

  Status CheckRow(const ConstRows& rows, int64_t r) const;
  Status CheckRows(const ConstRows& rows, int64_t num_rows, const ParallelFor& parallel_for,
                   int64_t* owned) const;
  Status CheckCandidates(const ConstRows& rows, int64_t num_keys, int64_t* owned) const;
  Status CheckSketch(const Piece& piece) const;
  // Sets those of the rows whose numbers these are.
  Status SetRows(const ConstRows& rows, const std::vector<int64_t>& numbers,
                 const ParallelFor& parallel_for) HET_REQUIRES(contents_);
  void SetReserved(const ConstRows& rows, const std::vector<int64_t>& numbers,
                   const ParallelFor& parallel_for) HET_REQUIRES(contents_);
  void DropRows() HET_REQUIRES(contents_);
  // Drops those of the keys that have a row.
  void DropKeys(const int64_t* keys, int64_t num_keys) HET_REQUIRES(contents_);
  void SetCandidates(const ConstRows& rows, int64_t num_keys) HET_REQUIRES(contents_);
  void MergeSketch(const Piece& piece) HET_REQUIRES(contents_);
  void NewIncarnation() HET_REQUIRES(contents_);

  // ---- State

  const RowConfig config_;
  const int shard_;
  const RowKit kit_;
  const int row_dim_;
  const RowFormat format_;
  const Lifetimes lifetimes_;
  const bool lives_, expires_;  // whether there are lifetimes, and whether rows expire
  const size_t record_bytes_;
  TableTime time_;

  // Held shared by what reads or writes rows, exclusively by what replaces them all.
  mutable SharedMutex contents_;
  uint64_t incarnation_ HET_GUARDED_BY(contents_) = 0;
  int64_t num_drops_ HET_GUARDED_BY(contents_) = 0;  // of expired rows
  ClockOfLife clocks_;                               // where there are lifetimes
  Arena arena_;
  const std::unique_ptr<FileArena> file_;  // nullptr: rows are in arena_
  std::vector<std::unique_ptr<Stripe>> stripes_;
  KeptRows kept_;
  std::map<std::string, Reader> readers_ HET_GUARDED_BY(contents_);

  Sessions sessions_;
  Closures closures_;
  std::atomic<bool> watches_{false};  // whether a cache ever had rows watched

  Mutex step_mutex_;
  // Of a step that is not merged yet.
  std::vector<std::shared_ptr<StepPart>> step_parts_ HET_GUARDED_BY(step_mutex_);

  mutable Counters<TableCounter> counters_;
  std::array<std::atomic<int64_t>, kMissedBuckets> missed_{};
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_TABLE_H_
