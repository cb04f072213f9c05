#include "ops/core/cache/unsent.h"

#include <algorithm>

#include "ops/core/wire/request.h"

namespace het_tf {

int Unsent::MaxGradients(const Optimizer& optimizer, const RowFormat& wire) {
  const auto row_bytes = [&](int64_t gradients, int64_t contributions) {
    return sizeof(PushRow) +
           sizeof(float) * PushWords(gradients, contributions, wire, optimizer.contribution_dim());
  };
  return static_cast<int>((row_bytes(0, 1) - 1) / row_bytes(1, 0));
}

void Unsent::Append(Line* line, uint32_t at) {
  GradientAt(at)->next = Line::kNone;
  if (line->gradients == Line::kNone) {
    line->gradients = at;
    return;
  }
  uint32_t last = line->gradients;
  while (GradientAt(last)->next != Line::kNone) last = GradientAt(last)->next;
  GradientAt(last)->next = at;
}

void Unsent::DropGradients(Line* line) {
  while (line->gradients != Line::kNone) {
    const uint32_t next = GradientAt(line->gradients)->next;
    gradients_.Free(line->gradients);
    line->gradients = next;
  }
}

void Unsent::Prepare(Line* line) {
  if (line->record == Line::kNone) line->record = records_.Allocate();
  if (line->pending >= max_gradients_) {
    DropGradients(line);
  } else if (line->pending == 0 || line->gradients != Line::kNone) {
    Append(line, gradients_.Allocate());
  }
}

void Unsent::Update(Line* line, float* row, const Gradient& gradient, float learning_rate) {
  if (line->gradients != Line::kNone) {
    uint32_t last = line->gradients;
    while (GradientAt(last)->next != Line::kNone) last = GradientAt(last)->next;
    GradientAt(last)->learning_rate = learning_rate;
    std::memcpy(FloatsOf(last), gradient.values, sizeof(float) * optimizer_.dim());
  }
  if (line->pending == 1) optimizer_.BeginRecord(row, RecordOf(*line));
  optimizer_.Update(row, gradient, learning_rate, RecordOf(*line));
}

void Unsent::Keep(Line* line, const float* gradient, float learning_rate) {
  const uint32_t at = gradients_.Allocate();
  Append(line, at);
  GradientAt(at)->learning_rate = learning_rate;
  std::memcpy(FloatsOf(at), gradient, sizeof(float) * optimizer_.dim());
}

void Unsent::MoveOnto(Line* line, const float* old_row, float* row) {
  if (line->pending == 0) return;
  if (line->gradients == Line::kNone) {
    optimizer_.MoveOnto(old_row, row, RecordOf(*line), line->pending);
    return;
  }
  if (line->record == Line::kNone) line->record = records_.Allocate();
  optimizer_.BeginRecord(row, RecordOf(*line));
  ForEachGradient(*line, [&](const float* gradient, float learning_rate) {
    optimizer_.Update(row, gradient, learning_rate, RecordOf(*line));
  });
  if (line->pending > max_gradients_) DropGradients(line);
}

void Unsent::Drop(Line* line) {
  DropGradients(line);
  if (line->record != Line::kNone) {
    records_.Free(line->record);
    line->record = Line::kNone;
  }
}

}  // namespace het_tf
