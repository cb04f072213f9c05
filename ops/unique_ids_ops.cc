#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

REGISTER_OP("Het>Keys")
    .Input("ids: T")
    .Output("keys: int64")
    .Attr(
        "T: {int8, uint8, int16, uint16, int32, uint32, int64, uint64, half, bfloat16, float, "
        "double}")
    .Attr("cast_to: {int8, uint8, int16, uint16, int32, uint32, int64, uint64} = DT_INT64")
    .Attr("input_dim: int >= 0 = 0")
    .Attr("name_of_ids: string = 'ids'")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Ids as keys; none becomes another one, or the op fails and names it.

ids: Any shape. Of floats only whole numbers below what the type counts without gaps.
keys: The shape of ids.
cast_to: An integer type that has to hold the ids.
input_dim: The ids have to be in [0, input_dim); 0: no bound.
name_of_ids: What errors call them.
)doc");

REGISTER_OP("Het>UniqueIds")
    .Input("ids: int64")
    .Output("unique_ids: variant")
    .Attr("on_device: bool = false")
    .SetDoNotOptimize()  // a folded constant could not hold the variant
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Brings ids to their unique keys, once for all ops that follow in the step.

ids: Any shape.
unique_ids: Scalar. The unique keys and where each occurs, for lookups and updates in this process.
on_device: They may be for a cache with its rows on a device, which finds the unique keys itself.
)doc");

REGISTER_OP("Het>StackIds")
    .Input("ids: T")
    .Output("keys: int64")
    .Attr("T: list({int8, uint8, int16, uint16, int32, uint32, int64, uint64}) >= 1")
    .Attr("offsets: list(int) >= 1")
    .Attr("sizes: list(int) >= 1")
    .Attr("names: list(string) >= 1")
    .Attr("bag_sizes: list(int) = []")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The ids of several features as keys of one table, each feature's from its offset on.

ids: Any shapes.
keys: [ids], those of the first feature, then those of the second, and so on; with bag_sizes the
  first bag of each feature, then the second of each, and so on.
offsets: What is added to the ids of each.
sizes: Each feature's ids have to be in [0, size); the op fails otherwise.
names: Of the features, for errors.
bag_sizes: How many ids each feature has in a bag; all have to have as many bags.
)doc");

REGISTER_OP("Het>CheckIds")
    .Input("unique_ids: variant")
    .Input("ids: int64")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle unused;
      return c->WithRank(c->input(0), 0, &unused);
    })
    .Doc(R"doc(
Fails unless these are the ids, in their order, that unique_ids was made of.

unique_ids: Scalar.
ids: Any shape.
)doc");

REGISTER_OP("Het>ShardOf")
    .Input("keys: int64")
    .Output("shards: int32")
    .Attr("num_shards: int >= 1")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
The shard of a table that holds each key.

keys: Any shape.
shards: The shape of keys; in [0, num_shards).
)doc");

}  // namespace
}  // namespace het_tf
