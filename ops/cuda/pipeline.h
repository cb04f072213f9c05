// Work that goes through stages, each on a thread of its own: while one item is in a stage, the
// next is in the stage before it, so that an item takes as long as the slowest stage.

#ifndef HET_TF_OPS_CUDA_PIPELINE_H_
#define HET_TF_OPS_CUDA_PIPELINE_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "ops/core/status.h"

namespace het_tf {
namespace cuda {

class Pipeline {
 public:
  // Works on one item; items come in order.
  using Stage = std::function<Status(int64_t item)>;

  // window: items that may be under way at a time, at least one for each stage to keep all busy.
  Pipeline(std::vector<Stage> stages, int64_t window)
      : stages_(std::move(stages)), window_(window), done_(stages_.size()) {}

  // Takes items 0 to n - 1 through all stages. Returns the first error, after which nothing more is
  // begun.
  Status Run(int64_t n) {
    done_.assign(stages_.size(), 0);
    first_error_ = Status();
    std::vector<std::thread> threads;
    for (size_t s = 0; s < stages_.size(); ++s) {
      threads.emplace_back([this, s, n] { Work(s, n); });
    }
    for (std::thread& thread : threads) thread.join();
    return first_error_;
  }

 private:
  void Work(size_t s, int64_t n) {
    for (int64_t item = 0; item < n; ++item) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !first_error_.ok() || MayBegin(s, item); });
        if (!first_error_.ok()) return;
      }
      const Status status = stages_[s](item);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!status.ok() && first_error_.ok()) first_error_ = status;
        ++done_[s];
      }
      changed_.notify_all();
    }
  }

  bool MayBegin(size_t s, int64_t item) const {
    return s > 0 ? done_[s - 1] > item : done_.back() > item - window_;
  }

  const std::vector<Stage> stages_;
  const int64_t window_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> done_;  // items that left each stage
  Status first_error_;
};

}  // namespace cuda
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_PIPELINE_H_
