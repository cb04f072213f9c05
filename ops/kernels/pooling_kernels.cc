#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/core/cache/row_cache.h"
#include "ops/core/pooling.h"
#include "ops/kernels/kernel_util.h"
#include "ops/kernels/resource_kernels.h"
#include "ops/kernels/stays_on_host.h"

namespace het_tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// What a pooled lookup hands to its gradient.
struct Pooled {
  static constexpr const char* kVariantName = "Het>Pooling";

  std::shared_ptr<Pooling> pooling;
  int dim = 0;
  // Of a cache's lookup the rows, of a table's the ids.
  std::shared_ptr<PooledRows> rows = nullptr;
  std::shared_ptr<const UniqueIds> ids = nullptr;
};

// What does not change from step to step.
struct Layout {
  std::vector<Combiner> combiners;  // (n)
  std::vector<int64_t> bag_sizes;   // (n)

  absl::Status Get(OpKernelConstruction* context) {
    std::vector<std::string> names;
    int32_t count;
    TF_RETURN_IF_ERROR(context->GetAttr("n", &count));
    TF_RETURN_IF_ERROR(context->GetAttr("combiners", &names));
    TF_RETURN_IF_ERROR(context->GetAttr("bag_sizes", &bag_sizes));
    const size_t n = static_cast<size_t>(count);
    if (names.size() != n || bag_sizes.size() != n) {
      return absl::InvalidArgumentError(StrCat("combiners holds ", names.size(), " names and ",
                                               "bag_sizes ", bag_sizes.size(), " numbers for ", n,
                                               " features"));
    }
    for (const std::string& name : names) {
      combiners.push_back(name == "sum"    ? Combiner::kSum
                          : name == "mean" ? Combiner::kMean
                          : name == "max"  ? Combiner::kMax
                                           : Combiner::kSqrtN);
    }
    for (size_t f = 0; f < n; ++f) {
      if (bag_sizes[f] > 0) continue;
      return absl::InvalidArgumentError(
          StrCat("bag_sizes[", f, "] = ", bag_sizes[f], " must be positive"));
    }
    return absl::OkStatus();
  }
};

// Reads splits and weights, of `num_ids` ids, and makes room for the outputs.
absl::Status BeginPooling(OpKernelContext* context, const Layout& layout, int64_t num_ids, int dim,
                          std::shared_ptr<Pooling>* pooling, std::vector<float*>* outputs) {
  tensorflow::OpInputList splits, weights;
  tensorflow::OpOutputList pooled;
  TF_RETURN_IF_ERROR(context->input_list("splits", &splits));
  TF_RETURN_IF_ERROR(context->input_list("weights", &weights));
  TF_RETURN_IF_ERROR(context->output_list("pooled", &pooled));
  std::vector<Pooling::Feature> features;
  int64_t total = 0;
  for (size_t f = 0; f < layout.combiners.size(); ++f) {
    Pooling::Feature feature;
    feature.combiner = layout.combiners[f];
    if (splits[f].dims() == 0) {
      feature.num_ids = splits[f].scalar<int64_t>()();
      feature.num_bags = feature.num_ids / layout.bag_sizes[f];
      if (feature.num_bags * layout.bag_sizes[f] != feature.num_ids) {
        return absl::InvalidArgumentError(StrCat("splits[", f, "] = ", feature.num_ids,
                                                 " ids do not fill bags of ", layout.bag_sizes[f]));
      }
    } else if (splits[f].dims() == 1 && splits[f].NumElements() > 0) {
      feature.splits = splits[f].flat<int64_t>().data();
      feature.num_bags = splits[f].NumElements() - 1;
      feature.num_ids = feature.splits[feature.num_bags];
    } else {
      return absl::InvalidArgumentError(StrCat("splits[", f,
                                               "] must be a vector of at least one or a scalar, "
                                               "not of shape ",
                                               splits[f].shape().DebugString()));
    }
    if (feature.num_ids < 0 || feature.num_ids > num_ids - total) {
      return absl::InvalidArgumentError(StrCat("splits[", f, "] says that there are ",
                                               feature.num_ids, " ids; there are ",
                                               num_ids - total));
    }
    total += feature.num_ids;
    if (weights[f].NumElements() != 0) {
      if (weights[f].dims() != 1 || weights[f].NumElements() != feature.num_ids) {
        return absl::InvalidArgumentError(StrCat("weights[", f, "] has shape ",
                                                 weights[f].shape().DebugString(), ", expected [",
                                                 feature.num_ids, "] or [0]"));
      }
      feature.weights = weights[f].flat<float>().data();
    }
    features.push_back(feature);
  }
  if (total != num_ids) {
    return absl::InvalidArgumentError(
        StrCat("splits hold ", total, " ids, looked up were ", num_ids));
  }
  TF_RETURN_IF_ERROR(ToTf(Pooling::Create(features, pooling)));
  for (size_t f = 0; f < layout.combiners.size(); ++f) {
    Tensor* output;
    TF_RETURN_IF_ERROR(
        pooled.allocate(static_cast<int>(f), {(*pooling)->num_bags(f), dim}, &output));
    outputs->push_back(output->flat<float>().data());
  }
  return absl::OkStatus();
}

