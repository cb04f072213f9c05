#include "ops/core/cache/cache.h"
#include "ops/shape_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Het>CacheHandle")
    .Output("cache: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Attr("dim: int >= 1")
    .Attr("optimizer: string")
    .Attr("initializer: string")
    .Attr("seed: int = 0")
    .Attr("clock: {'count', 'lamport', 'drift'} = 'count'")
    .Attr("num_shards: int >= 1 = 1")
    .Attr("row_dtype: {'float32', 'bfloat16'} = 'float32'")
    .Attr("capacity: int")
    .Attr("workers_on_host: int >= 1 = 1")
    .Attr("device_capacity: int >= -1 = 0")
    .Attr("policy: {'lru', 'lfu'} = 'lfu'")
    .Attr("read_bound: int = -1")
    .Attr("write_bound: int = -1")
    .Attr("due_bound: int = -1")
    .Attr("synchronous: bool = false")
    .Attr("nonfinite: {'error', 'skip'} = 'error'")
    .Attr("wire_dtype: {'float32', 'bfloat16'} = 'float32'")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
A worker's cache of an embedding table, made when there is none with this name on the device.

cache: Scalar.
shared_name: The cache's name; empty: private to this op.
dim: As of the table, like optimizer, initializer, seed, clock, num_shards and row_dtype.
capacity: Rows. 0: no cache. Every lookup fetches its rows, updates send gradients, and the shards
  apply the optimizer. With device_capacity those that are kept in the host's memory when they have
  given way to others on the device; 0: none. -1: as many as fit into a quarter of the memory that
  is free when the first such cache of the process is made, which all of them share.
workers_on_host: Worker processes that share this host's memory.
device_capacity: Rows in the memory of the device of this op; -1: as many as three quarters of the
  memory hold that TensorFlow has not handed out there. 0: rows are in the host's memory. In a build without CUDA the CPU is such a device, else GPUs are.
policy: Which rows leave a full cache.
read_bound: What a read may miss of other workers' updates beyond those not yet sent, in units of the
  clock: updates, or lengths of 2^-14 under a drift clock; -1: unbounded.
write_bound: What a shard may lack of a row's updates, in the same units; -1: unbounded.
due_bound: With what of them a row is due, at most write_bound; -1: that.
synchronous: Whether the steps of all workers count as one (ServeStep). The bounds must be 0.
nonfinite: Whether NaN or infinity in a key's gradient fails the update, which then changes nothing,
  or skips that key and counts it.
wire_dtype: Of values, their gradients and their changes in messages. What goes up is rounded
  stochastically, what comes down to the nearest; optimizer slots are float32.
)doc");

REGISTER_OP("Het>CacheLookup")
    .Input("cache: resource")
    .Input("unique_ids: variant")
    .Output("ticket: variant")
    .Output("requests: num_shards * uint8")
    .Attr("num_shards: int >= 1")
    .Attr("fresh: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0}));
      return RequestShapes(c);
    })
    .Doc(R"doc(
Begins a step: finds its rows and writes one request for each shard.

unique_ids: From UniqueIds; with its on_device if the cache may have its rows on a device.
ticket: Scalar; keeps the rows in the cache while it lives.
requests: [bytes] each; 0 bytes: nothing to send.
fresh: Read with a read_bound of 0, as for evaluation.
)doc");

REGISTER_OP("Het>CacheInstall")
    .Input("cache: resource")
    .Input("ticket: variant")
    .Input("replies: num_shards * uint8")
    .Output("rows: int64")
    .Output("incomplete: bool")
    .Attr("num_shards: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0}));
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes what the shards replied; all of it or, on an error, nothing.

ticket: From CacheLookup or CacheFlush.
replies: [bytes] each, from TableSync; 0 bytes where nothing was sent.
rows: Scalar. How many came.
incomplete: Scalar. Shards have to be asked again (CacheAskAgain): one had other rows than the cache
  knew, and was not asked about some of the step's, which are else read as they were; or a flush
  came before the push that it waits for, which the shard may not have yet.
)doc");

REGISTER_OP("Het>CacheAskAgain")
    .Input("cache: resource")
    .Input("ticket: variant")
    .Output("requests: num_shards * uint8")
    .Attr("num_shards: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0}));
      for (int s = 0; s < c->num_outputs(); ++s) c->set_output(s, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Asks for the rows that a step lacks. The replies go to CacheInstall, with the same ticket.

ticket: From CacheLookup, installed.
requests: [bytes] each; 0 bytes: nothing to send.
)doc");

REGISTER_OP("Het>CacheGather")
    .Input("cache: resource")
    .Input("ticket: variant")
    .Output("rows: float")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0}));
      c->set_output(0, c->Matrix(c->UnknownDim(), c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Puts out the rows of a step as they are now.

ticket: From CacheLookup, installed.
rows: [ids, dim], on the device of the rows.
)doc");

REGISTER_OP("Het>CacheUpdate")
    .Input("cache: resource")
    .Input("ticket: variant")
    .Input("gradients: float")
    .Input("learning_rate: float")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 0, 2, 0}); })
    .Doc(R"doc(
Applies the optimizer to the cached rows: one update of each key, with the sum of its gradients.

ticket: From CacheLookup, installed.
gradients: [ids, dim].
learning_rate: Scalar.
)doc");

