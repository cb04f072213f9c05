// Unique ids. A hash table of positions brings equal ids together, and the lowest position of an id
// stands for it; so the outcome does not depend on who came first. A radix sort by key number then
// lists each key's occurrences, which the segment sum wants too.

#include "ops/core/memory/hash.h"
#include "ops/cuda/device.h"
#include "ops/cuda/het_cuda.h"
#include "ops/cuda/primitives.h"
#include "ops/cuda/scratch.h"

namespace het_tf {
namespace cuda {
namespace {

constexpr int32_t kEmpty = -1;

int64_t TableSize(int64_t n) {
  int64_t size = 16;
  while (size < 2 * n) size *= 2;
  return size;
}

struct UniqueScratch {
  int32_t* table;    // (table_size): the lowest position known of the id that lives here
  int32_t* place;    // (n): where in the table an id lives
  int32_t* is_key;   // (n): 1 at the first occurrence of an id
  int32_t* keys_to;  // (n): keys that first occur before this position
  int32_t* iota;     // (n)
  int32_t* sorted;   // (n): key numbers, ascending
  void* primitive;
  size_t scan_bytes = 0, sort_bytes = 0;

  UniqueScratch(Scratch* scratch, int64_t n) {
    table = scratch->Take<int32_t>(TableSize(n));
    place = scratch->Take<int32_t>(n);
    is_key = scratch->Take<int32_t>(n);
    keys_to = scratch->Take<int32_t>(n);
    // The two of them live after the table is of no more use.
    iota = table;
    sorted = table == nullptr ? nullptr : table + n;
    ExclusiveSum(nullptr, &scan_bytes, is_key, keys_to, n, nullptr);
    SortPairs(nullptr, &sort_bytes, place, sorted, iota, place, n, BitsBelow(n), nullptr);
    primitive = scratch->Take<char>(scan_bytes > sort_bytes ? scan_bytes : sort_bytes);
  }
};

struct InsertIds {
  const int64_t* ids;
  int32_t* table;
  uint32_t mask;
  int32_t* place;

  HET_DEVICE void operator()(int64_t item) const {
    const auto i = static_cast<int32_t>(item);
    uint32_t at = static_cast<uint32_t>(HashKey(ids[i])) & mask;
    while (true) {
      int32_t seen = AtomicLoad(&table[at]);
      if (seen == kEmpty) seen = AtomicCompareAndSwap(&table[at], kEmpty, i);
      if (seen == kEmpty) break;
      if (ids[seen] == ids[i]) {
        if (i < seen) AtomicMin(&table[at], i);
        break;
      }
      at = (at + 1) & mask;
    }
    place[i] = static_cast<int32_t>(at);
  }
};

struct MarkFirst {
  const int32_t* table;
  const int32_t* place;
  int32_t* is_key;

  HET_DEVICE void operator()(int64_t i) const { is_key[i] = table[place[i]] == i ? 1 : 0; }
};

struct NumberKeys {
  const int64_t* ids;
  const int32_t* table;
  const int32_t* place;
  const int32_t* keys_to;
  HetBatch batch;

  HET_DEVICE void operator()(int64_t i) const {
    const int32_t first = table[place[i]];
    const int32_t u = keys_to[first];
    batch.key_of[i] = u;
    if (first == i) batch.keys[u] = ids[i];
    if (i == batch.num_ids - 1) *batch.num_keys = keys_to[i] + (first == i ? 1 : 0);
  }
};

struct Iota {
  int32_t* to;

  HET_DEVICE void operator()(int64_t i) const { to[i] = static_cast<int32_t>(i); }
};

struct MarkBegin {
  const int32_t* sorted;
  HetBatch batch;

  HET_DEVICE void operator()(int64_t i) const {
    const int32_t u = sorted[i];
    if (i == 0 || sorted[i - 1] != u) batch.begin[u] = static_cast<int32_t>(i);
    if (i == batch.num_ids - 1) batch.begin[u + 1] = static_cast<int32_t>(batch.num_ids);
  }
};

}  // namespace

extern "C" {

const char* het_error_string(int error) { return ErrorString(error); }

size_t het_unique_scratch_bytes(int64_t n) {
  Scratch scratch;
  UniqueScratch(&scratch, n);
  return scratch.bytes();
}

int het_unique(const int64_t* ids, const HetBatch* batch, void* memory, HetStream stream) {
  const int64_t n = batch->num_ids;
  if (n == 0) {
    HET_CUDA_RETURN_IF_ERROR(Fill(0, sizeof(int32_t), batch->begin, stream));
    return Fill(0, sizeof(int32_t), batch->num_keys, stream);
  }
  Scratch scratch(memory);
  UniqueScratch s(&scratch, n);
  HET_CUDA_RETURN_IF_ERROR(Fill(0xff, sizeof(int32_t) * TableSize(n), s.table, stream));
  const auto mask = static_cast<uint32_t>(TableSize(n) - 1);
  HET_CUDA_RETURN_IF_ERROR(Launch(InsertIds{ids, s.table, mask, s.place}, n, stream));
  HET_CUDA_RETURN_IF_ERROR(Launch(MarkFirst{s.table, s.place, s.is_key}, n, stream));
  HET_CUDA_RETURN_IF_ERROR(
      ExclusiveSum(s.primitive, &s.scan_bytes, s.is_key, s.keys_to, n, stream));
  HET_CUDA_RETURN_IF_ERROR(Launch(NumberKeys{ids, s.table, s.place, s.keys_to, *batch}, n, stream));
  HET_CUDA_RETURN_IF_ERROR(Launch(Iota{s.iota}, n, stream));
  HET_CUDA_RETURN_IF_ERROR(SortPairs(s.primitive, &s.sort_bytes, batch->key_of, s.sorted, s.iota,
                                     batch->positions, n, BitsBelow(n), stream));
  return Launch(MarkBegin{s.sorted, *batch}, n, stream);
}

}  // extern "C"

}  // namespace cuda
}  // namespace het_tf
