#include "ops/core/table/storage.h"

#include <charconv>

namespace het_tf {

Status Storage::Parse(const std::string& text, Storage* storage) {
  *storage = Storage();
  if (text.empty()) return Status();
  const std::string memory = "memory=", path = " path=";
  const size_t at = text.find(path);
  if (text.rfind(memory, 0) == 0 && at != std::string::npos && at + path.size() < text.size()) {
    const char* end = text.data() + at;
    const auto parsed = std::from_chars(text.data() + memory.size(), end, storage->memory);
    if (parsed.ec == std::errc() && parsed.ptr == end && storage->memory > 0) {
      storage->path = text.substr(at + path.size());
      return Status();
    }
  }
  return InvalidArgument("storage = '", text, "' must be \"memory=BYTES path=FOLDER\"");
}

}  // namespace het_tf
