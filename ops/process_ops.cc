// Ops that find what a process has of tables and dense variables by its numbers, whichever client
// made it.

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

absl::Status VectorShape(InferenceContext* c) {
  c->set_output(0, c->Vector(c->UnknownDim()));
  return absl::OkStatus();
}

absl::Status PairsShape(InferenceContext* c) {
  c->set_output(0, c->Matrix(c->UnknownDim(), 2));
  return absl::OkStatus();
}

REGISTER_OP("Het>ProcessTables")
    .Output("incarnations: int64")
    .SetIsStateful()
    .SetShapeFn(VectorShape)
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

REGISTER_OP("Het>ProcessDenseShards")
    .Output("incarnations: int64")
    .SetIsStateful()
    .SetShapeFn(VectorShape)
    .Doc(R"doc(
The incarnations of all shards of dense variables in this process.

incarnations: [shards]. 0: of one that was not set yet.
)doc");

REGISTER_OP("Het>ProcessDenseShard")
    .Input("incarnation: int64")
    .Output("dense: resource")
    .SetIsStateful()
    .SetShapeFn(HandleShape)
    .Doc(R"doc(
A handle of a shard of dense variables in this process.

incarnation: Scalar, from ProcessDenseShards or ProcessReplicas.
dense: Scalar.
)doc");

REGISTER_OP("Het>ProcessCaches")
    .Output("shards: int64")
    .Attr("all: bool = false")
    .SetIsStateful()
    .SetShapeFn(PairsShape)
    .Doc(R"doc(
The caches of this process that hold updates not yet known to be merged; or (all) every one.

shards: [shards, 2]. One row for each shard of each such cache, in the order of the shards: the
  cache's id and the incarnation of the shard, 0 if the cache never heard from it.
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

REGISTER_OP("Het>ProcessReplicas")
    .Output("shards: int64")
    .Attr("all: bool = false")
    .SetIsStateful()
    .SetShapeFn(PairsShape)
    .Doc(R"doc(
The replicas of this process that have made steps not yet known to be merged; or (all) every one.

shards: [shards, 2]. As from ProcessCaches.
)doc");

REGISTER_OP("Het>ProcessReplica")
    .Input("id: int64")
    .Output("replica: resource")
    .SetIsStateful()
    .SetShapeFn(HandleShape)
    .Doc(R"doc(
A handle of a replica in this process.

id: Scalar, from ProcessReplicas.
replica: Scalar.
)doc");

REGISTER_OP("Het>ProcessEnds")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Has every later lookup and update of every cache in this process fail, and every later step of every
replica, since what they made would be lost.
)doc");

REGISTER_OP("Het>DestroyLater")
    .Input("resource: resource")
    .Attr("container: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0}); })
    .Doc(R"doc(
Destroys a reference-counted resource on a separate thread after its last handle is released.

The release does not wait then. Other resources stay as they are.

An iterator of tf.data needs the op: its destructor waits for the thread that tunes the pipeline. In
TensorFlow 2.21, this thread mostly misses the cancellation, and sleeps for as long as the iterator
has lived, up to a minute. The eager operations of a worker would wait meanwhile. The memory of the
pipeline is free only afterwards.

resource: Scalar.
container: Of the program: its resources are destroyed at once when the container is cleared.
)doc");

REGISTER_OP("Het>ProcessNoteEnded")
    .Input("ids: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {1}); })
    .Doc(R"doc(
Has this process remember that caches and replicas have ended after they had sent all that they had.

ids: [n], of caches and replicas.
)doc");

REGISTER_OP("Het>ProcessEnded")
    .Output("ids: int64")
    .SetIsStateful()
    .SetShapeFn(VectorShape)
    .Doc(R"doc(
What ProcessNoteEnded was told in this process.

ids: [n].
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
