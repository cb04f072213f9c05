// Pooling: the rows of several ids brought to one, and its gradient back to rows and weights.
//
// A lookup has one feature or more, whose ids follow one another. The ids of a feature lie in bags,
// and each bag becomes one output. Nothing here takes the memory of a row for each id: outputs are
// summed where they go, and gradients of outputs are summed to those of unique keys.

#ifndef HET_TF_OPS_CORE_POOLING_H_
#define HET_TF_OPS_CORE_POOLING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ops/core/memory/prefetch.h"
#include "ops/core/parallel.h"
#include "ops/core/status.h"
#include "ops/core/unique_ids.h"

namespace het_tf {

// Of the rows r and weights w of a bag. A mean or sqrtn over nothing, or by zero, is zero.
enum class Combiner {
  kSum,    // sum of w r
  kMean,   // sum of w r / sum of w
  kSqrtN,  // sum of w r / sqrt(sum of w^2)
  kMax,    // of w r, column by column
};

class Pooling {
 public:
  struct Feature {
    Combiner combiner = Combiner::kSum;
    int64_t num_ids = 0;
    int64_t num_bags = 0;
    // (num_bags + 1): where each bag's ids begin among the feature's; nullptr: all have as many.
    const int64_t* splits = nullptr;
    const float* weights = nullptr;  // (num_ids); nullptr: ones
  };

  // Copies what it needs. An error names the feature by its number.
  static Status Create(const std::vector<Feature>& features, std::shared_ptr<Pooling>* pooling);

  int num_features() const { return static_cast<int>(features_.size()); }
  int64_t num_ids() const { return static_cast<int64_t>(factors_.size()); }
  int64_t num_ids(int feature) const { return features_[feature].num_ids; }
  int64_t num_bags(int feature) const { return features_[feature].num_bags; }
  bool weighted(int feature) const { return features_[feature].weighted; }
  bool weighted() const;  // some feature is

  // Of all features one after the other, for whoever pools where the rows are.
  int64_t num_bags() const { return static_cast<int64_t>(scales_.size()); }
  int32_t num_max() const { return num_max_; }  // bags that are pooled by their maximum
  const std::vector<int32_t>& begins() const { return begin_; }        // (num_bags + 1), of ids
  const std::vector<int32_t>& bags_of_ids() const { return bag_of_; }  // (num_ids)
  const std::vector<float>& scales() const { return scales_; }         // (num_bags): 1 for max
  const std::vector<float>& weights() const { return weights_; }       // (num_ids)
  // (num_bags): which of num_max() it is, or -1; empty: there are none.
  const std::vector<int32_t>& max_of() const { return max_of_; }
  // Whether some gradient depends on the rows that were pooled.
  bool keeps_rows() const { return keeps_rows_; }
  // What each bag has of arrays of the features, (num_bags(feature), dim) each.
  template <typename T>
  std::vector<T*> OfBags(const std::vector<T*>& of_features, int dim) const {
    std::vector<T*> of_bags;
    of_bags.reserve(scales_.size());
    for (size_t f = 0; f < of_features.size(); ++f) {
      for (int64_t b = 0; b < features_[f].num_bags; ++b) {
        of_bags.push_back(of_features[f] + b * dim);
      }
    }
    return of_bags;
  }

  // Writes each bag's output. Sums go by the order of the ids.
  // ids: of num_ids() ids. rows: (ids.num_keys()) pointers to (dim). outputs: (num_features), each
  // (num_bags(feature), dim).
  void Pool(const UniqueIds& ids, const float* const* rows, int dim,
            const ParallelFor& parallel_for, const std::vector<float*>& outputs);

 private:
  friend class PooledGradients;

  struct Part {
    Combiner combiner;
    bool weighted;
    int64_t first_id, num_ids;
    int64_t first_bag, num_bags;
  };

  // The feature that has a bag.
  int FeatureOf(int64_t bag) const;
  template <typename Visit>
  void ForBags(const ParallelFor& parallel_for, int dim, const Visit& visit) const;

  std::vector<Part> features_;
  std::vector<int32_t> begin_;   // (num_bags + 1): where each bag's ids begin
  std::vector<int32_t> bag_of_;  // (num_ids)
  std::vector<float> weights_;   // (num_ids)
  std::vector<float> scales_;    // (num_bags): of the sum of w r; 1 for max
  std::vector<float> factors_;   // (num_ids): weight times scale
  std::vector<int32_t> max_of_;  // as of max_of()
  int32_t num_max_ = 0;
  bool keeps_rows_ = false;
  // (ids.num_keys(), dim): as they were pooled. Others may have changed them before the gradient
  // comes.
  std::unique_ptr<float[]> rows_;
};

// The gradients of a lookup's outputs, as GradientSums takes them.
class PooledGradients {
 public:
  // pooling: after Pool, of the same ids. gradients: (num_features), each (num_bags(feature), dim).
  // rows: (ids.num_keys(), dim), as they were pooled, where pooling keeps_rows(); nullptr: those
  // that its Pool kept. All of these must outlive this.
  PooledGradients(const Pooling& pooling, const UniqueIds& ids, int dim,
                  const ParallelFor& parallel_for, const std::vector<const float*>& gradients,
                  const float* rows = nullptr);

  // The gradient of the id at a place, where it is that of its bag.
  const float* Whole(int32_t place) const {
    const int32_t bag = pooling_.bag_of_[place];
    return pooling_.factors_[place] == 1 && !is_max(bag) ? gradients_[bag] : nullptr;
  }
  void Prefetch(int32_t place) const {
    het_tf::Prefetch(gradients_[pooling_.bag_of_[place]], sizeof(float) * dim_);
  }
  // The gradient of the id at a place, put in sum or added to it. sum: (dim).
  void Put(int32_t place, float* sum) const;
  void Add(int32_t place, float* sum) const;

  // Of the weights of a weighted feature. out: (num_ids(feature)).
  void OfWeights(int feature, const ParallelFor& parallel_for, float* out) const;

 private:
  bool is_max(int32_t bag) const { return !pooling_.max_of_.empty() && pooling_.max_of_[bag] >= 0; }
  const float* row(int32_t place) const {
    return rows_ + static_cast<int64_t>(ids_.key_of[place]) * dim_;
  }
  void FindMaxima(const ParallelFor& parallel_for);

  const Pooling& pooling_;
  const UniqueIds& ids_;
  const int dim_;
  const float* const rows_;
  std::vector<const float*> gradients_;  // (num_bags), each (dim)
  // Of bags pooled by their maximum, (num_max, dim): the maximum, and the gradient over the number
  // of ids that have it, as TensorFlow and Keras share it out.
  std::unique_ptr<float[]> maxima_, shares_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_POOLING_H_
