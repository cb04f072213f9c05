#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/core/cache/cache.h"
#include "ops/core/cache/memory_share.h"
#include "ops/core/memory/free_memory.h"
#include "ops/kernels/device_caches.h"
#include "ops/kernels/device_ids.h"
#include "ops/kernels/kernel_util.h"
#include "ops/kernels/process_registry.h"
#include "ops/kernels/programs.h"
#include "ops/kernels/resource_kernels.h"
#include "ops/kernels/resources.h"
#include "ops/kernels/stays_on_host.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace het_tf {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

std::string NameOf(Policy policy) { return policy == Policy::kLru ? "lru" : "lfu"; }
std::string NameOf(Nonfinite nonfinite) { return nonfinite == Nonfinite::kSkip ? "skip" : "error"; }

// What the caches without a capacity may use in this process, told when the first of them is made.
MemoryShare* MemoryOfCaches(int64_t workers_on_host) {
  // The rest is for input pipelines, tensors and other processes.
  constexpr int64_t kPartOfFree = 4;
  constexpr int64_t kUnknown = int64_t{1} << 30;
  static MemoryShare* const memory = [&] {
    const int64_t free = FreeMemory();
    const int64_t bytes = (free < 0 ? kUnknown : free / kPartOfFree) / workers_on_host;
    return new MemoryShare(bytes);
  }();
  return memory;
}

class CacheHandleOp : public tensorflow::ResourceOpKernel<CacheResource> {
 public:
  explicit CacheHandleOp(OpKernelConstruction* context)
      : ResourceOpKernel(context), device_(context->device()) {
    OP_REQUIRES_OK(context, GetRowConfig(context, &config_.rows));
    std::string policy, dtype;
    bool skip;
    OP_REQUIRES_OK(context, context->GetAttr("capacity", &config_.capacity));
    OP_REQUIRES_OK(context, context->GetAttr("workers_on_host", &workers_on_host_));
    OP_REQUIRES_OK(context, context->GetAttr("device_capacity", &device_capacity_));
    OP_REQUIRES_OK(context, context->GetAttr("read_bound", &config_.read_bound));
    OP_REQUIRES_OK(context, context->GetAttr("write_bound", &config_.write_bound));
    OP_REQUIRES_OK(context, context->GetAttr("due_bound", &config_.due_bound));
    OP_REQUIRES_OK(context, context->GetAttr("synchronous", &config_.synchronous));
    OP_REQUIRES_OK(context, context->GetAttr("policy", &policy));
    OP_REQUIRES_OK(context, GetNonfinite(context, &skip));
    OP_REQUIRES_OK(context, context->GetAttr("wire_dtype", &dtype));
    config_.half = dtype == kBfloat16;
    config_.policy = policy == "lru" ? Policy::kLru : Policy::kLfu;
    config_.nonfinite = skip ? Nonfinite::kSkip : Nonfinite::kError;
  }

  bool IsExpensive() override { return kWaitsForDevice; }

 private:
  absl::Status CreateResource(CacheResource** resource) override {
    TF_RETURN_IF_ERROR(CheckNotReplaced(cinfo_.container()));
    std::shared_ptr<RowCache> cache;
    TF_RETURN_IF_ERROR(NewCache(&cache));
    *resource = new CacheResource(config_, device_capacity_, std::move(cache));
    ProcessRegistry<CacheResource>::Get().Add(*resource);
    if (process_ends) (*resource)->cache->Freeze();
    return absl::OkStatus();
  }

