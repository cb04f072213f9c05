// Serves what train.py publishes, without Python: loads it and asks it as TensorFlow Serving does.
//
//   TF=$(python -c 'import tensorflow as tf; print(tf.sysconfig.get_lib())')
//   g++ -std=c++17 -O2 -isystem $TF/include serve.cc -o serve -L$TF -Wl,-rpath,$TF \
//     -l:libtensorflow_cc.so.2 -l:libtensorflow_framework.so.2
//   OPS=$(python -c 'import het_tf; print(het_tf.ops.LIBRARY)')
//   echo 1 50 | ./serve $OPS /tmp/het_tf_live
//
// Each line of its input has the ids of one example. It prints the version that is served by then,
// and what is predicted.

#include <cstdint>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/c/c_api.h"
#include "tensorflow/cc/saved_model/loader.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/public/session.h"

namespace {

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << status << "\n";
  std::exit(1);
}

void LoadOps(const char* library) {
  TF_Status* status = TF_NewStatus();
  TF_LoadLibrary(library, status);
  if (TF_GetCode(status) != TF_OK) {
    std::cerr << TF_Message(status) << "\n";
    std::exit(1);
  }
  TF_DeleteStatus(status);
}

// What a signature with at most one input answers, by the names of its outputs.
class Signature {
 public:
  Signature(const tensorflow::SavedModelBundleLite& model, const std::string& name)
      : session_(model.GetSession()), signature_(model.GetSignatures().at(name)) {}

  tensorflow::Tensor Ask(const std::string& output,
                         const std::vector<tensorflow::Tensor>& input) const {
    std::vector<std::pair<std::string, tensorflow::Tensor>> fed;
    if (!input.empty()) fed = {{signature_.inputs().begin()->second.name(), input[0]}};
    std::vector<tensorflow::Tensor> fetched;
    Check(session_->Run(fed, {signature_.outputs().at(output).name()}, {}, &fetched));
    return fetched[0];
  }

  std::string FirstOutput() const { return signature_.outputs().begin()->first; }

 private:
  tensorflow::Session* session_;
  tensorflow::SignatureDef signature_;
};

tensorflow::Tensor OneExample(const std::vector<int64_t>& ids) {
  const auto columns = static_cast<int64_t>(ids.size());
  tensorflow::Tensor batch(tensorflow::DT_INT64, {1, columns});
  for (int64_t i = 0; i < columns; ++i) batch.matrix<int64_t>()(0, i) = ids[i];
  return batch;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: serve LIBRARY FOLDER < ids\n";
    return 2;
  }
  LoadOps(argv[1]);
  tensorflow::SavedModelBundleLite model;
  Check(tensorflow::LoadSavedModel({}, {}, argv[2], {"serve"}, &model));
  const Signature predict(model, "serving_default");
  const Signature freshness(model, "freshness");

  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::vector<int64_t> ids;
    for (int64_t id; words >> id;) ids.push_back(id);
    const tensorflow::Tensor version = freshness.Ask("version", {});
    const tensorflow::Tensor answer = predict.Ask(predict.FirstOutput(), {OneExample(ids)});
    std::cout << version.scalar<int64_t>()() << std::setprecision(9);
    for (int64_t i = 0; i < answer.NumElements(); ++i) std::cout << " " << answer.flat<float>()(i);
    std::cout << std::endl;
  }
}
