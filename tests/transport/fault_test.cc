#include "libs/transport/fault_transport.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "libs/transport/loopback_transport.h"
#include "tests/transport/conformance_tests.h"

namespace conclave::testing {
namespace {

using E = TransportEvent;

template <class AnyExecutor>
auto faulty_maker(std::shared_ptr<LoopbackHub> hub, FaultPlan plan, uint64_t seed) {
  return [hub, plan, seed](Node& node, AnyExecutor& executor, TransportOptions options) {
    auto transport = std::make_unique<LoopbackTransport>(hub, executor, options);
    node.session = transport.get();
    node.transport = std::make_unique<FaultTransport>(std::move(transport), executor, seed, plan);
  };
}

// With every fault off, the decorated transport is a transport like any other.
INSTANTIATE_TEST_SUITE_P(FaultsOff, TransportConformance,
                         ::testing::Values(RigFactory{"threads",
                                                      []() -> std::unique_ptr<Rig> {
                                                        return std::make_unique<ThreadRig>(
                                                            faulty_maker<LoopExecutor>(
                                                                std::make_shared<LoopbackHub>(), {}, 1));
                                                      }},
                                           RigFactory{"simulated",
                                                      []() -> std::unique_ptr<Rig> {
                                                        return std::make_unique<SimRig>(
                                                            3, faulty_maker<Executor>(
                                                                   std::make_shared<LoopbackHub>(), {}, 1));
                                                      }}),
                         [](const auto& p) { return p.param.name; });

struct Outcome {
  FaultCounts a, b;
  uint64_t hash = 0;
  std::map<uint64_t, int> arrived;  // seq -> how often
  size_t rejected = 0, downs = 0;
  std::vector<uint64_t> order;
};

// 400 dispatches from a to b, both ends faulty; a reconnects when its peer goes down.
Outcome run(uint64_t seed, FaultPlan plan) {
  SimRig rig(seed, faulty_maker<Executor>(std::make_shared<LoopbackHub>(), plan, seed));
  TransportOptions oa = rig.options(), ob = rig.options();
  oa.self = Incarnation(10);
  ob.self = Incarnation(20);
  auto a = rig.make(oa), b = rig.make(ob);
  a->on_event = [&](const TransportEvent& e) {
    if (std::holds_alternative<E::PeerDown>(e.what)) a->transport->connect(b->id, b->address);
  };
  rig.join(*a, *b);
  for (uint64_t i = 1; i <= 400; ++i) {
    (void)a->submit(b->id, make_dispatch(a->id, i, 2, 32));
    rig.pass(200 * kMicrosecond);
  }
  rig.pass(kSecond);
  Outcome r;
  r.a = static_cast<FaultTransport&>(*a->transport).counts();
  r.b = static_cast<FaultTransport&>(*b->transport).counts();
  r.hash = rig.world.trace_hash();
  for (size_t i = 0; i < b->count<E::Dispatch>(); ++i) {
    const auto batch = b->get<E::Dispatch>(i).second.batch;
    expect_equal(batch, make_dispatch(a->id, batch.id.seq, 2, 32));  // whatever arrives is whole
    ++r.arrived[batch.id.seq];
    r.order.push_back(batch.id.seq);
  }
  r.rejected = b->count<E::Rejected>();
  r.downs = b->count<E::PeerDown>();
  return r;
}

TEST(Faults, EachFaultDoesWhatItSaysAndIsCounted) {
  Outcome r = run(1, {.drop_out = 0.1, .drop_in = 0.1});
  EXPECT_GT(r.a.dropped, 20u);
  EXPECT_GT(r.b.dropped, 20u);
  EXPECT_EQ(r.arrived.size(), 400 - r.a.dropped - r.b.dropped);

  r = run(2, {.duplicate_out = 0.1, .duplicate_in = 0.1});
  EXPECT_EQ(r.arrived.size(), 400u);
  EXPECT_EQ(r.order.size(), 400 + r.a.duplicated + r.b.duplicated);
  EXPECT_GT(r.a.duplicated + r.b.duplicated, 40u);

  r = run(3, {.delay_out = 0.2, .delay_in = 0.2});
  EXPECT_EQ(r.order.size(), 400u) << "late, but each once";
  EXPECT_FALSE(std::is_sorted(r.order.begin(), r.order.end()));
  EXPECT_GT(r.a.delayed, 40u);
  EXPECT_GT(r.b.delayed, 40u);

  r = run(4, {.corrupt_in = 0.2});
  EXPECT_GT(r.b.corrupted, 40u);
  EXPECT_EQ(r.b.undetected, 0u);
  EXPECT_EQ(r.rejected, r.b.corrupted);
  EXPECT_EQ(r.order.size(), 400 - r.b.corrupted);

  r = run(5, {.peer_down = 0.02});
  EXPECT_GT(r.b.peers_downed, 2u);
  EXPECT_EQ(r.downs, r.b.peers_downed);
  EXPECT_GT(r.order.size(), 200u) << "and the next connection works";

  r = run(6, {.stall = 0.01});
  EXPECT_GT(r.a.stalled, 0u);
  EXPECT_EQ(r.order.size(), 400u);
}

TEST(Faults, ReorderSwapsNeighbours) {
  SimRig rig(7, faulty_maker<Executor>(std::make_shared<LoopbackHub>(), {.reorder_in = 0.5}, 7));
  auto a = rig.make(), b = rig.make();
  rig.join(*a, *b);
  b->hold();
  for (uint64_t i = 1; i <= 100; ++i) ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, i, 1, 8)).ok());
  rig.pass(10 * kMillisecond);
  b->release();
  ASSERT_EQ(b->count<E::Dispatch>(), 100u);
  std::vector<uint64_t> order;
  for (size_t i = 0; i < 100; ++i) order.push_back(b->get<E::Dispatch>(i).second.batch.id.seq);
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(std::set<uint64_t>(order.begin(), order.end()).size(), 100u);
}