REGISTER_OP("Het>CacheMakeRoom")
    .Input("cache: resource")
    .Input("ticket: variant")
    .Output("made: variant")
    .Output("lacks_room: bool")
    .Output("requests: num_shards * uint8")
    .Attr("num_shards: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0}));
      TF_RETURN_IF_ERROR(RequestShapes(c));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Before CacheUpdate where steps overlap: writes requests that push updates of the ticket's rows if
their shard lacks as many as write_bound says. The replies go to CacheInstall with `made`; then it
has them.

ticket: From CacheLookup.
made: Scalar.
lacks_room: Scalar, whether there is anything to send.
requests: [bytes] each; 0 bytes: nothing to send.
)doc");

REGISTER_OP("Het>CacheFlush")
    .Input("cache: resource")
    .Output("ticket: variant")
    .Output("requests: num_shards * uint8")
    .Attr("num_shards: int >= 1")
    .Attr("all: bool = true")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      return RequestShapes(c);
    })
    .Doc(R"doc(
Writes requests that push updates. The replies go to CacheInstall.

ticket: Scalar.
requests: [bytes] each; 0 bytes: nothing to send.
all: Everything not yet sent, or only what is due.
)doc");

REGISTER_OP("Het>CacheBeginClosure")
    .Input("cache: resource")
    .Input("number: int64")
    .Output("closure: variant")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0}));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Begins steps that count once, however often they are run: what they update is not pushed before
CacheCommitClosure. What a closure before them updated that did not end is undone.

number: Scalar, positive, the same for every run.
closure: Scalar, for the other two ops. When it is gone, the run is over.
)doc");

REGISTER_OP("Het>CacheCommitClosure")
    .Input("cache: resource")
    .Input("closure: variant")
    .Input("done: int64")
    .Output("ticket: variant")
    .Output("requests: num_shards * uint8")
    .Attr("num_shards: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0, 0}));
      return RequestShapes(c);
    })
    .Doc(R"doc(
Writes requests that push all that a closure's steps have updated, with its number: a shard that has
merged another run of it does not merge this one. The replies go to CacheInstall.

closure: From CacheBeginClosure.
done: Scalar, below the closure's number: no closure up to this number will be run again.
ticket: Scalar.
requests: [bytes] each; 0 bytes: nothing to send.
)doc");

REGISTER_OP("Het>CacheEndClosure")
    .Input("cache: resource")
    .Input("closure: variant")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 0}); })
    .Doc(R"doc(
Ends a closure that was committed and whose replies were installed. CANCELLED, upon which tf.distribute
runs it again: a shard was replaced meanwhile, and lost what it should have merged.

closure: From CacheBeginClosure.
)doc");

REGISTER_OP("Het>CachePush")
    .Input("cache: resource")
    .Input("keys: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 1}); })
    .Doc(R"doc(
The unsent updates of those of the keys that have some travel with the next request.

keys: [keys].
)doc");

REGISTER_OP("Het>CacheKeep")
    .Input("cache: resource")
    .Input("keeps: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 0}); })
    .Doc(R"doc(
Whether updates stay in the cache until CachePush. If not, all unsent updates travel with the next
request.

keeps: Scalar. A flush of everything sets it to false.
)doc");

REGISTER_OP("Het>CacheClear")
    .Input("cache: resource")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0}); })
    .Doc(R"doc(
Forgets all rows and the updates not yet sent, which are counted as lost.
)doc");

REGISTER_OP("Het>CacheStats")
    .Input("cache: resource")
    .Output("names: string")
    .Output("values: int64")
    .SetShapeFn(StatsShapes)
    .Doc(R"doc(
Counters of a cache since it was made.

names: [counters].
values: [counters].
)doc");

REGISTER_OP("Het>CacheReport")
    .Input("cache: resource")
    .Output("report: int64")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      c->set_output(0, c->Vector(2 + Counters<CacheCounter>::kSize));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Who the cache is, and its counters since it was made.

report: [2 + counters]: task index of this process, id of the cache, then the counters in the order
  of CacheCounterNames. Another cache under the same name, after its process was restarted, has
  another id.
)doc");

REGISTER_OP("Het>CacheCounterNames")
    .Output("names: string")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(Counters<CacheCounter>::kSize));
      return absl::OkStatus();
    })
    .Doc(R"doc(
What the counters of CacheReport count (CacheCounter in ops/core/cache/cache.h).

names: [counters].
)doc");

}  // namespace
}  // namespace het_tf
