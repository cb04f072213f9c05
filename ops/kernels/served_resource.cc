#include "ops/kernels/served_resource.h"

#include <algorithm>
#include <chrono>

#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/path.h"
#include "tensorflow/core/util/tensor_bundle/tensor_bundle.h"

namespace het_tf {
namespace {

using std::chrono::duration;
using std::chrono::steady_clock;

// An Open takes about so long; what it leaves is opened while the model is served.
constexpr double kOpeningSeconds = 0.5;

// An error that names the file. Python's loader takes NotFound for a matter of devices.
absl::Status Of(const std::string& path, const absl::Status& status) {
  const std::string message(status.message());
  const bool named = message.find(path) != std::string::npos;
  return absl::FailedPreconditionError(named ? message : StrCat(path, ": ", message));
}

absl::Status ReadVariables(const std::string& prefix, ServedVariables* variables) {
  tensorflow::BundleReader reader(tensorflow::Env::Default(), prefix);
  TF_RETURN_IF_ERROR(reader.status());
  while (true) {
    const std::string name = StrCat(variables->size());
    if (!reader.Contains(name)) return absl::OkStatus();
    tensorflow::DataType dtype;
    tensorflow::TensorShape shape;
    TF_RETURN_IF_ERROR(reader.LookupDtypeAndShape(name, &dtype, &shape));
    tensorflow::Tensor value(dtype, shape);
    TF_RETURN_IF_ERROR(reader.Lookup(name, &value));
    variables->push_back(std::move(value));
  }
}

}  // namespace

ServedResource::~ServedResource() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  served_.Close();
  if (thread_.joinable()) thread_.join();
}

std::string ServedResource::trouble() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return trouble_;
}

absl::Status ServedResource::Open(const std::string& folder) {
  std::lock_guard<std::mutex> opening(opening_);
  if (folder_ == folder) return absl::OkStatus();
  if (!folder_.empty()) {
    return absl::InvalidArgumentError(StrCat("the model follows ", folder_, ", not ", folder));
  }
  folder_ = folder;
  bool more = false;
  absl::Status status = Advance(poll_seconds_ > 0 ? kOpeningSeconds : 1e9, &more);
  if (status.ok() && current_.version < 0) {
    status = absl::FailedPreconditionError(StrCat(folder, ": there is no whole version"));
  }
  // Where there is a version to serve, a thread goes on trying.
  if (current_.version < 0 || (!status.ok() && poll_seconds_ == 0)) {
    folder_.clear();
    return status;
  }
  if (!status.ok()) trouble_ = std::string(status.message());
  if (poll_seconds_ > 0) thread_ = std::thread([this] { Follow(); });
  return absl::OkStatus();
}

void ServedResource::Follow() {
  bool more = false;
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, duration<double>(more ? 0 : poll_seconds_), [&] { return ends_; });
      if (ends_) return;
    }
    absl::Status status;
    try {
      status = Advance(kOpeningSeconds, &more);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError("out of memory");
      more = false;
    }
    if (!status.ok()) more = false;
    std::lock_guard<std::mutex> lock(mutex_);
    trouble_ = std::string(status.message());
  }
}

absl::Status ServedResource::Advance(double seconds, bool* more) {
  const auto begin = steady_clock::now();
  std::vector<std::string> children;
  const absl::Status listed = tensorflow::Env::Default()->GetChildren(folder_, &children);
  if (!listed.ok()) return Of(folder_, listed);
  std::vector<ManifestName> names;
  for (const std::string& child : children) {
    ManifestName name;
    if (ManifestName::Parse(child, &name)) names.push_back(name);
  }
  *more = false;
  const std::vector<ManifestName> next = NextVersions(names, current_);
  if (next.empty() && current_.version >= 0 &&
      std::find(names.begin(), names.end(), current_) == names.end()) {
    return absl::FailedPreconditionError(
        StrCat(folder_, ": ", current_.ToString(),
               ", which is served, is not there any longer, nor is what could follow it"));
  }
  for (const ManifestName& name : next) {
    if (current_.version >= 0 && duration<double>(steady_clock::now() - begin).count() > seconds) {
      *more = true;
      return absl::OkStatus();
    }
    TF_RETURN_IF_ERROR(OpenVersion(name));
  }
  return absl::OkStatus();
}

absl::Status ServedResource::OpenVersion(const ManifestName& name) {
  auto* env = tensorflow::Env::Default();
  const std::string path = tensorflow::io::JoinPath(folder_, name.ToString());
  std::string text;
  const absl::Status read = tensorflow::ReadFileToString(env, path, &text);
  if (!read.ok()) return Of(path, read);
  Manifest manifest;
  const Status parsed = Manifest::Parse(text, &manifest);
  if (!parsed.ok()) return Of(path, ToTf(parsed));
  if (!(manifest.name == name)) {
    return absl::InvalidArgumentError(StrCat(path, ": says it is ", manifest.name.ToString()));
  }
  ServedChange change;
  change.version = name.version;
  change.publisher = name.publisher;
  change.whole = name.whole;
  change.written_micros = manifest.written_micros;
  change.tables.resize(manifest.tables.size());
  for (size_t t = 0; t < manifest.tables.size(); ++t) {
    for (const std::string& file : manifest.tables[t]) {
      std::shared_ptr<const RowsFile> opened;
      TF_RETURN_IF_ERROR(ToTf(RowsFile::Open(tensorflow::io::JoinPath(folder_, file), &opened)));
      // The rows of a whole version are not read before somebody asks for them.
      if (!name.whole) TF_RETURN_IF_ERROR(ToTf(opened->Verify()));
      change.tables[t].push_back(std::move(opened));
    }
  }
  const std::string prefix = tensorflow::io::JoinPath(folder_, manifest.others);
  auto variables = std::make_shared<ServedVariables>();
  const absl::Status found = ReadVariables(prefix, variables.get());
  if (!found.ok()) return Of(prefix, found);
  change.others = std::move(variables);
  const absl::Status applied = ToTf(served_.Apply(change));
  if (!applied.ok()) return Of(path, applied);
  current_ = name;
  return absl::OkStatus();
}

}  // namespace het_tf
