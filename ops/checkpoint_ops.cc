#include "ops/shape_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Het>TableCut")
    .Input("table: resource")
    .Attr("owner: string = ''")
    .Output("snapshot: variant")
    .Output("rows: int64")
    .Output("candidates: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The rows as they are now, for TableSave; the table can be updated meanwhile. What sets or drops rows
waits until they are saved or the snapshot is let go of.

table: A shard.
owner: A name for who has one cut of the shard at a time: another one lets go of the one before.
  Empty: it is an error until that is let go of.
snapshot: Scalar, of this process.
rows: Scalar, how many they are.
candidates: Scalar, how many keys have no row and are counted exactly; -1: all keys get a row.
)doc");

REGISTER_OP("Het>TableCutChanged")
    .Input("table: resource")
    .Input("reader: string")
    .Input("since: int64")
    .Attr("owner: string = ''")
    .Output("snapshot: variant")
    .Output("rows: int64")
    .Output("number: int64")
    .Output("whole: bool")
    .Output("dropped: int64")
    .Output("time: int64")
    .Output("candidates: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0, 0}));
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
TableCut, of the rows that changed since an earlier one. The table notes what changes from a
reader's first call on, a bit a row.

table: A shard.
reader: Scalar, a name for who reads.
since: Scalar, the number of the last cut whose rows the reader has, or 0. What came after it and
  was lost comes again.
owner: As of TableCut.
snapshot: Scalar, of this process.
rows: Scalar, how many they are.
number: Scalar, of this cut, not 0.
whole: Scalar, whether the rows are all that there are: where since is 0 or another table's, or all
  rows were replaced or dropped meanwhile.
dropped: Scalar, how many keys had a row then, and now have none.
time: Scalar, of the table, from which ages are counted.
candidates: Scalar, how many keys have no row and are counted exactly; -1: all keys get a row.
)doc");

REGISTER_OP("Het>TableForgetReader")
    .Input("table: resource")
    .Input("reader: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 0}); })
    .Doc(R"doc(
The table no longer notes what changes for a reader.

table: A shard.
reader: Scalar, the name in TableCutChanged.
)doc");

REGISTER_OP("Het>TableCutEnd")
    .Input("table: resource")
    .Attr("owner: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0}); })
    .Doc(R"doc(
Lets go of the rows that TableCut or TableCutChanged has cut last for an owner, if that has not
ended.

table: A shard.
owner: The name given to TableCut.
)doc");

REGISTER_OP("Het>TableSave")
    .Input("table: resource")
    .Input("snapshot: variant")
    .Input("prefix: string")
    .Input("part: string")
    .Input("config: string")
    .Output("rows: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0, 0, 0, 0}));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Writes a shard as a tensor bundle of its own, in blocks, as tensors PART/keys (int64 [rows]),
PART/values (float [rows, dim]), PART/slots (float [rows, slot_dim], where there are slots),
PART/clocks (int64 [rows]), PART/ages (int64 [rows], where rows expire), PART/dropped (int64 [keys
that have no row any longer], where there are some) and PART/config. Where not every key gets a row,
those that are counted as PART/candidates, PART/counts and PART/candidate_ages (int64 [candidates];
ages where rows expire), and sketches as PART/sketch_RANGE. After an error there is no file.

table: A shard.
snapshot: Scalar, of TableCut, which is then used up.
prefix: Scalar, path of the bundle.
part: Scalar, what the names of its tensors begin with.
config: Scalar, stored as it is.
rows: Scalar, how many were written.
)doc");

REGISTER_OP("Het>TableSaveRows")
    .Input("table: resource")
    .Input("snapshot: variant")
    .Input("path: string")
    .Attr("dtype: {'float32', 'float16', 'int8'} = 'float32'")
    .Attr("min_clock: int = 0")
    .Attr("min_norm: float = 0.0")
    .Attr("max_age: int = 9223372036854775807")
    .Output("rows: int64")
    .Output("bytes: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0, 0}));
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Writes a shard as a file that servers map (ops/core/serving/rows_file.h). After an error there is
no file.

table: A shard.
snapshot: Scalar, of TableCut, which is then used up.
path: Scalar, of the file.
dtype: What values are stored as.
min_clock: Rows with a smaller clock are left out.
min_norm: Rows with a smaller L2 norm are left out.
max_age: Rows that were not updated for longer are left out, where rows expire.
rows: Scalar, how many were written.
bytes: Scalar, of the file.
)doc");

absl::Status PartsShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, {0, 1, 1, 1, 1, 1, 1}));
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("Het>TableCheck")
    .Input("table: resource")
    .Input("prefixes: string")
    .Input("parts: string")
    .Input("rows: int64")
    .Input("dropped: int64")
    .Input("elapsed: int64")
    .Input("candidates: int64")
    .Attr("slots: bool = true")
    .Attr("clocks: bool = true")
    .Attr("ages: bool = false")
    .Attr("sketches: bool = false")
    .Output("owned: int64")
    .SetIsStateful()
    .SetShapeFn(PartsShape)
    .Doc(R"doc(
Reads the parts of a table in tensor bundles, checksums included, without loading them. It fails,
and names the part, if TableRestore would.

table: A shard of the table that is to have the rows.
prefixes: [parts], paths of the bundles. Later ones go over earlier ones.
parts: [parts], as TableSave was given each.
rows: [parts], how many each must have.
dropped: [parts], how many keys each says to have no row any longer.
elapsed: [parts], what is to be added to the ages of its rows.
candidates: [parts], of how many keys without a row it has counts; -1: they are not read.
slots: Whether the optimizer's slots are read, too.
clocks: Whether the rows' clocks are read, too.
ages: Whether the rows' ages are read, too.
sketches: Whether sketches are read, too, of parts whose counts are.
owned: Scalar, how many of the rows, and of the keys without one, are this shard's.
)doc");

REGISTER_OP("Het>TableRestore")
    .Input("table: resource")
    .Input("prefixes: string")
    .Input("parts: string")
    .Input("rows: int64")
    .Input("dropped: int64")
    .Input("elapsed: int64")
    .Input("candidates: int64")
    .Attr("slots: bool = true")
    .Attr("clocks: bool = true")
    .Attr("ages: bool = false")
    .Attr("sketches: bool = false")
    .Attr("time: int = -1")
    .Output("owned: int64")
    .SetIsStateful()
    .SetShapeFn(PartsShape)
    .Doc(R"doc(
Replaces a shard's rows with those of them that the parts in tensor bundles hold. After an error
the shard is empty: check before. Caches of the table drop theirs when they next hear from it.

table: A shard.
prefixes: [parts], paths of the bundles. Later ones go over earlier ones.
parts: [parts], as TableSave was given each.
rows: [parts], how many each must have.
dropped: [parts], how many keys each says to have no row any longer.
elapsed: [parts], what is to be added to the ages of its rows.
candidates: [parts], of how many keys without a row it has counts; -1: they are not read.
slots: Whether the optimizer's slots are read, too; if not, rows get those of a new row.
clocks: Whether the rows' clocks are read, too; if not, they begin anew.
ages: Whether the rows' ages are read, too; if not, they are as if updated now.
sketches: Whether sketches are read, too, of parts whose counts are. Those of several are merged.
time: TableExpire's last now when the rows were saved; negative: there was none.
owned: Scalar, how many rows the shard has now.
)doc");

}  // namespace
}  // namespace het_tf
