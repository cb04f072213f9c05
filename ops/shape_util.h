// Shape functions that several ops share.

#ifndef HET_TF_OPS_SHAPE_UTIL_H_
#define HET_TF_OPS_SHAPE_UTIL_H_

#include "tensorflow/core/framework/shape_inference.h"

namespace het_tf {

// Inputs of these ranks, one for each of the first inputs.
inline absl::Status CheckRanks(tensorflow::shape_inference::InferenceContext* c,
                               std::initializer_list<int> ranks) {
  int input = 0;
  for (const int rank : ranks) {
    tensorflow::shape_inference::ShapeHandle unused;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(input++), rank, &unused));
  }
  return absl::OkStatus();
}

// A ticket and one request for each shard.
inline absl::Status RequestShapes(tensorflow::shape_inference::InferenceContext* c) {
  c->set_output(0, c->Scalar());
  for (int i = 1; i < c->num_outputs(); ++i) {
    c->set_output(i, c->Vector(c->UnknownDim()));
  }
  return absl::OkStatus();
}

// Names and values of what a resource has counted.
inline absl::Status StatsShapes(tensorflow::shape_inference::InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
  c->set_output(0, c->Vector(c->UnknownDim()));
  c->set_output(1, c->Vector(c->UnknownDim()));
  return absl::OkStatus();
}

}  // namespace het_tf

#endif  // HET_TF_OPS_SHAPE_UTIL_H_
