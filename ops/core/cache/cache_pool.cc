// Pool, and the update of what was pooled.

#include <memory>
#include <utility>
#include <vector>

#include "ops/core/cache/cache.h"

namespace het_tf {

// Does not keep the ticket: its lines may go while a gradient is still to come.
class Cache::Pooled : public PooledRows {
 public:
  Pooled(std::shared_ptr<Cache> cache, std::shared_ptr<const UniqueIds> ids,
         std::shared_ptr<const Pooling> pooling)
      : cache_(std::move(cache)), ids_(std::move(ids)), pooling_(std::move(pooling)) {}

  bool IsOf(const RowTicket& ticket) const override {
    return ticket.owner() == cache_.get() &&
           &static_cast<const Ticket&>(ticket).ids() == ids_.get();
  }

  Status Update(RowTicket* row_ticket, const std::vector<const float*>& gradients,
                float learning_rate, const ParallelFor& parallel_for) override {
    auto* ticket = static_cast<Ticket*>(row_ticket);
    const int dim = cache_->dim();
    const PooledGradients of_ids(*pooling_, *ids_, dim, parallel_for, gradients);
    return cache_->UpdateSummed(ticket, GradientSums(*ids_, of_ids, dim, parallel_for),
                                learning_rate, parallel_for);
  }

  Status Read(std::shared_ptr<const UniqueIds>* ids, std::vector<float>* rows) const override {
    *ids = ids_;
    rows->clear();
    return Status();
  }

 private:
  const std::shared_ptr<Cache> cache_;
  const std::shared_ptr<const UniqueIds> ids_;
  const std::shared_ptr<const Pooling> pooling_;
};

Status Cache::Pool(const std::shared_ptr<RowTicket>& row_ticket, std::shared_ptr<Pooling> pooling,
                   const ParallelFor& parallel_for, const std::vector<float*>& outputs,
                   std::shared_ptr<PooledRows>* pooled) {
  const auto& ticket = static_cast<const Ticket&>(*row_ticket);
  MutexLock lock(&mutex_);
  if (!ticket.installed_) return FailedPrecondition("ticket was not installed before its rows");
  pooling->Pool(ticket.ids(), store_.RowsOf(ticket.slots_).data(), dim(), parallel_for, outputs);
  *pooled = std::make_shared<Pooled>(shared_from_this(), ticket.ids_, std::move(pooling));
  return Status();
}

}  // namespace het_tf
