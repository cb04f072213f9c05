#include <algorithm>
#include <mutex>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/kernels/kernel_util.h"
#include "ops/kernels/process_registry.h"
#include "ops/kernels/resources.h"

namespace het_tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

uint64_t IdOf(const TableResource& resource) { return resource.table->incarnation(); }
uint64_t IdOf(const CacheResource& resource) { return resource.cache->id(); }

// What the ops call the number.
template <typename Resource>
constexpr const char* NumberOf() {
  return std::is_same_v<Resource, CacheResource> ? "id" : "incarnation";
}

class ProcessTablesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const auto tables = ProcessRegistry<TableResource>::Get().All();
    Tensor* incarnations;
    OP_REQUIRES_OK(
        context, context->allocate_output(0, {static_cast<int64_t>(tables.size())}, &incarnations));
    int64_t* out = incarnations->flat<int64_t>().data();
    for (const auto& table : tables) *out++ = static_cast<int64_t>(IdOf(*table));
  }
};

class ProcessCachesOp : public OpKernel {
 public:
  explicit ProcessCachesOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("freeze", &freeze_));
    OP_REQUIRES_OK(context, context->GetAttr("all", &all_));
  }

  void Compute(OpKernelContext* context) override {
    std::vector<std::pair<uint64_t, uint64_t>> rows;
    if (freeze_) caches_frozen = true;
    const auto resources = ProcessRegistry<CacheResource>::Get().All();
    if (freeze_) {
      for (const auto& resource : resources) resource->cache->Freeze();
    }
    for (const auto& resource : resources) {
      RowCache* cache = resource->cache.get();
      RowCache::Stats stats;
      OP_REQUIRES_OK(context, ToTf(cache->GetStats(&stats)));
      if (!all_ && stats[static_cast<size_t>(CacheCounter::kPending)] == 0) continue;
      for (const uint64_t incarnation : cache->incarnations()) {
        rows.emplace_back(cache->id(), incarnation);
      }
    }
    Tensor* shards;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, {static_cast<int64_t>(rows.size()), 2}, &shards));
    int64_t* out = shards->flat<int64_t>().data();
    for (const auto& [id, incarnation] : rows) {
      *out++ = static_cast<int64_t>(id);
      *out++ = static_cast<int64_t>(incarnation);
    }
  }

 private:
  bool freeze_, all_;
};

// Caches of other processes that have ended properly.
class EndedCaches {
 public:
  static EndedCaches& Get() {
    static auto* const ended = new EndedCaches;  // kernels may run while statics die
    return *ended;
  }

  void Add(int64_t cache) {
    std::lock_guard<std::mutex> lock(mutex_);
    caches_.insert(cache);
  }
  std::vector<int64_t> All() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return {caches_.begin(), caches_.end()};
  }

 private:
  mutable std::mutex mutex_;
  std::set<int64_t> caches_;
};

class ProcessNoteEndedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& caches = context->input(0);
    OP_REQUIRES(context, caches.dims() == 1,
                absl::InvalidArgumentError(StrCat("caches must be a vector, not of shape ",
                                                  caches.shape().DebugString())));
    for (int64_t i = 0; i < caches.NumElements(); ++i) {
      EndedCaches::Get().Add(caches.flat<int64_t>()(i));
    }
  }
};

class ProcessEndedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const std::vector<int64_t> ended = EndedCaches::Get().All();
    Tensor* caches;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, {static_cast<int64_t>(ended.size())}, &caches));
    std::copy(ended.begin(), ended.end(), caches->flat<int64_t>().data());
  }
};

template <typename Resource>
class ProcessResourceOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& input = context->input(0);
    OP_REQUIRES(
        context, input.dims() == 0,
        absl::InvalidArgumentError(StrCat(NumberOf<Resource>(), " must be a scalar, not of shape ",
                                          input.shape().DebugString())));
    const int64_t id = input.scalar<int64_t>()();
    for (auto& resource : ProcessRegistry<Resource>::Get().All()) {
      if (IdOf(*resource) != static_cast<uint64_t>(id)) continue;
      Tensor* handle;
      OP_REQUIRES_OK(context, context->allocate_output(0, {}, &handle));
      handle->scalar<tensorflow::ResourceHandle>()() =
          tensorflow::ResourceHandle::MakeRefCountingHandle(resource.release(),
                                                            context->device()->name());
      return;
    }
    context->SetStatus(absl::NotFoundError(
        StrCat(type_string(), ": there is none with the number ", id, " in this process")));
  }
};

REGISTER_KERNEL_BUILDER(Name("Het>ProcessNoteEnded").Device(tensorflow::DEVICE_CPU),
                        ProcessNoteEndedOp);
REGISTER_KERNEL_BUILDER(Name("Het>ProcessEnded").Device(tensorflow::DEVICE_CPU), ProcessEndedOp);
REGISTER_KERNEL_BUILDER(Name("Het>ProcessTables").Device(tensorflow::DEVICE_CPU), ProcessTablesOp);
REGISTER_KERNEL_BUILDER(Name("Het>ProcessCaches").Device(tensorflow::DEVICE_CPU), ProcessCachesOp);
REGISTER_KERNEL_BUILDER(Name("Het>ProcessTable").Device(tensorflow::DEVICE_CPU),
                        ProcessResourceOp<TableResource>);
REGISTER_KERNEL_BUILDER(Name("Het>ProcessCache").Device(tensorflow::DEVICE_CPU),
                        ProcessResourceOp<CacheResource>);

}  // namespace
}  // namespace het_tf