absl::Status GetGradients(OpKernelContext* context, const Pooled& pooled,
                          std::vector<const float*>* gradients) {
  tensorflow::OpInputList list;
  TF_RETURN_IF_ERROR(context->input_list("gradients", &list));
  if (list.size() != pooled.pooling->num_features()) {
    return absl::InvalidArgumentError(StrCat("gradients holds ", list.size(), " tensors for ",
                                             pooled.pooling->num_features(), " features"));
  }
  for (int f = 0; f < list.size(); ++f) {
    const tensorflow::TensorShape expected({pooled.pooling->num_bags(f), pooled.dim});
    if (list[f].shape() != expected) {
      return absl::InvalidArgumentError(StrCat("gradients[", f, "] has shape ",
                                               list[f].shape().DebugString(), ", expected ",
                                               expected.DebugString()));
    }
    gradients->push_back(list[f].flat<float>().data());
  }
  return absl::OkStatus();
}

absl::Status OfAnotherLookup() {
  return absl::InvalidArgumentError("pooling is of another lookup");
}

// rows: of PooledGradients.
absl::Status MakeGradients(OpKernelContext* context, const Pooled& pooled, const UniqueIds& ids,
                           const float* rows, std::unique_ptr<PooledGradients>* made) {
  std::vector<const float*> gradients;
  TF_RETURN_IF_ERROR(GetGradients(context, pooled, &gradients));
  *made = std::make_unique<PooledGradients>(*pooled.pooling, ids, pooled.dim, PoolOf(context),
                                            gradients, rows);
  return absl::OkStatus();
}

// Sums the gradients of the unique keys that `ids` holds.
absl::Status GetSums(OpKernelContext* context, const Pooled& pooled, const UniqueIds& ids,
                     const float* rows, std::unique_ptr<PooledGradients>* gradients,
                     std::unique_ptr<GradientSums>* sums) {
  TF_RETURN_IF_ERROR(MakeGradients(context, pooled, ids, rows, gradients));
  *sums = std::make_unique<GradientSums>(ids, **gradients, pooled.dim, PoolOf(context));
  return absl::OkStatus();
}

// What gradients on the host need of a lookup, wherever its rows are. rows: empty where the pooling
// has them.
absl::Status GetHere(const Pooled& pooled, std::shared_ptr<const UniqueIds>* ids,
                     std::vector<float>* rows) {
  if (pooled.rows != nullptr) return ToTf(pooled.rows->Read(ids, rows));
  *ids = pooled.ids;
  return absl::OkStatus();
}

