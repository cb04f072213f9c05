// The half of lanes.h that is CUDA's, on a warp of threads: what lanes of a GPU compute together,
// and, under ThreadSanitizer, that none reads what another writes without waiting for it. (In the
// host build all lanes are one thread, which no sanitizer sees race.)

#include <gtest/gtest.h>

#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <variant>
#include <vector>

#include "ops/core/row/lanes.h"
#include "ops/core/row/rule.h"
#include "ops/core/testing.h"

// What lanes.h has of CUDA. A call of all lanes of the mask returns when all of them have made it.

#define __device__
struct LaneOfThread {
  unsigned x;
};
static thread_local LaneOfThread threadIdx;

class LaneBarrier {
 public:
  explicit LaneBarrier(int lanes) : lanes_(lanes) {}
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t round = round_;
    if (++waiting_ == lanes_) {
      waiting_ = 0;
      ++round_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  const int lanes_;
  std::mutex mutex_;
  std::condition_variable all_;
  int waiting_ = 0;
  int64_t round_ = 0;
};

static LaneBarrier whole_warp(32), lower_half(16), upper_half(16);
static uint64_t lane_values[32];

static void __syncwarp(unsigned mask) {
  (mask == 0xffffffff ? whole_warp : mask == 0xffff ? lower_half : upper_half).Wait();
}

template <typename T>
static T __shfl_sync(unsigned mask, T x, int from, int width) {
  const unsigned lane = threadIdx.x;
  std::memcpy(&lane_values[lane], &x, sizeof(x));
  __syncwarp(mask);
  std::memcpy(&x, &lane_values[lane / width * width + static_cast<unsigned>(from) % width],
              sizeof(x));
  __syncwarp(mask);
  return x;
}

static unsigned __ballot_sync(unsigned mask, bool holds) {
  lane_values[threadIdx.x] = holds;
  __syncwarp(mask);
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && lane_values[lane] != 0) all |= 1u << lane;
  }
  __syncwarp(mask);
  return all;
}

static int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }

// Beside the host's half, which other files of the program have.
#define cuda warp_of_threads
#define __CUDACC__
#include "ops/cuda/lanes.h"
#undef __CUDACC__
#undef cuda

