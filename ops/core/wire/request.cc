#include "ops/core/wire/request.h"

#include "ops/core/row/clock.h"

namespace het_tf {

PushWriter::PushWriter(char* bytes, const PushHeader& header, int dim, int contribution_dim)
    : dim_(dim), contribution_dim_(contribution_dim) {
  WriteCursor cursor(bytes);
  *cursor.Take<PushHeader>(1) = header;
  gradient_row_ = cursor.Take<PushRow>(header.num_gradients);
  contribution_row_ = cursor.Take<PushRow>(header.num_contributions);
  gradient_ = cursor.Take<float>(uint64_t{header.num_gradients} * dim);
  contribution_ = cursor.Take<float>(uint64_t{header.num_contributions} * contribution_dim);
  const uint64_t floats =
      uint64_t{header.num_gradients} * dim + uint64_t{header.num_contributions} * contribution_dim;
  if (floats % 2 != 0) *cursor.Take<float>(1) = 0;
}

float* PushWriter::AddGradient(int64_t key, float learning_rate, uint32_t clock) {
  gradient_row_->key = key;
  gradient_row_->learning_rate = learning_rate;
  gradient_row_->clock = clock;
  ++gradient_row_;
  float* at = gradient_;
  gradient_ += dim_;
  return at;
}

float* PushWriter::AddContribution(int64_t key, uint32_t updates, uint32_t clock) {
  contribution_row_->key = key;
  contribution_row_->updates = updates;
  contribution_row_->clock = clock;
  ++contribution_row_;
  float* at = contribution_;
  contribution_ += contribution_dim_;
  return at;
}

RequestWriter::RequestWriter(char* bytes, const RequestHeader& header)
    : cursor_(bytes),
      packing_{header.lowest_key, header.key_bytes},
      padding_(header.padding_needed()) {
  auto* written = cursor_.Take<RequestHeader>(1);
  *written = header;
  written->padding = header.padding_needed();
}

bool ReadPush(ReadCursor* cursor, uint64_t dim, uint64_t contribution_dim, PushView* push) {
  const auto* header = cursor->Take<PushHeader>(1);
  if (header == nullptr) return false;
  push->sequence = header->sequence;
  push->num_gradients = header->num_gradients;
  push->num_contributions = header->num_contributions;
  push->rows = cursor->Take<PushRow>(push->num_rows());
  if (push->rows == nullptr) return false;
  const uint64_t gradient_floats = push->num_gradients * dim;
  const uint64_t floats = gradient_floats + push->num_contributions * contribution_dim;
  push->gradients = reinterpret_cast<const float*>(cursor->Take((floats + 1) / 2, 8));
  if (push->gradients == nullptr) return false;
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
    return InvalidArgument("request has version ", header->version, ", this shard speaks ",
                           kWireVersion, ": run one het_tf version everywhere");
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
      header->contribution_dim > 2 * kMaxWidth) {
    return InvalidArgument("request has dim = ", header->dim, ", slot_dim = ", header->slot_dim,
                           ", contribution_dim = ", header->contribution_dim);
  }
  view->pushes.clear();
  for (uint32_t p = 0; p < header->num_pushes; ++p) {
    PushView push;
    if (!ReadPush(&cursor, header->dim, header->contribution_dim, &push)) {
      return InvalidArgument("request ends within push ", p);
    }
    view->pushes.push_back(push);
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
