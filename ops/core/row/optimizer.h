// The optimizers on the host's rows, as the worker's cache and the shard use them. What they
// compute is rule.h, which ops/cuda runs on a device.
//
// A row is value[dim] followed by slots[slot_dim], contiguous. Formulas and defaults are those of
// Keras where Keras has the optimizer. Two differ on purpose, because a table has no global step:
// Adam's bias correction counts the updates of its own row (the last slot), and weight decay acts
// on a row when it is updated.
//
// A contribution is what k updates add to a row, whatever the row was when they were made: merging
// it into a row that others have updated meanwhile counts each of the k gradients once, with the
// weight that a serial run in merging order gives it (docs/protocol.md, 2). Adding the
// difference of two rows instead diverges, since every worker takes its share of the same old slot
// away.
//
// What is stored is clamped to the finite floats, so that no finite input makes NaN or infinity.

#ifndef HET_TF_OPS_CORE_ROW_OPTIMIZER_H_
#define HET_TF_OPS_CORE_ROW_OPTIMIZER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ops/core/row/gradient.h"
#include "ops/core/status.h"

namespace het_tf {

class Optimizer {
 public:
  // Specs: "sgd", "momentum momentum= nesterov=", "adagrad initial_accumulator_value= epsilon=",
  // "row_wise_adagrad ..." (one accumulator a row: the mean square of the gradient, as in DLRM),
  // "adam beta_1= beta_2= epsilon=", "row_wise_adam ..." (one second moment a row),
  // "ftrl initial_accumulator_value= l1= l2= l2_shrinkage= beta=", "rmsprop rho= momentum= epsilon=
  // centered=", "lion beta_1= beta_2=", "lamb beta_1= beta_2= epsilon=" (of a row). All of them
  // also take weight_decay= and l2= (a penalty l2 * |value|^2; ftrl has its own l2 and neither of
  // these), clipnorm= (of a row's gradient), cowclip= and cowclip_floor= (LimitByRow), and of a
  // row's value min_norm=, max_norm= and nonnegative=; 0 switches these off.
  static Status Parse(const std::string& text, int dim, std::unique_ptr<Optimizer>* optimizer);

  virtual ~Optimizer() = default;

  int dim() const { return dim_; }
  int slot_dim() const { return slot_dim_; }
  int row_dim() const { return dim_ + slot_dim_; }
  // Of a contribution, and of the record in which a worker keeps it while it grows.
  int contribution_dim() const { return contribution_dim_; }
  int record_dim() const { return record_dim_; }

  // slots: (slot_dim), as they are before a row's first update.
  virtual void InitSlots(float* slots) const = 0;

  // Whether updates can be made with this learning rate: finite, not negative, for ftrl positive.
  virtual Status CheckLearningRate(float learning_rate) const = 0;

  // CowClip (Zheng et al., AAAI 2023, algorithm 1): whether gradients have to be multiplied by
  // LimitByRow(...) where they come in, before Update. So it is done once, on the row that they
  // were computed on or a newer one; what travels and merges is the product.
  virtual bool limits_by_row() const = 0;
  // What brings a gradient within occurrences * max(cowclip * |value|, cowclip_floor). value:
  // (dim), occurrences: of the key in the batch.
  virtual float LimitByRow(const float* value, const Gradient& gradient,
                           int64_t occurrences) const = 0;

  // Begins a record of updates. row: (row_dim), before the first of them; record: (record_dim).
  virtual void BeginRecord(const float* row, float* record) const = 0;

  // Whether an update writes to the record that it is given.
  virtual bool updates_record() const = 0;

  // One update. row: (row_dim). record: (record_dim) of the updates before it; nullptr where nobody
  // asks.
  virtual void Update(float* row, const Gradient& gradient, float learning_rate,
                      float* record = nullptr) const = 0;
  // The same. gradient: (dim).
  void Update(float* row, const float* gradient, float learning_rate,
              float* record = nullptr) const {
    Update(row, Gradient::Of(gradient, dim_), learning_rate, record);
  }

  // The contribution of the updates in a record. row: (row_dim), as they left it; contribution:
  // (contribution_dim).
  virtual void Contribute(const float* row, const float* record, float* contribution) const = 0;

  // Adds the contribution of that many updates. row: (row_dim), contribution: (contribution_dim).
  virtual void Merge(float* row, const float* contribution, int64_t updates) const = 0;

  // The row that a worker has updated was read anew: has the new one take the updates in, and the
  // record stand for them on top of it. old_row, row: (row_dim), record: (record_dim).
  virtual void MoveOnto(const float* old_row, float* row, float* record, int64_t updates) const = 0;

  // Whether a contribution that came from elsewhere can be merged. contribution:
  // (contribution_dim).
  virtual Status CheckContribution(const float* contribution) const = 0;

 protected:
  Optimizer(int dim, int slot_dim, int contribution_dim, int record_dim)
      : dim_(dim),
        slot_dim_(slot_dim),
        contribution_dim_(contribution_dim),
        record_dim_(record_dim) {}

 private:
  const int dim_;
  const int slot_dim_;
  const int contribution_dim_;
  const int record_dim_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_ROW_OPTIMIZER_H_
