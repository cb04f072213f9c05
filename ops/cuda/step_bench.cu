// Times a step on rows in device memory, verb by verb: step_bench IDS_FILE N ROWS DIM. The file
// holds batches of N ids, which are used in turn. Prints one line of JSON: medians in milliseconds,
// and what the device copies in a second. benchmarks/gpu_step.py writes the file and reads the
// line.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "ops/cuda/device.h"
#include "ops/cuda/het_cuda.h"

namespace het_tf {
namespace {

constexpr int kRounds = 7;
constexpr int64_t kBagSize = 10;  // of what is pooled; the last bag has what is left
constexpr HetStream kStream = nullptr;

void Must(int error, const char* what) {
  if (error == 0) return;
  std::printf("{\"error\": \"%s: %s\"}\n", what, het_error_string(error));
  std::exit(0);
}
#define MUST(expr) Must(expr, #expr)

template <typename T>
T* New(int64_t n) {
  void* memory = nullptr;
  MUST(cuda::Allocate(sizeof(T) * n, &memory));
  return static_cast<T*>(memory);
}

template <typename T>
T* NewOf(const std::vector<T>& from) {
  T* there = New<T>(static_cast<int64_t>(from.size()));
  MUST(cuda::Copy(from.data(), sizeof(T) * from.size(), there, kStream));
  MUST(cuda::Synchronize(kStream));  // from may end with this
  return there;
}

// Moments of the stream.
class Moment {
 public:
#ifdef __CUDACC__
  Moment() {
    MUST(cudaEventCreate(&event_));
    MUST(cudaEventRecord(event_, cuda::ToCuda(kStream)));
  }
  double MillisecondsSince(const Moment& other) const {
    float milliseconds = 0;
    MUST(cudaEventElapsedTime(&milliseconds, other.event_, event_));
    return milliseconds;
  }

 private:
  cudaEvent_t event_;
#else
  double MillisecondsSince(const Moment& other) const {
    return std::chrono::duration<double, std::milli>(time_ - other.time_).count();
  }

 private:
  const std::chrono::steady_clock::time_point time_ = std::chrono::steady_clock::now();
#endif
};

double Median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
  return x[x.size() / 2];
}

double CopiedGigabytesPerSecond(char* from, char* to, size_t bytes) {
  std::vector<double> milliseconds;
  for (int round = 0; round < 2 * kRounds; ++round) {
    const Moment begin;
    MUST(cuda::Copy(from, bytes, to, kStream));
    const Moment end;
    MUST(cuda::Synchronize(kStream));
    milliseconds.push_back(end.MillisecondsSince(begin));
  }
  return 2 * static_cast<double>(bytes) / Median(milliseconds) / 1e6;
}

int Main(const char* path, int64_t n, int64_t rows, int32_t dim) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const int64_t batches = static_cast<int64_t>(file.tellg()) / (n * 8);
  std::vector<int64_t> ids_here(batches * n);
  file.seekg(0);
  file.read(reinterpret_cast<char*>(ids_here.data()), batches * n * 8);
  if (!file || batches == 0) Must(1, path);

  const HetStoreConfig config = {dim, "row_wise_adagrad", rows, HET_LRU, HET_CLOCK_COUNT};
  HetStore* store = nullptr;
  char message[200] = "";
  int64_t bytes = 0;
  Must(het_store_bytes(&config, &bytes, message, sizeof(message)), "het_store_bytes");
  Must(het_store_create(&config, New<char>(bytes), &store, message, sizeof(message), kStream),
       "het_store_create");
  HetStoreInfo info;
  het_store_info(store, &info);

  int64_t* ids = NewOf(ids_here);
  const HetBatch batch = {
      n, New<int64_t>(n), New<int32_t>(n), New<int32_t>(n + 1), New<int32_t>(n), New<int32_t>(1)};
  const HetList misses = {New<int32_t>(n), New<int64_t>(n), New<int64_t>(n), New<int32_t>(1)};
  const HetList checks = {New<int32_t>(n), New<int64_t>(n), New<int64_t>(n), New<int32_t>(1)};
  int32_t* slots = New<int32_t>(n);
  float* fresh = New<float>(n * info.row_stride);
  float* out = New<float>(n * dim);
  float* sums = New<float>(n * dim);
  float* squares = New<float>(n);
  int64_t* nonfinite = New<int64_t>(1);
  int64_t* num_evicted = New<int64_t>(1);
  float* gradients[2];
  for (float*& each : gradients) {
    each = New<float>(n * dim);
    MUST(cuda::Fill(0x3c, sizeof(float) * n * dim, each, kStream));  // 0.0115
  }
  const int64_t bags = (n + kBagSize - 1) / kBagSize;
  std::vector<int32_t> begins(bags + 1), bag_of(n);
  std::vector<float*> out_of(bags), gradient_of(bags);
  for (int64_t i = 0; i < n; ++i) bag_of[i] = static_cast<int32_t>(i / kBagSize);
  for (int64_t b = 0; b <= bags; ++b) begins[b] = static_cast<int32_t>(std::min(b * kBagSize, n));
  for (int64_t b = 0; b < bags; ++b) {
    out_of[b] = out + b * dim;
    gradient_of[b] = gradients[0] + b * dim;
  }
  const HetBags pooled = {bags,    NewOf(begins), NewOf(bag_of), NewOf(std::vector<float>(bags, 1)),
                          nullptr, nullptr,       nullptr,       nullptr,
                          nullptr};
  float** out_of_there = NewOf(out_of);
  float** gradient_of_there = NewOf(gradient_of);
  char* scratch = New<char>(std::max(
      {het_unique_scratch_bytes(n), het_list_scratch_bytes(n), het_evict_scratch_bytes(store, n),
       het_segment_sum_scratch_bytes(n, dim), het_update_scratch_bytes(store, n)}));

