// Requests and replies: what goes in comes out, and any other bytes are refused.

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "ops/core/memory/hash.h"
#include "ops/core/row/clock.h"
#include "ops/core/table/table.h"
#include "ops/core/testing.h"
#include "ops/core/wire/reply.h"
#include "ops/core/wire/request.h"

namespace het_tf {
namespace {

using testing::Below;
using testing::Buffer;
using testing::Chance;
using testing::MakeTable;
using testing::Random;
using testing::RequestBuilder;
using testing::Sync;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr uint32_t kMax32 = std::numeric_limits<uint32_t>::max();

Status Parse(const Buffer& bytes, RequestView* view) {
  return RequestView::Parse(bytes.data(), bytes.size(), view);
}
Status Parse(const Buffer& bytes, ReplyView* view) {
  return ReplyView::Parse(bytes.data(), bytes.size(), view);
}

// Contributions of 3 floats, so that a push with one of them ends with padding.
RequestBuilder SmallRequest() {
  RequestBuilder request;
  request.header.dim = 2;
  request.header.slot_dim = 1;
  request.header.contribution_dim = 3;
  request.header.cache_id = 0xfedcba9876543210;
  request.header.incarnation = 5;
  request.header.session = 6;
  request.header.read_bound = 3;
  request.pushes = {{1, {{100, 2, {1, 2, 3}, 7}}},
                    {2, {}},
                    {9, {{-7, 0, {4, 5}, 8, 0.125f}, {kMax, 4, {6, 7, 8}, kMax32}}}};
  request.checks = {{100, 6}, {-7, 0}};
  request.value_checks = {{3, int64_t{1} << 62}, {4, 300}};
  request.full = {55, kMax};
  request.values = {-1};
  return request;
}

Buffer SmallReply(uint32_t num_queries = 7) {
  ReplyHeader header;
  header.flags = kRestarted;
  header.incarnation = 77;
  header.session = 78;
  header.acknowledged = 9;
  header.num_queries = num_queries;
  header.num_full = 2;
  header.num_values = 1;
  header.dim = 2;
  header.slot_dim = 1;
  Buffer bytes(ReplyWriter::Size(header));
  ReplyWriter writer(bytes.data(), header);
  const float floats[] = {1, 2, 3, 4, 5, 6, 7, 8};
  writer.SetFull(0, {8, 1}, floats);
  writer.SetFull(1, {9, 4}, floats + 3);
  writer.SetValue(0, {10, 6}, floats + 6);
  return bytes;
}

TEST(RequestTest, RoundTrip) {
  const RequestBuilder request = SmallRequest();
  const Buffer bytes = request.Encode();
  RequestView view;
  ASSERT_OK(Parse(bytes, &view));
  EXPECT_EQ(view.header.cache_id, 0xfedcba9876543210);
  EXPECT_EQ(view.header.incarnation, 5u);
  EXPECT_EQ(view.header.session, 6u);
  EXPECT_EQ(view.header.cut, 9u);
  EXPECT_EQ(view.header.read_bound, 3);
  ASSERT_EQ(view.header.num_queries(), 7);
  EXPECT_EQ(view.keys, (std::vector<int64_t>{100, -7, 3, 4, 55, kMax, -1}));
  EXPECT_EQ(view.bases, (std::vector<int64_t>{6, 0, int64_t{1} << 62, 300}));
  const bool checks[] = {true, true, true, true, false, false, false};
  const bool values[] = {false, false, true, true, false, false, true};
  for (int64_t q = 0; q < 7; ++q) {
    EXPECT_EQ(view.is_check(q), checks[q]);
    EXPECT_EQ(view.wants_value(q), values[q]);
  }
  ASSERT_EQ(view.pushes.size(), request.pushes.size());
  for (size_t p = 0; p < view.pushes.size(); ++p) {
    const PushView& push = view.pushes[p];
    const RequestBuilder::Push& expected = request.pushes[p];
    EXPECT_EQ(push.sequence, expected.sequence);
    ASSERT_EQ(push.num_rows(), static_cast<int64_t>(expected.rows.size()));
    const float *gradient = push.gradients, *contribution = push.contributions;
    for (int64_t r = 0; r < push.num_rows(); ++r) {
      const RequestBuilder::Row& row = expected.rows[r];
      EXPECT_EQ(push.rows[r].key, row.key);
      EXPECT_EQ(push.rows[r].clock, row.clock);
      const bool is_gradient = r < push.num_gradients;
      EXPECT_EQ(is_gradient, row.updates == 0);
      if (is_gradient) {
        EXPECT_EQ(push.rows[r].learning_rate, row.learning_rate);
      } else {
        EXPECT_EQ(push.rows[r].updates, row.updates);
      }
      const float*& at = is_gradient ? gradient : contribution;
      EXPECT_EQ(std::vector<float>(at, at + row.floats.size()), row.floats);
      at += row.floats.size();
    }
  }
}

TEST(RequestTest, KeysOfAnyRange) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  const auto size_of = [](const std::vector<int64_t>& keys) {
    RequestBuilder request;
    request.full = keys;
    const Buffer bytes = request.Encode();
    RequestView view;
    EXPECT_OK(Parse(bytes, &view));
    EXPECT_EQ(view.keys, keys);
    return bytes.size() - sizeof(RequestHeader);
  };
  EXPECT_EQ(size_of({}), 0u);
  EXPECT_EQ(size_of({kMin}), 8u);
  for (int bytes = 1; bytes <= 8; ++bytes) {
    const uint64_t range = ~uint64_t{0} >> (64 - 8 * bytes);
    for (const int64_t low : {kMin, int64_t{-1}, int64_t{0}, int64_t{1} << 40}) {
      const auto high = static_cast<int64_t>(static_cast<uint64_t>(low) + range);
      if (high < low) continue;
      EXPECT_EQ(size_of({low, high, low + 1, high - 1, low, low, low, low}), 8u * bytes);
    }
  }
}

TEST(RequestTest, BasesOfAnySize) {
  for (int bits = 0; bits <= 62; ++bits) {
    const int64_t base = int64_t{1} << bits;
    for (const int64_t each : {base - 1, base, base + 1}) {
      RequestBuilder request;
      request.checks = {{1, each}};
      RequestView view;
      ASSERT_OK(Parse(request.Encode(), &view));
      EXPECT_EQ(view.bases[0], each);
    }
  }
}

TEST(ReplyTest, RoundTrip) {
  const Buffer bytes = SmallReply();
  ReplyView view;
  ASSERT_OK(Parse(bytes, &view));
  EXPECT_EQ(view.header.incarnation, 77u);
  EXPECT_EQ(view.header.session, 78u);
  EXPECT_EQ(view.header.acknowledged, 9u);
  EXPECT_EQ(view.header.flags, kRestarted);
  EXPECT_EQ(view.full_rows[1].clock, 9);
  EXPECT_EQ(view.full_rows[1].query, 4);
  EXPECT_EQ(view.full[5], 6);
  EXPECT_EQ(view.value_rows[0].clock, 10);
  EXPECT_EQ(view.values[1], 8);
}

// docs/protocol.md, 4: a check takes 16 bytes or less, a row 16 + 4(d+k) or less.
TEST(WireTest, CostOnTheWire) {
  EXPECT_LE(sizeof(int64_t) + BaseBytes(int64_t{1} << 48), 16u);
  EXPECT_EQ(BaseBytes(0), 1u);
  EXPECT_EQ(BaseBytes(127), 1u);
  EXPECT_EQ(BaseBytes(128), 2u);
  EXPECT_EQ(sizeof(ReplyRow), 16u);
  EXPECT_EQ(PushBytes({1, 1000, 0}, {64, false}, 65), sizeof(PushHeader) + 1000 * (16 + 4 * 64));
  EXPECT_EQ(PushBytes({1, 0, 1000}, {64, false}, 65), sizeof(PushHeader) + 1000 * (16 + 4 * 65));
  EXPECT_EQ(PushBytes({1, 1000, 0}, {64, true}, 65), sizeof(PushHeader) + 1000 * (16 + 2 * 64));
  EXPECT_EQ(PushBytes({1, 0, 1000}, {64, true}, 65), sizeof(PushHeader) + 1000 * (16 + 2 * 64 + 4));
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

TEST(WireTest, OnlyTheExactSizeIsAccepted) {
  ExpectOnlyTheExactSize<RequestView>(SmallRequest().Encode(), "request ");
  ExpectOnlyTheExactSize<ReplyView>(SmallReply(), "reply ");
}

TEST(WireTest, InBfloat16) {
  RequestBuilder request = SmallRequest();
  request.header.flags = kHalf;
  // An odd dim, and numbers of which the value has to be rounded and the rest does not.
  request.header.dim = 3;
  request.header.contribution_dim = 4;
  const float third = 1.0f / 3;
  request.pushes = {
      {1, {{100, 0, {1, 2, 3}}, {100, 0, {third, -third, 3e38f}}, {5, 2, {4, 5, 6, third}}}},
      {2, {{5, 1, {7, 8, third, third}}}}};
  const Buffer bytes = request.Encode();
  EXPECT_LT(bytes.size(), SmallRequest().Encode().size() + 40);
  ExpectOnlyTheExactSize<RequestView>(bytes, "request ");
  RequestView view;
  ASSERT_OK(Parse(bytes, &view));
  const PushView& push = view.pushes[0];
  EXPECT_EQ(std::vector<float>(push.gradients, push.gradients + 3), (std::vector<float>{1, 2, 3}));
  EXPECT_NEAR(push.gradients[3], third, third / 128);
  EXPECT_NEAR(push.gradients[4], -third, third / 128);
  EXPECT_NEAR(push.gradients[5], 3e38f, 3e38f / 128);
  EXPECT_EQ(std::vector<float>(push.contributions, push.contributions + 4),
            (std::vector<float>{4, 5, 6, third}));
  EXPECT_EQ(view.pushes[1].contributions[1], 8);
  EXPECT_EQ(view.pushes[1].contributions[3], third);
  EXPECT_EQ(request.Encode(), bytes) << "the same numbers each time";

  ReplyHeader header;
  header.flags = kHalfReply;
  header.num_queries = header.num_full = 2;
  header.num_full = header.num_values = 1;
  header.dim = 3;
  header.slot_dim = 1;
  Buffer reply(ReplyWriter::Size(header));
  ReplyWriter writer(reply.data(), header);
  const float floats[] = {1, third, 3, third};
  writer.SetFull(0, {8, 0}, floats);
  writer.SetValue(0, {9, 1}, floats);
  ExpectOnlyTheExactSize<ReplyView>(reply, "reply ");
  ReplyView read;
  ASSERT_OK(Parse(reply, &read));
  EXPECT_EQ(read.full[0], 1);
  EXPECT_NEAR(read.full[1], third, third / 256) << "to the nearest";
  EXPECT_EQ(read.full[3], third);
  EXPECT_EQ(read.values[1], read.full[1]);
  EXPECT_EQ(read.values[2], 3);
}

TEST(WireTest, UnalignedBytesAreRefused) {
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
  refused([](RequestHeader* h) { h->version = 1; }, "version 1");
  refused([](RequestHeader* h) { h->flags = 2; }, "unknown flags 2");
  refused([](RequestHeader* h) { h->key_bytes = 0; }, "key_bytes = 0");
  refused([](RequestHeader* h) { h->key_bytes = 9; }, "key_bytes = 9");
  refused([](RequestHeader* h) { h->key_bytes = 1; }, "not what its header announces");
  refused([](RequestHeader* h) { h->read_bound = -2; }, "read_bound = -2");
  refused([](RequestHeader* h) { h->dim = 0; }, "dim = 0");
  refused([](RequestHeader* h) { h->dim = kMax32; }, "dim = 4294967295");
  refused([](RequestHeader* h) { h->slot_dim = kMax32; }, "slot_dim = 4294967295");
  refused([](RequestHeader* h) { h->contribution_dim = kMax32; }, "contribution_dim = 4294967295");
  refused([](RequestHeader* h) { --h->base_bytes, ++h->padding %= 8; },
          "bytes of bases, which are");
  for (auto count :
       {&RequestHeader::num_checks, &RequestHeader::num_value_checks, &RequestHeader::num_full,
        &RequestHeader::num_values, &RequestHeader::base_bytes}) {
    for (int off = 1; off <= 16; ++off) {
      refused([&](RequestHeader* h) { h->*count += off; }, "not what its header announces");
    }
  }
  refused([](RequestHeader* h) { h->base_bytes = 0; }, "not what its header announces");
  refused([](RequestHeader* h) { --h->num_checks, ++h->num_full; }, "more than 3 numbers");
}

TEST(RequestTest, CountsTooLargeForTheirBytesAreRefused) {
  for (const uint32_t n : {1u << 20, 1u << 28, (1u << 31) - 1, 1u << 31, kMax32}) {
    ExpectRequestRefused([&](RequestHeader* h) { h->num_checks = n; }, "request has");
    ExpectRequestRefused([&](RequestHeader* h) { h->num_value_checks = n; }, "request has");
    ExpectRequestRefused([&](RequestHeader* h) { h->num_full = n; }, "request has");
    ExpectRequestRefused([&](RequestHeader* h) { h->num_values = n; }, "request has");
    ExpectRequestRefused([&](RequestHeader* h) { h->base_bytes = n; }, "request has");
    ExpectRequestRefused([&](RequestHeader* h) { h->num_pushes = n; }, "request ");
    for (const bool gradients : {false, true}) {
      Buffer bytes = SmallRequest().Encode();
      auto* push = reinterpret_cast<PushHeader*>(bytes.data() + sizeof(RequestHeader));
      (gradients ? push->num_gradients : push->num_contributions) = n;
      RequestView view;
      EXPECT_REFUSED(Parse(bytes, &view), "request ends within push");
    }
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
  refused([](ReplyHeader* h) { h->flags = 16; }, "unknown flags 16");
  for (const uint32_t n : {1u << 20, 1u << 31, kMax32}) {
    refused([&](ReplyHeader* h) { h->num_full = n; }, "num_full");
    refused([&](ReplyHeader* h) { h->num_full = h->num_queries = n; }, "reply has");
    refused([&](ReplyHeader* h) { h->num_values = n; }, "num_values");
    refused([&](ReplyHeader* h) { h->num_unasked = n; }, "reply has");
    refused([&](ReplyHeader* h) { h->dim = n; }, "reply has");
    refused([&](ReplyHeader* h) { h->slot_dim = n; }, "reply has");
  }
  refused([](ReplyHeader* h) { h->dim = 0; }, "dim = 0");
  refused([](ReplyHeader* h) { h->num_queries = 1; }, "num_queries = 1");
}

TEST(ReplyTest, RowsMustAnswerQueriesInOrder) {
  ReplyView view;
  EXPECT_REFUSED(Parse(SmallReply(6), &view), "reply value 0 answers query 6 of 6");
  for (const int64_t query : {int64_t{-1}, int64_t{1}, int64_t{0}, kMax}) {
    Buffer bytes = SmallReply();
    reinterpret_cast<ReplyRow*>(bytes.data() + sizeof(ReplyHeader))[1].query = query;
    EXPECT_REFUSED(Parse(bytes, &view), "reply row 1 answers query");
  }
  for (const int64_t clock : {int64_t{-1}, kMaxClock + 1, kMax}) {
    Buffer bytes = SmallReply();
    reinterpret_cast<ReplyRow*>(bytes.data() + sizeof(ReplyHeader))[1].clock = clock;
    EXPECT_REFUSED(Parse(bytes, &view), "reply row 1 has clock");
  }
}

// ---- Fuzzing. The seeds are fixed; the sanitizers say what went wrong. ----

// Touches all that the view claims to hold.
uint64_t ReadAll(const RequestView& view) {
  uint64_t sum = 0;
  const auto read = [&](const void* at, size_t bytes) {
    for (size_t b = 0; b < bytes; ++b) sum += static_cast<const unsigned char*>(at)[b];
  };
  for (const PushView& push : view.pushes) {
    read(push.rows, push.num_rows() * sizeof(PushRow));
    read(push.gradients, push.num_gradients * view.header.dim * sizeof(float));
    read(push.contributions, push.num_contributions * view.header.contribution_dim * sizeof(float));
  }
  for (const int64_t key : view.keys) sum += key;
  for (const int64_t base : view.bases) sum += base;
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
RequestBuilder RandomRequest(Random* random, const Table& table, const ReplyHeader& known) {
  constexpr int64_t kKeys = 100;
  RequestBuilder request;
  request.header.dim = static_cast<uint32_t>(table.dim());
  request.header.slot_dim = static_cast<uint32_t>(table.slot_dim());
  request.header.contribution_dim = static_cast<uint32_t>(table.contribution_dim());
  request.header.read_bound = Below(random, 3) - 1;
  request.header.incarnation = known.incarnation;
  request.header.session = known.session;
  request.header.cut = known.acknowledged;
  const auto number = [&] { return (*random)() >> Below(random, 64); };
  uint64_t sequence = known.acknowledged + 1;
  for (int64_t p = Below(random, 3); p > 0; --p) {
    RequestBuilder::Push push = {Chance(random, 0.1) ? number() : sequence++, {}};
    const int64_t gradients = Below(random, 5), rows = gradients + Below(random, 5);
    for (int64_t r = 0; r < rows; ++r) {
      const bool is_gradient = r < gradients;
      RequestBuilder::Row row = {
          Below(random, kKeys), is_gradient ? 0 : 1 + static_cast<uint32_t>(number()), {}};
      if (!is_gradient && row.updates == 0) row.updates = 1;
      row.clock = static_cast<uint32_t>((*random)());
      for (int i = 0; i < (is_gradient ? table.dim() : table.contribution_dim()); ++i) {
        const auto bits = static_cast<uint32_t>((*random)());
        float x;
        std::memcpy(&x, &bits, sizeof(bits));
        row.floats.push_back(Chance(random, 0.05) ? x : static_cast<float>(Below(random, 100)));
      }
      push.rows.push_back(row);
    }
    request.pushes.push_back(push);
  }
  for (auto* checks : {&request.checks, &request.value_checks}) {
    for (int64_t n = Below(random, 5); n > 0; --n) {
      checks->push_back({Below(random, kKeys), static_cast<int64_t>(number() >> 1)});
    }
  }
  for (auto* keys : {&request.full, &request.values}) {
    for (int64_t n = Below(random, 5); n > 0; --n) keys->push_back(Below(random, kKeys));
  }
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
    const Buffer exact(bytes);
    RequestView request;
    if (Parse(exact, &request).ok()) {
      ++accepted;
      sum += ReadAll(request);
    }
    Buffer reply_bytes = SmallReply();
    Mutate(&random, &reply_bytes);
    const Buffer reply_exact(reply_bytes);
    ReplyView reply;
    if (!Parse(reply_exact, &reply).ok()) continue;
    const int64_t floats =
        int64_t{reply.header.num_full} * (reply.header.dim + reply.header.slot_dim) +
        int64_t{reply.header.num_values} * reply.header.dim;
    for (int64_t f = 0; f < floats; ++f) {
      uint32_t bits;
      std::memcpy(&bits, reply.full + f, sizeof(bits));
      sum += bits;
    }
  }
  EXPECT_GT(accepted, 2000) << "too few to test anything";
  EXPECT_NE(sum, 0u);
}

TEST(FuzzTest, TablesSurviveAnyRequest) {
  for (const ClockRule clock : {ClockRule::kCount, ClockRule::kLamport, ClockRule::kDrift}) {
    for (const char* optimizer : {"adam", "ftrl l1=0.1", "row_wise_adagrad max_norm=1"}) {
      const auto table = MakeTable({2, optimizer, "uniform", 1, clock});
      Random random(3);
      int accepted = 0;
      ReplyHeader known;
      for (int i = 0; i < 3000; ++i) {
        RequestBuilder request = RandomRequest(&random, *table, known);
        if (known.session == 0) request.pushes.clear();
        Buffer bytes = request.Encode();
        if (Chance(&random, 0.3)) Mutate(&random, &bytes);
        Buffer reply;
        if (!Sync(table.get(), Buffer(bytes), &reply).ok()) continue;
        ++accepted;
        ReplyView view;
        ASSERT_OK(Parse(reply, &view));
        // A mutation may make it another cache's.
        if (view.header.session == 1) known = view.header;
      }
      EXPECT_GT(accepted, 500) << "too few to test anything";
      EXPECT_GT(known.acknowledged, 100u);
      EXPECT_GT(table->size(), 0);
      for (const auto& [key, row] : testing::Snapshot(*table)) {
        for (const float x : row.value) EXPECT_TRUE(std::isfinite(x)) << key;
        for (const float x : row.slots) EXPECT_TRUE(std::isfinite(x)) << key;
      }
    }
  }
}

}  // namespace
}  // namespace het_tf
