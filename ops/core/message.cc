#include "ops/core/message.h"

#include <cstring>

namespace het_tf {
namespace {

// Takes arrays off the front of a block, never beyond its end.
class Cursor {
 public:
  Cursor(const char* bytes, size_t size) : at_(bytes), left_(size) {}

  // Returns nullptr when fewer than count are left. record_bytes is not 0.
  const char* Take(uint64_t count, uint64_t record_bytes) {
    if (count > left_ / record_bytes) return nullptr;
    const char* taken = at_;
    at_ += count * record_bytes;
    left_ -= count * record_bytes;
    return taken;
  }

  template <typename Record>
  const Record* Take(uint64_t count) {
    return reinterpret_cast<const Record*>(Take(count, sizeof(Record)));
  }

  size_t left() const { return left_; }

 private:
  const char* at_;
  size_t left_;
};

// Rows and columns that could not be in memory at all, so that products stay within 64 bits.
constexpr uint64_t kMaxWidth = 1ULL << 24;
constexpr int64_t kMaxCount = 1LL << 31;

Status CheckAlignment(const char* what, const char* bytes) {
  if (reinterpret_cast<uintptr_t>(bytes) % 8 == 0) return Status();
  return InvalidArgument(what, " is not aligned to 8 bytes");
}

}  // namespace

Status RequestView::Parse(const char* bytes, size_t size, RequestView* view) {
  HET_RETURN_IF_ERROR(CheckAlignment("request", bytes));
  Cursor cursor(bytes, size);
  const auto* header = cursor.Take<RequestHeader>(1);
  if (header == nullptr) {
    return InvalidArgument("request has ", size, " bytes, fewer than its header");
  }
  view->header = *header;
  if (header->magic != kRequestMagic) return InvalidArgument("request does not start with HETQ");
  if (header->version != kMessageVersion) {
    return InvalidArgument("request has version ", header->version, ", this shard speaks ",
                           kMessageVersion, ": run one het_tf version everywhere");
  }
  if ((header->flags & ~kServerApplies) != 0) {
    return InvalidArgument("request has unknown flags ", header->flags);
  }
  if (header->read_bound < kUnbounded) {
    return InvalidArgument("request has read_bound = ", header->read_bound);
  }
  if (header->num_checks < 0 || header->num_checks >= kMaxCount || header->num_absent < 0 ||
      header->num_absent >= kMaxCount) {
    return InvalidArgument("request has num_checks = ", header->num_checks,
                           ", num_absent = ", header->num_absent);
  }
  const bool server_applies = header->flags & kServerApplies;
  const uint64_t width = uint64_t{header->dim} + (server_applies ? 0 : header->slot_dim);
  if (header->dim == 0 || width > kMaxWidth) {
    return InvalidArgument("request has dim = ", header->dim, ", slot_dim = ", header->slot_dim);
  }
  view->pushes.clear();
  for (uint32_t b = 0; b < header->num_batches; ++b) {
    PushView push;
    const auto* push_header = cursor.Take<PushHeader>(1);
    if (push_header == nullptr) return InvalidArgument("request ends within push ", b);
    push.sequence = push_header->sequence;
    push.learning_rate = push_header->learning_rate;
    push.num_rows = push_header->rows;
    push.rows = cursor.Take<PushRow>(push.num_rows);
    if (push.rows == nullptr) return InvalidArgument("request ends within push ", b);
    push.data = reinterpret_cast<const float*>(
        cursor.Take((push.num_rows * width * sizeof(float) + 7) / 8, 8));
    if (push.data == nullptr) return InvalidArgument("request ends within push ", b);
    view->pushes.push_back(push);
  }
  view->checks = cursor.Take<Check>(header->num_checks);
  view->absent = view->checks ? cursor.Take<int64_t>(header->num_absent) : nullptr;
  if (view->absent == nullptr || cursor.left() != 0) {
    return InvalidArgument("request has ", size, " bytes, which is not what its header announces");
  }
  return Status();
}

Status ReplyView::Parse(const char* bytes, size_t size, ReplyView* view) {
  HET_RETURN_IF_ERROR(CheckAlignment("reply", bytes));
  Cursor cursor(bytes, size);
  const auto* header = cursor.Take<ReplyHeader>(1);
  if (header == nullptr) {
    return InvalidArgument("reply has ", size, " bytes, fewer than its header");
  }
  view->header = *header;
  if (header->magic != kReplyMagic) return InvalidArgument("reply does not start with HETR");
  if (header->version != kMessageVersion) {
    return InvalidArgument("reply has version ", header->version, ", this cache speaks ",
                           kMessageVersion, ": run one het_tf version everywhere");
  }
  if (header->num_rows < 0 || header->num_rows > header->num_queries || header->width < 1 ||
      static_cast<uint64_t>(header->width) > kMaxWidth || header->num_queries >= 2 * kMaxCount) {
    return InvalidArgument("reply has num_rows = ", header->num_rows,
                           ", num_queries = ", header->num_queries, ", width = ", header->width);
  }
  view->rows = cursor.Take<ReplyRow>(header->num_rows);
  view->data = view->rows ? reinterpret_cast<const float*>(
                                cursor.Take(header->num_rows * header->width, sizeof(float)))
                          : nullptr;
  if (view->data == nullptr || cursor.left() != 0) {
    return InvalidArgument("reply has ", size, " bytes, which is not what its header announces");
  }
  int64_t previous = -1;
  for (int64_t r = 0; r < header->num_rows; ++r) {
    if (view->rows[r].query <= previous || view->rows[r].query >= header->num_queries) {
      return InvalidArgument("reply row ", r, " answers query ", view->rows[r].query, " of ",
                             header->num_queries);
    }
    previous = view->rows[r].query;
  }
  return Status();
}

}  // namespace het_tf
