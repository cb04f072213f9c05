// A model that is served, and the folder that it follows.

#ifndef HET_TF_OPS_KERNELS_SERVED_RESOURCE_H_
#define HET_TF_OPS_KERNELS_SERVED_RESOURCE_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/core/serving/manifest.h"
#include "ops/core/serving/served.h"
#include "ops/kernels/kernel_util.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/tensor.h"

namespace het_tf {

class ServedResource : public tensorflow::ResourceBase {
 public:
  ServedResource(std::vector<ServedTable> tables, double poll_seconds)
      : num_tables_(tables.size()), poll_seconds_(poll_seconds), served_(std::move(tables)) {}
  ~ServedResource() override;

  std::string DebugString() const override { return StrCat("Het>Served ", folder_); }

  // Opens the newest version in a folder, and follows it. Again it has no effect.
  absl::Status Open(const std::string& folder);

  Served& served() { return served_; }
  size_t num_tables() const { return num_tables_; }
  // Why the next version could not be opened.
  std::string trouble() const;

 private:
  // Opens what there is of newer versions, for about so long. *more: there are others.
  absl::Status Advance(double seconds, bool* more);
  absl::Status OpenVersion(const ManifestName& name);
  void Follow();

  const size_t num_tables_;
  const double poll_seconds_;
  Served served_;

  std::mutex opening_;
  std::string folder_;    // guarded by opening_; does not change once it is there
  ManifestName current_;  // what is open; of Open, then of the thread

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;    // guarded by mutex_
  std::string trouble_;  // guarded by mutex_
  std::thread thread_;
};

// What else belongs to a version: its variables.
using ServedVariables = std::vector<tensorflow::Tensor>;

// A version for the ops of one request.
struct ServedView {
  static constexpr const char* kVariantName = "Het>ServedView";

  tensorflow::core::RefCountPtr<ServedResource> resource;  // outlives the view
  Served::View view;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_SERVED_RESOURCE_H_
