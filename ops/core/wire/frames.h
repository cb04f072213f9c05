// One message for several: what a step has for one server, of all its tables and of the dense
// variables.
//
//   FramesHeader, uint64[num_frames] sizes, then the frames, each from a multiple of 8 on
//
// Frames are told apart by their place. A frame of 0 bytes: nothing to say. A message of no bytes:
// neither has any of them.

#ifndef HET_TF_OPS_CORE_WIRE_FRAMES_H_
#define HET_TF_OPS_CORE_WIRE_FRAMES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "ops/core/status.h"

namespace het_tf {

inline constexpr uint32_t kFramesMagic = 0x46544548;  // "HETF"

struct FramesHeader {
  uint32_t magic = kFramesMagic;
  uint32_t num_frames = 0;
};

struct Frame {
  const char* bytes = nullptr;  // (size)
  size_t size = 0;
};

// allocate(bytes) provides the message's memory, aligned to 8, once.
void PackFrames(const std::vector<Frame>& frames, const std::function<char*(size_t)>& allocate);

// bytes: (size), aligned to 8, which must outlive the frames. num_frames: how many there must be.
Status UnpackFrames(const char* bytes, size_t size, size_t num_frames, std::vector<Frame>* frames);

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_WIRE_FRAMES_H_
