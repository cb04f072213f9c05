#include "ops/core/wire/frames.h"

#include <cstring>

#include "ops/core/wire/cursor.h"

namespace het_tf {
namespace {

size_t Padded(size_t size) { return (size + 7) / 8 * 8; }

}  // namespace

void PackFrames(const std::vector<Frame>& frames, const std::function<char*(size_t)>& allocate) {
  size_t said = 0;
  size_t size = sizeof(FramesHeader) + frames.size() * sizeof(uint64_t);
  for (const Frame& frame : frames) {
    said += frame.size;
    size += Padded(frame.size);
  }
  if (said == 0) size = 0;
  char* message = allocate(size);
  if (size == 0) return;
  WriteCursor cursor(message);
  *cursor.Take<FramesHeader>(1) = {kFramesMagic, static_cast<uint32_t>(frames.size())};
  auto* sizes = cursor.Take<uint64_t>(frames.size());
  for (size_t f = 0; f < frames.size(); ++f) {
    const Frame& frame = frames[f];
    sizes[f] = frame.size;
    char* to = cursor.Take<char>(Padded(frame.size));
    if (frame.size > 0) std::memcpy(to, frame.bytes, frame.size);
    std::memset(to + frame.size, 0, Padded(frame.size) - frame.size);
  }
}

Status UnpackFrames(const char* bytes, size_t size, size_t num_frames, std::vector<Frame>* frames) {
  frames->assign(num_frames, Frame());
  if (size == 0) return Status();
  HET_RETURN_IF_ERROR(CheckAlignment("message", bytes));
  ReadCursor cursor(bytes, size);
  const auto* header = cursor.Take<FramesHeader>(1);
  if (header == nullptr) {
    return InvalidArgument("message has ", size, " bytes, fewer than its header");
  }
  if (header->magic != kFramesMagic) return InvalidArgument("message does not start with HETF");
  if (header->num_frames != num_frames) {
    return InvalidArgument("message has ", header->num_frames, " frames, expected ", num_frames);
  }
  const auto* sizes = cursor.Take<uint64_t>(num_frames);
  for (size_t f = 0; sizes != nullptr && f < num_frames; ++f) {
    const char* frame = sizes[f] <= cursor.left() ? cursor.Take(Padded(sizes[f]), 1) : nullptr;
    if (frame == nullptr) {
      return InvalidArgument("message has ", size, " bytes, frame ", f, " ends beyond them");
    }
    (*frames)[f] = {frame, sizes[f]};
  }
  if (sizes == nullptr || cursor.left() != 0) {
    return InvalidArgument("message has ", size, " bytes, which is not what its header announces");
  }
  return Status();
}

}  // namespace het_tf
