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
      if (stats[static_cast<size_t>(CacheCounter::kPending)] == 0) continue;
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
  bool freeze_;
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

REGISTER_KERNEL_BUILDER(Name("Het>ProcessTables").Device(tensorflow::DEVICE_CPU), ProcessTablesOp);
REGISTER_KERNEL_BUILDER(Name("Het>ProcessCaches").Device(tensorflow::DEVICE_CPU), ProcessCachesOp);
REGISTER_KERNEL_BUILDER(Name("Het>ProcessTable").Device(tensorflow::DEVICE_CPU),
                        ProcessResourceOp<TableResource>);
REGISTER_KERNEL_BUILDER(Name("Het>ProcessCache").Device(tensorflow::DEVICE_CPU),
                        ProcessResourceOp<CacheResource>);

}  // namespace
}  // namespace het_tf
