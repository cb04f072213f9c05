// Own updates that are in no push yet, in the form in which they will travel.
//
// A few updates of a row travel as their gradients, and the shard runs the optimizer on them as if
// they were the only ones; more travel as one contribution. A line keeps both as long as either is
// possible, and none while it is clean.

#ifndef HET_TF_OPS_CORE_CACHE_UNSENT_H_
#define HET_TF_OPS_CORE_CACHE_UNSENT_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/core/cache/line.h"
#include "ops/core/memory/prefetch.h"
#include "ops/core/memory/slab.h"
#include "ops/core/row/optimizer.h"
#include "ops/core/row/row_format.h"

namespace het_tf {

class Unsent {
 public:
  // wire: how values travel. adds_up: whether shards add up the gradients of several workers, so
  // that a single update must travel as one.
  Unsent(const Optimizer& optimizer, const RowFormat& wire, bool adds_up, Arena* arena)
      : optimizer_(optimizer),
        max_gradients_(std::max(MaxGradients(optimizer, wire), adds_up ? 1 : 0)),
        records_(sizeof(float) * optimizer.record_dim(), arena),
        gradients_(sizeof(KeptGradient) + sizeof(float) * optimizer.dim(), arena) {}

  // The most updates whose gradients are shorter on the wire than one contribution.
  static int MaxGradients(const Optimizer& optimizer, const RowFormat& wire);

  // Whether the line's updates travel as gradients, one for each.
  static bool TravelsAsGradients(const Line& line) { return line.gradients != Line::kNone; }

  // Whether the line's next update has to be prepared: Prepare, or, of a line that is not full,
  // Keep.
  static bool NeedsRoom(const Line& line) {
    return !line.has(Line::kFull) || line.record == Line::kNone || line.gradients != Line::kNone;
  }
  // Has memory for so many updates, so that preparing them does not throw.
  void Reserve(size_t updates) {
    records_.Reserve(updates);
    gradients_.Reserve(updates);
  }
  // Makes room for one more update of a full line. Not to be called concurrently.
  void Prepare(Line* line);
  // Fetches what the next update of the line, which is prepared, will touch.
  void Prefetch(const Line& line) const {
    if (line.record != Line::kNone && (optimizer_.updates_record() || line.pending == 0)) {
      het_tf::Prefetch(records_[line.record], records_.record_bytes());
    }
  }
  // What a push of the line reads.
  void PrefetchSent(const Line& line) const {
    if (TravelsAsGradients(line)) {
      het_tf::Prefetch(gradients_[line.gradients], gradients_.record_bytes());
    } else if (line.record != Line::kNone) {
      het_tf::Prefetch(records_[line.record], records_.record_bytes());
    }
  }
  // One update of the line and its row (row_dim), prepared and counted as pending. Other lines may
  // be updated meanwhile.
  void Update(Line* line, float* row, const Gradient& gradient, float learning_rate);
  // One update of a line without slots: its gradient is kept. Not to be called concurrently.
  void Keep(Line* line, const float* gradient, float learning_rate);

  // The line's row was read anew: has the new one take the line's updates in. old_row, row:
  // (row_dim); old_row counts only where the line was full.
  void MoveOnto(Line* line, const float* old_row, float* row);

  // Drops the line's updates.
  void Drop(Line* line);

  template <typename Visit>  // visit(gradient (dim), learning_rate), oldest first
  void ForEachGradient(const Line& line, const Visit& visit) const {
    for (uint32_t at = line.gradients; at != Line::kNone; at = GradientAt(at)->next) {
      visit(FloatsOf(at), GradientAt(at)->learning_rate);
    }
  }
  // row: (row_dim), the line's; contribution: (contribution_dim).
  void GetContribution(const Line& line, const float* row, float* contribution) const {
    optimizer_.Contribute(row, RecordOf(line), contribution);
  }

  int64_t bytes() const { return records_.bytes() + gradients_.bytes(); }

 private:
  // Followed by the gradient[dim].
  struct KeptGradient {
    uint32_t next;
    float learning_rate;
  };

  KeptGradient* GradientAt(uint32_t at) const {
    return reinterpret_cast<KeptGradient*>(gradients_[at]);
  }
  float* FloatsOf(uint32_t at) const {
    return reinterpret_cast<float*>(gradients_[at] + sizeof(KeptGradient));
  }
  float* RecordOf(const Line& line) const {
    return reinterpret_cast<float*>(records_[line.record]);
  }
  void Append(Line* line, uint32_t at);
  void DropGradients(Line* line);

  const Optimizer& optimizer_;
  const int max_gradients_;
  Slab records_;
  Slab gradients_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_CACHE_UNSENT_H_