TEST(Faults, TheSameSeedGivesTheSameFaults) {
  const FaultPlan plan{.drop_out = 0.05,
                       .duplicate_in = 0.05,
                       .delay_out = 0.1,
                       .reorder_in = 0.1,
                       .corrupt_in = 0.05,
                       .peer_down = 0.01,
                       .stall = 0.01};
  const Outcome x = run(42, plan), y = run(42, plan), z = run(43, plan);
  EXPECT_EQ(x.hash, y.hash);
  EXPECT_EQ(x.order, y.order);
  EXPECT_EQ(x.a.total(), y.a.total());
  EXPECT_EQ(x.b.total(), y.b.total());
  EXPECT_NE(x.order, z.order);
  EXPECT_GT(x.a.total() + x.b.total(), 50u);
}

TEST(Faults, OnlyWithinTheirTime) {
  FaultPlan plan{.drop_out = 1.0};
  plan.from = 2 * kSecond;
  plan.until = 3 * kSecond;
  SimRig rig(8, faulty_maker<Executor>(std::make_shared<LoopbackHub>(), plan, 8));
  auto a = rig.make(), b = rig.make();
  rig.join(*a, *b);
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 1, 1, 8)).ok());
  rig.world.run_until(2500 * kMillisecond);
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 2, 1, 8)).ok());
  rig.world.run_until(3500 * kMillisecond);
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 3, 1, 8)).ok());
  rig.pass(10 * kMillisecond);
  ASSERT_EQ(b->count<E::Dispatch>(), 2u);
  EXPECT_EQ(b->get<E::Dispatch>(1).second.batch.id.seq, 3u);
}

TEST(Faults, TakeDownOnASchedule) {
  SimRig rig(9, faulty_maker<Executor>(std::make_shared<LoopbackHub>(), {}, 9));
  auto a = rig.make(), b = rig.make();
  rig.join(*a, *b);
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 1, 1, 8)).ok());
  a->run([&] { static_cast<FaultTransport&>(*a->transport).take_down(b->id, "pulled the plug"); });
  ASSERT_TRUE(rig.saw<E::PeerDown>(*a));
  EXPECT_EQ(message_of(a->get<E::PeerDown>().second.cause), "pulled the plug");
  ASSERT_TRUE(rig.saw<E::PeerDown>(*b));
  rig.join(*a, *b);
}

}  // namespace
}  // namespace conclave::testing
