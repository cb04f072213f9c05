// The optimizers' row kernels: one definition each, used by the worker's cache and by the shard.
//
// A row is value[dim] followed by slots[slot_dim], contiguous. Formulas and defaults are those of
// Keras where Keras has the optimizer. Two differ on purpose, because a table has no global step:
// Adam's bias correction counts the updates of its own row (the last slot), and weight decay acts
// on a row when it is updated.

#ifndef HET_TF_OPS_CORE_OPTIMIZER_H_
#define HET_TF_OPS_CORE_OPTIMIZER_H_

#include <memory>
#include <string>

#include "ops/core/status.h"

namespace het_tf {

class Optimizer {
 public:
  // Specs: "sgd", "momentum momentum= nesterov=", "adagrad initial_accumulator_value= epsilon=",
  // "row_wise_adagrad ..." (one accumulator a row: the mean square of the gradient, as in DLRM),
  // "adam beta_1= beta_2= epsilon=", "row_wise_adam ..." (one second moment a row),
  // "ftrl initial_accumulator_value= l1= l2= l2_shrinkage= beta=". All of them also take
  // weight_decay= (not ftrl), clipnorm= (of a row's gradient) and max_norm= (of a row's value);
  // 0 switches these off.
  static Status Parse(const std::string& text, int dim, std::unique_ptr<Optimizer>* optimizer);

  virtual ~Optimizer() = default;

  int dim() const { return dim_; }
  int slot_dim() const { return slot_dim_; }
  int row_dim() const { return dim_ + slot_dim_; }

  // slots: (slot_dim), as they are before a row's first update.
  virtual void InitSlots(float* slots) const;

  // Whether updates can be made with this learning rate: finite, not negative, for ftrl positive.
  virtual Status CheckLearningRate(float learning_rate) const;

  // One update. row: (row_dim), gradient: (dim).
  void Update(float* row, const float* gradient, float learning_rate) const;

  // Adds what updates made elsewhere have changed. row, delta: (row_dim). learning_rate: that of
  // the last of these updates.
  virtual void Merge(float* row, const float* delta, float learning_rate) const;
  virtual bool MergeUsesLearningRate() const { return false; }

 protected:
  Optimizer(int dim, int slot_dim, float initial_slot)
      : dim_(dim), slot_dim_(slot_dim), initial_slot_(initial_slot) {}

  virtual void Step(float* row, const float* gradient, float learning_rate) const = 0;

  // Brings the value within max_norm.
  void LimitNorm(float* row) const;

  const int dim_;
  const int slot_dim_;

 private:
  const float initial_slot_;
  float weight_decay_ = 0;
  float clipnorm_ = 0;
  float max_norm_ = 0;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_OPTIMIZER_H_
