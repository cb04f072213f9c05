// No test copies device memory that nobody has written: the initcheck of compute-sanitizer refuses
// that on a GPU, and here the host build does.

#include <gtest/gtest.h>

#include <cstdint>

#include "ops/cuda/testing.h"

namespace het_tf {
namespace {

using testing::DeviceArray;
using testing::kStream;

class UnwrittenCopies : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo&) override {
    EXPECT_EQ(cuda::unwritten_copies.exchange(0), 0) << "copies of what nobody has written";
  }
};

// Of all tests of the program.
const bool listens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new UnwrittenCopies);
  return true;
}();

TEST(UnwrittenCopiesTest, AreFound) {
  if (!cuda::IsHostBuild()) GTEST_SKIP() << "compute-sanitizer finds them on a device";
  const DeviceArray<int32_t> from(3), to(3);
  EXPECT_CUDA(cuda::Fill(0, 2 * sizeof(int32_t), from.get(), kStream));
  EXPECT_CUDA(cuda::Copy(from.get(), 2 * sizeof(int32_t), to.get(), kStream));
  EXPECT_EQ(cuda::unwritten_copies, 0);
  EXPECT_CUDA(cuda::Copy(from.get(), 3 * sizeof(int32_t), to.get(), kStream));
  EXPECT_EQ(cuda::unwritten_copies.exchange(0), 1);
}

}  // namespace
}  // namespace het_tf