  absl::Status VerifyResource(CacheResource* resource) override {
    const CacheConfig& existing = resource->config;
    return AttributeCheck("cache", cinfo_.name())
        .SameRows(existing.rows, config_.rows)
        .Same("capacity", existing.capacity, config_.capacity)
        .Same("device_capacity", resource->device_capacity, device_capacity_)
        .Same("policy", NameOf(existing.policy), NameOf(config_.policy))
        .Same("read_bound", existing.read_bound, config_.read_bound)
        .Same("write_bound", existing.write_bound, config_.write_bound)
        .Same("due_bound", existing.due_bound, config_.due_bound)
        .Same("synchronous", existing.synchronous, config_.synchronous)
        .Same("nonfinite", NameOf(existing.nonfinite), NameOf(config_.nonfinite))
        .Same("wire_dtype", NameOfDtype(existing.half), NameOfDtype(config_.half))
        .status();
  }

  absl::Status NewCache(std::shared_ptr<RowCache>* cache) const {
    if (device_capacity_ != 0) return NewDeviceCache(config_, device_capacity_, device_, cache);
    if (device_->tensorflow_accelerator_device_info() != nullptr) {
      return absl::InvalidArgumentError(
          StrCat("device_capacity = 0 on ", device_->name(), ": rows on the host are for its CPU"));
    }
    std::shared_ptr<Cache> made;
    CacheConfig config = config_;
    if (config.capacity == kSharedMemory) config.memory = MemoryOfCaches(workers_on_host_);
    TF_RETURN_IF_ERROR(ToTf(Cache::Create(config, &made)));
    if (config.memory != nullptr) {
      LOG(INFO) << cinfo_.name() << " may grow to " << made->capacity() << " rows, in "
                << (config.memory->bytes() >> 20)
                << " MB that all caches of this process share: a quarter of the free memory"
                << " divided by the workers on this host, " << workers_on_host_;
    }
    *cache = std::move(made);
    return absl::OkStatus();
  }

  tensorflow::DeviceBase* const device_;
  CacheConfig config_;
  int64_t device_capacity_ = 0;
  int64_t workers_on_host_ = 1;
};

// A kernel that puts out one request for each shard.
class RequestKernel : public CacheKernel {
 public:
  explicit RequestKernel(OpKernelConstruction* context) : CacheKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_shards", &num_shards_));
  }

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    if (num_shards_ != cache->num_shards()) {
      return absl::InvalidArgumentError(StrCat("num_shards = ", num_shards_, ", but the cache has ",
                                               cache->num_shards(), " shards"));
    }
    const int first = context->num_outputs() - num_shards_;
    absl::Status allocated;
    std::shared_ptr<RowTicket> ticket;
    TF_RETURN_IF_ERROR(Request(
        context, cache,
        [&](int shard, size_t bytes) -> std::shared_ptr<char> {
          // The cache keeps the tensor for as long as its pushes may have to be sent again.
          auto request = std::make_shared<Tensor>();
          tensorflow::AllocatorAttributes on_host;
          on_host.set_on_host(true);
          absl::Status status = context->allocate_temp(
              tensorflow::DT_UINT8, {static_cast<int64_t>(bytes)}, request.get(), on_host);
          if (status.ok()) {
            context->set_output(first + shard, *request);
            auto* data = reinterpret_cast<char*>(request->flat<uint8_t>().data());
            return std::shared_ptr<char>(std::move(request), data);
          }
          allocated.Update(status);
          return std::shared_ptr<char>(new char[bytes], std::default_delete<char[]>());
        },
        &ticket));
    TF_RETURN_IF_ERROR(allocated);
    return first == 0 ? absl::OkStatus() : SetVariant(context, 0, std::move(ticket));
  }

 protected:
  virtual absl::Status Request(OpKernelContext* context, RowCache* cache,
                               const AllocateRequest& allocate,
                               std::shared_ptr<RowTicket>* ticket) = 0;

 private:
  int num_shards_;
};

