#include "ops/core/wire/dense.h"

#include "ops/core/row/clock.h"
#include "ops/core/wire/cursor.h"

namespace het_tf {
namespace {

// What could not be in memory at all, so that products stay within 64 bits.
constexpr uint64_t kMaxFloats = 1ULL << 40;
// More steps than clocks of one training count.
constexpr int64_t kMaxSteps = int64_t{1} << 40;

template <typename Header>
Status CheckHeader(const char* what, const Header* header, size_t size, uint32_t magic,
                   uint16_t flags) {
  if (header == nullptr) {
    return InvalidArgument(what, " has ", size, " bytes, fewer than its header");
  }
  if (header->magic != magic) {
    return InvalidArgument(what, " does not start with ",
                           std::string(reinterpret_cast<const char*>(&magic), 4));
  }
  if (header->version != kDenseVersion) {
    return InvalidArgument(what, " has version ", header->version, ", this process speaks ",
                           kDenseVersion, ": run one het_tf version everywhere");
  }
  if ((header->flags & ~flags) != 0) {
    return InvalidArgument(what, " has unknown flags ", header->flags);
  }
  if (header->num_floats > kMaxFloats || header->clock < 0 || header->clock > kMaxClock) {
    return InvalidArgument(what, " has num_floats = ", header->num_floats,
                           ", clock = ", header->clock);
  }
  return Status();
}

Status WrongSize(const char* what, size_t size) {
  return InvalidArgument(what, " has ", size, " bytes, which is not what its header announces");
}

}  // namespace

DensePushWriter::DensePushWriter(char* bytes, const DensePushHeader& header, uint64_t num_floats,
                                 uint32_t num_counters)
    : half_(header.flags & kDenseHalf) {
  WriteCursor cursor(bytes);
  *cursor.Take<DensePushHeader>(1) = header;
  counters_ = cursor.Take<int64_t>(num_counters);
  const uint64_t padded = NumbersBytes(num_floats, half_);
  const uint64_t used = num_floats * (half_ ? sizeof(uint16_t) : sizeof(float));
  char* numbers = cursor.Take<char>(padded);
  std::memset(numbers + used, 0, padded - used);
  floats_ = reinterpret_cast<float*>(numbers);
}

DensePushView ViewDensePush(const char* bytes, uint32_t num_counters) {
  DensePushHeader header;
  std::memcpy(&header, bytes, sizeof(header));
  const auto* counters = reinterpret_cast<const int64_t*>(bytes + sizeof(header));
  return {
      header.sequence, header.steps, header.interval, counters,
      Numbers(reinterpret_cast<const char*>(counters + num_counters), header.flags & kDenseHalf)};
}

Status DenseRequestView::Parse(const char* bytes, size_t size, DenseRequestView* view) {
  HET_RETURN_IF_ERROR(CheckAlignment("dense request", bytes));
  ReadCursor cursor(bytes, size);
  const auto* header = cursor.Take<DenseRequestHeader>(1);
  HET_RETURN_IF_ERROR(
      CheckHeader("dense request", header, size, kDenseRequestMagic, kDenseHalf | kDenseAsk));
  if (header->replica_id == 0 || header->read_bound < kUnbounded ||
      (header->incarnation == 0) != (header->session == 0)) {
    return InvalidArgument("dense request has replica_id = ", header->replica_id,
                           ", read_bound = ", header->read_bound,
                           ", incarnation = ", header->incarnation,
                           ", session = ", header->session);
  }
  if ((header->flags & kDenseAsk) != 0 && header->num_pushes != 0) {
    return InvalidArgument("dense request asks and has num_pushes = ", header->num_pushes);
  }
  view->header = *header;
  view->pushes.clear();
  uint64_t last = 0;
  for (uint32_t p = 0; p < header->num_pushes; ++p) {
    const auto* push = cursor.Take<DensePushHeader>(1);
    if (push == nullptr) return WrongSize("dense request", size);
    if ((push->flags & ~uint32_t{kDenseHalf}) != 0) {
      return InvalidArgument("push ", p, " of a dense request has unknown flags ", push->flags);
    }
    const bool half = push->flags & kDenseHalf;
    const size_t rest = DensePushWriter::Size(header->num_floats, header->num_counters, half) -
                        sizeof(DensePushHeader);
    if (cursor.Take(rest, 1) == nullptr) return WrongSize("dense request", size);
    const DensePushView read =
        ViewDensePush(reinterpret_cast<const char*>(push), header->num_counters);
    if (read.sequence <= last || read.steps < 0 || read.steps > kMaxSteps || read.interval < 1) {
      return InvalidArgument("push ", p, " of a dense request has sequence ", read.sequence,
                             " after ", last, ", ", read.steps, " steps and interval ",
                             read.interval);
    }
    last = read.sequence;
    view->pushes.push_back(read);
  }
  if (cursor.left() != 0) return WrongSize("dense request", size);
  return Status();
}

size_t DenseReplyBytes(const DenseReplyHeader& header) {
  size_t bytes = sizeof(header);
  if (header.flags & kDenseValues) {
    bytes += header.num_counters * sizeof(int64_t) +
             NumbersBytes(header.num_floats, header.flags & kDenseHalf);
  }
  if (header.flags & kDenseRest) bytes += header.rest_bytes;
  return bytes;
}

Status DenseReplyView::Parse(const char* bytes, size_t size, DenseReplyView* view) {
  HET_RETURN_IF_ERROR(CheckAlignment("dense reply", bytes));
  ReadCursor cursor(bytes, size);
  const auto* header = cursor.Take<DenseReplyHeader>(1);
  HET_RETURN_IF_ERROR(CheckHeader("dense reply", header, size, kDenseReplyMagic,
                                  kDenseHalf | kDenseValues | kDenseRest | kDenseRestarted));
  if (header->rest_bytes > kMaxFloats) {
    return InvalidArgument("dense reply has rest_bytes = ", header->rest_bytes);
  }
  if (DenseReplyBytes(*header) != size) return WrongSize("dense reply", size);
  view->header = *header;
  if (view->has(kDenseValues)) {
    view->counters = cursor.Take<int64_t>(header->num_counters);
    const bool half = view->has(kDenseHalf);
    view->values = Numbers(cursor.Take(NumbersBytes(header->num_floats, half), 1), half);
  }
  if (view->has(kDenseRest)) view->rest = cursor.Take(header->rest_bytes, 1);
  return Status();
}

}  // namespace het_tf
