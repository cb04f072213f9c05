#include "ops/core/memory/file_arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <thread>
#include <vector>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Random;

constexpr size_t kPage = FileArena::kPage;
// What may be in memory after a call, and what that call has wanted.
constexpr int64_t kMostBytes = FileArena::kLeastPages * kPage * 5 / 4;

std::unique_ptr<FileArena> Make(int64_t pages = FileArena::kLeastPages) {
  std::unique_ptr<FileArena> arena;
  EXPECT_OK(FileArena::Create(".", pages * static_cast<int64_t>(kPage), &arena));
  return arena;
}

// Wants records, as a request does.
int64_t Want(FileArena* arena, const std::vector<char*>& records, size_t bytes) {
  FileArena::Pages pages;
  for (const char* record : records) {
    arena->Want(record, bytes, [&](uint32_t page) { pages.push_back(page); });
  }
  arena->Read(pages, SerialFor);
  EXPECT_OK(arena->Trim());
  return static_cast<int64_t>(pages.size());
}

TEST(FileArenaTest, WhatIsLetGoComesBackAsItWas) {
  constexpr size_t kBytes = 600, kRecords = 4000;  // 10 times what may be in memory
  const auto arena = Make();
  char* records = arena->Allocate(kBytes * kRecords);
  std::vector<uint32_t> expected(kRecords, 0);
  Random random(1);
  for (int step = 0; step < 300; ++step) {
    std::vector<char*> wanted;
    std::vector<size_t> numbers;
    for (int i = 0; i < 20; ++i) {
      numbers.push_back(Below(&random, kRecords));
      wanted.push_back(records + numbers.back() * kBytes);
    }
    Want(arena.get(), wanted, kBytes);
    for (size_t i = 0; i < wanted.size(); ++i) {
      for (size_t at = 0; at < kBytes; at += 4) {
        uint32_t value;
        std::memcpy(&value, wanted[i] + at, 4);
        ASSERT_EQ(value, expected[numbers[i]]);
      }
      const uint32_t next = ++expected[numbers[i]];
      for (size_t at = 0; at < kBytes; at += 4) std::memcpy(wanted[i] + at, &next, 4);
    }
    EXPECT_LE(arena->memory_bytes(), kMostBytes);
  }
  EXPECT_GT(arena->pages_let_go(), 1000);
  EXPECT_GT(arena->pages_read(), 1000);
}

TEST(FileArenaTest, WhatIsUsedOftenStays) {
  const auto arena = Make();
  char* pages = arena->Allocate(1000 * kPage);
  std::vector<char*> often;
  for (size_t p = 0; p < 20; ++p) often.push_back(pages + p * 50 * kPage);
  Want(arena.get(), often, 1);
  int64_t read = 0, wanted = 0;
  for (size_t p = 0; p < 1000; ++p) {
    if (p % 50 == 0) continue;
    Want(arena.get(), {pages + p * kPage}, 1);
    if (p % 5 != 0) continue;
    read += Want(arena.get(), often, 1);
    wanted += static_cast<int64_t>(often.size());
  }
  EXPECT_LT(read, wanted / 2);
}

TEST(FileArenaTest, PagesTouchedUnaskedAreCountedAndLetGo) {
  constexpr int64_t kInMemory = 512, kPages = 8192;
  const auto arena = Make(kInMemory);
  char* pages = arena->Allocate(kPages * kPage);
  std::memset(pages, 1, kPages * kPage);
  EXPECT_EQ(arena->memory_bytes(), 0);
  Random random(1);
  for (int step = 0; step < 500; ++step) {
    std::vector<char*> wanted;
    for (int i = 0; i < 40; ++i) wanted.push_back(pages + Below(&random, kPages) * kPage);
    Want(arena.get(), wanted, 1);
    for (char* page : wanted) ASSERT_EQ(*page, 1);
  }
  std::vector<unsigned char> in_memory(kPages);
  ASSERT_EQ(mincore(pages, kPages * kPage, in_memory.data()), 0);
  const auto count =
      std::count_if(in_memory.begin(), in_memory.end(), [](auto m) { return m & 1; });
  EXPECT_LE(count, kInMemory * 5 / 4);
  EXPECT_GE(count, kInMemory / 2);
}

TEST(FileArenaTest, AClearedArenaBeginsAnew) {
  const auto arena = Make();
  for (int round = 0; round < 3; ++round) {
    char* memory = arena->Allocate(100 * kPage);
    for (size_t at = 0; at < 100 * kPage; ++at) ASSERT_EQ(memory[at], 0);
    std::memset(memory, 1, 100 * kPage);
    EXPECT_GE(arena->file_bytes(), static_cast<int64_t>(100 * kPage));
    arena->Clear();
    EXPECT_EQ(arena->file_bytes(), 0);
    EXPECT_EQ(arena->memory_bytes(), 0);
  }
}

TEST(FileArenaTest, ThreadsUseAndLetGoTheSamePages) {
  constexpr size_t kThreads = 4, kCells = 2000;
  const auto arena = Make();
  char* memory = arena->Allocate(kCells * kPage / 4);
  const auto cell = [&](size_t c, size_t thread) {
    return reinterpret_cast<std::atomic<uint32_t>*>(memory + c * kPage / 4) + thread;
  };
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Random random(t);
      std::vector<uint32_t> expected(kCells, 0);
      for (int step = 0; step < 1500; ++step) {
        const size_t c = Below(&random, kCells);
        Want(arena.get(), {memory + c * kPage / 4}, kPage / 4);
        ASSERT_EQ(cell(c, t)->load(), expected[c]);
        cell(c, t)->store(++expected[c]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(FileArenaTest, WhereNoFileCanBeIsRefused) {
  std::unique_ptr<FileArena> arena;
  EXPECT_REFUSED(FileArena::Create("/no/such/folder", 1 << 20, &arena), "'/no/such/folder'");
  EXPECT_REFUSED(FileArena::Create("/dev/shm", 1 << 20, &arena), "in memory (tmpfs)");
  EXPECT_REFUSED(FileArena::Create(".", 1000, &arena), "memory = 1000");
}

TEST(FileArenaTest, AFullDiskIsNoMemory) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {32 << 20, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto arena = Make();
  char* first = arena->Allocate(10 << 20);
  EXPECT_THROW(arena->Allocate(100 << 20), DiskFull);
  std::memset(first, 1, 10 << 20);  // what was there stays
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(arena->Allocate(100 << 20), nullptr);
  EXPECT_EQ(first[5], 1);
}

}  // namespace
}  // namespace het_tf
