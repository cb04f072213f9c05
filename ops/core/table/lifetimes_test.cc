#include "ops/core/table/lifetimes.h"

#include <gtest/gtest.h>

#include "ops/core/table/table_time.h"
#include "ops/core/testing.h"

namespace het_tf {
namespace {

TEST(LifetimesTest, NothingIsTheDefault) {
  Lifetimes lifetimes;
  ASSERT_OK(Lifetimes::Parse("", &lifetimes));
  EXPECT_FALSE(lifetimes.any());
  EXPECT_EQ(lifetimes.num_ranges(), 1);
}

TEST(LifetimesTest, ClausesAreOfTheirKeys) {
  Lifetimes lifetimes;
  ASSERT_OK(
      Lifetimes::Parse("given; admit count=3 sketch=4096; expire age=100; expire age=10 "
                       "updates_below=2 norm_below=.5;"
                       "keys -9223372036854775808 -1; admit probability=0.25; keys "
                       "9007199254740993 9007199254740993",
                       &lifetimes));
  EXPECT_TRUE(lifetimes.time_is_given());
  EXPECT_TRUE(lifetimes.admits_some() && lifetimes.expires());
  EXPECT_EQ(lifetimes.shortest_age(), 10);
  ASSERT_EQ(lifetimes.num_ranges(), 3);
  EXPECT_EQ(lifetimes.RangeOf(0), 0);
  EXPECT_EQ(lifetimes.RangeOf(-1), 1);
  EXPECT_EQ(lifetimes.RangeOf(int64_t{1} << 53), 0) << "a neighbour that a double takes for it";
  EXPECT_EQ(lifetimes.RangeOf((int64_t{1} << 53) + 1), 2);
  EXPECT_EQ(lifetimes.range(0).count, 3);
  EXPECT_EQ(lifetimes.range(0).sketch_bytes, 4096);
  ASSERT_EQ(lifetimes.range(0).expiries.size(), 2);
  EXPECT_EQ(lifetimes.range(0).expiries[1].updates_below, 2);
  EXPECT_EQ(lifetimes.range(0).expiries[1].norm_below, .5);
  EXPECT_EQ(lifetimes.range(1).probability, .25);
  EXPECT_TRUE(lifetimes.range(1).expiries.empty());
  EXPECT_TRUE(lifetimes.range(2).admits_all());
}

TEST(LifetimesTest, WrongClausesAreNamed) {
  Lifetimes lifetimes;
  const auto refused = [&](const std::string& text, const std::string& why) {
    EXPECT_REFUSED(Lifetimes::Parse(text, &lifetimes), why);
  };
  refused("admit count=0", "count must be an integer from 1");
  refused("admit count=1.5", "count must be an integer");
  refused("admit probability=1.5", "probability must lie in [0, 1]");
  refused("admit count=2 probability=.5", "exclude each other");
  refused("admit count=16 sketch=100", "counts to 15");
  refused("admit count=2 sketch=4503599627370496",
          "sketch must be an integer from 0 to 8589934592");
  refused("admit count=2; admit count=3", "another admission");
  refused("expire age=-1", "age must be an integer from 0");
  refused("expire age=1 norm=2", "no parameter 'norm'");
  refused("keys 3 2", "not of the form keys FIRST LAST");
  refused("keys 1", "not of the form keys FIRST LAST");
  refused("hold", "no such clause");
}

TEST(LifetimesTest, ClocksOfTwoLivesAreFartherApartThanAnyBound) {
  ClockOfLife clocks;
  EXPECT_EQ(clocks.gone(), 0) << "the base of a row that nobody has updated";
  int64_t last = clocks.gone();
  for (int life = 0; life < 1000; ++life) {
    EXPECT_GT(clocks.born(), last + kMaxBound);
    EXPECT_EQ(ClockOfLife::UpdatesOf(clocks.born() + life), life);
    last = clocks.born() + life;
    clocks.Ended(last);
    EXPECT_GT(clocks.gone(), last + kMaxBound);
    const int64_t gone = clocks.gone();
    clocks.Ended(last);
    EXPECT_EQ(clocks.gone(), gone) << "rows of one time are one step";
    last = gone + 5;  // refused updates, on a row that is not there
  }
  clocks.Ended(kMaxClock - 1);
  EXPECT_LE(clocks.born(), kMaxClock);
}

TEST(TableTimeTest, GivenTimeBeginsWithTheFirstCall) {
  TableTime time(nullptr);
  const uint32_t before = time.now();
  ASSERT_OK(time.Set(1000000));
  EXPECT_EQ(time.now(), before);
  ASSERT_OK(time.Set(1000007));
  EXPECT_EQ(time.now(), before + 7);
  EXPECT_EQ(time.TimeOfAge(10), before - 3) << "older than the table";
  EXPECT_REFUSED(time.Set(1000006), "now = 1000006 must be at least 1000007");
  EXPECT_REFUSED(time.Set(1000007 + (int64_t{1} << 31)), "2^31");
  EXPECT_REFUSED(time.Set(-1), "now = -1");
  time.Restart(50);
  ASSERT_OK(time.Set(53));
  EXPECT_EQ(time.now(), before + 3);
  EXPECT_REFUSED(TableTime([] { return 0; }).Set(1), "ages are in seconds");
}

TEST(TableTimeTest, SecondsGoOnFromTheBeginning) {
  int64_t seconds = -5;
  TableTime time([&] { return seconds; });
  EXPECT_EQ(time.now(), TableTime::kBegin);
  seconds += 100;
  EXPECT_EQ(time.now(), TableTime::kBegin + 100);
  EXPECT_EQ(time.TimeOfAge(int64_t{1} << 40), 0);
}

}  // namespace
}  // namespace het_tf
