#include "ops/core/wire/request.h"

#include <utility>

#include "ops/core/row/clock.h"

namespace het_tf {

PushWriter::PushWriter(char* bytes, const PushHeader& header, const RowFormat& format,
                       int contribution_dim)
    : format_(format),
      rest_(contribution_dim - format.dim),
      sequence_(header.sequence),
      scratch_(format.half ? contribution_dim : 0) {
  WriteCursor cursor(bytes);
  *cursor.Take<PushHeader>(1) = header;
  rows_ = gradient_row_ = cursor.Take<PushRow>(header.num_gradients);
  contribution_row_ = cursor.Take<PushRow>(header.num_contributions);
  const uint64_t gradient_words = PushWords(header.num_gradients, 0, format, contribution_dim);
  const uint64_t words =
      PushWords(header.num_gradients, header.num_contributions, format, contribution_dim);
  gradient_ = cursor.Take<float>(words);
  contribution_ = gradient_ + gradient_words;
  if (words % 2 != 0) *cursor.Take<float>(1) = 0;
}

void PushWriter::AddGradient(int64_t key, float learning_rate, uint32_t clock,
                             const float* gradient) {
  gradient_row_->key = key;
  gradient_row_->learning_rate = learning_rate;
  gradient_row_->clock = clock;
  format_.Write(gradient, 0, NumberOf(*gradient_row_), gradient_);
  ++gradient_row_;
  gradient_ += format_.words(0);
}

RequestWriter::RequestWriter(char* bytes, const RequestHeader& header)
    : cursor_(bytes),
      packing_{header.lowest_key, header.key_bytes},
      padding_(header.padding_needed()) {
  auto* written = cursor_.Take<RequestHeader>(1);
  *written = header;
  written->padding = header.padding_needed();
}

bool ReadPush(ReadCursor* cursor, const RowFormat& format, int64_t contribution_dim,
              PushView* push) {
  const auto* header = cursor->Take<PushHeader>(1);
  if (header == nullptr) return false;
  push->sequence = header->sequence;
  push->num_gradients = header->num_gradients;
  push->num_contributions = header->num_contributions;
  push->closure = header->closure;
  push->closures_done = header->closures_done;
  push->rows = cursor->Take<PushRow>(push->num_rows());
  if (push->rows == nullptr) return false;
  const uint64_t words =
      PushWords(header->num_gradients, header->num_contributions, format, contribution_dim);
  const auto* packed = reinterpret_cast<const float*>(cursor->Take((words + 1) / 2, 8));
  if (packed == nullptr) return false;
  const int64_t gradient_floats = push->num_gradients * format.dim;
  if (format.half) {
    const std::shared_ptr<float[]> unpacked(
        new float[gradient_floats + push->num_contributions * contribution_dim]);
    float* to = unpacked.get();
    const auto unpack = [&](int64_t count, int64_t rest) {
      for (int64_t r = 0; r < count; ++r, to += format.dim + rest, packed += format.words(rest)) {
        format.Read(packed, rest, to);
      }
    };
    unpack(push->num_gradients, 0);
    unpack(push->num_contributions, contribution_dim - format.dim);
    push->unpacked = unpacked;
    push->gradients = unpacked.get();
  } else {
    push->gradients = packed;
  }
  push->contributions = push->gradients + gradient_floats;
  return true;
}

Status RequestView::Parse(const char* bytes, size_t size, RequestView* view) {
  HET_RETURN_IF_ERROR(CheckAlignment("request", bytes));
  ReadCursor cursor(bytes, size);
  const auto* header = cursor.Take<RequestHeader>(1);
  if (header == nullptr) {
    return InvalidArgument("request has ", size, " bytes, fewer than its header");
  }
  view->header = *header;
  if (header->magic != kRequestMagic) return InvalidArgument("request does not start with HETQ");
  if (header->version != kWireVersion) {
    return InvalidArgument("request has version ", int{header->version}, ", this shard speaks ",
                           int{kWireVersion}, ": run one het_tf version everywhere");
  }
  if ((header->flags & ~kHalf) != 0) {
    return InvalidArgument("request has unknown flags ", int{header->flags});
  }
  if (header->key_bytes < 1 || header->key_bytes > sizeof(int64_t)) {
    return InvalidArgument("request has key_bytes = ", int{header->key_bytes});
  }
  if (header->read_bound < kUnbounded) {
    return InvalidArgument("request has read_bound = ", header->read_bound);
  }
  if (header->num_queries() >= static_cast<int64_t>(kMaxCount)) {
    return InvalidArgument("request has num_checks = ", header->num_checks,
                           ", num_value_checks = ", header->num_value_checks,
                           ", num_full = ", header->num_full,
                           ", num_values = ", header->num_values);
  }
  if (header->dim == 0 || uint64_t{header->dim} + header->slot_dim > kMaxWidth ||
      (header->format().half && header->contribution_dim < header->dim) ||
      header->contribution_dim > 2 * kMaxWidth) {
    return InvalidArgument("request has dim = ", header->dim, ", slot_dim = ", header->slot_dim,
                           ", contribution_dim = ", header->contribution_dim);
  }
  view->pushes.clear();
  for (uint32_t p = 0; p < header->num_pushes; ++p) {
    PushView push;
    if (!ReadPush(&cursor, header->format(), header->contribution_dim, &push)) {
      return InvalidArgument("request ends within push ", p);
    }
    view->pushes.push_back(std::move(push));
  }
  const char* queries = cursor.Take(header->query_bytes(), 1);
  if (queries == nullptr || header->padding != header->padding_needed() ||
      cursor.left() != header->padding) {
    return InvalidArgument("request has ", size, " bytes, which is not what its header announces");
  }
  view->keys =
      KeyPacking{header->lowest_key, header->key_bytes}.Unpack(queries, header->num_queries());
  const auto* base =
      reinterpret_cast<const uint8_t*>(queries + header->num_queries() * header->key_bytes);
  const uint8_t* base_end = base + header->base_bytes;
  view->bases.resize(header->num_bases());
  for (int64_t& value : view->bases) {
    uint64_t bits = 0;
    int shift = 0;
    for (; base != base_end && (*base & 128) != 0 && shift < 56; shift += 7) {
      bits |= uint64_t{*base++ & 127u} << shift;
    }
    if (base == base_end || (*base & 128) != 0) {
      return InvalidArgument("request has ", header->base_bytes, " bytes of bases, which are not ",
                             header->num_bases(), " numbers");
    }
    value = static_cast<int64_t>(bits | uint64_t{*base++} << shift);
  }
  if (base != base_end) {
    return InvalidArgument("request has ", header->base_bytes, " bytes of bases, more than ",
                           header->num_bases(), " numbers");
  }
  return Status();
}

}  // namespace het_tf
