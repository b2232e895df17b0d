#include "expert_service/core/expert_store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <vector>

namespace conclave {
namespace {

constexpr Incarnation kShard(7);
constexpr uint32_t kExperts = 3;
// Of each of an expert's three matrices; not whole pages, so that neighbours share some.
constexpr uint32_t kRows = 100, kCols = 99;

// Weights as a checkpoint has them: in a mapped file, one after the other.
class ExpertStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    file_ = std::tmpfile();
    ASSERT_NE(file_, nullptr);
    bytes_.resize(size_t{kExperts} * 3 * kRows * kCols);
    for (size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<char>(i * 31 + i / 7);
    ASSERT_EQ(std::fwrite(bytes_.data(), 1, bytes_.size(), file_), bytes_.size());
    ASSERT_EQ(std::fflush(file_), 0);
    void* map = ::mmap(nullptr, bytes_.size(), PROT_READ, MAP_SHARED, ::fileno(file_), 0);
    ASSERT_NE(map, MAP_FAILED);
    map_ = static_cast<char*>(map);
    table_.resize(1);
    for (uint32_t e = 0; e < kExperts; ++e) {
      const auto view = [&](uint32_t part) {
        return WeightView{map_ + (size_t{e} * 3 + part) * kRows * kCols, WeightDtype::kFp8E4m3, kRows, kCols};
      };
      table_[0].push_back({view(0), view(1), view(2)});
    }
  }
  void TearDown() override {
    ::munmap(map_, bytes_.size());
    std::fclose(file_);
  }
  static PlacementTable placement(uint64_t epoch, std::vector<uint32_t> experts) {
    PlacementTable table(Epoch(epoch), 1, kExperts, {{kShard, "s", "a"}});
    for (const uint32_t e : experts) table.add_home(0, e, 0);
    return table;
  }

  std::FILE* file_ = nullptr;
  char* map_ = nullptr;
  std::vector<char> bytes_;
  ExpertTable table_;
};

TEST_F(ExpertStoreTest, WhatIsGivenBackToTheSystemIsReadAgainUnchanged) {
  ExpertStore store(table_, kExperts, {0, true});
  store.assign(placement(1, {0, 1, 2}), kShard);
  while (store.warm(1) > 0) {
  }
  EXPECT_EQ(store.release(), 0u) << "all of it is assigned";
  store.assign(placement(2, {1}), kShard);
  EXPECT_EQ(store.held(), 3u);
  EXPECT_FALSE(store.warming()) << "it is warm";
  EXPECT_EQ(store.release(), 2u);
  EXPECT_FALSE(store.holds(0, 0));
  EXPECT_TRUE(store.holds(0, 1));
  EXPECT_EQ(store.held_bytes(), store.largest_bytes());
  EXPECT_EQ(std::memcmp(map_, bytes_.data(), bytes_.size()), 0);
  store.assign(placement(3, {0}), kShard);
  EXPECT_EQ(store.cold(), 1u);
  EXPECT_EQ(store.warm(1ull << 40), store.largest_bytes());
}

TEST_F(ExpertStoreTest, WhatAnOvertakenPlacementAssignedIsNotWarmedButMayComeBack) {
  ExpertStore store(table_, kExperts);
  store.assign(placement(1, {0, 1}), kShard);
  store.assign(placement(2, {2}), kShard);
  EXPECT_EQ(store.held(), 3u);
  EXPECT_EQ(store.cold(), 1u);
  while (store.warm(1) > 0) {
  }
  store.assign(placement(3, {0, 2}), kShard);
  EXPECT_EQ(store.cold(), 1u);
  EXPECT_EQ(store.release(), 1u);
  EXPECT_EQ(store.held(), 2u);
  // Of another shard only.
  store.assign(placement(4, {0, 1, 2}), Incarnation(8));
  EXPECT_EQ(store.release(), 2u);
  EXPECT_EQ(store.held(), 0u);
  EXPECT_EQ(store.held_bytes(), 0u);
}

}  // namespace
}  // namespace conclave
