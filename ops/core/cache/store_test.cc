// The verbs of a step, each alone: no shard, no message.

#include "ops/core/cache/store.h"

#include <gtest/gtest.h>

#include <vector>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

using Slots = std::vector<uint32_t>;
using Floats = std::vector<float>;

class StoreTest : public ::testing::Test {
 protected:
  void Make(const std::string& optimizer, int64_t capacity, bool half = false,
            Policy policy = Policy::kLru) {
    CacheConfig config;
    config.rows = {2, optimizer, "zeros"};
    config.policy = policy;
    config.capacity = capacity;
    EXPECT_OK(RowKit::Create(config.rows, &kit_));
    store_ = std::make_unique<Store>(kit_, config, RowFormat{2, half});
  }

  static UniqueIds Ids(const std::vector<int64_t>& ids) {
    return {ids.data(), static_cast<int64_t>(ids.size())};
  }

  Slots Find(const std::vector<int64_t>& ids, Store::Found* found = nullptr) {
    Slots slots;
    const Store::Found result = store_->Find(Ids(ids), SerialFor, &slots);
    if (found != nullptr) *found = result;
    return slots;
  }

  // A resident line with its row.
  uint32_t MakeFull(int64_t key, float value) {
    const uint32_t slot = store_->Make(key, HashKey(key), 1);
    Floats row(kit_.optimizer->row_dim(), value);
    store_->InstallFull(slot, row.data(), 5);
    store_->SetResident(slot);
    return slot;
  }

  int64_t Update(const std::vector<int64_t>& ids, const Slots& slots, const Floats& gradients) {
    const UniqueIds unique = Ids(ids);
    const GradientSums sums(unique, gradients.data(), 2, SerialFor);
    return store_->Update(
        unique, slots, sums, 1, SerialFor, [](const Line& line) { return line.pending >= 2; },
        &due_);
  }

  RowKit kit_;
  std::unique_ptr<Store> store_;
  Slots due_;  // by two updates each
};

TEST_F(StoreTest, FindHoldsWhatIsThere) {
  Make("sgd", 10);
  EXPECT_EQ(Find({7}), Slots{Line::kNone});
  const uint32_t full = MakeFull(7, 1), empty = store_->Make(8, HashKey(8), 1);
  Store::Found found;
  EXPECT_EQ(Find({9, 8, 7, 8}, &found), (Slots{Line::kNone, empty, full}));
  EXPECT_EQ(found.lines, 2);
  EXPECT_EQ(found.full, 1);
  EXPECT_EQ(store_->line(full)->holds, 2);
  EXPECT_FALSE(store_->Unhold(full));
  EXPECT_FALSE(store_->Unhold(full)) << "it is resident";
  EXPECT_FALSE(store_->Unhold(empty));
  EXPECT_TRUE(store_->Unhold(empty));
  store_->Free(empty);
  EXPECT_EQ(Find({8}), Slots{Line::kNone});
}

TEST_F(StoreTest, GatherCopiesEachIdsValue) {
  Make("adagrad", 10);
  const Slots slots = {MakeFull(1, 10), MakeFull(2, 20)};
  Floats out(6);
  store_->Gather(Ids({1, 2, 1}), slots, SerialFor, out.data());
  EXPECT_EQ(out, (Floats{10, 10, 20, 20, 10, 10}));
}

