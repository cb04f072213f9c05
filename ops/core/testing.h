// What several of the tests need: statuses as expectations, threads, hand-made requests, snapshots.

#ifndef HET_TF_OPS_CORE_TESTING_H_
#define HET_TF_OPS_CORE_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ops/core/parallel.h"
#include "ops/core/row/row_config.h"
#include "ops/core/status.h"
#include "ops/core/table/table.h"
#include "ops/core/wire/reply.h"
#include "ops/core/wire/request.h"

#define EXPECT_OK(expr) EXPECT_TRUE(::het_tf::testing::IsOk(expr))
#define ASSERT_OK(expr) ASSERT_TRUE(::het_tf::testing::IsOk(expr))
// The error's message must hold the text: what it names is part of what it is for.
#define EXPECT_REFUSED(expr, text) EXPECT_TRUE(::het_tf::testing::IsRefused(expr, text))

namespace het_tf {
namespace testing {

// Whether these tests are built with a sanitizer, which takes address space and ten times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline ::testing::AssertionResult IsOk(const Status& status) {
  if (status.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << status.message();
}

inline ::testing::AssertionResult IsRefused(const Status& status, const std::string& text) {
  if (status.ok()) return ::testing::AssertionFailure() << "was not refused";
  if (status.message().find(text) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "'" << status.message() << "' lacks '" << text << "'";
}

using Random = std::mt19937_64;

// Below n. The standard distributions differ between libraries, and then so would the tests.
inline int64_t Below(Random* random, int64_t n) { return (*random)() % static_cast<uint64_t>(n); }
inline bool Chance(Random* random, double p) { return (*random)() < p * 0x1p64; }

inline void RunThreads(int n, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < n; ++t) threads.emplace_back(body, t);
  for (std::thread& thread : threads) thread.join();
}

// A ParallelFor that splits even the smallest work.
inline void ThreadedFor(int64_t total, int64_t /*cost*/,
                        const std::function<void(int64_t, int64_t)>& body) {
  constexpr int kThreads = 3;
  RunThreads(kThreads, [&](int t) {
    const int64_t first = total * t / kThreads, last = total * (t + 1) / kThreads;
    if (first < last) body(first, last);
  });
}

// Threads that stay, as TensorFlow's: work waits in line for one of them, and the caller for the
// work.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int t = 0; t < threads; ++t) threads_.emplace_back([this] { Work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  ParallelFor parallel_for() {
    return [this](int64_t total, int64_t, const std::function<void(int64_t, int64_t)>& body) {
      int64_t left = total;  // guarded by mutex_
      std::unique_lock<std::mutex> lock(mutex_);
      for (int64_t i = 0; i < total; ++i) {
        tasks_.push_back([this, i, &body, &left] {
          body(i, i + 1);
          std::lock_guard<std::mutex> done(mutex_);
          if (--left == 0) changed_.notify_all();
        });
      }
      changed_.notify_all();
      changed_.wait(lock, [&] { return left == 0; });
    };
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

// On the heap and of the exact size, so that AddressSanitizer sees a read beyond the end.
using Buffer = std::vector<char>;

// A request written by hand: what a cache sends, and what none would.
struct RequestBuilder {
  struct Row {
    int64_t key;
    uint32_t updates;  // 0: a gradient
    std::vector<float> floats;
    uint32_t clock = 0;
    float learning_rate = 1;
  };
  struct Push {
    uint64_t sequence;
    std::vector<Row> rows;  // gradients before contributions
    int64_t closure = 0;
    int64_t closures_done = 0;
  };
  struct Check {
    int64_t key;
    int64_t base;
  };

  RequestBuilder() {
    header.cache_id = 7;
    header.dim = header.contribution_dim = 1;
  }

  RequestHeader header;
  std::vector<Push> pushes;
  std::vector<Check> checks, value_checks;
  std::vector<int64_t> full, values;

