#include <vector>

#include "ops/shape_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Het>ServedHandle")
    .Output("served: resource")
    .Attr("dims: list(int) >= 0")
    .Attr("initializers: list(string) >= 0")
    .Attr("seeds: list(int) >= 0")
    .Attr("poll_seconds: float = 0.0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
The tables of a model that is served, one model for each kernel of this op; ServedOpen opens it.

served: Scalar.
dims: Columns of each table's rows.
initializers: Of each table, as for TableHandle: what a key without a row reads as.
seeds: Of each table's initial values.
poll_seconds: How often the folder is looked at for newer versions; 0: never.
)doc");

REGISTER_OP("Het>ServedOpen")
    .Input("served: resource")
    .Input("asset: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return CheckRanks(c, {0, 0}); })
    .Doc(R"doc(
Opens the newest version there is, and follows the folder from then on. Again it has no effect.

served: A model.
asset: Scalar, path of a file in the assets of a SavedModel; the versions are in
  assets.extra/het_tf of it.
)doc");

REGISTER_OP("Het>ServedPin")
    .Input("served: resource")
    .Output("view: variant")
    .Output("version: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The current version of a model. What is read through one view is all of one version.

served: A model.
view: Scalar, for ServedLookup and ServedVariables.
version: Scalar.
)doc");

REGISTER_OP("Het>ServedLookup")
    .Input("view: variant")
    .Input("ids: int64")
    .Output("rows: float")
    .Attr("table: int >= 0")
    .Attr("dim: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      c->set_output(0, c->Matrix(c->NumElements(c->input(1)), dim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads rows of a version. A key that has none reads as its initial value.

view: Scalar, of ServedPin.
ids: Any shape.
rows: [ids, dim].
table: Which of the model's tables.
dim: Columns of its rows.
)doc");

REGISTER_OP("Het>ServedVariables")
    .Input("view: variant")
    .Output("variables: dtypes")
    .Attr("dtypes: list(type) >= 0")
    .Attr("shapes: list(shape) >= 0")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<tensorflow::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
      if (static_cast<int>(shapes.size()) != c->num_outputs()) {
        return absl::InvalidArgumentError("dtypes and shapes differ in length");
      }
      for (int i = 0; i < c->num_outputs(); ++i) {
        ShapeHandle shape;
        TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[i], &shape));
        c->set_output(i, shape);
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
What a version has beside its rows: variables, all of them.

view: Scalar, of ServedPin.
variables: Their values.
dtypes: Of the variables.
shapes: Of the variables.
)doc");

REGISTER_OP("Het>ServedStatus")
    .Input("served: resource")
    .Output("version: int64")
    .Output("written: double")
    .Output("age_seconds: double")
    .Output("changed_rows: int64")
    .Output("trouble: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
How fresh a model is.

served: A model.
version: Scalar, which it serves.
written: Scalar, when that was published, in seconds since 1970.
age_seconds: Scalar, by this machine's clock.
changed_rows: Scalar, in memory, since the last whole version.
trouble: Scalar, why the next version could not be opened; empty: there is none, or it was.
)doc");

}  // namespace
}  // namespace het_tf