class CacheLookupOp : public RequestKernel {
 public:
  explicit CacheLookupOp(OpKernelConstruction* context) : RequestKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("fresh", &fresh_));
  }

  absl::Status Request(OpKernelContext* context, RowCache* cache, const AllocateRequest& allocate,
                       std::shared_ptr<RowTicket>* ticket) override {
    LookupIds ids;
    std::shared_ptr<DeviceIds> as_they_are;
    const absl::Status status = GetVariant(context, "unique_ids", &as_they_are);
    if (status.ok()) {  // on the host, too, where one step runs on workers with a GPU and on others
      ids.ids = as_they_are->data();
      ids.num_ids = as_they_are->num_ids();
    } else if (cache->on_device()) {
      return status;
    } else {
      std::shared_ptr<UniqueIds> unique_ids;
      TF_RETURN_IF_ERROR(GetVariant(context, "unique_ids", &unique_ids));
      ids.unique = std::move(unique_ids);
    }
    return ToTf(cache->Lookup(ids, fresh_, PoolOf(context), allocate, ticket));
  }

 private:
  bool fresh_;
};

class CacheFlushOp : public RequestKernel {
 public:
  explicit CacheFlushOp(OpKernelConstruction* context) : RequestKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("all", &all_));
  }

  absl::Status Request(OpKernelContext*, RowCache* cache, const AllocateRequest& allocate,
                       std::shared_ptr<RowTicket>* ticket) override {
    return ToTf(cache->Flush(all_, allocate, ticket));
  }

 private:
  bool all_;
};

class CacheBeginClosureOp : public CacheKernel {
 public:
  using CacheKernel::CacheKernel;

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    int64_t number = 0;
    TF_RETURN_IF_ERROR(GetScalar(context, "number", &number));
    std::shared_ptr<Closure> closure;
    // What TensorFlow has given up may take a moment to end.
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (true) {
      const Status status = cache->BeginClosure(number, &closure);
      if (status.ok()) break;
      if (status.code() != Code::kCancelled || std::chrono::steady_clock::now() > until) {
        return ToTf(status);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return SetVariant(context, 0, std::move(closure));
  }

 private:
  static constexpr std::chrono::seconds kPatience{5};
};

class CacheCommitClosureOp : public RequestKernel {
 public:
  using RequestKernel::RequestKernel;

  absl::Status Request(OpKernelContext* context, RowCache* cache, const AllocateRequest& allocate,
                       std::shared_ptr<RowTicket>* ticket) override {
    std::shared_ptr<Closure> closure;
    int64_t done = 0;
    TF_RETURN_IF_ERROR(GetVariant(context, "closure", &closure));
    TF_RETURN_IF_ERROR(GetScalar(context, "done", &done));
    return ToTf(cache->CommitClosure(*closure, done, allocate, ticket));
  }
};

class CacheEndClosureOp : public CacheKernel {
 public:
  using CacheKernel::CacheKernel;

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    std::shared_ptr<Closure> closure;
    TF_RETURN_IF_ERROR(GetVariant(context, "closure", &closure));
    return ToTf(cache->EndClosure(*closure));
  }
};

class CacheInstallOp : public CacheKernel {
 public:
  using CacheKernel::CacheKernel;

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    std::shared_ptr<RowTicket> ticket;
    TF_RETURN_IF_ERROR(GetTicket(context, cache, &ticket));
    tensorflow::OpInputList replies;
    TF_RETURN_IF_ERROR(context->input_list("replies", &replies));
    std::vector<AlignedBytes> aligned;
    aligned.reserve(replies.size());
    std::vector<ReplyBytes> bytes;
    for (int s = 0; s < replies.size(); ++s) {
      aligned.emplace_back(replies[s]);
      bytes.push_back({aligned[s].data(), aligned[s].size()});
    }
    Tensor* rows;
    Tensor* incomplete;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &rows));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {}, &incomplete));
    TF_RETURN_IF_ERROR(
        ToTf(cache->Install(ticket.get(), bytes, PoolOf(context), &rows->scalar<int64_t>()())));
    incomplete->scalar<bool>()() = ticket->incomplete();
    return absl::OkStatus();
  }
};

