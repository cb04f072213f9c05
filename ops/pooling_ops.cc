#include "ops/shape_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

constexpr char kCombiners[] = "combiners: list({'sum', 'mean', 'sqrtn', 'max'}) >= 1";
constexpr char kBagSizes[] = "bag_sizes: list(int) >= 1";

// The first `n` outputs are [bags, dim], by splits from input `splits` on.
absl::Status PooledShapes(InferenceContext* c, int splits) {
  int n;
  TF_RETURN_IF_ERROR(c->GetAttr("n", &n));
  for (int f = 0; f < n; ++f) {
    const ShapeHandle shape = c->input(splits + f);
    DimensionHandle bags = c->UnknownDim();
    if (c->RankKnown(shape) && c->Rank(shape) == 1 && c->ValueKnown(c->Dim(shape, 0))) {
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(shape, 0), 1, &bags));
    }
    c->set_output(f, c->Matrix(bags, c->UnknownDim()));
  }
  for (int i = n; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("Het>CachePool")
    .Input("cache: resource")
    .Input("ticket: variant")
    .Input("splits: n * int64")
    .Input("weights: n * float")
    .Output("pooled: n * float")
    .Output("pooling: variant")
    .Attr("n: int >= 1")
    .Attr(kCombiners)
    .Attr(kBagSizes)
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0}));
      return PooledShapes(c, 2);
    })
    .Doc(R"doc(
Puts out the rows of a step as they are now, those of each bag of ids brought to one.

ticket: From CacheLookup, installed. Its ids are those of feature 0, then those of feature 1, and so
  on.
splits: Of each feature: [bags + 1], where each bag's ids begin among the feature's, from 0 to their
  number; or a scalar, how many ids it has, in bags of bag_size.
weights: Of each feature: [ids], or [0]: ones.
pooled: [bags, dim] each; zeros for a bag of no ids.
pooling: Scalar, for CacheUpdatePooled and PoolingGradient.
combiners: How the bags of each feature are brought to one row; n of them. Of a bag's rows r and
  weights w: the sum of w r; that over the sum of w; that over the root of the sum of w^2; or the
  largest w r, column by column.
bag_sizes: Ids in each bag of each feature, where its splits are a scalar; n of them.
)doc");

REGISTER_OP("Het>TablePool")
    .Input("table: resource")
    .Input("ids: int64")
    .Input("splits: n * int64")
    .Input("weights: n * float")
    .Output("pooled: n * float")
    .Output("found: variant")
    .Output("pooling: variant")
    .Attr("n: int >= 1")
    .Attr(kCombiners)
    .Attr(kBagSizes)
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      return PooledShapes(c, 2);
    })
    .Doc(R"doc(
Reads rows, those of each bag of ids brought to one; otherwise as TableLookup.

table: A table of one shard.
ids: Any shape. Those of feature 0, then those of feature 1, and so on.
splits: As of CachePool, like weights, pooled, combiners and bag_sizes.
found: Scalar, for TableApplyPooled.
pooling: Scalar, for TableApplyPooled and PoolingGradient.
)doc");

REGISTER_OP("Het>CacheUpdatePooled")
    .Input("cache: resource")
    .Input("ticket: variant")
    .Input("learning_rate: float")
    .Input("pooling: variant")
    .Input("gradients: n * float")
    .Attr("n: int >= 1")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 0, 0, 0}); })
    .Doc(R"doc(
As CacheUpdate, of what was pooled: one update of each key, with the sum of its gradients.

ticket: That of CachePool.
learning_rate: Scalar.
pooling: From CachePool.
gradients: [bags, dim] of each feature.
)doc");

REGISTER_OP("Het>TableApplyPooled")
    .Input("table: resource")
    .Input("found: variant")
    .Input("learning_rate: float")
    .Input("pooling: variant")
    .Input("gradients: n * float")
    .Attr("n: int >= 1")
    .Attr("nonfinite: {'error', 'skip'} = 'error'")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 0, 0, 0}); })
    .Doc(R"doc(
As TableApply, of what was pooled: one update of each key, with the sum of its gradients.

table: A table of one shard.
found: From TablePool.
learning_rate: Scalar.
pooling: From TablePool.
gradients: [bags, dim] of each feature.
nonfinite: As of TableApply.
)doc");

REGISTER_OP("Het>PoolingGradient")
    .Input("pooling: variant")
    .Input("gradients: n * float")
    .Output("of_weights: n * float")
    .Attr("n: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      for (int f = 0; f < c->num_outputs(); ++f) c->set_output(f, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The gradients of the weights that rows were pooled with, for the rows as they were then.

pooling: From CachePool or TablePool.
gradients: [bags, dim] of each feature.
of_weights: [ids] of each feature that has weights, else [0]. 0 where a mean or sqrtn had nothing to
  divide by. Ids that share a maximum share its gradient.
)doc");

REGISTER_OP("Het>PooledSums")
    .Input("pooling: variant")
    .Input("gradients: n * float")
    .Output("keys: int64")
    .Output("sums: float")
    .Attr("n: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      const DimensionHandle keys = c->UnknownDim();
      c->set_output(0, c->Vector(keys));
      c->set_output(1, c->Matrix(keys, c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The gradients of the rows that were pooled: what CacheUpdatePooled makes its updates of.

pooling: From CachePool or TablePool.
gradients: [bags, dim] of each feature.
keys: [keys], the unique ids.
sums: [keys, dim]; NaN in the row of a key whose sum or its squares are not finite.
)doc");

}  // namespace
}  // namespace het_tf
