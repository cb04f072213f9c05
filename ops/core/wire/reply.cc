#include "ops/core/wire/reply.h"

#include "ops/core/row/clock.h"

namespace het_tf {
namespace {

Status CheckClocks(const char* what, const ReplyRow* rows, int64_t n) {
  for (int64_t r = 0; r < n; ++r) {
    if (rows[r].clock < 0 || rows[r].clock > kMaxClock) {
      return InvalidArgument("reply ", what, " ", r, " has clock ", rows[r].clock);
    }
  }
  return Status();
}

Status CheckRows(const char* what, const ReplyRow* rows, int64_t n, int64_t num_queries) {
  int64_t previous = -1;
  for (int64_t r = 0; r < n; ++r) {
    if (rows[r].query <= previous || rows[r].query >= num_queries) {
      return InvalidArgument("reply ", what, " ", r, " answers query ", rows[r].query, " of ",
                             num_queries);
    }
    previous = rows[r].query;
  }
  return CheckClocks(what, rows, n);
}

void Unpack(ReplyView* view) {
  const ReplyHeader& header = view->header;
  const RowFormat format = header.format();
  const uint64_t width = uint64_t{header.dim} + header.slot_dim;
  const std::shared_ptr<float[]> unpacked(
      new float[(uint64_t{header.num_full} + header.num_unasked) * width +
                uint64_t{header.num_values} * header.dim]);
  float* to = unpacked.get();
  const auto unpack = [&](const float* packed, int64_t count, int64_t rest) {
    for (int64_t r = 0; r < count; ++r, to += format.dim + rest) {
      format.Read(packed + r * format.words(rest), rest, to);
    }
  };
  unpack(view->full, header.num_full, header.slot_dim);
  unpack(view->values, header.num_values, 0);
  unpack(view->unasked, header.num_unasked, header.slot_dim);
  view->full = unpacked.get();
  view->values = view->full + header.num_full * width;
  view->unasked = view->values + uint64_t{header.num_values} * header.dim;
  view->unpacked = unpacked;
}

}  // namespace

ReplyWriter::ReplyWriter(char* bytes, const ReplyHeader& header)
    : format_(header.format()), slot_dim_(header.slot_dim) {
  WriteCursor cursor(bytes);
  *cursor.Take<ReplyHeader>(1) = header;
  full_rows_ = cursor.Take<ReplyRow>(header.num_full);
  value_rows_ = cursor.Take<ReplyRow>(header.num_values);
  unasked_rows_ = cursor.Take<ReplyRow>(header.num_unasked);
  full_ = cursor.Take<float>(header.num_full * format_.words(slot_dim_));
  values_ = cursor.Take<float>(header.num_values * format_.words(0));
  unasked_ = cursor.Take<float>(header.num_unasked * format_.words(slot_dim_));
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
  if ((header->flags & ~(kRestarted | kHalfReply | kCounted | kWatches)) != 0) {
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
  view->unasked_rows = view->value_rows ? cursor.Take<ReplyRow>(header->num_unasked) : nullptr;
  const RowFormat format = header->format();
  const auto take = [&](bool there, uint64_t rows, int64_t rest) {
    return there ? cursor.Take(rows * format.words(rest), sizeof(float)) : nullptr;
  };
  const char* full = take(view->unasked_rows != nullptr, header->num_full, header->slot_dim);
  const char* values = take(full != nullptr, header->num_values, 0);
  const char* unasked = take(values != nullptr, header->num_unasked, header->slot_dim);
  if (unasked == nullptr || cursor.left() != 0) {
    return InvalidArgument("reply has ", size, " bytes, which is not what its header announces");
  }
  view->full = reinterpret_cast<const float*>(full);
  view->values = reinterpret_cast<const float*>(values);
  view->unasked = reinterpret_cast<const float*>(unasked);
  if (format.half) Unpack(view);
  HET_RETURN_IF_ERROR(CheckRows("row", view->full_rows, header->num_full, header->num_queries));
  HET_RETURN_IF_ERROR(
      CheckRows("value", view->value_rows, header->num_values, header->num_queries));
  return CheckClocks("row that was not asked for", view->unasked_rows, header->num_unasked);
}

}  // namespace het_tf
