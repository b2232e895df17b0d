#include "attention_service/core/expert_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "libs/runtime/sim_executor.h"
#include "tests/support/fake_transport.h"

namespace conclave {
namespace {

using testing::FakeTransport;

constexpr Incarnation kSelf(100);
constexpr Incarnation kS1(1);
constexpr Incarnation kS2(2);
constexpr uint32_t kHidden = 4;
constexpr size_t kRowBytes = kHidden * 4;

// The output of an expert for a token is its (token, expert) pair, so that a test sees where each row came
// from.
class ExchangeTest : public ::testing::Test {
 protected:
  ExchangeTest() {
    options.deadline_floor = 100 * kMillisecond;
    make();
  }
  void make() {
    exchange.reset();
    exchange = std::make_unique<ExpertExchange>(
        executor, transport, options, 2, kHidden, RowDtype::kF32, RowDtype::kF32, metrics,
        ExpertExchange::Callbacks{[this](uint32_t lane) { completed.push_back(lane); },
                                  [this](Incarnation s, const std::string&) { troubles.push_back(s); },
                                  [this](uint32_t, const Status& s) { failed = s; }});
    transport.set_ready([this] {
      std::vector<TransportEvent> events;
      transport.poll(events);
      for (auto& e : events) exchange->handle(e);
    });
  }
  // Runs what is due now, no timers of later.
  void settle() { world.run_until(world.now()); }
  void place(uint64_t epoch, std::vector<Incarnation> shards, bool replicated = false, bool lost = false) {
    std::vector<ShardEndpoint> ends;
    for (Incarnation s : shards) ends.push_back({s, "s", "addr"});
    PlacementTable table = even_placement(Epoch(epoch), 3, 8, ends);
    if (replicated) {
      table = PlacementTable(Epoch(epoch), 3, 8, ends);
      for (uint32_t l = 0; l < 3; ++l) {
        for (uint32_t e = 0; e < 8; ++e) {
          for (uint16_t s = 0; s < ends.size(); ++s) table.add_home(l, e, s);
        }
      }
    }
    exchange->set_placement(table, lost);
    settle();
  }
  void begin(uint32_t lane = 0, uint32_t layer = 0) {
    auto rows = std::make_shared<std::vector<std::byte>>(3 * kRowBytes);
    for (uint32_t t = 0; t < 3; ++t) (*rows)[t * kRowBytes] = std::byte(t);
    exchange->begin(lane, layer, 3, 2, ids, rows);
  }
  static CombineBatch answer(Incarnation shard, const DispatchBatch& d,
                             const std::vector<uint16_t>& missing = {}) {
    CombineBatch c;
    c.id = d.id;
    c.shard = shard;
    c.layer = d.layer;
    c.hidden = d.hidden;
    c.dtype = d.dtype;
    c.missing = missing;
    c.outputs = std::make_shared<std::vector<std::byte>>();
    for (uint32_t row = 0; row < d.row_count(); ++row) {
      for (uint32_t i = d.expert_begin[row]; i < d.expert_begin[row + 1]; ++i) {
        if (std::count(missing.begin(), missing.end(), d.expert_ids[i]) > 0) continue;
        c.items.push_back(i);
        std::vector<std::byte> out(kRowBytes);
        out[0] = (*d.rows)[row * kRowBytes];
        out[1] = std::byte(d.expert_ids[i]);
        c.outputs->insert(c.outputs->end(), out.begin(), out.end());
      }
    }
    return c;
  }
  void reply(size_t submit, const std::vector<uint16_t>& missing = {}) {
    const auto& [peer, batch] = transport.submits[submit];
    transport.push(peer, TransportEvent::Combine{answer(peer, batch, missing)});
    settle();
  }
  void expect_all(uint32_t lane = 0) {
    for (uint32_t t = 0; t < 3; ++t) {
      for (uint32_t s = 0; s < 2; ++s) {
        const std::byte* row = exchange->tracker(lane).rows(t)[s];
        ASSERT_NE(row, nullptr);
        EXPECT_EQ(row[0], std::byte(t));
        EXPECT_EQ(row[1], std::byte(ids[t * 2 + s]));
      }
    }
  }

