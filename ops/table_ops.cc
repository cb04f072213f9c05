#include "ops/shape_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Het>TableHandle")
    .Output("table: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Attr("dim: int >= 1")
    .Attr("optimizer: string")
    .Attr("initializer: string")
    .Attr("seed: int = 0")
    .Attr("clock: {'count', 'lamport', 'drift'} = 'count'")
    .Attr("shard: int >= 0 = 0")
    .Attr("num_shards: int >= 1 = 1")
    .Attr("row_dtype: {'float32', 'bfloat16'} = 'float32'")
    .Attr("lifetimes: string = ''")
    .Attr("storage: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
A shard of an embedding table, made when there is none with this name on the device.

table: Scalar.
shared_name: The table's name; empty: private to this op.
dim: Columns of a row's value.
optimizer: Name and parameters, for example "row_wise_adagrad epsilon=1e-07".
initializer: Name and parameters, for example "uniform minval=-0.05 maxval=0.05".
seed: Of the initial values, which depend on (seed, key, column) alone.
clock: How merging an update moves a row's clock.
shard: Which shard this is.
num_shards: Shards of the whole table.
row_dtype: What values are kept as. An update is made in float32, and its result rounded
  stochastically; optimizer slots are float32.
lifetimes: Which keys get a row, and when rows expire: clauses separated by ';' that are "admit
  count=N [sketch=BYTES]", "admit probability=P", "expire age=A [updates_below=N] [norm_below=X]",
  "given" (ages are in the unit of TableExpire's now, not in seconds), and "keys FIRST LAST", after
  which clauses are of these keys alone. Where ages are in seconds, a thread looks for expired rows
  for as long as the table exists.
storage: Where the rows are. Empty: in memory. "memory=BYTES path=FOLDER": in a file without a name
  in that folder, with so many bytes of it in memory.
)doc");

REGISTER_OP("Het>TableLookup")
    .Input("table: resource")
    .Input("ids: int64")
    .Output("rows: float")
    .Output("found: variant")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(c->NumElements(c->input(1)), c->UnknownDim()));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads rows. Unknown keys read as their initial value and do not enter the table.

table: A table of one shard.
ids: Any shape.
rows: [ids, dim].
found: Scalar. The ids, and where their rows are, for TableApply.
)doc");

REGISTER_OP("Het>TableApply")
    .Input("table: resource")
    .Input("found: variant")
    .Input("gradients: float")
    .Input("learning_rate: float")
    .Attr("nonfinite: {'error', 'skip'} = 'error'")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 0, 2, 0}); })
    .Doc(R"doc(
Applies the table's optimizer: one update of each key, with the sum of its gradients.

table: A table of one shard.
found: From TableLookup, which saves looking for the rows again, or from UniqueIds.
gradients: [ids, dim].
learning_rate: Scalar.
nonfinite: Whether NaN or infinity in a key's gradient fails the op, which then changes nothing, or
  skips that key and counts it.
)doc");

REGISTER_OP("Het>TableSync")
    .Input("table: resource")
    .Input("request: uint8")
    .Output("reply: uint8")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 1}));
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Merges what a cache pushes and sends the rows that it lacks.

table: The shard that the request is for.
request: [bytes], from CacheLookup or CacheFlush. 0 bytes: nothing was asked, and the reply has 0
  bytes.
reply: [bytes], for CacheInstall.
)doc");

REGISTER_OP("Het>TableSize")
    .Input("table: resource")
    .Output("size: int64")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The number of rows that have been updated or imported.

table: A shard.
size: Scalar.
)doc");

REGISTER_OP("Het>TableStats")
    .Input("table: resource")
    .Output("names: string")
    .Output("values: int64")
    .SetShapeFn(StatsShapes)
    .Doc(R"doc(
Counters of a shard since it was made, its rows, the bytes they take, and in "reads_missing_N" how
many reads of cached rows missed from N to 2N - 1 of the other caches' updates (0: none), in the unit
of the clock.

table: A shard.
names: [counters].
values: [counters].
)doc");

REGISTER_OP("Het>TableClear")
    .Input("table: resource")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0}); })
    .Doc(R"doc(
Drops all rows. Caches of the table drop theirs when they next hear from it.

table: A shard.
)doc");

REGISTER_OP("Het>TableExpire")
    .Input("table: resource")
    .Input("now: int64")
    .Output("expired: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0}));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Drops all rows that have expired, a few at a time; others use the table meanwhile.

table: A shard.
now: Scalar. The time from now on, where it is given, not before the last; negative: as it is.
expired: Scalar, how many rows were dropped.
)doc");

REGISTER_OP("Het>TableExport")
    .Input("table: resource")
    .Input("part: int64")
    .Input("num_parts: int64")
    .Attr("max_age: int = 9223372036854775807")
    .Output("keys: int64")
    .Output("values: float")
    .Output("slots: float")
    .Output("clocks: int64")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0, 0}));
      const auto rows = c->UnknownDim();
      c->set_output(0, c->Vector(rows));
      c->set_output(1, c->Matrix(rows, c->UnknownDim()));
      c->set_output(2, c->Matrix(rows, c->UnknownDim()));
      c->set_output(3, c->Vector(rows));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads a part of the rows, in no particular order. The parts are disjoint, of about the same size, and
make up the shard. A key's part stays the same, whatever happens to the table between two reads.

table: A shard.
part: Scalar in [0, num_parts).
num_parts: Scalar.
max_age: Rows that were not updated for longer are left out, where rows expire.
keys: [rows].
values: [rows, dim].
slots: [rows, slot_dim], the optimizer's.
clocks: [rows].
)doc");

REGISTER_OP("Het>TableImport")
    .Input("table: resource")
    .Input("keys: int64")
    .Input("values: float")
    .Input("slots: float")
    .Input("clocks: int64")
    .Attr("initial_slots: bool = false")
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 1, 2, 2, 1}); })
    .Doc(R"doc(
Sets rows, replacing those that exist; all of them or, on an error, none. Caches of the table drop
theirs when they next hear from it.

table: A shard.
keys: [rows], keys of this shard.
values: [rows, dim].
slots: [rows, slot_dim], the optimizer's; with initial_slots [rows, 0].
clocks: [rows], not negative.
initial_slots: The slots are to be as before a row's first update.
)doc");

}  // namespace
}  // namespace het_tf
