#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Het>Trained")
    .Input("rows: n * float")
    .Input("by: T")
    .Output("trained: n * float")
    .Attr("n: int >= 1")
    .Attr("T: list({half, bfloat16, float, double}) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Puts out rows as they are. A gradient goes on to what they are trained by.

rows: Any shapes.
by: The variable that stands for the rows where gradients are asked for, and what else they depend
  on; any shapes.
trained: rows.
)doc");

}  // namespace
}  // namespace het_tf
