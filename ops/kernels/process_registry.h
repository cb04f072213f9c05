// The tables, caches, shards or replicas of this process, wherever TensorFlow keeps them.
//
// A resource lives in the context of the client that made it, and no other client gets to it there.
// A server that is told to end must, to send on what its caches and replicas hold, so it finds them
// here.

#ifndef HET_TF_OPS_KERNELS_PROCESS_REGISTRY_H_
#define HET_TF_OPS_KERNELS_PROCESS_REGISTRY_H_

#include <algorithm>
#include <mutex>
#include <vector>

#include "tensorflow/core/platform/refcount.h"

namespace het_tf {

template <typename Resource>
class ProcessRegistry {
 public:
  using Ref = tensorflow::core::RefCountPtr<Resource>;

  static ProcessRegistry& Get() {
    static auto* const registry = new ProcessRegistry;  // kernels may run while statics die
    return *registry;
  }

  // It stays here for as long as it lives elsewhere.
  void Add(Resource* resource) {
    std::lock_guard<std::mutex> lock(mutex_);
    resources_.erase(std::remove_if(resources_.begin(), resources_.end(),
                                    [](const Weak& weak) { return weak.GetNewRef() == nullptr; }),
                     resources_.end());
    resources_.emplace_back(resource);
  }

  std::vector<Ref> All() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Ref> all;
    for (const Weak& weak : resources_) {
      if (Ref resource = weak.GetNewRef()) all.push_back(std::move(resource));
    }
    return all;
  }

 private:
  using Weak = tensorflow::core::WeakPtr<Resource>;

  mutable std::mutex mutex_;
  std::vector<Weak> resources_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_PROCESS_REGISTRY_H_
