// What a core function reports back. The kernels turn it into the op's status.

#ifndef HET_TF_OPS_CORE_STATUS_H_
#define HET_TF_OPS_CORE_STATUS_H_

#include <sstream>
#include <string>
#include <utility>

namespace het_tf {

enum class Code { kOk, kInvalidArgument, kFailedPrecondition, kResourceExhausted, kCancelled };

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
Status InvalidArgument(const Parts&... parts) {
  return Status(Code::kInvalidArgument, StrCat(parts...));
}

template <typename... Parts>
Status FailedPrecondition(const Parts&... parts) {
  return Status(Code::kFailedPrecondition, StrCat(parts...));
}

template <typename... Parts>
Status ResourceExhausted(const Parts&... parts) {
  return Status(Code::kResourceExhausted, StrCat(parts...));
}

template <typename... Parts>
Status Cancelled(const Parts&... parts) {
  return Status(Code::kCancelled, StrCat(parts...));
}

}  // namespace het_tf

#define HET_RETURN_IF_ERROR(expr)            \
  do {                                       \
    ::het_tf::Status het_status = (expr);    \
    if (!het_status.ok()) return het_status; \
  } while (0)

#endif  // HET_TF_OPS_CORE_STATUS_H_
