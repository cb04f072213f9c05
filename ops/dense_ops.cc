#include "ops/core/dense/replica.h"
#include "ops/shape_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Het>DenseHandle")
    .Output("shard: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
A server's part of the dense variables, empty when there was none with this name on the device.

shard: Scalar.
)doc");

REGISTER_OP("Het>DenseSet")
    .Input("shard: resource")
    .Input("floats: float")
    .Input("owed: float")
    .Input("counters: int64")
    .Input("rest: uint8")
    .Input("clock: int64")
    .Attr("num_workers: int >= 1")
    .Attr("total: float = 1.0")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 1, 1, 1, 1, 0}); })
    .Doc(R"doc(
Replaces everything; replicas start anew from it.

floats: [num_floats], the trained ones first. Contributions to trained floats count `total` of
  themselves, though not at once, to others 1 / num_workers.
owed: [trained floats], contributions that floats do not hold yet.
counters: [num_counters].
rest: [bytes], which replicas that start get and nothing is merged into.
clock: Scalar. Steps of all workers that floats and counters hold.
num_workers: Replicas that make steps from now on.
total: In (0, 1]. Of one worker: 1.
)doc");

REGISTER_OP("Het>DenseGet")
    .Input("shard: resource")
    .Output("floats: float")
    .Output("owed: float")
    .Output("counters: int64")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
What was set, and all contributions merged since.

floats: [num_floats].
owed: [trained floats], contributions that floats do not hold yet.
counters: [num_counters].
)doc");

REGISTER_OP("Het>DenseSync")
    .Input("shard: resource")
    .Input("request: uint8")
    .Output("reply: uint8")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 1}));
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Answers a replica: merges what it pushes and sends the values if it lacks too many steps.

request: [bytes], from ReplicaRequest. 0 bytes: nothing was asked, and the reply has 0 bytes.
reply: [bytes], for ReplicaReceive.
)doc");

REGISTER_OP("Het>ReplicaHandle")
    .Output("replica: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Attr("dtypes: list(type) >= 1")
    .Attr("shapes: list(shape) >= 1")
    .Attr("kinds: list(string) >= 1")
    .Attr("num_shards: int >= 1")
    .Attr("num_phases: int >= 1 = 1")
    .Attr("num_workers: int >= 1")
    .Attr("staleness: int >= 0")
    .Attr("wire: {'float32', 'bfloat16'} = 'float32'")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
A worker's replica of the dense variables, made when there is none with this name on the device.

replica: Scalar.
dtypes: Of the variables, like shapes and kinds.
kinds: "float": exchanged (float32); "counter": exchanged, and added (int64); "own": every worker has
  its own; "seed": its own, and another one on each worker (integers).
num_shards: Parts of what is exchanged. Shards s and s + num_phases are due at the same steps.
num_workers: Replicas that there are.
staleness: Own steps that may be unsent, and steps of others that may be missing.
wire: What numbers are in messages; what rounding takes off is sent later.
)doc");

REGISTER_OP("Het>ReplicaVariables")
    .Input("replica: resource")
    .Output("variables: n * resource")
    .Attr("n: int >= 1")
    .Attr("dtypes: list(type) >= 1")
    .Attr("shapes: list(shape) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      std::vector<tensorflow::DataType> dtypes;
      std::vector<tensorflow::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(c->GetAttr("dtypes", &dtypes));
      TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
      if (static_cast<int>(dtypes.size()) != c->num_outputs() ||
          static_cast<int>(shapes.size()) != c->num_outputs()) {
        return absl::InvalidArgumentError("n, dtypes and shapes differ");
      }
      for (int i = 0; i < c->num_outputs(); ++i) {
        tensorflow::shape_inference::ShapeHandle shape;
        TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[i], &shape));
        c->set_output(i, c->Scalar());
        c->set_output_handle_shapes_and_types(
            i, std::vector<tensorflow::shape_inference::ShapeAndType>{{shape, dtypes[i]}});
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Handles of the replica's variables, which are TensorFlow's resource variables.

