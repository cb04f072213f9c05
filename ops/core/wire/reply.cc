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

void Unpack(ReplyView* view) {
  const ReplyHeader& header = view->header;
  const RowFormat format = header.format();
  const uint64_t width = uint64_t{header.dim} + header.slot_dim;
  const std::shared_ptr<float[]> unpacked(
      new float[header.num_full * width + uint64_t{header.num_values} * header.dim]);
  float* to = unpacked.get();
  const auto unpack = [&](const float* packed, int64_t count, int64_t rest) {
    for (int64_t r = 0; r < count; ++r, to += format.dim + rest) {
      format.Read(packed + r * format.words(rest), rest, to);
    }
  };
  unpack(view->full, header.num_full, header.slot_dim);
  unpack(view->values, header.num_values, 0);
  view->full = unpacked.get();
  view->values = unpacked.get() + header.num_full * width;
  view->unpacked = unpacked;
}

}  // namespace

ReplyWriter::ReplyWriter(char* bytes, const ReplyHeader& header)
    : format_(header.format()), slot_dim_(header.slot_dim) {
  WriteCursor cursor(bytes);
  *cursor.Take<ReplyHeader>(1) = header;
  full_rows_ = cursor.Take<ReplyRow>(header.num_full);
  value_rows_ = cursor.Take<ReplyRow>(header.num_values);
  full_ = cursor.Take<float>(header.num_full * format_.words(slot_dim_));
  values_ = cursor.Take<float>(header.num_values * format_.words(0));
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
                           int{kWireVersion}, ": run one het_tf version everywhere");
  }
  if ((header->flags & ~(kRestarted | kHalfReply | kCounted)) != 0) {
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
  const RowFormat format = header->format();
  const char* full =
      view->value_rows
          ? cursor.Take(header->num_full * format.words(header->slot_dim), sizeof(float))
          : nullptr;
  const char* values =
      full ? cursor.Take(header->num_values * format.words(0), sizeof(float)) : nullptr;
  if (values == nullptr || cursor.left() != 0) {
    return InvalidArgument("reply has ", size, " bytes, which is not what its header announces");
  }
  view->full = reinterpret_cast<const float*>(full);
  view->values = reinterpret_cast<const float*>(values);
  if (format.half) Unpack(view);
  HET_RETURN_IF_ERROR(CheckRows("row", view->full_rows, header->num_full, header->num_queries));
  return CheckRows("value", view->value_rows, header->num_values, header->num_queries);
}

}  // namespace het_tf