namespace het_tf {
namespace {

using warp_of_threads::Lanes;

// body(lanes, item) for the items that a warp works on at a time: one, or one for each half.
template <int kLanes, typename Body>
void RunWarp(const Body& body) {
  std::vector<std::thread> threads;
  for (unsigned lane = 0; lane < 32; ++lane) {
    threads.emplace_back([&body, lane] {
      threadIdx.x = lane;
      body(Lanes<kLanes>(), static_cast<int>(lane / kLanes));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

template <int kLanes>
void ExpectTheHosts() {
  std::vector<float> all(140);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<float>(static_cast<int>(i * 7919 % 20001) - 10000) / 7;
  }
  for (const int n : {1, 7, 16, 17, 33, 65, 130}) {
    SCOPED_TRACE(n);
    struct Item {
      std::vector<float> x;
      std::vector<int> written, read;
      std::vector<float> transformed, sums;
      float stored = 0;
      int once = 0;
      std::vector<char> same = std::vector<char>(32, 1);  // by lane
    };
    std::vector<Item> items(32 / kLanes);
    for (size_t i = 0; i < items.size(); ++i) {
      items[i].x.assign(all.begin() + i, all.begin() + i + n);
      items[i].written.resize(n);
      items[i].read.resize(n);
      items[i].transformed.resize(n);
      items[i].sums.resize(n);
    }
    RunWarp<kLanes>([&](const Lanes<kLanes>& lanes, int i) {
      Item& item = items[i];
      const std::vector<float>& x = item.x;
      const OneLane host;
      const auto at = [&](int c) { return x[c] * 0.5f; };
      const auto coarse = [&](int c) { return static_cast<int64_t>(x[c] / 100); };
      const auto holds = [&](int c) { return c >= n / 2 && x[c] > 0; };
      int first = -1, least = 0;
      for (int c = n - 1; c >= 0; --c) first = holds(c) ? c : first;
      for (int c = 1; c < n; ++c) least = coarse(c) < coarse(least) ? c : least;
      bool same = lanes.SumOfSquares(x.data(), n) == host.SumOfSquares(x.data(), n);
      same &= lanes.SumOfSquares(n, at) == host.SumOfSquares(n, at);
      same &= lanes.Largest(n, at) == host.Largest(n, at);
      same &= lanes.FirstWhere(n, holds) == first;
      same &= lanes.FirstWhere(n, [](int) { return false; }) == -1;
      same &= lanes.LeastOf(n, coarse) == least;
      same &= lanes.LeastOf(n, [](int) { return std::numeric_limits<int64_t>::max(); }) == 0;
      lanes.ForEach(n, [&](int c) { item.written[c] = c; });
      lanes.ForEach(n, [&](int c) { item.read[c] = item.written[n - 1 - c]; });
      for (int c = 0; c < n; ++c) same &= item.read[c] == n - 1 - c;
      float* transformed = item.transformed.data();
      lanes.Transform(transformed, n, [&](int c) { return x[n - 1 - c]; });
      lanes.Transform(transformed, n, [&](int c) { return transformed[c] * 3; });
      lanes.Sum(item.sums.data(), n, 2, 13, [&](int32_t j, int c) { return transformed[c] / j; });
      for (int c = 0; c < n; ++c) {
        float sum = x[n - 1 - c] * 3 / 2;
        for (int32_t j = 3; j < 13; ++j) sum += x[n - 1 - c] * 3 / j;
        same &= transformed[c] == x[n - 1 - c] * 3 && item.sums[c] == sum;
      }
      lanes.Store(&item.stored, 3);
      same &= item.stored == 3;
      lanes.Once([&] { ++item.once; });
      same &= item.once == 1;
      item.same[threadIdx.x] = same;
    });
    for (const Item& item : items) EXPECT_EQ(item.same, std::vector<char>(32, 1));
  }
}

TEST(WarpOfThreadsTest, HalvesComputeWhatTheHostDoes) { ExpectTheHosts<16>(); }
TEST(WarpOfThreadsTest, AllComputeWhatTheHostDoes) { ExpectTheHosts<32>(); }

// What kernels do with a row, in their order.
template <typename RuleType, typename LanesType>
void Use(const RuleType& rule, const LanesType& lanes, const std::vector<float>& gradient,
         std::vector<float>* row, std::vector<float>* fresh, std::vector<float>* record,
         std::vector<float>* contribution) {
  const Gradient g = {gradient.data(), SumOfSquares(gradient.data(), rule.dim())};
  rule.algorithm.BeginRecord(lanes, row->data(), record->data());
  for (int t = 0; t < 2; ++t) rule.Update(lanes, row->data(), g, 0.1f, record->data());
  rule.MoveOnto(lanes, row->data(), fresh->data(), record->data(), 2);
  lanes.ForEach(rule.row_dim(), [&](int i) { (*row)[i] = (*fresh)[i]; });
  rule.Update(lanes, row->data(), g, 0.1f, record->data());
  rule.algorithm.Contribute(lanes, row->data(), record->data(), contribution->data());
}

template <typename RuleType>
void ExpectTheHostsRow(RuleType rule) {
  using Algorithm = typename RuleType::Algorithm;
  std::vector<float> table;
  if constexpr (Algorithm::kHasTable) {
    table = rule.algorithm.MakeTable();
    rule.algorithm.table = table.data();
  }
  struct Row {
    std::vector<float> row, fresh, record, contribution;
  };
  Row start;
  for (int i = 0; i < rule.row_dim(); ++i) {
    const bool is_slot = i >= rule.dim();
    const float slot = is_slot ? rule.algorithm.InitialSlot(i - rule.dim()) : 0;
    start.row.push_back(is_slot ? slot : 0.1f * static_cast<float>(i % 7 - 3));
    start.fresh.push_back(is_slot ? slot : 0.2f * static_cast<float>(i % 5 - 2));
  }
  start.record.assign(rule.algorithm.record_dim(), 7);
  start.contribution.assign(rule.algorithm.contribution_dim(), 9);
  std::vector<float> gradient;
  for (int i = 0; i < rule.dim(); ++i) gradient.push_back(0.3f * static_cast<float>(i % 11 - 5));
  Row host = start;
  Use(rule, OneLane(), gradient, &host.row, &host.fresh, &host.record, &host.contribution);
  std::vector<Row> items(2, start);
  RunWarp<16>([&](const Lanes<16>& lanes, int i) {
    Row& item = items[i];
    Use(rule, lanes, gradient, &item.row, &item.fresh, &item.record, &item.contribution);
  });
  for (const Row& item : items) {
    EXPECT_EQ(item.row, host.row);
    EXPECT_EQ(item.fresh, host.fresh);
    EXPECT_EQ(item.record, host.record);
    EXPECT_EQ(item.contribution, host.contribution);
  }
}

TEST(WarpOfThreadsTest, OptimizersStepAsOnTheHost) {
  for (const std::string algorithm :
       {"sgd", "momentum momentum=0.9 nesterov=1", "adagrad", "row_wise_adagrad", "adam",
        "row_wise_adam", "rmsprop momentum=0.8 centered=1", "lion", "lamb",
        "ftrl l1=0.01 l2=0.01 beta=0.1"}) {
    for (const std::string options : {"", " clipnorm=1 max_norm=0.5"}) {
      SCOPED_TRACE(algorithm + options);
      AnyRule rule;
      ASSERT_OK(ParseRule(algorithm + options, 19, &rule));
      std::visit([](const auto& parsed) { ExpectTheHostsRow(parsed); }, rule);
    }
  }
}

}  // namespace
}  // namespace het_tf