TEST_F(StoreTest, UpdatesAreMadeHereAndTravelAsGradientsWhileThatIsShorter) {
  Make("momentum momentum=0.5", 10);
  const uint32_t slot = MakeFull(1, 0);
  Line* line = store_->line(slot);
  EXPECT_EQ(Update({1}, {slot}, {1, 2}), 1);
  EXPECT_EQ(Floats(store_->row(slot), store_->row(slot) + 4), (Floats{-1, -2, -1, -2}));
  EXPECT_EQ(store_->dirty(), Slots{slot});
  ASSERT_TRUE(Unsent::TravelsAsGradients(*line));
  store_->unsent().ForEachGradient(*line, [](const float* gradient, float rate) {
    EXPECT_EQ(Floats(gradient, gradient + 2), (Floats{1, 2}));
    EXPECT_EQ(rate, 1);
  });
  Update({1}, {slot}, {1, 2});
  EXPECT_EQ(line->pending, 2);
  EXPECT_FALSE(Unsent::TravelsAsGradients(*line));
  Floats contribution(4);
  store_->unsent().GetContribution(*line, store_->row(slot), contribution.data());
  EXPECT_EQ(contribution, (Floats{-2.5, -5, -1.5, -3}));
  store_->MakeClean(slot);
  EXPECT_EQ(line->pending, 0);
  EXPECT_TRUE(store_->dirty().empty());
}

// As gradients travel 16 bytes for each and its columns; as a contribution the same once, and its
// rest in float32.
TEST_F(StoreTest, WhichIsShorterIsWeighedAsItTravels) {
  RowKit kit;
  EXPECT_OK(RowKit::Create({64, "adam", "zeros"}, &kit));
  const int rest = kit.optimizer->contribution_dim() - 64;
  EXPECT_EQ(rest, 2 * 64 + 1);
  EXPECT_EQ(Unsent::MaxGradients(*kit.optimizer, {64, false}), 2);
  EXPECT_LT(2 * (16 + 4 * 64), 16 + 4 * (64 + rest));
  EXPECT_GE(3 * (16 + 4 * 64), 16 + 4 * (64 + rest));
  EXPECT_EQ(Unsent::MaxGradients(*kit.optimizer, {64, true}), 4);
  EXPECT_LT(4 * (16 + 2 * 64), 16 + 2 * 64 + 4 * rest);
  EXPECT_GE(5 * (16 + 2 * 64), 16 + 2 * 64 + 4 * rest);
}

TEST_F(StoreTest, AsBfloat16MoreUpdatesTravelAsGradients) {
  for (const bool half : {false, true}) {
    Make("rmsprop momentum=0.5 centered=1", 10, half);
    const uint32_t slot = MakeFull(1, 0);
    Update({1}, {slot}, {1, 2});
    EXPECT_TRUE(Unsent::TravelsAsGradients(*store_->line(slot)));
    Update({1}, {slot}, {1, 2});
    EXPECT_EQ(Unsent::TravelsAsGradients(*store_->line(slot)), half);
  }
}

TEST_F(StoreTest, ALineWithoutSlotsKeepsGradientsUntilItsRowComes) {
  Make("momentum momentum=0.5", 10);
  const uint32_t slot = store_->Make(1, HashKey(1), 1);
  store_->InstallValue(slot, Floats{3, 3}.data(), 1);
  for (int update = 0; update < 3; ++update) Update({1}, {slot}, {1, 1});
  EXPECT_EQ(due_, (Slots{slot, slot}));
  EXPECT_EQ(Floats(store_->row(slot), store_->row(slot) + 2), (Floats{3, 3}));
  EXPECT_TRUE(Unsent::TravelsAsGradients(*store_->line(slot)));
  store_->InstallFull(slot, Floats{8, 8, 0, 0}.data(), 2);
  EXPECT_EQ(store_->row(slot)[0], 8 - 1 - 1.5f - 1.75f);
  EXPECT_FALSE(Unsent::TravelsAsGradients(*store_->line(slot))) << "three are longer than a sum";
}

TEST_F(StoreTest, AnInstalledRowTakesUnsentUpdatesIn) {
  for (const char* optimizer : {"sgd", "momentum", "adagrad", "adam", "ftrl"}) {
    for (const int updates : {1, 2, 5}) {
      Make(optimizer, 10);
      const uint32_t slot = MakeFull(1, 0);
      Floats expected(kit_.optimizer->row_dim(), 1);
      for (int update = 0; update < updates; ++update) Update({1}, {slot}, {0.5f, 0.25f});
      store_->InstallFull(slot, expected.data(), 9);
      EXPECT_NE(store_->row(slot)[0], 1) << optimizer;
      EXPECT_EQ(store_->line(slot)->pending, updates);
      EXPECT_EQ(store_->line(slot)->base, 9);
    }
  }
}

