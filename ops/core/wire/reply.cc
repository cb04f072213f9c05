#include "ops/core/wire/reply.h"

#include "ops/core/row/clock.h"

namespace het_tf {
namespace {

Status CheckRows(const char* what, const ReplyRow* rows, int64_t n, int64_t num_queries) {
  int64_t previous = -1;
  for (int64_t r = 0; r < n; ++r) {
    if (rows[r].query <= previous || rows[r].query >= num_queries) {
      return InvalidArgument("reply ", what, " ", r, " answers query ", rows[r].query, " of ",
                             num_queries);
    }
    if (rows[r].clock < 0 || rows[r].clock > kMaxClock) {
      return InvalidArgument("reply ", what, " ", r, " has clock ", rows[r].clock);
    }
    previous = rows[r].query;
  }
  return Status();
}

}  // namespace

ReplyWriter::ReplyWriter(char* bytes, const ReplyHeader& header)
    : dim_(header.dim), width_(int64_t{header.dim} + header.slot_dim) {
  WriteCursor cursor(bytes);
  *cursor.Take<ReplyHeader>(1) = header;
  full_rows_ = cursor.Take<ReplyRow>(header.num_full);
  value_rows_ = cursor.Take<ReplyRow>(header.num_values);
  full_ = cursor.Take<float>(header.num_full * width_);
  values_ = cursor.Take<float>(header.num_values * dim_);
}

Status ReplyView::Parse(const char* bytes, size_t size, ReplyView* view) {
  HET_RETURN_IF_ERROR(CheckAlignment("reply", bytes));
  ReadCursor cursor(bytes, size);
  const auto* header = cursor.Take<ReplyHeader>(1);
  if (header == nullptr) {
    return InvalidArgument("reply has ", size, " bytes, fewer than its header");
  }
  view->header = *header;
  if (header->magic != kReplyMagic) return InvalidArgument("reply does not start with HETR");
  if (header->version != kWireVersion) {
    return InvalidArgument("reply has version ", header->version, ", this cache speaks ",
                           kWireVersion, ": run one het_tf version everywhere");
  }
  if ((header->flags & ~kRestarted) != 0) {
    return InvalidArgument("reply has unknown flags ", header->flags);
  }
  const uint64_t width = uint64_t{header->dim} + header->slot_dim;
  if (uint64_t{header->num_full} + header->num_values > header->num_queries || header->dim == 0 ||
      width > kMaxWidth) {
    return InvalidArgument("reply has num_full = ", header->num_full,
                           ", num_values = ", header->num_values,
                           ", num_queries = ", header->num_queries, ", dim = ", header->dim,
                           ", slot_dim = ", header->slot_dim);
  }
  view->full_rows = cursor.Take<ReplyRow>(header->num_full);
  view->value_rows = view->full_rows ? cursor.Take<ReplyRow>(header->num_values) : nullptr;
  const char* full =
      view->value_rows ? cursor.Take(header->num_full * width, sizeof(float)) : nullptr;
  const char* values =
      full ? cursor.Take(uint64_t{header->num_values} * header->dim, sizeof(float)) : nullptr;
  if (values == nullptr || cursor.left() != 0) {
    return InvalidArgument("reply has ", size, " bytes, which is not what its header announces");
  }
  view->full = reinterpret_cast<const float*>(full);
  view->values = reinterpret_cast<const float*>(values);
  HET_RETURN_IF_ERROR(CheckRows("row", view->full_rows, header->num_full, header->num_queries));
  return CheckRows("value", view->value_rows, header->num_values, header->num_queries);
}

}  // namespace het_tf
