#include "ops/core/pooling.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/core/simd.h"

namespace het_tf {
namespace {

constexpr int64_t kAhead = 12;  // rows asked for before they are summed, as UniqueIds::Gather does

void PutScaled(float factor, const float* __restrict from, int dim, float* __restrict to) {
  for (int i = 0; i < dim; ++i) to[i] = factor * from[i];
}

void AddScaled(float factor, const float* __restrict from, int dim, float* __restrict to) {
  for (int i = 0; i < dim; ++i) to[i] += factor * from[i];
}

void TakeMax(float factor, const float* __restrict from, int dim, float* __restrict to) {
  for (int i = 0; i < dim; ++i) to[i] = std::max(to[i], factor * from[i]);
}

float Dot(const float* a, const float* b, int dim) {
  Float8 sum = {0};
  int i = 0;
  for (; i + 8 <= dim; i += 8) {
    Float8 p, q;
    Load(a + i, &p);
    Load(b + i, &q);
    sum += p * q;
  }
  float rest = 0;
  for (; i < dim; ++i) rest += a[i] * b[i];
  return Total(sum) + rest;
}

float ScaleOf(Combiner combiner, const float* weights, int64_t n) {
  double sum = 0;
  if (combiner == Combiner::kMean) {
    for (int64_t i = 0; i < n; ++i) sum += weights[i];
  } else if (combiner == Combiner::kSqrtN) {
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(weights[i]) * weights[i];
    sum = std::sqrt(sum);
  } else {
    return 1;
  }
  return sum == 0 ? 0 : static_cast<float>(1 / sum);
}

Status CheckSplits(const Pooling::Feature& feature, size_t number) {
  if (feature.splits[0] != 0) {
    return InvalidArgument("splits of feature ", number, " begin with ", feature.splits[0],
                           ", not 0");
  }
  for (int64_t b = 0; b < feature.num_bags; ++b) {
    if (feature.splits[b] > feature.splits[b + 1]) {
      return InvalidArgument("splits of feature ", number, " fall from ", feature.splits[b], " to ",
                             feature.splits[b + 1], " at ", b + 1);
    }
  }
  if (feature.splits[feature.num_bags] != feature.num_ids) {
    return InvalidArgument("splits of feature ", number, " end with ",
                           feature.splits[feature.num_bags], ", but it has ", feature.num_ids,
                           " ids");
  }
  return Status();
}

}  // namespace

Status Pooling::Create(const std::vector<Feature>& features, std::shared_ptr<Pooling>* pooling) {
  int64_t num_ids = 0, num_bags = 0;
  for (size_t f = 0; f < features.size(); ++f) {
    if (features[f].splits != nullptr) {
      HET_RETURN_IF_ERROR(CheckSplits(features[f], f));
    } else if (features[f].num_bags == 0 ? features[f].num_ids != 0
                                         : features[f].num_ids % features[f].num_bags != 0) {
      return InvalidArgument("feature ", f, " has ", features[f].num_ids, " ids for ",
                             features[f].num_bags, " bags of one size");
    }
    num_ids += features[f].num_ids;
    num_bags += features[f].num_bags;
  }
  constexpr int64_t kMost = 0x7fffffff;
  if (num_ids > kMost || num_bags > kMost) {
    return InvalidArgument("a lookup has ", num_ids, " ids in ", num_bags,
                           " bags, more than 2147483647");
  }
  auto made = std::make_shared<Pooling>();
  const bool any_max = std::any_of(features.begin(), features.end(), [](const Feature& feature) {
    return feature.combiner == Combiner::kMax && feature.num_bags > 0;
  });
  made->begin_.resize(num_bags + 1, static_cast<int32_t>(num_ids));
  made->scales_.resize(num_bags);
  if (any_max) made->max_of_.resize(num_bags, -1);
  made->bag_of_.resize(num_ids);
  made->weights_.resize(num_ids, 1.0f);
  made->factors_.resize(num_ids);
  int64_t first_id = 0, first_bag = 0;
  for (const Feature& feature : features) {
    Part part;
    part.combiner = feature.combiner;
    part.weighted = feature.weights != nullptr;
    part.first_id = first_id;
    part.num_ids = feature.num_ids;
    part.first_bag = first_bag;
    part.num_bags = feature.num_bags;
    made->features_.push_back(part);
    made->keeps_rows_ |= part.weighted || part.combiner == Combiner::kMax;
    if (part.weighted)
      std::copy_n(feature.weights, feature.num_ids, made->weights_.data() + first_id);
    const int64_t bag_size = feature.num_bags == 0 ? 0 : feature.num_ids / feature.num_bags;
    const auto begin_of = [&](int64_t b) {
      return first_id + (feature.splits == nullptr ? b * bag_size : feature.splits[b]);
    };
    const auto scale_of = [&](int64_t begin, int64_t n) {
      return ScaleOf(feature.combiner, made->weights_.data() + begin, n);
    };
    // One for all where bags are of one size and weights are ones.
    const bool alike = feature.splits == nullptr && !part.weighted;
    const float scale_of_all = alike ? scale_of(first_id, bag_size) : 0;
    for (int64_t b = 0; b < feature.num_bags; ++b) {
      const int64_t begin = begin_of(b), end = begin_of(b + 1), bag = first_bag + b;
      const float scale = alike ? scale_of_all : scale_of(begin, end - begin);
      made->begin_[bag] = static_cast<int32_t>(begin);
      made->scales_[bag] = scale;
      if (feature.combiner == Combiner::kMax) made->max_of_[bag] = made->num_max_++;
      for (int64_t i = begin; i < end; ++i) {
        made->bag_of_[i] = static_cast<int32_t>(bag);
        made->factors_[i] = made->weights_[i] * scale;
      }
    }
    first_id += feature.num_ids;
    first_bag += feature.num_bags;
  }
  *pooling = std::move(made);
  return Status();
}

bool Pooling::weighted() const {
  return std::any_of(features_.begin(), features_.end(),
                     [](const Part& part) { return part.weighted; });
}

int Pooling::FeatureOf(int64_t bag) const {
  const auto after = std::upper_bound(
      features_.begin(), features_.end(), bag,
      [](int64_t b, const Part& part) { return b < part.first_bag + part.num_bags; });
  return static_cast<int>(after - features_.begin());
}

// Calls visit(feature, bag) for all bags, on many threads.
template <typename Visit>
void Pooling::ForBags(const ParallelFor& parallel_for, int dim, const Visit& visit) const {
  if (num_bags() == 0) return;
  const int64_t cost = (num_ids() / num_bags() + 1) * dim;
  parallel_for(num_bags(), cost, [&](int64_t first, int64_t last) {
    int feature = FeatureOf(first);
    for (int64_t b = first; b < last; ++b) {
      while (b >= features_[feature].first_bag + features_[feature].num_bags) ++feature;
      visit(feature, b, last);
    }
  });
}

void Pooling::Pool(const UniqueIds& ids, const float* const* rows, int dim,
                   const ParallelFor& parallel_for, const std::vector<float*>& outputs) {
  const size_t row_bytes = sizeof(float) * dim;
  ForBags(parallel_for, dim, [&](int feature, int64_t b, int64_t last_bag) {
    const Part& part = features_[feature];
    float* out = outputs[feature] + (b - part.first_bag) * dim;
    const int32_t begin = begin_[b], end = begin_[b + 1], last = begin_[last_bag];
    if (begin == end) {
      std::memset(out, 0, row_bytes);
      return;
    }
    for (int32_t i = begin; i < end; ++i) {
      if (i + kAhead < last) Prefetch(rows[ids.key_of[i + kAhead]], row_bytes);
      const float* row = rows[ids.key_of[i]];
      if (i == begin) {
        PutScaled(weights_[i], row, dim, out);
      } else if (part.combiner == Combiner::kMax) {
        TakeMax(weights_[i], row, dim, out);
      } else {
        AddScaled(weights_[i], row, dim, out);
      }
    }
    if (scales_[b] != 1) {
      for (int i = 0; i < dim; ++i) out[i] *= scales_[b];
    }
  });
  if (!keeps_rows_) return;
  rows_.reset(new float[ids.num_keys() * dim]);
  parallel_for(ids.num_keys(), dim, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; ++u) std::memcpy(&rows_[u * dim], rows[u], row_bytes);
  });
}

