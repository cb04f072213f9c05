// TensorFlow's resource variables, as kernels of ours write them.

#ifndef HET_TF_OPS_KERNELS_VARIABLES_H_
#define HET_TF_OPS_KERNELS_VARIABLES_H_

#include <algorithm>
#include <cstring>
#include <vector>

#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace het_tf {

// Locks different variables in the order in which TensorFlow's ops lock several.
inline std::vector<tensorflow::mutex_lock> LockInOrder(std::vector<tensorflow::Var*> vars) {
  std::sort(vars.begin(), vars.end(),
            [](tensorflow::Var* a, tensorflow::Var* b) { return a->mu() < b->mu(); });
  std::vector<tensorflow::mutex_lock> locks;
  for (tensorflow::Var* var : vars) locks.emplace_back(*var->mu());
  return locks;
}

// The memory of a locked variable, to be written. Whoever read the variable before keeps what it
// read.
inline char* WritableData(tensorflow::Tensor* tensor) {
  if (!tensor->RefCountIsOne()) {
    tensorflow::Tensor copy(tensor->dtype(), tensor->shape());
    const auto bytes = tensor->tensor_data();
    std::memcpy(const_cast<char*>(copy.tensor_data().data()), bytes.data(), bytes.size());
    *tensor = copy;
  }
  return const_cast<char*>(tensor->tensor_data().data());
}

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_VARIABLES_H_
