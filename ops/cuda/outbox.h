// Rows that wait to be pushed to a shard: their lines are clean, so only this has their updates.

#ifndef HET_TF_OPS_CUDA_OUTBOX_H_
#define HET_TF_OPS_CUDA_OUTBOX_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/core/cache/pushes_since.h"
#include "ops/core/row/row_format.h"
#include "ops/core/wire/request.h"

namespace het_tf {
namespace cuda {

class Outbox {
 public:
  Outbox(const RowFormat& format, int contribution_dim)
      : format_(format), dim_(format.dim), contribution_dim_(contribution_dim) {}

  // Makes room for so many more rows of each kind: adding them cannot fail. Throws std::bad_alloc.
  void Reserve(int64_t gradients, int64_t contributions) {
    Grow(gradients, &gradient_rows_);
    Grow(gradients * dim_, &gradients_);
    Grow(contributions, &contribution_rows_);
    Grow(contributions * contribution_dim_, &contributions_);
  }

  // gradient: (dim)
  void AddGradient(int64_t key, float learning_rate, uint32_t clock, const float* gradient) {
    PushRow row;
    row.key = key;
    row.learning_rate = learning_rate;
    row.clock = clock;
    gradient_rows_.push_back(row);
    gradients_.insert(gradients_.end(), gradient, gradient + dim_);
    ++updates_;
  }
  // contribution: (contribution_dim)
  void AddContribution(int64_t key, uint32_t updates, uint32_t clock, const float* contribution) {
    PushRow row;
    row.key = key;
    row.updates = updates;
    row.clock = clock;
    contribution_rows_.push_back(row);
    contributions_.insert(contributions_.end(), contribution, contribution + contribution_dim_);
    updates_ += updates;
  }

  int64_t num_rows() const {
    return static_cast<int64_t>(gradient_rows_.size() + contribution_rows_.size());
  }
  int64_t updates() const { return updates_; }

  template <typename Visit>  // visit(key)
  void ForEachKey(const Visit& visit) const {
    for (const PushRow& row : gradient_rows_) visit(row.key);
    for (const PushRow& row : contribution_rows_) visit(row.key);
  }

  // As the shard would merge them. They must not change as long as since lives.
  void AddTo(PushesSince* since) const {
    const auto num_gradients = static_cast<int64_t>(gradient_rows_.size());
    const auto num_contributions = static_cast<int64_t>(contribution_rows_.size());
    since->Add({0, num_gradients, 0, gradient_rows_.data(), gradients_.data(), nullptr, nullptr});
    since->Add({0, 0, num_contributions, contribution_rows_.data(), nullptr, contributions_.data(),
                nullptr});
  }

  PushHeader Header(uint64_t sequence) const {
    return {sequence, static_cast<uint32_t>(gradient_rows_.size()),
            static_cast<uint32_t>(contribution_rows_.size())};
  }
  // bytes: (PushBytes(...)), aligned to 8.
  void Write(const PushHeader& header, char* bytes) const {
    PushWriter writer(bytes, header, format_, contribution_dim_);
    const float* gradient = gradients_.data();
    for (const PushRow& row : gradient_rows_) {
      writer.AddGradient(row.key, row.learning_rate, row.clock, gradient);
      gradient += dim_;
    }
    const float* contribution = contributions_.data();
    for (const PushRow& row : contribution_rows_) {
      writer.AddContribution(row.key, row.updates, row.clock,
                             [&](float* to) { std::copy_n(contribution, contribution_dim_, to); });
      contribution += contribution_dim_;
    }
  }

  void Clear() {
    gradient_rows_.clear();
    contribution_rows_.clear();
    gradients_.clear();
    contributions_.clear();
    updates_ = 0;
  }

 private:
  template <typename T>
  static void Grow(int64_t more, std::vector<T>* to) {
    const size_t needed = to->size() + more;
    if (needed > to->capacity()) to->reserve(std::max(needed, to->capacity() * 3 / 2));
  }

  const RowFormat format_;
  const int dim_, contribution_dim_;
  std::vector<PushRow> gradient_rows_, contribution_rows_;
  std::vector<float> gradients_, contributions_;  // (rows, dim), (rows, contribution_dim)
  int64_t updates_ = 0;
};

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_OUTBOX_H_
