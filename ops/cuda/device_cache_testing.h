// Device caches and table shards in one process, with the network between them in the test's hands.

#ifndef HET_TF_OPS_CUDA_DEVICE_CACHE_TESTING_H_
#define HET_TF_OPS_CUDA_DEVICE_CACHE_TESTING_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/testing.h"
#include "ops/cuda/device_cache.h"
#include "ops/cuda/testing.h"

namespace het_tf {
namespace testing {

class DeviceCluster {
 public:
  explicit DeviceCluster(const CacheConfig& config, int num_caches = 1) {
    for (int s = 0; s < config.rows.num_shards; ++s) tables_.push_back(MakeTable(config.rows, s));
    for (int w = 0; w < num_caches; ++w) {
      caches_.emplace_back();
      EXPECT_OK(cuda::DeviceCache::Create(config, kStream, &caches_.back()));
    }
  }

  int num_shards() const { return static_cast<int>(tables_.size()); }
  int num_caches() const { return static_cast<int>(caches_.size()); }
  cuda::DeviceCache* cache(int w = 0) const { return caches_[w].get(); }
  Table* table(int s = 0) const { return tables_[s].get(); }
  Table* table_of(int64_t key) const {
    return table(static_cast<int>(ShardOfHash(HashKey(key), num_shards())));
  }

  int64_t count(CacheCounter counter, int w = 0) const {
    Cache::Stats stats;
    EXPECT_OK(cache(w)->stats(&stats));
    return stats[static_cast<size_t>(counter)];
  }

  // A lookup or flush under way: the requests that were cut, then the shards' replies to them.
  struct Call {
    int cache;
    std::shared_ptr<cuda::DeviceTicket> ticket;
    std::vector<std::shared_ptr<Buffer>> requests;
    std::vector<Buffer> replies;
  };

  Call NewCall(int w) const {
    return {w, nullptr, std::vector<std::shared_ptr<Buffer>>(num_shards()),
            std::vector<Buffer>(num_shards())};
  }
  Status TryLookup(const std::vector<int64_t>& ids, Call* call, bool fresh = false) const {
    const DeviceArray<int64_t> there(ids);
    return cache(call->cache)->Lookup(there.get(), there.size(), fresh, Into(call), &call->ticket);
  }
  Call Lookup(int w, const std::vector<int64_t>& ids, bool fresh = false) const {
    Call call = NewCall(w);
    EXPECT_OK(TryLookup(ids, &call, fresh));
    return call;
  }

  Call CutFlush(int w, bool all) const {
    Call call = NewCall(w);
    EXPECT_OK(cache(w)->Flush(all, Into(&call), &call.ticket));
    return call;
  }

  void Deliver(Call* call) const {
    for (int s = 0; s < num_shards(); ++s) Deliver(call, s);
  }
  void Deliver(Call* call, int s) const {
    if (call->requests[s]->empty()) return;
    EXPECT_OK(Sync(table(s), *call->requests[s], &call->replies[s]));
  }

  Status TryInstall(Call* call) const {
    std::vector<Cache::Bytes> replies;
    for (const Buffer& reply : call->replies) replies.push_back({reply.data(), reply.size()});
    int64_t rows = 0;
    return cache(call->cache)->Install(call->ticket.get(), replies, &rows);
  }
  std::vector<float> Gather(const Call& call) const {
    const DeviceArray<float> out(call.ticket->num_ids() * cache(call.cache)->dim());
    EXPECT_OK(cache(call.cache)->Gather(*call.ticket, out.get()));
    return out.Read();
  }
  std::vector<float> Fill(Call* call) const {
    EXPECT_OK(TryInstall(call));
    return Gather(*call);
  }

  Status Update(const Call& call, const std::vector<float>& gradients,
                float learning_rate = 1) const {
    const DeviceArray<float> there(gradients);
    return cache(call.cache)->Update(call.ticket.get(), there.get(), learning_rate);
  }

  std::vector<float> Read(int w, const std::vector<int64_t>& ids) const {
    Call call = Lookup(w, ids);
    Deliver(&call);
    return Fill(&call);
  }

  // What the step read before its update.
  std::vector<float> Step(int w, const std::vector<int64_t>& ids,
                          const std::vector<float>& gradients, float learning_rate = 1) const {
    Call call = Lookup(w, ids);
    Deliver(&call);
    std::vector<float> values = Fill(&call);
    EXPECT_OK(Update(call, gradients, learning_rate));
    return values;
  }

  void Flush(int w, bool all = true) const {
    Call call = CutFlush(w, all);
    Deliver(&call);
    EXPECT_OK(TryInstall(&call));
  }

  TableRows Rows() const {
    TableRows rows;
    for (const auto& table : tables_) {
      for (const auto& [key, row] : Snapshot(*table)) rows[key] = row;
    }
    return rows;
  }

 private:
  static Cache::AllocateRequest Into(Call* call) {
    return [call](int shard, size_t bytes) {
      auto& request = call->requests[shard];
      request = std::make_shared<Buffer>(bytes);
      return std::shared_ptr<char>(request, request->data());
    };
  }

  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<std::shared_ptr<cuda::DeviceCache>> caches_;
};

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CUDA_DEVICE_CACHE_TESTING_H_
