// Ops that plan which worker trains which example.

#include "ops/shape_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Het>Plan")
    .Input("planner: variant")
    .Input("keys: int64")
    .Output("next_planner: variant")
    .Output("workers: int32")
    .Output("due_tables: int32")
    .Output("due_keys: int64")
    .Output("counts: int64")
    .Attr("num_workers: int >= 1")
    .Attr("worker: int >= 0")
    .Attr("capacity: int >= 0")
    .Attr("synchronous: bool")
    .Attr("tables: list(int) >= 1")
    .Attr("scored: list(int)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 2}));
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Vector(c->Dim(c->input(1), 0)));
      for (int i = 2; i < 4; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      c->set_output(4, c->Vector(2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Assigns the examples of a step to the workers that cache most of their rows. The same inputs give
the same plan on every worker.

planner: Scalar, of the step before; anything else: a new one is made.
keys: [examples, columns].
next_planner: Scalar, for the next step.
workers: [examples].
due_tables: [due], with due_keys the rows whose updates `worker` pushes at the end of the step
  before, since another worker needs them.
counts: Keys, and how many of them the shadow of their worker holds.
worker: Of which due rows are wanted.
capacity: Rows that every worker caches; 0: as many as there are.
synchronous: Whether a row is a hit only while no other worker has trained it since.
tables: Of each column.
scored: Columns whose rows decide. None: workers get examples in turn.
)doc");

REGISTER_OP("Het>PlanCounts")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The counts of all plans that were made in this process.
)doc");

}  // namespace
}  // namespace het_tf
