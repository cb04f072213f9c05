// The tables of a model that is served, as versions that follow one another.
//
// A version has all tables, and whatever else goes with them, as of one moment. A whole version is
// files that are mapped (rows_file.h). What changes one is laid over them: rows in memory, with an
// index of which there are two copies, sides. Requests read one side while a change is made to the
// other; then these begin to read that one, and when the last request has left the first, the same
// change is made there. So a request that holds a view sees one version, no request ever waits, and
// none sees an older version than one before it did.

#ifndef HET_TF_OPS_CORE_SERVING_SERVED_H_
#define HET_TF_OPS_CORE_SERVING_SERVED_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/memory/index.h"
#include "ops/core/mutex.h"
#include "ops/core/parallel.h"
#include "ops/core/row/initializer.h"
#include "ops/core/serving/rows_file.h"
#include "ops/core/status.h"

namespace het_tf {

// What a table's rows are, and what a row is that nobody has trained.
struct ServedTable {
  int dim = 0;
  Initializer initializer;
};

using RowsFiles = std::vector<std::shared_ptr<const RowsFile>>;

// A version, or what makes one of the version before it.
struct ServedChange {
  int64_t version = 0;
  std::string publisher;
  bool whole = false;
  int64_t written_micros = 0;  // when, since 1970
  std::vector<RowsFiles> tables;
  std::shared_ptr<const void> others;  // what else belongs to the version
};

// Safe for concurrent use.
class Served {
 private:
  struct Side;

 public:
  explicit Served(std::vector<ServedTable> tables);
  ~Served();
  Served(const Served&) = delete;
  Served& operator=(const Served&) = delete;

  // Makes the next version: a whole one that is newer than the current one, or a change of it by
  // its publisher. A whole one of another publisher is newer if its number is larger, or it was
  // written later: its publisher began anew. The files were verified. After an error all is as it
  // was. Waits for the requests that still hold the version before the current one.
  Status Apply(const ServedChange& change);

  // Has Apply fail from now on, also where it waits.
  void Close();

  // A version, for as long as this exists. The Served must outlive it.
  class View {
   public:
    View() = default;
    View(View&& other) noexcept { *this = std::move(other); }
    View& operator=(View&& other) noexcept {
      std::swap(served_, other.served_);
      std::swap(side_, other.side_);
      return *this;
    }
    ~View();

    int64_t version() const;
    int64_t written_micros() const;
    const void* others() const;
    // Rows that lie over the files, of all tables.
    int64_t num_changed() const;

    int dim(int table) const;
    // Reads rows; a key that has none reads as its initial value. table: in [0, tables);
    // keys: (num_keys); out: (num_keys, dim).
    void Lookup(int table, const int64_t* keys, int64_t num_keys, const ParallelFor& parallel_for,
                float* out) const;

   private:
    friend class Served;
    const Served* served_ = nullptr;
    int side_ = 0;
  };
  // Fails if there is no version yet.
  Status Pin(View* view) const;

 private:
  class Records;
  struct TableSide;
  // What a change makes of a table: keys' hashes and the records that they have from now on.
  using Places = std::vector<std::pair<uint64_t, uint32_t>>;

  // current: the current side.
  Status Check(const ServedChange& change, const Side& current) const;
  Status CatchUp(int side) HET_REQUIRES(applying_);
  void Lay(TableSide* table, const Places& places, bool frees) const;

  const std::vector<ServedTable> tables_;
  Mutex applying_;

  mutable Mutex mutex_;
  mutable CondVar left_;
  bool closed_ HET_GUARDED_BY(mutex_) = false;
  int current_ HET_GUARDED_BY(mutex_) = 0;                         // changes under applying_, too
  mutable std::array<int64_t, 2> views_ HET_GUARDED_BY(mutex_){};  // of each side
  std::array<std::unique_ptr<Side>, 2> sides_;

  // The last change, while only one side has it.
  bool is_behind_ HET_GUARDED_BY(applying_) = false;
  bool last_is_whole_ HET_GUARDED_BY(applying_) = false;
  std::vector<Places> last_ HET_GUARDED_BY(applying_);
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_SERVING_SERVED_H_