PooledGradients::PooledGradients(const Pooling& pooling, const UniqueIds& ids, int dim,
                                 const ParallelFor& parallel_for,
                                 const std::vector<const float*>& gradients, const float* rows)
    : pooling_(pooling),
      ids_(ids),
      dim_(dim),
      rows_(rows == nullptr ? pooling.rows_.get() : rows),
      gradients_(pooling.OfBags(gradients, dim)) {
  if (pooling.num_max() > 0) FindMaxima(parallel_for);
}

void PooledGradients::FindMaxima(const ParallelFor& parallel_for) {
  maxima_.reset(new float[int64_t{pooling_.num_max()} * dim_]);
  shares_.reset(new float[int64_t{pooling_.num_max()} * dim_]);
  pooling_.ForBags(parallel_for, 3 * dim_, [&](int, int64_t b, int64_t) {
    const int32_t begin = pooling_.begin_[b], end = pooling_.begin_[b + 1];
    if (!is_max(static_cast<int32_t>(b)) || begin == end) return;
    float* maximum = &maxima_[int64_t{pooling_.max_of_[b]} * dim_];
    float* share = &shares_[int64_t{pooling_.max_of_[b]} * dim_];
    PutScaled(pooling_.weights_[begin], row(begin), dim_, maximum);
    for (int32_t i = begin + 1; i < end; ++i) {
      TakeMax(pooling_.weights_[i], row(i), dim_, maximum);
    }
    std::fill_n(share, dim_, 0.0f);  // how many ids have the maximum
    for (int32_t i = begin; i < end; ++i) {
      const float* row_i = row(i);
      const float weight = pooling_.weights_[i];
      for (int c = 0; c < dim_; ++c) share[c] += weight * row_i[c] == maximum[c] ? 1.0f : 0.0f;
    }
    for (int c = 0; c < dim_; ++c) share[c] = share[c] == 0 ? 0 : gradients_[b][c] / share[c];
  });
}

