#include "ops/core/table/storage.h"

#include <charconv>

namespace het_tf {

Status Storage::Parse(const std::string& text, Storage* storage) {
  *storage = Storage();
  if (text.empty()) return Status();
  const std::string memory = "memory=", path = " path=";
  const size_t at = text.find(path);
  if (text.rfind(memory, 0) == 0 && at != std::string::npos && at + path.size() < text.size()) {
    const char *begin = text.data() + memory.size(), *end = text.data() + at;
    const auto parsed = std::from_chars(begin, end, storage->memory);
    const bool is_number = parsed.ec == std::errc() && parsed.ptr == end && storage->memory > 0;
    if (is_number || std::string(begin, end) == "auto") {
      storage->path = text.substr(at + path.size());
      return Status();
    }
  }
  return InvalidArgument("storage = '", text, "' must be \"memory=BYTES path=FOLDER\", or auto for",
                         " the bytes");
}

}  // namespace het_tf
