#include "ops/core/message.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "ops/core/hash.h"
#include "ops/core/table.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

using testing::Append;
using testing::Below;
using testing::Buffer;
using testing::Chance;
using testing::MakeTable;
using testing::Random;
using testing::RequestBuilder;
using testing::Sync;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

Status Parse(const Buffer& bytes, RequestView* view) {
  return RequestView::Parse(bytes.data(), bytes.size(), view);
}
Status Parse(const Buffer& bytes, ReplyView* view) {
  return ReplyView::Parse(bytes.data(), bytes.size(), view);
}

// Rows of 3 floats, so that a push of one row ends with padding.
RequestBuilder SmallRequest() {
  RequestBuilder request;
  request.header.dim = 2;
  request.header.slot_dim = 1;
  request.header.cache_id = 0xfedcba9876543210;
  request.header.incarnation = 5;
  request.header.read_bound = 3;
  request.pushes = {{1, {{100, 2}}, {1, 2, 3}, 0.5f},
                    {2, {}, {}, 0.25f},
                    {9, {{-7, 1}, {kMax, 4}}, {4, 5, 6, 7, 8, 9}, 0.125f}};
  request.checks = {{100, 6}, {-7, 0}};
  request.absent = {55, kMax, -1};
  return request;
}

Buffer SmallReply(int64_t num_queries = 5) {
  const ReplyHeader header = {kReplyMagic, kMessageVersion, kRestarted, 77, 9, num_queries, 2, 3};
  const ReplyRow rows[] = {{8, 1}, {9, 4}};
  const float data[] = {1, 2, 3, 4, 5, 6};
  Buffer bytes;
  Append(&bytes, &header, 1);
  Append(&bytes, rows, 2);
  Append(&bytes, data, 6);
  return Buffer(bytes);
}

TEST(RequestTest, RoundTrip) {
  const RequestBuilder request = SmallRequest();
  const Buffer bytes = request.Encode();
  RequestView view;
  ASSERT_OK(Parse(bytes, &view));
  EXPECT_EQ(view.header.cache_id, 0xfedcba9876543210);
  EXPECT_EQ(view.header.incarnation, 5u);
  EXPECT_EQ(view.header.read_bound, 3);
  EXPECT_EQ(view.num_queries(), 5);
  const int64_t keys[] = {100, -7, 55, kMax, -1};
  for (int64_t q = 0; q < 5; ++q) EXPECT_EQ(view.query_key(q), keys[q]);
  EXPECT_EQ(view.checks[0].base, 6);
  ASSERT_EQ(view.pushes.size(), request.pushes.size());
  size_t bytes_of_pushes = 0;
  for (size_t p = 0; p < view.pushes.size(); ++p) {
    const PushView& push = view.pushes[p];
    const RequestBuilder::Push& expected = request.pushes[p];
    EXPECT_EQ(push.sequence, expected.sequence);
    EXPECT_EQ(push.learning_rate, expected.learning_rate);
    ASSERT_EQ(push.num_rows, static_cast<int64_t>(expected.rows.size()));
    for (int64_t r = 0; r < push.num_rows; ++r) {
      EXPECT_EQ(push.rows[r].key, expected.rows[r].key);
      EXPECT_EQ(push.rows[r].clock, expected.rows[r].clock);
    }
    EXPECT_EQ(std::vector<float>(push.data, push.data + expected.data.size()), expected.data);
    bytes_of_pushes += PushBytes(push.num_rows, 3);
  }
  EXPECT_EQ(bytes.size(), sizeof(RequestHeader) + bytes_of_pushes + 2 * 16 + 3 * 8);
}

TEST(RequestTest, GradientsAreAsWideAsTheValue) {
  RequestBuilder request = SmallRequest();
  request.header.flags = kServerApplies;
  request.pushes = {{1, {{100, 2}}, {1, 2}}};
  RequestView view;
  EXPECT_OK(Parse(request.Encode(), &view));
  request.header.flags = 0;
  EXPECT_REFUSED(Parse(request.Encode(), &view), "not what its header announces");
}