class CachePoolOp : public CacheKernel {
 public:
  explicit CachePoolOp(OpKernelConstruction* context) : CacheKernel(context) {
    OP_REQUIRES_OK(context, layout_.Get(context));
  }

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    std::shared_ptr<RowTicket> ticket;
    TF_RETURN_IF_ERROR(GetTicket(context, cache, &ticket));
    auto pooled = std::make_shared<Pooled>();
    pooled->dim = cache->dim();
    std::vector<float*> outputs;
    TF_RETURN_IF_ERROR(BeginPooling(context, layout_, ticket->num_ids(), cache->dim(),
                                    &pooled->pooling, &outputs));
    TF_RETURN_IF_ERROR(
        ToTf(cache->Pool(ticket, pooled->pooling, PoolOf(context), outputs, &pooled->rows)));
    return SetVariant(context, static_cast<int>(outputs.size()), std::move(pooled));
  }

 private:
  Layout layout_;
};

class TablePoolOp : public TableKernel {
 public:
  explicit TablePoolOp(OpKernelConstruction* context) : TableKernel(context) {
    OP_REQUIRES_OK(context, layout_.Get(context));
  }

  absl::Status Compute(OpKernelContext* context, Table* table) override {
    TF_RETURN_IF_ERROR(CheckWhole(*table));
    const Tensor& ids = context->input(1);
    TF_RETURN_IF_ERROR(CheckNumIds(ids));
    std::shared_ptr<Pooling> pooling;
    std::vector<float*> outputs;
    TF_RETURN_IF_ERROR(
        BeginPooling(context, layout_, ids.NumElements(), table->dim(), &pooling, &outputs));
    auto found = std::make_shared<Found>(
        Found{UniqueIds(ids.flat<int64_t>().data(), ids.NumElements()), FoundRows()});
    TF_RETURN_IF_ERROR(
        ToTf(table->Pool(found->ids, pooling.get(), PoolOf(context), outputs, &found->rows)));
    const int n = static_cast<int>(outputs.size());
    const std::shared_ptr<const UniqueIds> unique_ids(found, &found->ids);
    TF_RETURN_IF_ERROR(SetVariant(context, n, std::move(found)));
    return SetVariant(
        context, n + 1,
        std::make_shared<Pooled>(Pooled{std::move(pooling), table->dim(), nullptr, unique_ids}));
  }

 private:
  Layout layout_;
};

class CacheUpdatePooledOp : public CacheKernel {
 public:
  using CacheKernel::CacheKernel;

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    std::shared_ptr<RowTicket> ticket;
    TF_RETURN_IF_ERROR(GetTicket(context, cache, &ticket));
    float learning_rate = 0;
    TF_RETURN_IF_ERROR(GetScalar(context, "learning_rate", &learning_rate));
    std::shared_ptr<Pooled> pooled;
    TF_RETURN_IF_ERROR(GetVariant(context, "pooling", &pooled));
    if (pooled->rows == nullptr || !pooled->rows->IsOf(*ticket)) return OfAnotherLookup();
    std::vector<const float*> gradients;
    TF_RETURN_IF_ERROR(GetGradients(context, *pooled, &gradients));
    return OfUpdate(context,
                    pooled->rows->Update(ticket.get(), gradients, learning_rate, PoolOf(context)));
  }
};

class TableApplyPooledOp : public TableKernel {
 public:
  explicit TableApplyPooledOp(OpKernelConstruction* context) : TableKernel(context) {
    OP_REQUIRES_OK(context, GetNonfinite(context, &skip_));
  }

  absl::Status Compute(OpKernelContext* context, Table* table) override {
    TF_RETURN_IF_ERROR(CheckWhole(*table));
    std::shared_ptr<Found> found;
    TF_RETURN_IF_ERROR(GetVariant(context, "found", &found));
    float learning_rate = 0;
    TF_RETURN_IF_ERROR(GetScalar(context, "learning_rate", &learning_rate));
    std::shared_ptr<Pooled> pooled;
    TF_RETURN_IF_ERROR(GetVariant(context, "pooling", &pooled));
    if (pooled->ids.get() != &found->ids || pooled->dim != table->dim()) return OfAnotherLookup();
    std::unique_ptr<PooledGradients> gradients;
    std::unique_ptr<GradientSums> sums;
    TF_RETURN_IF_ERROR(GetSums(context, *pooled, found->ids, nullptr, &gradients, &sums));
    return OfUpdate(context,
                    table->Apply(found->ids, found->rows, *sums, learning_rate,
                                 skip_ ? Nonfinite::kSkip : Nonfinite::kError, PoolOf(context)));
  }

