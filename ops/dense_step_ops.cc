#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

// The variables, a gradient of any shape, a scalar.
absl::Status CheckStep(InferenceContext* c) {
  tensorflow::shape_inference::ShapeHandle unused;
  const int rate = c->num_inputs() - 1;
  for (int i = 0; i + 1 < rate; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
  return c->WithRank(c->input(rate), 0, &unused);
}

REGISTER_OP("Het>ApplyAdagrad")
    .Input("variable: resource")
    .Input("accumulator: resource")
    .Input("gradient: float")
    .Input("learning_rate: float")
    .Attr("epsilon: float")
    .SetIsStateful()
    .SetShapeFn(CheckStep)
    .Doc(R"doc(
A step of Keras's Adagrad: accumulator += gradient^2, then
variable -= learning_rate * gradient / sqrt(accumulator + epsilon).

variable: A float32 resource variable.
accumulator: Another one, of its shape.
gradient: Of its shape.
learning_rate: Scalar.
)doc");

REGISTER_OP("Het>ApplyAdam")
    .Input("variable: resource")
    .Input("momentum: resource")
    .Input("velocity: resource")
    .Input("gradient: float")
    .Input("rate: float")
    .Attr("one_minus_beta_1: float")
    .Attr("one_minus_beta_2: float")
    .Attr("epsilon: float")
    .SetIsStateful()
    .SetShapeFn(CheckStep)
    .Doc(R"doc(
A step of Keras's Adam: momentum += (gradient - momentum) * one_minus_beta_1,
velocity += (gradient^2 - velocity) * one_minus_beta_2, then
variable -= momentum * rate / (sqrt(velocity) + epsilon).

variable: A float32 resource variable.
momentum: Another one, of its shape.
velocity: Another one, of its shape.
gradient: Of its shape.
rate: Scalar. learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t) in step t.
)doc");

}  // namespace
}  // namespace het_tf