TEST(ReplyTest, RoundTrip) {
  const Buffer bytes = SmallReply();
  ReplyView view;
  ASSERT_OK(Parse(bytes, &view));
  EXPECT_EQ(view.header.incarnation, 77u);
  EXPECT_EQ(view.header.acknowledged, 9u);
  EXPECT_EQ(view.header.flags, kRestarted);
  EXPECT_EQ(view.rows[1].clock, 9);
  EXPECT_EQ(view.rows[1].query, 4);
  EXPECT_EQ(view.data[5], 6);
}

// DESIGN 3.4.
TEST(MessageTest, CostOnTheWire) {
  EXPECT_EQ(sizeof(Check), 16u);
  EXPECT_EQ(sizeof(ReplyRow), 16u);
  EXPECT_EQ(PushBytes(1000, 64) - sizeof(PushHeader), 1000 * (16 + 4 * 64));
}

template <typename View>
void ExpectOnlyTheExactSize(const Buffer& bytes, const char* what) {
  View view;
  ASSERT_OK(Parse(bytes, &view));
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_REFUSED(Parse(Buffer(bytes.begin(), bytes.begin() + size), &view), what) << size;
  }
  for (size_t more = 1; more <= 24; ++more) {
    Buffer longer = bytes;
    longer.resize(bytes.size() + more);
    EXPECT_REFUSED(Parse(longer, &view), "not what its header announces");
  }
}

TEST(MessageTest, OnlyTheExactSizeIsAccepted) {
  ExpectOnlyTheExactSize<RequestView>(SmallRequest().Encode(), "request ");
  ExpectOnlyTheExactSize<ReplyView>(SmallReply(), "reply ");
}

TEST(MessageTest, UnalignedBytesAreRefused) {
  RequestView request;
  ReplyView reply;
  Buffer bytes(SmallRequest().Encode());
  bytes.insert(bytes.begin(), 4, 0);
  EXPECT_REFUSED(RequestView::Parse(bytes.data() + 4, bytes.size() - 4, &request), "aligned");
  bytes = SmallReply();
  bytes.insert(bytes.begin(), 1, 0);
  EXPECT_REFUSED(ReplyView::Parse(bytes.data() + 1, bytes.size() - 1, &reply), "aligned");
}

void ExpectRequestRefused(const std::function<void(RequestHeader*)>& change, const char* text) {
  Buffer bytes = SmallRequest().Encode();
  change(reinterpret_cast<RequestHeader*>(bytes.data()));
  RequestView view;
  EXPECT_REFUSED(Parse(bytes, &view), text);
}

TEST(RequestTest, HeadersThatCannotBeAreRefused) {
  const auto refused = ExpectRequestRefused;
  refused([](RequestHeader* h) { h->magic = kReplyMagic; }, "HETQ");
  refused([](RequestHeader* h) { h->version = 2; }, "version 2");
  refused([](RequestHeader* h) { h->flags = 2; }, "unknown flags 2");
  refused([](RequestHeader* h) { h->read_bound = -2; }, "read_bound = -2");
  refused([](RequestHeader* h) { h->dim = 0; }, "dim = 0");
  refused([](RequestHeader* h) { h->dim = 0xffffffff; }, "dim = 4294967295");
  refused([](RequestHeader* h) { h->slot_dim = 0xffffffff; }, "slot_dim = 4294967295");
}

TEST(RequestTest, CountsTooLargeForTheirBytesAreRefused) {
  const int64_t k31 = int64_t{1} << 31, k32 = int64_t{1} << 32;
  // 2^60 records of 16 bytes are 2^64 bytes, which is 0.
  for (const int64_t n : {int64_t{-1}, std::numeric_limits<int64_t>::min(), k31 - 1, k31, k32,
                          k32 + 2, kMax, kMax - 2, int64_t{1} << 60, int64_t{1} << 61}) {
    ExpectRequestRefused([&](RequestHeader* h) { h->num_checks = n; }, "request has");
    ExpectRequestRefused([&](RequestHeader* h) { h->num_absent = n; }, "request has");
  }
  for (const uint32_t n : {4u, 1u << 28, 1u << 31, 0xffffffffu}) {
    ExpectRequestRefused([&](RequestHeader* h) { h->num_batches = n; }, "request ");
    Buffer bytes = SmallRequest().Encode();
    reinterpret_cast<PushHeader*>(bytes.data() + sizeof(RequestHeader))->rows = n;
    RequestView view;
    EXPECT_REFUSED(Parse(bytes, &view), "request ends within push");
  }
}