 private:
  bool skip_;
};

class PoolingGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, OrOutOfMemory(*this, [&] { return Run(context); }));
  }

 private:
  absl::Status Run(OpKernelContext* context) const {
    std::shared_ptr<Pooled> pooled;
    TF_RETURN_IF_ERROR(GetVariant(context, "pooling", &pooled));
    std::shared_ptr<const UniqueIds> ids;
    std::vector<float> rows;
    TF_RETURN_IF_ERROR(GetHere(*pooled, &ids, &rows));
    std::unique_ptr<PooledGradients> gradients;
    TF_RETURN_IF_ERROR(MakeGradients(context, *pooled, *ids, rows.data(), &gradients));
    for (int f = 0; f < pooled->pooling->num_features(); ++f) {
      const bool weighted = pooled->pooling->weighted(f);
      Tensor* of_weights;
      TF_RETURN_IF_ERROR(
          context->allocate_output(f, {weighted ? pooled->pooling->num_ids(f) : 0}, &of_weights));
      if (weighted) {
        gradients->OfWeights(f, PoolOf(context), of_weights->flat<float>().data());
      }
    }
    return absl::OkStatus();
  }
};

class PooledSumsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, OrOutOfMemory(*this, [&] { return Run(context); }));
  }

 private:
  static absl::Status Run(OpKernelContext* context) {
    std::shared_ptr<Pooled> pooled;
    TF_RETURN_IF_ERROR(GetVariant(context, "pooling", &pooled));
    std::shared_ptr<const UniqueIds> unique_ids;
    std::vector<float> rows;
    TF_RETURN_IF_ERROR(GetHere(*pooled, &unique_ids, &rows));
    const UniqueIds& ids = *unique_ids;
    std::unique_ptr<PooledGradients> gradients;
    std::unique_ptr<GradientSums> sums;
    TF_RETURN_IF_ERROR(GetSums(context, *pooled, ids, rows.data(), &gradients, &sums));
    Tensor* keys;
    Tensor* values;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {ids.num_keys()}, &keys));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {ids.num_keys(), pooled->dim}, &values));
    std::copy(ids.keys.begin(), ids.keys.end(), keys->flat<int64_t>().data());
    float* row = values->flat<float>().data();
    for (int64_t u = 0; u < ids.num_keys(); ++u, row += pooled->dim) {
      if (sums->finite(u)) {
        std::copy_n((*sums)[u].values, pooled->dim, row);
      } else {
        std::fill_n(row, pooled->dim, std::numeric_limits<float>::quiet_NaN());
      }
    }
    return absl::OkStatus();
  }
};

#define REGISTER_POOLING_KERNEL(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name("Het>" name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER_POOLING_KERNEL("CachePool", CachePoolOp);
REGISTER_POOLING_KERNEL("TablePool", TablePoolOp);
REGISTER_POOLING_KERNEL("CacheUpdatePooled", CacheUpdatePooledOp);
REGISTER_POOLING_KERNEL("TableApplyPooled", TableApplyPooledOp);
REGISTER_POOLING_KERNEL("PoolingGradient", PoolingGradientOp);
REGISTER_POOLING_KERNEL("PooledSums", PooledSumsOp);
#undef REGISTER_POOLING_KERNEL

// Where the cache's rows are on a GPU, the ids and how they are pooled are still in the host's
// memory.
#ifdef HET_TF_CUDA
REGISTER_KERNEL_BUILDER(Name("Het>CachePool")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("cache")
                            .HostMemory("ticket")
                            .HostMemory("splits")
                            .HostMemory("weights")
                            .HostMemory("pooling"),
                        CachePoolOp);
REGISTER_KERNEL_BUILDER(Name("Het>CacheUpdatePooled")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("cache")
                            .HostMemory("ticket")
                            .HostMemory("learning_rate")
                            .HostMemory("pooling"),
                        CacheUpdatePooledOp);
#endif

const StaysOnHost<Pooled> poolings_stay_on_host;

}  // namespace
}  // namespace het_tf
