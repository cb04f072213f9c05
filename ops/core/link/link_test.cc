#include "ops/core/link/link.h"

#include <gtest/gtest.h>

#include <vector>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using Sequences = std::vector<uint64_t>;

constexpr Link::Epoch kFirst = {11, 1}, kSecond = {22, 1}, kThird = {33, 1};

using Carry = Link::Carry;

class LinkTest : public ::testing::Test {
 protected:
  LinkTest() {
    link_.Restart(kFirst, [](const Link::Push&) {});
  }

  void Cut() {
    Link::Push push;
    push.sequence = link_.NextSequence();
    push.updates = 1;
    link_.AddPush(push);
  }
  Sequences ToCarry(Carry carry = Carry::kIdle) const {
    Sequences sequences;
    for (const Link::Push* push : link_.ToCarry(carry)) sequences.push_back(push->sequence);
    return sequences;
  }
  // The reply of a request came.
  Sequences Answer(const Link::Request& request, uint64_t acknowledged) {
    Sequences merged;
    link_.Acknowledge(request.number, acknowledged,
                      [&](const Link::Push& push) { merged.push_back(push.sequence); });
    link_.Close(request.number);
    return merged;
  }
  Sequences After(uint64_t sequence) const {
    Sequences sequences;
    link_.ForEachPushAfter(sequence,
                           [&](const Link::Push& push) { sequences.push_back(push.sequence); });
    return sequences;
  }

  Link link_;
};

TEST_F(LinkTest, APushTravelsOnceAndIsAcknowledgedOnce) {
  Cut();
  EXPECT_EQ(ToCarry(), (Sequences{1}));
  const Link::Request first = link_.Open(Carry::kIdle);
  EXPECT_EQ(ToCarry(), Sequences{}) << "it is under way";
  EXPECT_EQ(ToCarry(Carry::kAll), (Sequences{1})) << "a flush carries it once more";
  Cut();
  EXPECT_EQ(ToCarry(), (Sequences{2}));
  const Link::Request second = link_.Open(Carry::kIdle);
  EXPECT_EQ(Answer(second, 2), (Sequences{1, 2}));
  EXPECT_EQ(Answer(first, 1), Sequences{});
  EXPECT_EQ(ToCarry(Carry::kAll), Sequences{});
  EXPECT_EQ(link_.acknowledged(), 2u);
}

TEST_F(LinkTest, ItIsSentAgainWhenItsMessageFailed) {
  Cut();
  const Link::Request request = link_.Open(Carry::kIdle);
  link_.Close(request.number);
  link_.Close(request.number);
  EXPECT_EQ(ToCarry(), (Sequences{1}));
}

TEST_F(LinkTest, WhatOvertookIsSentAgainWithWhatItOvertook) {
  Cut();
  const Link::Request slow = link_.Open(Carry::kIdle);
  Cut();
  const Link::Request fast = link_.Open(Carry::kIdle);
  EXPECT_EQ(Answer(fast, 0), Sequences{}) << "the shard had not seen push 1";
  EXPECT_EQ(ToCarry(), (Sequences{1, 2})) << "however long the first takes";
  EXPECT_EQ(Answer(slow, 1), (Sequences{1}));
  EXPECT_EQ(ToCarry(), (Sequences{2}));
}

TEST_F(LinkTest, PushesStayForRepliesThatLackThem) {
  Cut();
  const Link::Request slow = link_.Open(Carry::kIdle);
  const Link::Request overtaking =
      link_.Open(Carry::kIdle);  // may be answered before push 1 arrives
  Answer(slow, 1);
  EXPECT_EQ(After(0), (Sequences{1}));
  Answer(overtaking, 0);
  EXPECT_EQ(After(0), Sequences{});
}

TEST_F(LinkTest, SequencesBeginAnewInANewEpoch) {
  Cut();
  Cut();
  link_.Open(Carry::kIdle);
  Sequences lost;
  Answer({0, kFirst}, 1);
  link_.Restart(kSecond, [&](const Link::Push& push) { lost.push_back(push.sequence); });
  EXPECT_EQ(lost, (Sequences{2})) << "push 1 was merged before";
  EXPECT_EQ(link_.NextSequence(), 1u);
  EXPECT_EQ(ToCarry(Carry::kAll), Sequences{});
}

TEST_F(LinkTest, WhatAReplySpeaksOf) {
  const Link::Request before = link_.Open(Carry::kIdle);
  EXPECT_EQ(link_.StandingOf(before, kFirst), Link::Standing::kCurrent);
  EXPECT_EQ(link_.StandingOf(before, kSecond), Link::Standing::kNew);
  EXPECT_EQ(link_.StandingOf(before, {11, 2}), Link::Standing::kNew) << "it forgot us";
  link_.Restart(kSecond, [](const Link::Push&) {});
  EXPECT_EQ(link_.StandingOf(before, kFirst), Link::Standing::kOld);
  EXPECT_EQ(link_.StandingOf(before, kThird), Link::Standing::kOld) << "whatever it says";
  EXPECT_EQ(link_.StandingOf(before, kSecond), Link::Standing::kCurrent);
}

TEST_F(LinkTest, WhatWasAskedBeforeItStartedAnewIsOld) {
  link_.StartAnew();
  const Link::Request before = link_.Open(Carry::kIdle);
  EXPECT_EQ(link_.StandingOf(before, kFirst), Link::Standing::kNew);
  link_.StartAnew();
  EXPECT_EQ(link_.StandingOf(before, kFirst), Link::Standing::kOld) << "that session is another's";
  EXPECT_EQ(link_.StandingOf(link_.Open(Carry::kIdle), kFirst), Link::Standing::kNew);
}

TEST_F(LinkTest, AnAcknowledgementOfWhatWasNeverCutIsRefused) {
  Cut();
  const Link::Request request = link_.Open(Carry::kIdle);
  EXPECT_OK(link_.Check(request, {kFirst, 1}));
  EXPECT_REFUSED(link_.Check(request, {kFirst, 2}), "acknowledges push 2, the last cut is 1");
  EXPECT_REFUSED(link_.Check(request, {kSecond, 1}), "acknowledges push 1, the last cut is 0");
  EXPECT_REFUSED(link_.Check(request, {{0, 1}, 0}), "incarnation = 0");
  EXPECT_REFUSED(link_.Check(request, {{1, 0}, 0}), "session = 0");
}

TEST_F(LinkTest, WhatIsUnderWayIsWaitedForAndNotSentTwice) {
  Cut();
  const Link::Request under_way = link_.Open(Carry::kIdle);
  EXPECT_EQ(ToCarry(Carry::kAwaited), Sequences{});
  Cut();
  EXPECT_EQ(ToCarry(Carry::kAwaited), (Sequences{2}));
  const Link::Request waiting = link_.Open(Carry::kAwaited);
  EXPECT_EQ(Answer(waiting, 2), (Sequences{1, 2})) << "the other one came first";
  EXPECT_EQ(Answer(under_way, 1), Sequences{});
}

}  // namespace
}  // namespace het_tf