TEST(ReplyTest, HeadersThatCannotBeAreRefused) {
  const auto refused = [](const std::function<void(ReplyHeader*)>& change, const char* text) {
    Buffer bytes = SmallReply();
    change(reinterpret_cast<ReplyHeader*>(bytes.data()));
    ReplyView view;
    EXPECT_REFUSED(Parse(bytes, &view), text);
  };
  refused([](ReplyHeader* h) { h->magic = kRequestMagic; }, "HETR");
  refused([](ReplyHeader* h) { h->version = 0; }, "version 0");
  for (const int64_t n :
       {int64_t{-1}, int64_t{1} << 31, int64_t{1} << 32, int64_t{1} << 60, kMax}) {
    refused([&](ReplyHeader* h) { h->num_rows = n; }, "num_rows");
    refused([&](ReplyHeader* h) { h->num_rows = h->num_queries = n; }, "reply has");
    refused([&](ReplyHeader* h) { h->width = n; }, "width");
  }
  refused([](ReplyHeader* h) { h->width = 0; }, "width = 0");
  refused([](ReplyHeader* h) { h->width = 1 << 24; }, "not what its header announces");
  refused([](ReplyHeader* h) { h->num_queries = 1; }, "num_queries = 1");
}

TEST(ReplyTest, RowsMustAnswerQueriesInOrder) {
  ReplyView view;
  EXPECT_REFUSED(Parse(SmallReply(4), &view), "reply row 1 answers query 4 of 4");
  for (const int64_t query : {int64_t{-1}, int64_t{1}, int64_t{0}, kMax}) {
    Buffer bytes = SmallReply();
    reinterpret_cast<ReplyRow*>(bytes.data() + sizeof(ReplyHeader))[1].query = query;
    EXPECT_REFUSED(Parse(bytes, &view), "reply row 1 answers query");
  }
}

// ---- Fuzzing. The seeds are fixed; the sanitizers say what went wrong. ----

// Touches all that the view claims to hold.
uint64_t ReadAll(const RequestView& view) {
  uint64_t sum = 0;
  const int64_t width = view.header.dim + (view.header.flags ? 0 : view.header.slot_dim);
  const auto read = [&](const void* at, size_t bytes) {
    for (size_t b = 0; b < bytes; ++b) sum += static_cast<const unsigned char*>(at)[b];
  };
  for (const PushView& push : view.pushes) {
    read(push.rows, push.num_rows * sizeof(PushRow));
    read(push.data, push.num_rows * width * sizeof(float));
  }
  for (int64_t q = 0; q < view.num_queries(); ++q) sum += view.query_key(q);
  return sum;
}

// Bytes that a mutation often sets: the edges of the fields' ranges.
void Mutate(Random* random, Buffer* bytes) {
  for (int64_t flips = 1 + Below(random, 4); flips > 0 && !bytes->empty(); --flips) {
    // Mostly in the headers, where it matters.
    const size_t range = Chance(random, 0.7) ? std::min<size_t>(bytes->size(), 96) : bytes->size();
    const size_t at = Below(random, range);
    switch (Below(random, 4)) {
      case 0:
        (*bytes)[at] ^= static_cast<char>(1 << Below(random, 8));
        break;
      case 1:
        (*bytes)[at] = static_cast<char>(Below(random, 256));
        break;
      case 2: {
        constexpr uint64_t kEdges[] = {0,          1,          0x7fffffff, 0x80000000, 0xffffffff,
                                       1ULL << 32, 1ULL << 60, 1ULL << 63, ~0ULL,      ~0ULL >> 1};
        const uint64_t edge = kEdges[Below(random, 10)];
        const size_t width = Below(random, 2) ? 4 : 8, start = at / width * width;
        if (start + width <= bytes->size()) std::memcpy(bytes->data() + start, &edge, width);
        break;
      }
      case 3:
        bytes->resize(Below(random, bytes->size() + 16));
        break;
    }
  }
}

