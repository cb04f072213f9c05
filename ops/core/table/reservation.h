#ifndef HET_TF_OPS_CORE_TABLE_RESERVATION_H_
#define HET_TF_OPS_CORE_TABLE_RESERVATION_H_

#include <cstddef>
#include <vector>

#include "ops/core/status.h"
#include "ops/core/table/table.h"

namespace het_tf {

// Asked for before the first row is touched, so that memory never ends half-way through a call.
class Table::Reservation {
 public:
  // groups: of the rows that may be inserted, by stripe.
  Reservation(Table* table, const Groups& groups);
  ~Reservation();
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  const Status& status() const { return status_; }

 private:
  Table* const table_;
  std::vector<size_t> reserved_;  // (stripes reserved)
  Status status_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_RESERVATION_H_