  // All rows of the batches get a line; the store is as large as the table, so they lie anywhere.
  std::vector<HetNewcomer> each(n);
  for (int64_t j = 0; j < n; ++j) each[j] = {1, static_cast<int32_t>(j)};
  const HetNewcomer* newcomers = NewOf(each);
  MUST(het_set_visitors(store, New<char>(static_cast<int64_t>(het_visitors_bytes(store, n))), n,
                        kStream));
  int64_t* bases = New<int64_t>(n);
  MUST(cuda::Fill(0, sizeof(int64_t) * n, bases, kStream));
  int64_t keys = 0;
  for (int64_t b = 0; b < batches; ++b) {
    MUST(het_unique(ids + b * n, &batch, scratch, kStream));
    MUST(het_find(store, &batch, slots, kStream));
    MUST(het_list(store, &batch, slots, nullptr, nullptr, &misses, &checks, scratch, kStream));
    int32_t num_misses = 0, num_keys = 0;
    MUST(cuda::Copy(misses.num, sizeof(int32_t), &num_misses, kStream));
    MUST(cuda::Copy(batch.num_keys, sizeof(int32_t), &num_keys, kStream));
    MUST(cuda::Synchronize(kStream));
    keys += num_keys;
    MUST(het_evict(store, &misses, num_misses, newcomers, slots, num_evicted, scratch, kStream));
    MUST(het_make(store, &misses, num_misses, newcomers, slots, kStream));
    MUST(cuda::Fill(0, sizeof(float) * n * info.row_stride, fresh, kStream));
    MUST(het_install(store, misses.index, slots, fresh, bases, num_misses, kStream));
    MUST(het_unpin(store, &batch, slots, kStream));
  }

  std::map<std::string, std::vector<double>> milliseconds;
  for (int round = 0; round < kRounds; ++round) {
    for (int64_t b = 0; b < batches; ++b) {
      const Moment begin;
      MUST(het_unique(ids + b * n, &batch, scratch, kStream));
      const Moment unique;
      MUST(het_find(store, &batch, slots, kStream));
      const Moment found;
      MUST(het_gather(&batch, slots, info.rows, info.row_stride, info.lines, fresh, info.row_stride,
                      dim, out, kStream));
      const Moment gathered;
      MUST(het_segment_sum(&batch, gradients[b % 2], dim, sums, squares, nonfinite, scratch,
                           kStream));
      const Moment summed;
      MUST(het_update(store, &batch, slots, sums, squares, 0.01f, nullptr, scratch, kStream));
      const Moment updated;
      MUST(het_unpin(store, &batch, slots, kStream));
      const Moment end;
      MUST(het_pool(&batch, &pooled, slots, info.rows, info.row_stride, info.lines, fresh,
                    info.row_stride, dim, out_of_there, kStream));
      const Moment after_pool;
      MUST(het_segment_sum_pooled(&batch, &pooled, gradient_of_there, dim, sums, squares, nonfinite,
                                  scratch, kStream));
      const Moment after_pooled_sum;
      MUST(cuda::Synchronize(kStream));
      if (round == 0) continue;  // warms up
      milliseconds["unique"].push_back(unique.MillisecondsSince(begin));
      milliseconds["find"].push_back(found.MillisecondsSince(unique));
      milliseconds["gather"].push_back(gathered.MillisecondsSince(found));
      milliseconds["segment_sum"].push_back(summed.MillisecondsSince(gathered));
      milliseconds["update"].push_back(updated.MillisecondsSince(summed));
      milliseconds["unpin"].push_back(end.MillisecondsSince(updated));
      milliseconds["step"].push_back(end.MillisecondsSince(begin));
      milliseconds["pool"].push_back(after_pool.MillisecondsSince(end));
      milliseconds["pooled_sum"].push_back(after_pooled_sum.MillisecondsSince(after_pool));
    }
  }
  const double copied =
      CopiedGigabytesPerSecond(reinterpret_cast<char*>(gradients[0]),
                               reinterpret_cast<char*>(gradients[1]), sizeof(float) * n * dim);
  std::printf("{\"keys\": %lld, \"bags\": %lld, \"copied_gb_s\": %.1f",
              static_cast<long long>(keys / batches), static_cast<long long>(bags), copied);
  for (const auto& [verb, times] : milliseconds) {
    std::printf(", \"%s\": %.4f", verb.c_str(), Median(times));
  }
  std::printf("}\n");
  return 0;
}

}  // namespace
}  // namespace het_tf

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "step_bench IDS_FILE N ROWS DIM\n");
    return 2;
  }
  return het_tf::Main(argv[1], std::atoll(argv[2]), std::atoll(argv[3]), std::atoi(argv[4]));
}
