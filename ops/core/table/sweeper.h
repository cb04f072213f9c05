// A thread that sweeps a table now and then, for as long as it exists.

#ifndef HET_TF_OPS_CORE_TABLE_SWEEPER_H_
#define HET_TF_OPS_CORE_TABLE_SWEEPER_H_

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include "ops/core/mutex.h"
#include "ops/core/table/sweep.h"

namespace het_tf {

class Sweeper {
 public:
  struct Pace {
    std::chrono::milliseconds between_sweeps, between_slices;
  };

  // A row stays for little longer than its age says, and a sweep takes a small part of one core: a
  // slice takes some tenths of a millisecond (benchmarks/expiry.py).
  static Pace PaceOf(const Lifetimes& lifetimes) {
    const int64_t seconds = std::clamp<int64_t>(lifetimes.shortest_age() / 16, 1, 3600);
    return {std::chrono::seconds(seconds), std::chrono::milliseconds(2)};
  }

  // table: must outlive the sweeper.
  Sweeper(Table* table, Pace pace) : table_(table), pace_(pace), thread_([this] { Run(); }) {}

  ~Sweeper() {
    {
      MutexLock lock(&mutex_);
      ended_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }
  Sweeper(const Sweeper&) = delete;
  Sweeper& operator=(const Sweeper&) = delete;

 private:
  void Run() {
    while (Wait(pace_.between_sweeps)) {
      try {
        Table::Sweep sweep(table_);
        while (sweep.Next()) {
          if (!Wait(pace_.between_slices)) return;
        }
      } catch (const std::bad_alloc&) {
        // The next sweep begins anew.
      }
    }
  }

  // Returns whether the sweeper goes on.
  bool Wait(std::chrono::milliseconds time) {
    const auto until = std::chrono::steady_clock::now() + time;
    MutexLock lock(&mutex_);
    while (!ended_ && changed_.WaitUntil(&mutex_, until)) {
    }
    return !ended_;
  }

  Table* const table_;
  const Pace pace_;
  Mutex mutex_;
  CondVar changed_;
  bool ended_ HET_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_TABLE_SWEEPER_H_