class CacheAskAgainOp : public RequestKernel {
 public:
  using RequestKernel::RequestKernel;

  absl::Status Request(OpKernelContext* context, RowCache* cache, const AllocateRequest& allocate,
                       std::shared_ptr<RowTicket>*) override {
    std::shared_ptr<RowTicket> ticket;
    TF_RETURN_IF_ERROR(GetTicket(context, cache, &ticket));
    return ToTf(cache->AskAgain(ticket.get(), allocate));
  }
};

class CacheMakeRoomOp : public RequestKernel {
 public:
  using RequestKernel::RequestKernel;

  absl::Status Request(OpKernelContext* context, RowCache* cache, const AllocateRequest& allocate,
                       std::shared_ptr<RowTicket>* made) override {
    std::shared_ptr<RowTicket> ticket;
    TF_RETURN_IF_ERROR(GetTicket(context, cache, &ticket));
    Tensor* lacks_room;
    TF_RETURN_IF_ERROR(context->allocate_output(1, {}, &lacks_room));
    bool& any = lacks_room->scalar<bool>()();
    any = false;
    return ToTf(cache->MakeRoom(
        *ticket,
        [&](int shard, size_t bytes) {
          any |= bytes > 0;
          return allocate(shard, bytes);
        },
        made));
  }
};

class CacheGatherOp : public CacheKernel {
 public:
  using CacheKernel::CacheKernel;

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    std::shared_ptr<RowTicket> ticket;
    TF_RETURN_IF_ERROR(GetTicket(context, cache, &ticket));
    Tensor* rows;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {ticket->num_ids(), cache->dim()}, &rows));
    return ToTf(cache->Gather(*ticket, PoolOf(context), rows->flat<float>().data()));
  }
};

class CacheUpdateOp : public CacheKernel {
 public:
  using CacheKernel::CacheKernel;

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    std::shared_ptr<RowTicket> ticket;
    TF_RETURN_IF_ERROR(GetTicket(context, cache, &ticket));
    const Tensor* gradients;
    TF_RETURN_IF_ERROR(
        GetMatrix(context, "gradients", ticket->num_ids(), cache->dim(), &gradients));
    float learning_rate = 0;
    TF_RETURN_IF_ERROR(GetScalar(context, "learning_rate", &learning_rate));
    return OfUpdate(context, cache->Update(ticket.get(), gradients->flat<float>().data(),
                                           learning_rate, PoolOf(context)));
  }
};

class CachePushOp : public CacheKernel {
 public:
  using CacheKernel::CacheKernel;

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    const Tensor& keys = context->input(1);
    return ToTf(cache->PushRows(keys.flat<int64_t>().data(), keys.NumElements()));
  }
};

class CacheKeepOp : public CacheKernel {
 public:
  using CacheKernel::CacheKernel;

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    bool keeps = false;
    TF_RETURN_IF_ERROR(GetScalar(context, "keeps", &keeps));
    return ToTf(cache->KeepUpdates(keeps));
  }
};

class CacheClearOp : public CacheKernel {
 public:
  using CacheKernel::CacheKernel;

  absl::Status Compute(OpKernelContext*, RowCache* cache) override { return ToTf(cache->Clear()); }
};

class CacheStatsOp : public CacheKernel {
 public:
  using CacheKernel::CacheKernel;

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    RowCache::Stats stats;
    TF_RETURN_IF_ERROR(ToTf(cache->GetStats(&stats)));
    return OutputCounters(context, kCacheCounterNames, stats);
  }
};

class CacheReportOp : public CacheKernel {
 public:
  using CacheKernel::CacheKernel;

  absl::Status Compute(OpKernelContext* context, RowCache* cache) override {
    RowCache::Stats stats;
    TF_RETURN_IF_ERROR(ToTf(cache->GetStats(&stats)));
    return OutputReport(context, cache->id(), stats);
  }
};

class CacheCounterNamesOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, OutputNames(context, kCacheCounterNames));
  }
};

