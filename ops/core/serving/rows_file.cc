#include "ops/core/serving/rows_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "ops/core/memory/prefetch.h"
#include "ops/core/row/rule.h"
#include "ops/core/serving/crc32.h"
#include "ops/core/serving/half.h"

namespace het_tf {
namespace {

constexpr char kMagic[8] = {'H', 'E', 'T', 'R', 'O', 'W', 'S', '\n'};
constexpr uint32_t kVersion = 1;
constexpr size_t kBlockBytes = 1 << 20;
constexpr size_t kIndexAlignment = 64;
// Beyond it the numbers of rows do not fit an entry.
constexpr uint64_t kMaxRows = 0xfffffffe;

// The fields of the footer, by their place in it.
enum Field : size_t {
  kFormatVersion = 8,
  kDtype = 12,
  kDim = 16,
  kShard = 20,
  kNumShards = 24,
  kBlock = 28,
  kRows = 32,     // uint64
  kEntries = 40,  // uint64
  kChecksumOfChecksums = 48,
  kChecksumOfFooter = 52,
  kFooterBytes = 56,
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian");

template <typename T>
T Load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}
template <typename T>
void Store(T value, char* at) {
  std::memcpy(at, &value, sizeof(value));
}

uint64_t RoundUp(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// Of the entries 5 in 8 are taken.
uint64_t EntriesFor(uint64_t rows) { return rows + rows * 3 / 5 + 1; }

uint64_t PlaceOfHash(uint64_t hash, uint64_t entries) {
  // As for buckets of the index in memory: shards use the hash's own high bits.
  return static_cast<uint64_t>(
      (static_cast<unsigned __int128>(hash * 0x9e3779b97f4a7c15ULL) * entries) >> 64);
}

uint64_t EntryOf(uint64_t hash, uint64_t row) { return hash << 32 | (row + 1); }

}  // namespace

Status StoredFormat::Parse(const std::string& dtype, int dim, StoredFormat* format) {
  if (dim < 1 || dim > kMaxDim) return InvalidArgument("dim = ", dim, " is out of range");
  format->dim = dim;
  if (dtype == "float32") {
    format->dtype = StoredDtype::kFloat32;
  } else if (dtype == "float16") {
    format->dtype = StoredDtype::kFloat16;
  } else if (dtype == "int8") {
    format->dtype = StoredDtype::kInt8;
  } else {
    return InvalidArgument("dtype must be float32, float16 or int8, not ", dtype);
  }
  return Status();
}

size_t StoredFormat::record_bytes() const {
  const size_t n = dim;
  switch (dtype) {
    case StoredDtype::kFloat32:
      return 8 + 4 * n;
    case StoredDtype::kFloat16:
      return 8 + RoundUp(2 * n, 4);
    case StoredDtype::kInt8:
      return 12 + RoundUp(n, 4);
  }
  return 0;
}

Status StoredFormat::Write(int64_t key, const float* values, char* record) const {
  std::memset(record, 0, record_bytes());
  Store(key, record);
  char* at = record + sizeof(key);
  if (dtype == StoredDtype::kFloat32) {
    std::memcpy(at, values, sizeof(float) * dim);
    return Status();
  }
  float most = 0;
  for (int i = 0; i < dim; ++i) most = std::max(most, std::fabs(values[i]));
  if (dtype == StoredDtype::kFloat16) {
    if (most >= kHalfEnd) return InvalidArgument("float16 cannot hold ", most, " of key ", key);
    for (int i = 0; i < dim; ++i) Store(ToHalf(values[i]), at + 2 * i);
    return Status();
  }
  const float scale = most / 127;
  Store(scale, at);
  at += sizeof(scale);
  for (int i = 0; i < dim && scale > 0; ++i) {
    const float steps = std::nearbyint(values[i] / scale);
    at[i] = static_cast<char>(static_cast<int8_t>(std::min(std::max(steps, -127.0f), 127.0f)));
  }
  return Status();
}

void StoredFormat::Read(const char* record, float* values) const {
  const char* at = record + sizeof(int64_t);
  switch (dtype) {
    case StoredDtype::kFloat32:
      std::memcpy(values, at, sizeof(float) * dim);
      break;
    case StoredDtype::kFloat16:
      FromHalf(at, dim, values);
      break;
    case StoredDtype::kInt8: {
      const float scale = Load<float>(at);
      const auto* steps = reinterpret_cast<const int8_t*>(at + sizeof(scale));
      for (int i = 0; i < dim; ++i) values[i] = scale * static_cast<float>(steps[i]);
      break;
    }
  }
}

int64_t KeyOfStored(const char* record) { return Load<int64_t>(record); }

RowsWriter::RowsWriter(const StoredFormat& format, int shard, int num_shards, Append append)
    : format_(format),
      shard_(shard),
      num_shards_(num_shards),
      append_(std::move(append)),
      record_(format.record_bytes()) {}

Status RowsWriter::Add(int64_t key, const float* values) {
  if (hashes_.size() >= kMaxRows) {
    return InvalidArgument("a file has at most ", kMaxRows, " rows: use more parameter servers");
  }
  HET_RETURN_IF_ERROR(format_.Write(key, values, record_.data()));
  hashes_.push_back(HashKey(key));
  return Write(record_.data(), record_.size());
}

Status RowsWriter::Finish() {
  const std::string zeros(RoundUp(num_bytes(), kIndexAlignment) - num_bytes(), '\0');
  HET_RETURN_IF_ERROR(Write(zeros.data(), zeros.size()));
  std::vector<uint64_t> index(EntriesFor(hashes_.size()));
  for (uint64_t row = 0; row < hashes_.size(); ++row) {
    uint64_t place = PlaceOfHash(hashes_[row], index.size());
    while (index[place] != 0) place = place + 1 == index.size() ? 0 : place + 1;
    index[place] = EntryOf(hashes_[row], row);
  }
  HET_RETURN_IF_ERROR(
      Write(reinterpret_cast<const char*>(index.data()), index.size() * sizeof(index[0])));
  HET_RETURN_IF_ERROR(WriteBlock());

  std::string end(reinterpret_cast<const char*>(checksums_.data()), checksums_.size() * 4);
  std::string footer(kFooterBytes, '\0');
  std::memcpy(footer.data(), kMagic, sizeof(kMagic));
  Store(kVersion, &footer[kFormatVersion]);
  Store(static_cast<uint32_t>(format_.dtype), &footer[kDtype]);
  Store(static_cast<uint32_t>(format_.dim), &footer[kDim]);
  Store(static_cast<uint32_t>(shard_), &footer[kShard]);
  Store(static_cast<uint32_t>(num_shards_), &footer[kNumShards]);
  Store(static_cast<uint32_t>(kBlockBytes), &footer[kBlock]);
  Store(static_cast<uint64_t>(hashes_.size()), &footer[kRows]);
  Store(static_cast<uint64_t>(index.size()), &footer[kEntries]);
  Store(Crc32(end.data(), end.size()), &footer[kChecksumOfChecksums]);
  Store(Crc32(footer.data(), kChecksumOfFooter), &footer[kChecksumOfFooter]);
  end += footer;
  written_ += static_cast<int64_t>(end.size());
  return append_(end.data(), end.size());
}

Status RowsWriter::Write(const char* data, size_t size) {
  while (size > 0) {
    const size_t part = std::min(size, kBlockBytes - block_.size());
    block_.append(data, part);
    data += part;
    size -= part;
    if (block_.size() == kBlockBytes) HET_RETURN_IF_ERROR(WriteBlock());
  }
  return Status();
}

Status RowsWriter::WriteBlock() {
  if (block_.empty()) return Status();
  checksums_.push_back(Crc32(block_.data(), block_.size()));
  written_ += static_cast<int64_t>(block_.size());
  const Status appended = append_(block_.data(), block_.size());
  block_.clear();
  return appended;
}

Status RowsFile::Open(const std::string& path, std::shared_ptr<const RowsFile>* file) {
  std::shared_ptr<RowsFile> opened(new RowsFile);
  opened->path_ = path;
  Status status = opened->Map(path);
  if (status.ok()) status = opened->ReadFooter();
  if (!status.ok()) return Status(status.code(), StrCat(path, ": ", status.message()));
  *file = std::move(opened);
  return Status();
}

Status RowsFile::Map(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return InvalidArgument("cannot be opened: ", std::strerror(errno));
  struct stat facts;
  Status status;
  if (fstat(descriptor, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    status = InvalidArgument("is no file of rows");
  } else if (static_cast<size_t>(facts.st_size) < kFooterBytes) {
    status = InvalidArgument("has ", facts.st_size, " bytes, too few for a file of rows");
  } else {
    size_ = facts.st_size;
    void* mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
      status = InvalidArgument("cannot be mapped: ", std::strerror(errno));
    } else {
      data_ = static_cast<char*>(mapped);
      madvise(mapped, size_, MADV_RANDOM);  // reading ahead would fetch rows that nobody wants
    }
  }
  close(descriptor);
  return status;
}

RowsFile::~RowsFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

Status RowsFile::ReadFooter() {
  const char* footer = data_ + size_ - kFooterBytes;
  if (std::memcmp(footer, kMagic, sizeof(kMagic)) != 0) {
    return InvalidArgument("is no file of rows, or its end is missing");
  }
  if (Load<uint32_t>(footer + kChecksumOfFooter) != Crc32(footer, kChecksumOfFooter)) {
    return InvalidArgument("its footer is damaged");
  }
  const auto version = Load<uint32_t>(footer + kFormatVersion);
  if (version != kVersion) return InvalidArgument("has format ", version, ", expected ", kVersion);
  const auto dtype = Load<uint32_t>(footer + kDtype), dim = Load<uint32_t>(footer + kDim);
  const auto shard = Load<uint32_t>(footer + kShard), shards = Load<uint32_t>(footer + kNumShards);
  const auto block = Load<uint32_t>(footer + kBlock);
  num_rows_ = Load<uint64_t>(footer + kRows);
  num_entries_ = Load<uint64_t>(footer + kEntries);
  constexpr uint32_t kMost = std::numeric_limits<int32_t>::max();
  if (dtype > static_cast<uint32_t>(StoredDtype::kInt8) || dim < 1 || dim > kMaxDim || shards < 1 ||
      shards > kMost || shard >= shards || block != kBlockBytes || num_rows_ > kMaxRows ||
      num_entries_ != EntriesFor(num_rows_)) {
    return InvalidArgument("its footer says dtype = ", dtype, ", dim = ", dim, ", shard = ", shard,
                           " of ", shards, ", block = ", block, ", rows = ", num_rows_,
                           ", entries = ", num_entries_);
  }
  format_.dtype = static_cast<StoredDtype>(dtype);
  format_.dim = static_cast<int>(dim);
  shard_ = static_cast<int>(shard);
  num_shards_ = static_cast<int>(shards);
  record_bytes_ = format_.record_bytes();
  // All less than 2^60.
  index_ = RoundUp(num_rows_ * record_bytes_, kIndexAlignment);
  checksums_ = index_ + num_entries_ * sizeof(uint64_t);
  const uint64_t blocks = RoundUp(checksums_, kBlockBytes) / kBlockBytes;
  const uint64_t size = checksums_ + blocks * sizeof(uint32_t) + kFooterBytes;
  if (size != size_) {
    return InvalidArgument("has ", size_, " bytes, ", num_rows_, " rows take ", size);
  }
  if (Load<uint32_t>(footer + kChecksumOfChecksums) !=
      Crc32(data_ + checksums_, blocks * sizeof(uint32_t))) {
    return InvalidArgument("its checksums are damaged");
  }
  return Status();
}

Status RowsFile::Verify() const {
  for (uint64_t at = 0; at < checksums_; at += kBlockBytes) {
    const uint64_t bytes = std::min<uint64_t>(kBlockBytes, checksums_ - at);
    const auto expected = Load<uint32_t>(data_ + checksums_ + at / kBlockBytes * sizeof(uint32_t));
    if (Crc32(data_ + at, bytes) != expected) {
      return InvalidArgument(path_, ": damaged between bytes ", at, " and ", at + bytes);
    }
  }
  return Status();
}

uint64_t RowsFile::PlaceOf(uint64_t hash) const { return PlaceOfHash(hash, num_entries_); }

uint64_t RowsFile::Entry(uint64_t place) const {
  return Load<uint64_t>(data_ + index_ + place * sizeof(uint64_t));
}

const char* RowsFile::Find(uint64_t hash, int64_t key) const {
  const uint64_t first = PlaceOf(hash);
  uint64_t place = first;
  do {
    const uint64_t entry = Entry(place);
    if (entry == 0) return nullptr;
    const uint64_t row = (entry & 0xffffffff) - 1;
    if (entry >> 32 == (hash & 0xffffffff) && row < num_rows_) {
      const char* record = Record(static_cast<int64_t>(row));
      if (KeyOfStored(record) == key) return record;
    }
    place = place + 1 == num_entries_ ? 0 : place + 1;
  } while (place != first);  // only a damaged index has no empty entry
  return nullptr;
}

void RowsFile::PrefetchIndex(uint64_t hash) const {
  het_tf::Prefetch(data_ + index_ + PlaceOf(hash) * sizeof(uint64_t));
}

void RowsFile::PrefetchRecord(uint64_t hash) const {
  const uint64_t entry = Entry(PlaceOf(hash));
  const uint64_t row = (entry & 0xffffffff) - 1;
  if (entry >> 32 == (hash & 0xffffffff) && row < num_rows_) {
    Prefetch(Record(static_cast<int64_t>(row)), record_bytes_);
  }
}

}  // namespace het_tf