// The lines of steps under way are the lowest, since they came last.
TEST_F(StoreTest, HeldLinesDoNotMakeVictimsDearer) {
  constexpr int64_t kCapacity = 20000, kHeld = 5000, kVictims = 40;
  Make("sgd", kCapacity, false, Policy::kLfu);
  const auto evict = [&](uint32_t slot) { store_->ClearResident(slot); };
  std::vector<int64_t> hot(kCapacity);
  for (int64_t key = 0; key < kCapacity; ++key) {
    hot[key] = key;
    store_->Unhold(MakeFull(key, 0));
  }
  for (int use = 0; use < 8; ++use) {
    for (const uint32_t slot : Find(hot)) store_->Unhold(slot);
  }
  for (int64_t key = 0; key < kHeld; ++key) MakeFull(kCapacity + key, 0);
  store_->Trim(evict);
  const int64_t before = store_->lines_passed();
  for (int64_t victim = 0; victim < kVictims; ++victim) {
    MakeFull(kCapacity + kHeld + victim, 0);
    store_->Trim(evict);
    EXPECT_EQ(store_->num_resident(), kCapacity);
  }
  EXPECT_LE(store_->lines_passed() - before, 2 * (kCapacity + kHeld));
}

TEST_F(StoreTest, TrimEvictsWhatNobodyHolds) {
  Make("sgd", 2);
  Slots slots;
  for (int64_t key = 0; key < 5; ++key) slots.push_back(MakeFull(key, 0));
  Slots evicted;
  const auto evict = [&](uint32_t slot) {
    evicted.push_back(slot);
    store_->ClearResident(slot);
  };
  store_->Trim(evict);
  EXPECT_TRUE(evicted.empty());
  for (const uint32_t slot : slots) store_->Unhold(slot);
  Find({0, 4});
  store_->Trim(evict);
  EXPECT_EQ(evicted, (Slots{slots[1], slots[2], slots[3]}));
  EXPECT_EQ(store_->num_resident(), 2);
}

TEST_F(StoreTest, ADriftClockCountsLengths) {
  CacheConfig config;
  config.rows = {2, "sgd", "zeros", 0, ClockRule::kDrift};
  config.capacity = 2;
  EXPECT_OK(RowKit::Create(config.rows, &kit_));
  store_ = std::make_unique<Store>(kit_, config, RowFormat{2, false});
  const uint32_t slot = MakeFull(1, 0);
  Update({1}, {slot}, {3, 4});
  Update({1}, {slot}, {0, 0});
  EXPECT_EQ(store_->line(slot)->units, static_cast<uint32_t>(5 / kDriftUnit) + 1);
  store_->MakeClean(slot);
  Update({1}, {slot}, {3, 4});
  EXPECT_EQ(store_->line(slot)->units, static_cast<uint32_t>(5 / kDriftUnit)) << "since the push";
}

// A line that has nothing unsent carries no more than its row.
TEST_F(StoreTest, CleanLinesAreLean) {
  CacheConfig config;
  config.rows = {64, "row_wise_adagrad", "zeros"};
  config.capacity = 100000;
  EXPECT_OK(RowKit::Create(config.rows, &kit_));
  store_ = std::make_unique<Store>(kit_, config, RowFormat{2, false});
  const Floats row(65);
  for (int64_t key = 0; key < 100000; ++key) {
    store_->InstallFull(store_->Make(key, HashKey(key), 1), row.data(), 0);
  }
  EXPECT_LE(static_cast<double>(store_->memory_bytes()) / 100000, 0.6 * 576);
}

}  // namespace
}  // namespace het_tf