#define REGISTER_CACHE_KERNEL(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name("Het>" name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER_CACHE_KERNEL("CacheHandle", CacheHandleOp);
REGISTER_CACHE_KERNEL("CacheLookup", CacheLookupOp);
REGISTER_CACHE_KERNEL("CacheGather", CacheGatherOp);
REGISTER_CACHE_KERNEL("CacheInstall", CacheInstallOp);
REGISTER_CACHE_KERNEL("CacheAskAgain", CacheAskAgainOp);
REGISTER_CACHE_KERNEL("CacheUpdate", CacheUpdateOp);
REGISTER_CACHE_KERNEL("CacheMakeRoom", CacheMakeRoomOp);
REGISTER_CACHE_KERNEL("CacheFlush", CacheFlushOp);
REGISTER_CACHE_KERNEL("CacheBeginClosure", CacheBeginClosureOp);
REGISTER_CACHE_KERNEL("CacheCommitClosure", CacheCommitClosureOp);
REGISTER_CACHE_KERNEL("CacheEndClosure", CacheEndClosureOp);
REGISTER_CACHE_KERNEL("CachePush", CachePushOp);
REGISTER_CACHE_KERNEL("CacheKeep", CacheKeepOp);
REGISTER_CACHE_KERNEL("CacheClear", CacheClearOp);
REGISTER_CACHE_KERNEL("CacheStats", CacheStatsOp);
REGISTER_CACHE_KERNEL("CacheReport", CacheReportOp);
REGISTER_CACHE_KERNEL("CacheCounterNames", CacheCounterNamesOp);
#undef REGISTER_CACHE_KERNEL

// On a GPU rows and gradients are in its memory, and all else is in the host's.
#ifdef HET_TF_CUDA
#define GPU_KERNEL(name) Name("Het>" name).Device(tensorflow::DEVICE_GPU).HostMemory("cache")
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheHandle"), CacheHandleOp);
REGISTER_KERNEL_BUILDER(
    GPU_KERNEL("CacheLookup").HostMemory("unique_ids").HostMemory("ticket").HostMemory("requests"),
    CacheLookupOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheGather").HostMemory("ticket"), CacheGatherOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheInstall")
                            .HostMemory("ticket")
                            .HostMemory("replies")
                            .HostMemory("rows")
                            .HostMemory("incomplete"),
                        CacheInstallOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheAskAgain").HostMemory("ticket").HostMemory("requests"),
                        CacheAskAgainOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheUpdate").HostMemory("ticket").HostMemory("learning_rate"),
                        CacheUpdateOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheMakeRoom")
                            .HostMemory("ticket")
                            .HostMemory("made")
                            .HostMemory("lacks_room")
                            .HostMemory("requests"),
                        CacheMakeRoomOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheFlush").HostMemory("ticket").HostMemory("requests"),
                        CacheFlushOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheBeginClosure").HostMemory("number").HostMemory("closure"),
                        CacheBeginClosureOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheCommitClosure")
                            .HostMemory("closure")
                            .HostMemory("done")
                            .HostMemory("ticket")
                            .HostMemory("requests"),
                        CacheCommitClosureOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheEndClosure").HostMemory("closure"), CacheEndClosureOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheClear"), CacheClearOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheStats").HostMemory("names").HostMemory("values"),
                        CacheStatsOp);
REGISTER_KERNEL_BUILDER(GPU_KERNEL("CacheReport").HostMemory("report"), CacheReportOp);
#undef GPU_KERNEL
#endif

// Where TensorFlow runs a step on a GPU it may take its tickets and ids there, too, as when they
// leave a branch.
const StaysOnHost<RowTicket> tickets_stay_on_host;
const StaysOnHost<DeviceIds> ids_stay_on_host;
const StaysOnHost<Closure> closures_stay_on_host;

}  // namespace
}  // namespace het_tf
