// Kernels on caches and tables: what those of several files share.

#ifndef HET_TF_OPS_KERNELS_RESOURCE_KERNELS_H_
#define HET_TF_OPS_KERNELS_RESOURCE_KERNELS_H_

#include <memory>
#include <utility>

#include "ops/core/cache/cache.h"
#include "ops/core/table/table.h"
#include "ops/kernels/kernel_util.h"
#include "ops/kernels/resources.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace het_tf {

// TensorFlow takes kernels of a GPU for launches, and runs them one after the other in the thread
// that also launches those of the dense network. A cache's wait for the device, for the cache's
// lock, and write messages: they are to have threads of their own, as kernels of a CPU have.
inline constexpr bool kWaitsForDevice = true;

// A kernel whose first input is a cache.
class CacheKernel : public tensorflow::OpKernel {
 public:
  using tensorflow::OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<CacheResource> resource;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &resource));
    OP_REQUIRES_OK(context,
                   OrOutOfMemory(*this, [&] { return Compute(context, resource->cache.get()); }));
  }

  bool IsExpensive() override { return kWaitsForDevice; }

 protected:
  virtual absl::Status Compute(tensorflow::OpKernelContext* context, RowCache* cache) = 0;

  absl::Status GetTicket(tensorflow::OpKernelContext* context, const RowCache* cache,
                         std::shared_ptr<RowTicket>* ticket) const {
    TF_RETURN_IF_ERROR(GetVariant(context, "ticket", ticket));
    if ((*ticket)->owner() == cache) return absl::OkStatus();
    return absl::InvalidArgumentError("ticket was given out by another cache");
  }
};

// A kernel whose first input is a table.
class TableKernel : public tensorflow::OpKernel {
 public:
  using tensorflow::OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<TableResource> resource;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &resource));
    OP_REQUIRES_OK(context,
                   OrOutOfMemory(*this, [&] { return Compute(context, resource->table.get()); }));
  }

 protected:
  virtual absl::Status Compute(tensorflow::OpKernelContext* context, Table* table) = 0;
};

// Lookups and updates without a cache take any key.
inline absl::Status CheckWhole(const Table& table) {
  if (table.num_shards() == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat("table must have one shard, not ", table.num_shards(),
                                           ": ask the shards of this one through a cache"));
}

// What a lookup hands to the update of the same ids.
struct Found {
  static constexpr const char* kVariantName = "Het>Found";

  UniqueIds ids;
  FoundRows rows;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_KERNELS_RESOURCE_KERNELS_H_
