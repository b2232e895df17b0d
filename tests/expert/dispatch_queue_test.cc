#include "expert_service/core/dispatch_queue.h"

#include <gtest/gtest.h>

namespace conclave {
namespace {

WaitingDispatch message(uint64_t worker, uint64_t seq, uint32_t layer, uint32_t items,
                        TimePoint expires = kNever) {
  WaitingDispatch d;
  d.worker = Incarnation(worker);
  d.batch.id = {Incarnation(worker), seq};
  d.batch.layer = layer;
  d.batch.expert_ids.assign(items, 0);
  d.expires = expires;
  return d;
}

std::vector<uint64_t> seqs(const std::vector<WaitingDispatch>& taken) {
  std::vector<uint64_t> out;
  for (const auto& d : taken) out.push_back(d.batch.id.seq);
  return out;
}

std::vector<WaitingDispatch> take(DispatchQueue& queue, TimePoint now, uint64_t max_items,
                                  uint64_t& expired) {
  std::vector<WaitingDispatch> taken(1);  // what it held before is gone
  queue.take(now, max_items, expired, taken);
  return taken;
}

TEST(DispatchQueue, TakesTheLayerOfTheOldestMessageFromAllWorkers) {
  DispatchQueue q(3, 1000);
  q.push(message(1, 1, 2, 4));
  q.push(message(2, 2, 0, 4));
  q.push(message(2, 3, 2, 4));
  q.push(message(1, 4, 0, 4));
  uint64_t expired = 0;
  EXPECT_EQ(seqs(take(q, 0, 100, expired)), (std::vector<uint64_t>{1, 3}));
  EXPECT_EQ(seqs(take(q, 0, 100, expired)), (std::vector<uint64_t>{2, 4}));
  EXPECT_TRUE(take(q, 0, 100, expired).empty());
  EXPECT_TRUE(q.empty());
  EXPECT_EQ(q.items(), 0u);
}

TEST(DispatchQueue, TakesNoMoreThanAskedButAlwaysOne) {
  DispatchQueue q(1, 1000);
  q.push(message(1, 1, 0, 50));
  q.push(message(1, 2, 0, 5));
  q.push(message(1, 3, 0, 5));
  q.push(message(1, 4, 0, 5));
  uint64_t expired = 0;
  EXPECT_EQ(seqs(take(q, 0, 10, expired)), (std::vector<uint64_t>{1}));
  EXPECT_EQ(seqs(take(q, 0, 10, expired)), (std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(seqs(take(q, 0, 10, expired)), (std::vector<uint64_t>{4}));
}

TEST(DispatchQueue, SkipsWhatIsExpired) {
  DispatchQueue q(2, 1000);
  q.push(message(1, 1, 0, 1, 10));
  q.push(message(1, 2, 1, 1, 30));
  uint64_t expired = 0;
  EXPECT_EQ(seqs(take(q, 10, 10, expired)), (std::vector<uint64_t>{2}));
  EXPECT_EQ(expired, 1u);
  EXPECT_TRUE(q.empty());
}

TEST(DispatchQueue, CancelsAndDropsAndKnowsWhenItIsFull) {
  DispatchQueue q(2, 10);
  q.push(message(1, 1, 0, 4));
  q.push(message(2, 1, 0, 4));
  EXPECT_FALSE(q.full());
  q.push(message(2, 2, 1, 4));
  EXPECT_TRUE(q.full());
  EXPECT_TRUE(q.cancel({Incarnation(1), 1}));
  EXPECT_FALSE(q.cancel({Incarnation(1), 1}));
  EXPECT_FALSE(q.full());
  EXPECT_EQ(q.drop_worker(Incarnation(2)), 2u);
  EXPECT_TRUE(q.empty());
  EXPECT_EQ(q.items(), 0u);
}

}  // namespace
}  // namespace conclave
