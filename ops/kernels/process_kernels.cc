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
uint64_t IdOf(const DenseResource& resource) { return resource.shard.incarnation(); }
uint64_t IdOf(const CacheResource& resource) { return resource.cache->id(); }
uint64_t IdOf(const ReplicaResource& resource) { return resource.replica->id(); }

// What the ops call the number.
template <typename Resource>
constexpr const char* NumberOf() {
  constexpr bool kIsHolder =
      std::is_same_v<Resource, CacheResource> || std::is_same_v<Resource, ReplicaResource>;
  return kIsHolder ? "id" : "incarnation";
}

// The shards of tables, or of dense variables.
template <typename Resource>
class ProcessShardsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const auto shards = ProcessRegistry<Resource>::Get().All();
    Tensor* incarnations;
    OP_REQUIRES_OK(
        context, context->allocate_output(0, {static_cast<int64_t>(shards.size())}, &incarnations));
    int64_t* out = incarnations->flat<int64_t>().data();
    for (const auto& shard : shards) *out++ = static_cast<int64_t>(IdOf(*shard));
  }
};

absl::Status HoldsBack(const CacheResource& resource, bool* holds_back) {
  RowCache::Stats stats;
  TF_RETURN_IF_ERROR(ToTf(resource.cache->GetStats(&stats)));
  *holds_back = stats[static_cast<size_t>(CacheCounter::kPending)] > 0;
  return absl::OkStatus();
}
absl::Status HoldsBack(const ReplicaResource& resource, bool* holds_back) {
  *holds_back = resource.replica->holds_back();
  return absl::OkStatus();
}

std::vector<uint64_t> ShardsOf(const CacheResource& resource) {
  return resource.cache->incarnations();
}
std::vector<uint64_t> ShardsOf(const ReplicaResource& resource) {
  return resource.replica->incarnations();
}

// The caches or the replicas, and their shards.
template <typename Resource>
class ProcessHoldersOp : public OpKernel {
 public:
  explicit ProcessHoldersOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("all", &all_));
  }

  void Compute(OpKernelContext* context) override {
    std::vector<std::pair<uint64_t, uint64_t>> rows;
    for (const auto& resource : ProcessRegistry<Resource>::Get().All()) {
      bool listed = true;
      if (!all_) OP_REQUIRES_OK(context, HoldsBack(*resource, &listed));
      if (!listed) continue;
      for (const uint64_t incarnation : ShardsOf(*resource)) {
        rows.emplace_back(IdOf(*resource), incarnation);
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
  bool all_;
};

class ProcessEndsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext*) override {
    process_ends = true;
    for (const auto& resource : ProcessRegistry<CacheResource>::Get().All()) {
      resource->cache->Freeze();
    }
  }
};

// Caches and replicas of other processes that have ended properly.
class EndedHolders {
 public:
  static EndedHolders& Get() {
    static auto* const ended = new EndedHolders;  // kernels may run while statics die
    return *ended;
  }

  void Add(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    ids_.insert(id);
  }
  std::vector<int64_t> All() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return {ids_.begin(), ids_.end()};
  }

 private:
  mutable std::mutex mutex_;
  std::set<int64_t> ids_;
};

class ProcessNoteEndedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& ids = context->input(0);
    OP_REQUIRES(context, ids.dims() == 1,
                absl::InvalidArgumentError(
                    StrCat("ids must be a vector, not of shape ", ids.shape().DebugString())));
    for (int64_t i = 0; i < ids.NumElements(); ++i) {
      EndedHolders::Get().Add(ids.flat<int64_t>()(i));
    }
  }
};

class ProcessEndedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const std::vector<int64_t> ended = EndedHolders::Get().All();
    Tensor* ids;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, {static_cast<int64_t>(ended.size())}, &ids));
    std::copy(ended.begin(), ended.end(), ids->flat<int64_t>().data());
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

#define REGISTER_PROCESS_KERNEL(name, ...) \
  REGISTER_KERNEL_BUILDER(Name("Het>Process" name).Device(tensorflow::DEVICE_CPU), __VA_ARGS__)
REGISTER_PROCESS_KERNEL("Tables", ProcessShardsOp<TableResource>);
REGISTER_PROCESS_KERNEL("DenseShards", ProcessShardsOp<DenseResource>);
REGISTER_PROCESS_KERNEL("Caches", ProcessHoldersOp<CacheResource>);
REGISTER_PROCESS_KERNEL("Replicas", ProcessHoldersOp<ReplicaResource>);
REGISTER_PROCESS_KERNEL("Table", ProcessResourceOp<TableResource>);
REGISTER_PROCESS_KERNEL("DenseShard", ProcessResourceOp<DenseResource>);
REGISTER_PROCESS_KERNEL("Cache", ProcessResourceOp<CacheResource>);
REGISTER_PROCESS_KERNEL("Replica", ProcessResourceOp<ReplicaResource>);
REGISTER_PROCESS_KERNEL("Ends", ProcessEndsOp);
REGISTER_PROCESS_KERNEL("NoteEnded", ProcessNoteEndedOp);
REGISTER_PROCESS_KERNEL("Ended", ProcessEndedOp);
#undef REGISTER_PROCESS_KERNEL

}  // namespace
}  // namespace het_tf
