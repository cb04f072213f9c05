// Ops that make messages of what several parties say, and carry them to servers.

#include "ops/shape_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Het>PackFrames")
    .Input("frames: n * uint8")
    .Output("message: uint8")
    .Attr("n: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Makes one message of several.

frames: [bytes] each.
message: [bytes]; 0 bytes if all frames have none.
)doc");

REGISTER_OP("Het>UnpackFrames")
    .Input("message: uint8")
    .Output("frames: n * uint8")
    .Attr("n: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {1}));
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The inverse of PackFrames.
)doc");

REGISTER_OP("Het>CallServers")
    .Input("requests: n * uint8")
    .Output("calls: variant")
    .Attr("n: int >= 1")
    .Attr("devices: list(string) >= 1")
    .Attr("functions: list(func) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) {
        tensorflow::shape_inference::ShapeHandle unused;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
      }
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Begins to call functions on other devices, all at the same time.

requests: [bytes] each. 0 bytes: nothing is called.
calls: Scalar, for AwaitReplies. They are cancelled when it is gone.
devices: Full name of the device that a request is for, one for each.
functions: From uint8[bytes] to uint8[bytes], one for each device.
)doc");

REGISTER_OP("Het>AwaitReplies")
    .Input("calls: variant")
    .Output("replies: n * uint8")
    .Attr("n: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Waits until all calls have ended; fails if one of them did.

calls: Scalar, from CallServers.
replies: [bytes] each; 0 bytes where nothing was called.
)doc");

}  // namespace
}  // namespace het_tf
