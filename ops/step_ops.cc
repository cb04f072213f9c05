// Ops for steps of several workers that count as one (docs/protocol.md, 9).

#include "ops/shape_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Het>StepHandle")
    .Output("steps: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Where the workers of a step wait for each other on a server, without members when there was none
with this name on the device.

steps: Scalar.
)doc");

REGISTER_OP("Het>StepBegin")
    .Input("steps: resource")
    .Input("round: int64")
    .Input("num_members: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 0, 0}); })
    .Doc(R"doc(
Begins a round of steps, from step 0 on. Members that wait in an earlier round get an error.

round: Scalar, another number than before.
num_members: Scalar, at least 1. Members are numbered from 0.
)doc");

REGISTER_OP("Het>StepLeave")
    .Input("steps: resource")
    .Input("round: int64")
    .Input("members: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 0, 1}); })
    .Doc(R"doc(
The others wait for these members no longer. Of another round: no effect.

round: Scalar.
members: [members].
)doc");

REGISTER_OP("Het>StepJoin")
    .Input("steps: resource")
    .Input("round: int64")
    .Input("member: int64")
    .Input("worker: int64")
    .Output("joined: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 0, 0, 0}));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
A worker is going to send the messages of a member.

round: Scalar, as member and worker.
joined: Scalar. False: it may not, since the round is over, the member has left, or a step of the
  round is merged.
)doc");

REGISTER_OP("Het>StepWaiting")
    .Input("steps: resource")
    .Output("round: int64")
    .Output("step: int64")
    .Output("absent: int64")
    .Output("workers: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      for (int i = 0; i < 2; ++i) c->set_output(i, c->Scalar());
      for (int i = 2; i < 4; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The step that the members of the round are at.

absent: [members], whose messages have not come.
workers: [members], who have joined as these; -1: nobody has.
)doc");

REGISTER_OP("Het>ServeStep")
    .Input("steps: resource")
    .Input("tables: n * resource")
    .Input("message: uint8")
    .Output("reply: uint8")
    .Attr("n: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes a member's message of a step, and answers when all members have sent theirs and what they push
is merged.

message: [bytes], of PackFrames: int64 [4] as bytes, which are round, member, step, and whether the
  member leaves after this step; then the request to each table; then float32 [numbers] as bytes.
reply: [bytes], for UnpackFrames: the reply of each table, then float32 [numbers] as bytes, the mean
  over the members with which the round began.
)doc");

}  // namespace
}  // namespace het_tf
