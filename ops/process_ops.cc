// Ops that find the tables and caches of a process by their numbers, whichever client made them.

#include "ops/shape_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

absl::Status HandleShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("Het>ProcessTables")
    .Output("incarnations: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The incarnations of all table shards in this process.

incarnations: [shards].
)doc");

REGISTER_OP("Het>ProcessTable")
    .Input("incarnation: int64")
    .Output("table: resource")
    .SetIsStateful()
    .SetShapeFn(HandleShape)
    .Doc(R"doc(
A handle of a table shard in this process.

incarnation: Scalar, from ProcessTables or ProcessCaches.
table: Scalar.
)doc");

REGISTER_OP("Het>ProcessCaches")
    .Output("shards: int64")
    .Attr("freeze: bool = false")
    .Attr("all: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(c->UnknownDim(), 2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The caches of this process that hold updates not yet known to be merged; or (all) every one.

shards: [shards, 2]. One row for each shard of each such cache, in the order of the shards: the
  cache's id and the incarnation of the shard, 0 if the cache never heard from it.
freeze: Before that, have every later lookup and update of every cache in this process fail.
)doc");

REGISTER_OP("Het>ProcessNoteEnded")
    .Input("caches: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {1}); })
    .Doc(R"doc(
Has this process remember that caches have ended after they had sent all their updates.

caches: [caches], their ids.
)doc");

REGISTER_OP("Het>ProcessEnded")
    .Output("caches: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
What ProcessNoteEnded was told in this process.

caches: [caches].
)doc");

REGISTER_OP("Het>ProcessCache")
    .Input("id: int64")
    .Output("cache: resource")
    .SetIsStateful()
    .SetShapeFn(HandleShape)
    .Doc(R"doc(
A handle of a cache in this process.

id: Scalar, from ProcessCaches.
cache: Scalar.
)doc");

REGISTER_OP("Het>ProgramHandle")
    .Output("program: resource")
    .Attr("container: string")
    .Attr("address: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Has what a program has by name on this device end with the program.

When the last such handle of the program is deleted, as TensorFlow does some time after it has heard
from the program last, all that is in the container on the device is destroyed. When a program at
the same address makes one, what others at this address have on the device is destroyed, and they
can make no more in this process.

program: Scalar. The program keeps it for as long as it runs.
container: Of the program's resources, and of no other's.
address: Where the program listens, as no two can at a time; empty if it has no address of its own.
)doc");

}  // namespace
}  // namespace het_tf