variables: Scalars.
)doc");

REGISTER_OP("Het>ReplicaDestroy")
    .Input("replica: resource")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0}); })
    .Doc(R"doc(
Forgets the replica and its variables.
)doc");

REGISTER_OP("Het>ReplicaSettle")
    .Input("replica: resource")
    .Input("variables: n * resource")
    .Input("steps: int64")
    .Output("exchange: bool")
    .Attr("n: int >= 0")
    .Attr("reads: bool = true")
    .Attr("all: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Between two steps: the variables take over what came from the servers, and what is due is set aside
to be sent. Waits for a request that is under way where its answer is needed.

variables: From ReplicaVariables. They are written, which orders this op among those that use them;
  none where there are no such ops.
steps: Scalar. Steps made since the last call.
reads: Whether a step is about to begin.
all: Whether everything is to be sent.
exchange: Scalar. Whether ReplicaRequest, ReplicaReceive and this op, with no steps, must run before
  the training goes on.
)doc");

REGISTER_OP("Het>ReplicaUrgent")
    .Input("replica: resource")
    .Output("urgent: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Waits until half of the time is over that something due has until steps must wait for it, or
ReplicaClose says that nobody is to wait.

urgent: Scalar. Whether there is such a thing.
)doc");

REGISTER_OP("Het>ReplicaClose")
    .Input("replica: resource")
    .Attr("closed: bool")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0}); })
    .Doc(R"doc(
Says whether ReplicaUrgent may wait. At first it may not.
)doc");

REGISTER_OP("Het>ReplicaRequest")
    .Input("replica: resource")
    .Output("ticket: variant")
    .Output("requests: num_shards * uint8")
    .Attr("num_shards: int >= 1")
    .Attr("asks: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      return RequestShapes(c);
    })
    .Doc(R"doc(
Writes a request for each shard. The replies go to ReplicaReceive.

ticket: Scalar.
requests: [bytes] each; 0 bytes: nothing to send, as while another request to it is under way.
asks: Whether to ask the shards for which there is nothing else how many steps the replica misses,
  in a few bytes.
)doc");

REGISTER_OP("Het>ReplicaReceive")
    .Input("replica: resource")
    .Input("ticket: variant")
    .Input("replies: num_shards * uint8")
    .Attr("num_shards: int >= 1")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 0}); })
    .Doc(R"doc(
Takes what the shards replied; all of it or, on an error, nothing. The variables change at the next
ReplicaSettle.

ticket: From ReplicaRequest.
replies: [bytes] each, from DenseSync; 0 bytes where nothing was sent.
)doc");

REGISTER_OP("Het>ReplicaOwn")
    .Input("replica: resource")
    .Output("own: uint8")
    .Output("steps: int64")
    .Attr("seeds_only: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The variables of the kinds "own" and "seed", one after the other.

seeds_only: Of those, the ones of the kind "seed".
own: [bytes].
steps: Scalar. Steps that the replica has made; 0: it has not started.
)doc");

REGISTER_OP("Het>ReplicaStats")
    .Input("replica: resource")
    .Output("names: string")
    .Output("values: int64")
    .SetShapeFn(StatsShapes)
    .Doc(R"doc(
Counters of a replica since it was made.

names: [counters].
values: [counters].
)doc");

REGISTER_OP("Het>ReplicaReport")
    .Input("replica: resource")
    .Output("report: int64")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      c->set_output(0, c->Vector(2 + Counters<ReplicaCounter>::kSize));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Who the replica is, and its counters since it was made, as CacheReport says it of a cache.

report: [2 + counters]: task index of this process, id of the replica, then the counters in the
  order of ReplicaCounterNames.
)doc");

REGISTER_OP("Het>ReplicaCounterNames")
    .Output("names: string")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(Counters<ReplicaCounter>::kSize));
      return absl::OkStatus();
    })
    .Doc(R"doc(
What the counters of ReplicaReport count (ReplicaCounter in ops/core/dense/replica.h).

names: [counters].
)doc");

}  // namespace
}  // namespace het_tf