void PooledGradients::Put(int32_t place, float* sum) const {
  const int32_t bag = pooling_.bag_of_[place];
  if (is_max(bag)) {
    std::fill_n(sum, dim_, 0.0f);
    Add(place, sum);
  } else {
    PutScaled(pooling_.factors_[place], gradients_[bag], dim_, sum);
  }
}

void PooledGradients::Add(int32_t place, float* __restrict sum) const {
  const int32_t bag = pooling_.bag_of_[place];
  const float factor = pooling_.factors_[place];
  if (!is_max(bag)) {
    AddScaled(factor, gradients_[bag], dim_, sum);
    return;
  }
  const float* maximum = &maxima_[int64_t{pooling_.max_of_[bag]} * dim_];
  const float* share = &shares_[int64_t{pooling_.max_of_[bag]} * dim_];
  const float* row_here = row(place);
  for (int c = 0; c < dim_; ++c) {
    sum[c] += factor * row_here[c] == maximum[c] ? factor * share[c] : 0.0f;
  }
}

void PooledGradients::OfWeights(int feature, const ParallelFor& parallel_for, float* out) const {
  const Pooling::Part& part = pooling_.features_[feature];
  if (part.num_bags == 0) return;
  const int64_t cost = 2 * (part.num_ids / part.num_bags + 1) * dim_;
  parallel_for(part.num_bags, cost, [&](int64_t first, int64_t last) {
    for (int64_t b = part.first_bag + first; b < part.first_bag + last; ++b) {
      const int32_t begin = pooling_.begin_[b], end = pooling_.begin_[b + 1];
      float* of_bag = out + begin - part.first_id;
      if (part.combiner == Combiner::kMax) {
        for (int32_t i = begin; i < end; ++i) {
          const float* maximum = &maxima_[int64_t{pooling_.max_of_[b]} * dim_];
          const float* share = &shares_[int64_t{pooling_.max_of_[b]} * dim_];
          double sum = 0;
          for (int c = 0; c < dim_; ++c) {
            if (pooling_.weights_[i] * row(i)[c] == maximum[c]) {
              sum += static_cast<double>(share[c]) * row(i)[c];
            }
          }
          of_bag[i - begin] = static_cast<float>(sum);
        }
        continue;
      }
      // With the output o = scale * sum of w r, and its gradient g:
      //   sum: g r;  mean: scale * (g r - g o);  sqrtn: scale * (g r - factor * g o).
      double of_output = 0;  // g o
      for (int32_t i = begin; i < end; ++i) {
        of_bag[i - begin] = Dot(gradients_[b], row(i), dim_);
        of_output += static_cast<double>(pooling_.factors_[i]) * of_bag[i - begin];
      }
      if (part.combiner == Combiner::kSum) continue;
      for (int32_t i = begin; i < end; ++i) {
        const double share = part.combiner == Combiner::kMean ? 1.0 : pooling_.factors_[i];
        of_bag[i - begin] =
            static_cast<float>(pooling_.scales_[b] * (of_bag[i - begin] - share * of_output));
      }
    }
  });
}

}  // namespace het_tf