// A request that a table would accept, but for what is in its numbers.
RequestBuilder RandomRequest(Random* random, const Table& table, int64_t num_keys) {
  RequestBuilder request;
  request.header.dim = table.dim();
  request.header.slot_dim = table.slot_dim();
  request.header.cache_id = Below(random, 4);
  request.header.read_bound = Below(random, 3) - 1;
  request.header.flags = Below(random, 2) ? kServerApplies : 0;
  const int width = table.dim() + (request.header.flags ? 0 : table.slot_dim());
  const auto number = [&] { return static_cast<int64_t>((*random)() >> Below(random, 64)); };
  for (int64_t p = Below(random, 3); p > 0; --p) {
    RequestBuilder::Push push = {(*random)() >> Below(random, 64), {}, {}};
    for (int64_t r = Below(random, 5); r > 0; --r) {
      push.rows.push_back({Below(random, num_keys), number()});
      for (int i = 0; i < width; ++i) {
        const auto bits = static_cast<uint32_t>((*random)());
        push.data.emplace_back();
        std::memcpy(&push.data.back(), &bits, sizeof(bits));
      }
    }
    request.pushes.push_back(push);
  }
  for (int64_t n = Below(random, 5); n > 0; --n) {
    request.checks.push_back({Below(random, num_keys), Below(random, 2) ? number() : -number()});
  }
  for (int64_t n = Below(random, 5); n > 0; --n) request.absent.push_back(Below(random, num_keys));
  return request;
}

TEST(FuzzTest, RandomBytesAreRefused) {
  Random random(1);
  for (int i = 0; i < 20000; ++i) {
    Buffer bytes(Below(&random, 200));
    for (char& byte : bytes) byte = static_cast<char>(random());
    RequestView request;
    EXPECT_FALSE(Parse(bytes, &request).ok());
    ReplyView reply;
    EXPECT_FALSE(Parse(bytes, &reply).ok());
  }
}

TEST(FuzzTest, MutatedMessagesParseOrAreRefused) {
  Random random(2);
  uint64_t sum = 0;
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    Buffer bytes = SmallRequest().Encode();
    Mutate(&random, &bytes);
    RequestView request;
    if (Parse(Buffer(bytes), &request).ok()) ++accepted;
    const Buffer exact(bytes);
    if (Parse(exact, &request).ok()) sum += ReadAll(request);

    Buffer reply_bytes = SmallReply();
    Mutate(&random, &reply_bytes);
    const Buffer reply_exact(reply_bytes);
    ReplyView reply;
    if (!Parse(reply_exact, &reply).ok()) continue;
    for (int64_t f = 0; f < reply.header.num_rows * reply.header.width; ++f) {
      uint32_t bits;
      std::memcpy(&bits, reply.data + f, sizeof(bits));
      sum += bits;
    }
  }
  EXPECT_GT(accepted, 2000) << "too few to test anything";
  EXPECT_NE(sum, 0u);
}

TEST(FuzzTest, TablesSurviveAnyRequest) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport}) {
    for (const char* optimizer : {"adam", "ftrl l1=0.1", "row_wise_adagrad max_norm=1"}) {
      const auto table = MakeTable({2, optimizer, "uniform", 1, clock});
      Random random(3);
      int accepted = 0;
      for (int i = 0; i < 3000; ++i) {
        Buffer bytes = RandomRequest(&random, *table, 100).Encode();
        if (Chance(&random, 0.3)) Mutate(&random, &bytes);
        Buffer reply;
        if (!Sync(table.get(), Buffer(bytes), &reply).ok()) continue;
        ++accepted;
        ReplyView view;
        EXPECT_OK(Parse(reply, &view));
      }
      EXPECT_GT(accepted, 500) << "too few to test anything";
      EXPECT_GT(table->size(), 0);
    }
  }
}

}  // namespace
}  // namespace het_tf
