// A shard that runs out of memory says so, keeps its rows and goes on serving them.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>
#include <numeric>
#include <vector>

#include "ops/core/table/table.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::ApplyRows;
using testing::LookupRows;
using testing::MakeTable;

// Leaves this process that much address space beyond what it has.
class MemoryLimit {
 public:
  explicit MemoryLimit(size_t bytes) {
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    getrlimit(RLIMIT_AS, &before_);
    rlimit limit = before_;
    limit.rlim_cur = pages * 4096 + bytes;
    setrlimit(RLIMIT_AS, &limit);
  }
  ~MemoryLimit() { setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_;
};

TEST(TableMemoryTest, OutOfMemoryIsAnErrorAndRowsStay) {
  if (testing::kSanitized) GTEST_SKIP() << "the sanitizer needs the address space";
  constexpr int kDim = 256;
  const auto table = MakeTable({kDim, "adam", "zeros"});
  std::vector<int64_t> ids(2000);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<float> gradients(ids.size() * kDim, 1);
  ASSERT_OK(ApplyRows(table.get(), ids, gradients));
  const auto before = testing::Snapshot(*table);
  Status status;
  int64_t rows = 0;
  {
    const MemoryLimit limit(size_t{100} << 20);
    for (int round = 0; round < 1000 && status.ok(); ++round) {
      rows = table->size();
      for (int64_t& id : ids) id += 2000;
      status = ApplyRows(table.get(), ids, gradients);
    }
    EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.message();
    EXPECT_NE(status.message().find("bytes for rows were asked for"), std::string::npos)
        << status.message();
    EXPECT_EQ(table->size(), rows) << "half of it was applied";
    EXPECT_EQ(LookupRows(*table, {5}), std::vector<float>(before.at(5).value));
    EXPECT_OK(ApplyRows(table.get(), {5}, std::vector<float>(kDim, 1)));
  }
  EXPECT_OK(ApplyRows(table.get(), ids, gradients)) << "there is memory again";
  EXPECT_EQ(table->size(), rows + 2000);
}

}  // namespace
}  // namespace het_tf
