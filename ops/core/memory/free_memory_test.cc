#include "ops/core/memory/free_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace het_tf {
namespace {

class FreeMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::remove_all(root_); }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }

  const std::string root_ = ::testing::TempDir() + "free_memory_test/";
};

TEST_F(FreeMemoryTest, OfTheMachine) {
  EXPECT_EQ(FreeMemory(root_), -1);
  Write("proc/meminfo", "MemTotal:  900 kB\nMemFree: 100 kB\nMemAvailable:     300 kB\n");
  EXPECT_EQ(FreeMemory(root_), 300 * 1024);
}

TEST_F(FreeMemoryTest, OfAContainer) {
  Write("proc/meminfo", "MemAvailable: 300 kB\n");
  Write("sys/fs/cgroup/memory.max", "max\n");
  Write("sys/fs/cgroup/memory.current", "60000\n");
  EXPECT_EQ(FreeMemory(root_), 300 * 1024);
  Write("sys/fs/cgroup/memory.max", "100000\n");
  EXPECT_EQ(FreeMemory(root_), 40000);
  Write("sys/fs/cgroup/memory.stat", "anon 1\ninactive_file 5000\n");
  EXPECT_EQ(FreeMemory(root_), 45000);
  Write("sys/fs/cgroup/memory.current", "200000\n");
  EXPECT_EQ(FreeMemory(root_), 0);
}

TEST_F(FreeMemoryTest, OfAContainerOfTheFirstKind) {
  Write("proc/meminfo", "MemAvailable: 300 kB\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "60000\n");
  EXPECT_EQ(FreeMemory(root_), 300 * 1024);
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "100000\n");
  Write("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 7000\n");
  EXPECT_EQ(FreeMemory(root_), 47000);
}

}  // namespace
}  // namespace het_tf
