#include "ops/core/wire/frames.h"

#include <gtest/gtest.h>

#include <string>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

class FramesTest : public ::testing::Test {
 protected:
  void Pack(const std::vector<std::string>& texts) {
    std::vector<Frame> frames;
    for (const std::string& text : texts) frames.push_back({text.data(), text.size()});
    PackFrames(frames, [&](size_t bytes) {
      message_.assign(bytes / 8, ~uint64_t{0});
      return bytes_of();
    });
  }
  char* bytes_of() { return reinterpret_cast<char*>(message_.data()); }
  size_t size() const { return message_.size() * 8; }
  Status Unpack(size_t size, size_t num_frames) {
    std::vector<Frame> frames;
    HET_RETURN_IF_ERROR(UnpackFrames(bytes_of(), size, num_frames, &frames));
    texts_.clear();
    for (const Frame& frame : frames) texts_.emplace_back(frame.bytes, frame.bytes + frame.size);
    return Status();
  }

  std::vector<uint64_t> message_;
  std::vector<std::string> texts_;
};

TEST_F(FramesTest, ComeOutAsTheyWentIn) {
  for (const auto& texts :
       std::vector<std::vector<std::string>>{{"a"}, {"12345678", "", "123456789"}, {"", "x"}}) {
    Pack(texts);
    ASSERT_OK(Unpack(size(), texts.size()));
    EXPECT_EQ(texts_, texts);
  }
}

TEST_F(FramesTest, NothingToSayIsNoMessage) {
  Pack({"", "", ""});
  EXPECT_EQ(size(), 0u);
  ASSERT_OK(Unpack(0, 3));
  EXPECT_EQ(texts_, (std::vector<std::string>(3)));
}

TEST_F(FramesTest, Malformed) {
  Pack({"abc", "defghijkl"});
  EXPECT_REFUSED(Unpack(4, 2), "fewer than its header");
  EXPECT_REFUSED(Unpack(16, 2), "not what its header announces");
  EXPECT_REFUSED(Unpack(size() - 8, 2), "frame 1 ends beyond");
  EXPECT_REFUSED(Unpack(size(), 3), "2 frames, expected 3");
  message_[1] = ~uint64_t{0};
  EXPECT_REFUSED(Unpack(size(), 2), "frame 0 ends beyond");
  Pack({"abc"});
  message_.push_back(0);
  EXPECT_REFUSED(Unpack(size(), 1), "not what its header announces");
  message_[0] = 0;
  EXPECT_REFUSED(Unpack(size(), 1), "HETF");
}

}  // namespace
}  // namespace het_tf