  SimWorld world{1};
  SimExecutor& executor = world.add_process("worker");
  FakeTransport transport{executor, kSelf};
  ExchangeOptions options;
  ExchangeMetrics metrics;
  std::vector<uint32_t> completed;
  std::vector<Incarnation> troubles;
  Status failed;
  std::vector<uint16_t> ids = {1, 6, 7,
                               0, 2, 3};  // tokens 0..2, two slots; experts 0..3 on the first of two shards
  std::unique_ptr<ExpertExchange> exchange;
};

TEST_F(ExchangeTest, OneDispatchPerShardAnyOrderOfCombines) {
  place(1, {kS1, kS2});
  begin();
  ASSERT_EQ(transport.submits.size(), 2u);
  EXPECT_EQ(transport.submits[0].second.row_count(), 3u);
  EXPECT_EQ(transport.submits[1].second.row_count(), 2u);
  EXPECT_EQ(transport.submits[1].second.expert_ids, (std::vector<uint16_t>{6, 7}));
  EXPECT_NE(transport.submits[0].second.id, transport.submits[1].second.id);
  reply(1);
  EXPECT_TRUE(completed.empty());
  reply(0);
  EXPECT_EQ(completed, (std::vector<uint32_t>{0}));
  expect_all();
}

TEST_F(ExchangeTest, DuplicatesAndLateCombinesChangeNothing) {
  place(1, {kS1, kS2});
  begin();
  reply(0);
  const std::byte* first = exchange->tracker(0).rows(2)[0];
  reply(0);
  EXPECT_EQ(exchange->tracker(0).rows(2)[0], first);
  EXPECT_EQ(metrics.duplicate_items, 4u);
  reply(1);
  EXPECT_EQ(completed.size(), 1u);
  begin(0, 1);
  reply(0);  // of the layer before
  reply(1);
  EXPECT_EQ(metrics.late_combines, 2u);
  EXPECT_EQ(exchange->tracker(0).remaining(), 6u);
  reply(2);
  reply(3);
  EXPECT_EQ(completed.size(), 2u);
  std::vector<uint64_t> seqs;
  for (const auto& [peer, b] : transport.submits) seqs.push_back(b.id.seq);
  std::sort(seqs.begin(), seqs.end());
  EXPECT_EQ(std::unique(seqs.begin(), seqs.end()), seqs.end()) << "an identity was used twice";
}

TEST_F(ExchangeTest, DeadlineSendsRowsToOtherHomesUnderANewIdentity) {
  place(1, {kS1, kS2}, true);
  begin();
  const size_t sent = transport.submits.size();
  ASSERT_EQ(sent, 2u);
  reply(0);
  const Incarnation slow = transport.submits[1].first;
  world.run_until([&] { return transport.submits.size() > sent; }, world.now() + kSecond);
  ASSERT_EQ(transport.submits.size(), 3u);
  EXPECT_NE(transport.submits[2].first, slow);
  EXPECT_EQ(transport.submits[2].second.expert_ids, transport.submits[1].second.expert_ids);
  EXPECT_EQ(transport.cancels.size(), 1u);
  EXPECT_EQ(troubles, (std::vector<Incarnation>{slow}));
  EXPECT_EQ(metrics.deadlines, 1u);
  // The late answer of the old identity fills what is open; the new one is then a duplicate.
  reply(1);
  EXPECT_EQ(completed.size(), 1u);
  expect_all();
  reply(2);
  EXPECT_EQ(metrics.late_combines, 1u);
}

TEST_F(ExchangeTest, DeadlineWithoutAnotherHomeAsksTheSameShardAndWaitsLonger) {
  place(1, {kS1});
  begin();
  ASSERT_EQ(transport.submits.size(), 1u);
  world.run_until([&] { return transport.submits.size() == 2; }, world.now() + 10 * kSecond);
  world.run_until([&] { return transport.submits.size() == 3; }, world.now() + 10 * kSecond);
  ASSERT_EQ(transport.submits.size(), 3u);
  EXPECT_EQ(transport.submits[0].second.time_left, 100 * kMillisecond);
  EXPECT_EQ(transport.submits[1].second.time_left, 200 * kMillisecond);
  EXPECT_EQ(transport.submits[2].second.time_left, 400 * kMillisecond);
  reply(0);
  EXPECT_EQ(completed.size(), 1u);
}

TEST_F(ExchangeTest, APartAnsweredByAnOldIdentityIsNotSentAgain) {
  place(1, {kS1});
  begin();
  world.run_until([&] { return transport.submits.size() == 2; }, world.now() + kSecond);
  reply(0, {6, 7, 0});
  world.run_until([&] { return transport.submits.size() == 3; }, world.now() + kSecond);
  EXPECT_EQ(transport.submits[2].second.expert_ids, (std::vector<uint16_t>{6, 7, 0}));
}

TEST_F(ExchangeTest, MissingExpertsGoToOtherHomesOrAreOfferedAgainLater) {
  place(1, {kS1, kS2}, true);
  begin();
  reply(0, {transport.submits[0].second.expert_ids[0]});
  ASSERT_EQ(transport.submits.size(), 3u);
  EXPECT_NE(transport.submits[2].first, transport.submits[0].first);
  EXPECT_EQ(transport.submits[2].second.expert_ids.size(), 1u);
  reply(1);
  reply(2);
  expect_all();

  transport.submits.clear();
  place(2, {kS1});
  begin(1);
  reply(0, {7});
  EXPECT_EQ(transport.submits.size(), 1u)
      << "no loop of messages with a shard that lacks what it should have";
  world.run_until([&] { return transport.submits.size() == 2; }, world.now() + kSecond);
  ASSERT_EQ(transport.submits.size(), 2u);
  EXPECT_EQ(transport.submits[1].second.expert_ids, (std::vector<uint16_t>{7}));
  reply(1);
  EXPECT_EQ(completed.back(), 1u);
  expect_all(1);
}

TEST_F(ExchangeTest, HoldsRowsWithoutAHomeUntilThereIsOne) {
  begin();  // no placement yet
  EXPECT_TRUE(transport.submits.empty());
  place(1, {kS1, kS2});
  ASSERT_EQ(transport.submits.size(), 2u);
  reply(0);
  transport.push_down(kS2);
  settle();
  EXPECT_EQ(transport.submits.size(), 2u);
  EXPECT_EQ(troubles, (std::vector<Incarnation>{kS2}));
  EXPECT_TRUE(completed.empty());
  transport.auto_up = false;
  const Incarnation s3(3);
  place(2, {kS1, s3});
  EXPECT_EQ(transport.submits.size(), 2u) << "its connection does not stand yet";
  transport.push_up(s3);
  settle();
  ASSERT_EQ(transport.submits.size(), 3u);
  EXPECT_EQ(transport.submits[2].first, s3);
  EXPECT_EQ(transport.submits[2].second.epoch, Epoch(2));
  reply(2);
  EXPECT_EQ(completed.size(), 1u);
  expect_all();
}

TEST_F(ExchangeTest, RowsOfALostShardMoveAtOnce) {
  place(1, {kS1, kS2}, true);
  begin();
  ASSERT_EQ(transport.submits.size(), 2u);
  transport.push_down(kS1);
  settle();
  ASSERT_EQ(transport.submits.size(), 3u);
  EXPECT_EQ(transport.submits[2].first, kS2);
  reply(1);
  reply(2);
  expect_all();
  EXPECT_EQ(completed.size(), 1u);
}

TEST_F(ExchangeTest, ReconnectsToAShardThatThePlacementStillNames) {
  place(1, {kS1});
  transport.auto_up = false;
  transport.push_down(kS1);
  settle();
  world.run_until([&] { return transport.connects.size() == 2; }, world.now() + kSecond);
  EXPECT_EQ(transport.connects.size(), 2u);
  transport.push_down(kS1);
  settle();
  const TimePoint before = world.now();
  world.run_until([&] { return transport.connects.size() == 3; }, world.now() + kSecond);
  EXPECT_EQ(world.now() - before, 2 * options.reconnect) << "backs off";
}

TEST_F(ExchangeTest, ShardsThatLeaveAreClosedWhenTheyHaveAnswered) {
  place(1, {kS1, kS2});
  begin();
  place(2, {kS1});
  EXPECT_TRUE(transport.closes.empty());
  EXPECT_EQ(transport.submits.size(), 2u);
  EXPECT_EQ(exchange->placement_epoch(), Epoch(2));
  EXPECT_EQ(exchange->epoch(), Epoch(1)) << "rows are on their way";
  begin(1);
  EXPECT_EQ(transport.submits.size(), 3u) << "nothing new goes there";
  reply(1);
  EXPECT_EQ(transport.closes, (std::vector<Incarnation>{kS2}));
  EXPECT_EQ(exchange->epoch(), Epoch(1)) << "the other dispatch of that time";
  reply(0);
  EXPECT_EQ(exchange->epoch(), Epoch(2));
  expect_all();
  reply(2);
  EXPECT_EQ(completed.size(), 2u);
  EXPECT_EQ(metrics.retried_items, 0u);
}

TEST_F(ExchangeTest, AShardThatFailsWhileItLeavesIsNotMissed) {
  place(1, {kS1, kS2});
  begin();
  place(2, {kS1});
  transport.push_down(kS2);
  settle();
  EXPECT_TRUE(troubles.empty());
  ASSERT_EQ(transport.submits.size(), 3u);
  EXPECT_EQ(transport.submits[2].first, kS1);
  world.run_until([&] { return transport.connects.size() > 2; }, world.now() + 5 * kSecond);
  EXPECT_EQ(transport.connects.size(), 2u);
}

TEST_F(ExchangeTest, ANewPlacementIsUsedOnceItsShardsAreConnected) {
  place(1, {kS1});
  transport.auto_up = false;
  place(2, {kS1, kS2});
  EXPECT_EQ(exchange->placement_epoch(), Epoch(1));
  begin();
  ASSERT_EQ(transport.submits.size(), 1u) << "the one before serves";
  reply(0);
  EXPECT_EQ(completed.size(), 1u);
  transport.push_up(kS2);
  settle();
  EXPECT_EQ(exchange->placement_epoch(), Epoch(2));
  begin();
  EXPECT_EQ(transport.submits.size(), 3u);
  // Not for ever: what the new one gives to others is held then.
  place(3, {kS1, kS2, Incarnation(3)});
  EXPECT_EQ(exchange->placement_epoch(), Epoch(2));
  const TimePoint before = world.now();
  world.run_until([&] { return exchange->placement_epoch() == Epoch(3); }, before + 5 * kSecond);
  EXPECT_EQ(world.now() - before, options.switch_wait);
  // Nor after a loss.
  place(4, {kS1, Incarnation(4)}, false, true);
  EXPECT_EQ(exchange->placement_epoch(), Epoch(4));
}

TEST_F(ExchangeTest, AShardThatMissedADeadlineIsAvoidedForAWhile) {
  options.slow_peer = 300 * kMillisecond;
  make();
  place(1, {kS1, kS2}, true);
  begin();
  ASSERT_FALSE(transport.submits.empty());
  const size_t first = transport.submits.size();
  std::set<Incarnation> asked;
  for (size_t i = 0; i < first; ++i) asked.insert(transport.submits[i].first);
  ASSERT_TRUE(asked.contains(kS1));
  for (size_t i = 0; i < first; ++i) {
    if (transport.submits[i].first == kS2) reply(i);
  }
  world.run_until([&] { return metrics.deadlines > 0; }, world.now() + kSecond);
  EXPECT_EQ(metrics.peers_slow, 1u);
  ASSERT_GT(transport.submits.size(), first);
  for (size_t i = first; i < transport.submits.size(); ++i) {
    EXPECT_EQ(transport.submits[i].first, kS2);
    reply(i);
  }
  EXPECT_EQ(completed.size(), 1u);
  size_t seen = transport.submits.size();
  begin();
  for (; seen < transport.submits.size(); ++seen) {
    EXPECT_EQ(transport.submits[seen].first, kS2);
    reply(seen);
  }
  EXPECT_EQ(completed.size(), 2u);
  world.run_until(world.now() + options.slow_peer);
  begin();
  asked.clear();
  for (; seen < transport.submits.size(); ++seen) asked.insert(transport.submits[seen].first);
  EXPECT_TRUE(asked.contains(kS1)) << "it comes back";
}

TEST_F(ExchangeTest, RowsOfLostShardsMoveAtOnce) {
  place(1, {kS1, kS2});
  begin();
  place(2, {kS1}, false, true);
  EXPECT_EQ(transport.closes, (std::vector<Incarnation>{kS2}));
  ASSERT_EQ(transport.submits.size(), 3u);
  EXPECT_EQ(transport.submits[2].first, kS1);
  EXPECT_EQ(transport.submits[2].second.expert_ids, (std::vector<uint16_t>{6, 7}));
  place(1, {kS1, kS2});  // older
  EXPECT_EQ(exchange->placement_epoch(), Epoch(2));
}

TEST_F(ExchangeTest, MaskedRowsAreNeitherAwaitedNorSentAgain) {
  place(1, {kS1, kS2});
  begin();
  exchange->mask(0, 0);
  transport.push_down(kS2);
  settle();
  place(2, {kS1});
  ASSERT_EQ(transport.submits.size(), 3u);
  EXPECT_EQ(transport.submits[2].second.expert_ids, (std::vector<uint16_t>{7})) << "token 0's 6 is masked";
  reply(0);
  reply(2);
  EXPECT_EQ(completed.size(), 1u);
  begin(1);
  for (uint32_t t = 0; t < 3; ++t) exchange->mask(1, t);
  EXPECT_EQ(completed.size(), 2u) << "nothing left to wait for";
}

TEST_F(ExchangeTest, WaitsForCreditsInOrder) {
  place(1, {kS1});
  transport.submit_status = resource_exhausted("credits");
  begin(0, 0);
  begin(1, 1);
  EXPECT_TRUE(transport.submits.empty());
  EXPECT_EQ(metrics.credit_waits, 2u);
  transport.submit_status = OkStatus();
  transport.push(kS1, TransportEvent::Writable{});
  settle();
  ASSERT_EQ(transport.submits.size(), 2u);
  EXPECT_EQ(transport.submits[0].second.layer, 0u);
  EXPECT_EQ(transport.submits[1].second.layer, 1u);
}

TEST_F(ExchangeTest, LargeWorkIsSentInParts) {
  options.max_dispatch_rows = 2;
  options.max_dispatch_items = 3;
  make();
  place(1, {kS1});
  begin();
  ASSERT_EQ(transport.submits.size(), 3u);
  for (size_t i = 0; i < 3; ++i) reply(i);
  EXPECT_EQ(completed.size(), 1u);
  expect_all();
}

TEST_F(ExchangeTest, MalformedCombinesAreNotTaken) {
  place(1, {kS1, kS2});
  begin();
  const auto& [peer, batch] = transport.submits[0];
  std::vector<CombineBatch> bad(7, answer(peer, batch));
  bad[0].layer = 1;
  bad[1].items.back() = 99;
  bad[2].outputs = std::make_shared<std::vector<std::byte>>(3);
  bad[3].shard = kS2;
  bad[4].hidden = 8;
  std::swap(bad[5].items[0], bad[5].items[1]);
  bad[6].outputs = nullptr;
  for (const auto& b : bad) transport.push(peer, TransportEvent::Combine{b});
  transport.push(kS2, TransportEvent::Combine{answer(kS1, batch)});  // from a shard that was not asked
  settle();
  EXPECT_EQ(metrics.rejected_combines, 8u);
  EXPECT_EQ(metrics.accepted_items, 0u);
  auto other_worker = answer(peer, batch);
  other_worker.id.worker = Incarnation(101);
  transport.push(peer, TransportEvent::Combine{other_worker});
  settle();
  EXPECT_EQ(metrics.accepted_items, 0u);
}

TEST_F(ExchangeTest, RandomFaultsNeverLoseOrMixARow) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SplitMix64 random(seed);
    transport.submits.clear();
    completed.clear();
    metrics = {};
    make();
    uint64_t epoch = 1;
    place(epoch, {kS1, kS2}, seed % 2 == 0);
    begin(0, 2);
    size_t answered = 0;
    for (int turn = 0; turn < 10'000 && completed.empty(); ++turn) {
      switch (random.below(8)) {
        case 0:
          world.run_until(world.now() + static_cast<Nanos>(random.below(300)) * kMillisecond);
          break;
        case 1:
          transport.push_down(random.chance(0.5) ? kS1 : kS2);
          settle();
          break;
        case 2:
          place(++epoch, random.chance(0.3) ? std::vector{kS2} : std::vector{kS1, kS2}, random.chance(0.5));
          break;
        case 3:
          if (answered < transport.submits.size()) ++answered;  // lost
          break;
        case 4:
          if (!transport.submits.empty())
            reply(random.below(transport.submits.size()));  // again, or out of order
          break;
        case 5:
          if (answered < transport.submits.size()) {
            reply(answered, {static_cast<uint16_t>(random.below(8))});
            ++answered;
          }
          break;
        default:
          if (answered < transport.submits.size()) reply(answered++);
      }
    }
    ASSERT_EQ(completed.size(), 1u);
    expect_all();
    EXPECT_EQ(metrics.accepted_items, 6u);
  }
}

}  // namespace
}  // namespace conclave