  Buffer Encode() const {
    RequestHeader counted = header;
    counted.num_pushes = static_cast<uint32_t>(pushes.size());
    counted.num_checks = static_cast<uint32_t>(checks.size());
    counted.num_value_checks = static_cast<uint32_t>(value_checks.size());
    counted.num_full = static_cast<uint32_t>(full.size());
    counted.num_values = static_cast<uint32_t>(values.size());
    std::vector<PushHeader> push_headers;
    std::vector<size_t> push_sizes;
    size_t push_bytes = 0;
    for (const Push& push : pushes) {
      PushHeader each = {push.sequence, 0, 0, push.closure, push.closures_done};
      for (const Row& row : push.rows)
        ++(row.updates == 0 ? each.num_gradients : each.num_contributions);
      push_headers.push_back(each);
      push_sizes.push_back(PushBytes(each, header.format(), header.contribution_dim));
      push_bytes += push_sizes.back();
      if (counted.cut < push.sequence) counted.cut = push.sequence;
    }
    for (const auto* list : {&checks, &value_checks}) {
      for (const Check& check : *list)
        counted.base_bytes += static_cast<uint32_t>(BaseBytes(check.base));
    }
    std::vector<int64_t> keys;
    for (const auto* list : {&checks, &value_checks}) {
      for (const Check& check : *list) keys.push_back(check.key);
    }
    for (const auto* list : {&full, &values}) keys.insert(keys.end(), list->begin(), list->end());
    const KeyPacking packing = KeyPacking::Of(keys);
    counted.lowest_key = packing.lowest;
    counted.key_bytes = packing.key_bytes;
    Buffer bytes(RequestWriter::Size(counted, push_bytes));
    RequestWriter writer(bytes.data(), counted);
    for (size_t p = 0; p < pushes.size(); ++p) {
      PushWriter push(writer.AddPush(push_sizes[p]), push_headers[p], header.format(),
                      static_cast<int>(header.contribution_dim));
      for (const Row& row : pushes[p].rows) {
        if (row.updates == 0) {
          push.AddGradient(row.key, row.learning_rate, row.clock, row.floats.data());
          continue;
        }
        push.AddContribution(row.key, row.updates, row.clock, [&](float* to) {
          std::copy(row.floats.begin(), row.floats.end(), to);
        });
      }
    }
    writer.AddKeys(keys);
    for (const auto* list : {&checks, &value_checks}) {
      for (const Check& check : *list) writer.AddBase(check.base);
    }
    writer.Finish();
    return bytes;
  }
};

inline Status Sync(Table* table, const Buffer& request, Buffer* reply,
                   const ParallelFor& parallel_for = SerialFor) {
  return table->Sync(request.data(), request.size(), parallel_for, [&](size_t bytes) {
    reply->resize(bytes);
    return reply->data();
  });
}

inline std::unique_ptr<Table> MakeTable(const RowConfig& config, int shard = 0) {
  std::unique_ptr<Table> table;
  EXPECT_OK(Table::Create(config, shard, &table));
  return table;
}

struct TableRow {
  std::vector<float> value, slots;
  int64_t clock = 0;

  bool operator==(const TableRow& other) const {
    return value == other.value && slots == other.slots && clock == other.clock;
  }
};
inline std::ostream& operator<<(std::ostream& out, const TableRow& row) {
  for (const float x : row.value) out << x << ' ';
  out << '|';
  for (const float x : row.slots) out << ' ' << x;
  return out << " @ " << row.clock;
}
using TableRows = std::map<int64_t, TableRow>;

inline TableRows Snapshot(const Table& table, int64_t part = 0, int64_t num_parts = 1) {
  std::vector<int64_t> keys, clocks;
  std::vector<float> values, slots;
  EXPECT_OK(table.Export(part, num_parts, [&](int64_t n) {
    keys.resize(n);
    clocks.resize(n);
    values.resize(n * table.dim());
    slots.resize(n * table.slot_dim());
    return Table::Rows{keys.data(), values.data(), slots.data(), clocks.data()};
  }));
  TableRows rows;
  for (size_t r = 0; r < keys.size(); ++r) {
    const float* value = values.data() + r * table.dim();
    const float* slot = slots.data() + r * table.slot_dim();
    const TableRow row = {{value, value + table.dim()}, {slot, slot + table.slot_dim()}, clocks[r]};
    EXPECT_TRUE(rows.emplace(keys[r], row).second) << "key " << keys[r] << " was exported twice";
  }
  return rows;
}

inline Status Restore(Table* table, const TableRows& rows) {
  std::vector<int64_t> keys, clocks;
  std::vector<float> values, slots;
  for (const auto& [key, row] : rows) {
    keys.push_back(key);
    clocks.push_back(row.clock);
    values.insert(values.end(), row.value.begin(), row.value.end());
    slots.insert(slots.end(), row.slots.begin(), row.slots.end());
  }
  return table->Import({keys.data(), values.data(), slots.data(), clocks.data()}, keys.size());
}

inline std::vector<float> LookupRows(const Table& table, const std::vector<int64_t>& ids) {
  std::vector<float> out(ids.size() * table.dim());
  FoundRows found;
  EXPECT_OK(table.Lookup(UniqueIds(ids.data(), ids.size()), SerialFor, out.data(), &found));
  return out;
}

inline Status ApplyRows(Table* table, const std::vector<int64_t>& ids,
                        const std::vector<float>& gradients, float learning_rate = 1,
                        Nonfinite nonfinite = Nonfinite::kError) {
  return table->Apply(UniqueIds(ids.data(), ids.size()), FoundRows(), gradients.data(),
                      learning_rate, nonfinite, SerialFor);
}

}  // namespace testing
}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TESTING_H_
