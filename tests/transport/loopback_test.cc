#include "libs/transport/loopback_transport.h"

#include <gtest/gtest.h>

#include "tests/transport/conformance_tests.h"

namespace conclave::testing {
namespace {

template <class AnyExecutor>
auto loopback_maker(std::shared_ptr<LoopbackHub> hub) {
  return [hub](Node& node, AnyExecutor& executor, TransportOptions options) {
    options.rows_crc = true;
    auto transport = std::make_unique<LoopbackTransport>(hub, executor, options);
    node.session = transport.get();
    node.transport = std::move(transport);
  };
}

std::unique_ptr<Rig> thread_rig() {
  return std::make_unique<ThreadRig>(loopback_maker<LoopExecutor>(std::make_shared<LoopbackHub>()));
}

std::unique_ptr<SimRig> sim_rig(uint64_t seed, std::shared_ptr<LoopbackHub> hub) {
  return std::make_unique<SimRig>(seed, loopback_maker<Executor>(std::move(hub)));
}

std::unique_ptr<Rig> delayed_sim_rig() {
  auto hub = std::make_shared<LoopbackHub>();
  auto rig = sim_rig(11, hub);
  // Long and very different delays: messages overtake each other.
  hub->set_delay_model([world = &rig->world](Incarnation, Incarnation, uint64_t) -> std::optional<Nanos> {
    return static_cast<Nanos>(world->random().below(3 * kMillisecond));
  });
  return rig;
}

INSTANTIATE_TEST_SUITE_P(
    Loopback, TransportConformance,
    ::testing::Values(RigFactory{"threads", thread_rig},
                      RigFactory{"simulated", [] { return sim_rig(5, std::make_shared<LoopbackHub>()); }},
                      RigFactory{"simulated_with_delays", delayed_sim_rig}),
    [](const auto& p) { return p.param.name; });

TEST(Loopback, RowsAreSharedNotCopied) {
  auto rig = sim_rig(1, std::make_shared<LoopbackHub>());
  auto a = rig->make(), b = rig->make();
  rig->join(*a, *b);
  const DispatchBatch d = make_dispatch(a->id, 1, 4, 64);
  ASSERT_TRUE(a->submit(b->id, d).ok());
  ASSERT_TRUE(rig->saw<TransportEvent::Dispatch>(*b));
  EXPECT_EQ(b->get<TransportEvent::Dispatch>().second.batch.rows, d.rows);
}

TEST(Loopback, AKilledProcessIsReportedWhenItsTransportGoes) {
  auto hub = std::make_shared<LoopbackHub>();
  auto rig = sim_rig(2, hub);
  auto a = rig->make(), b = rig->make();
  rig->join(*a, *b);
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 1, 4, 64)).ok());
  auto& victim = static_cast<SimNode&>(*b);
  rig->world.kill(victim.executor);
  b->transport.reset();
  ASSERT_TRUE(rig->saw<TransportEvent::PeerDown>(*a));
}

TEST(Loopback, APartitionIsFoundByKeepaliveOnBothSidesAndHeals) {
  auto hub = std::make_shared<LoopbackHub>();
  auto rig = sim_rig(3, hub);
  TransportOptions o = rig->options(), p = rig->options();
  for (auto* x : {&o, &p}) {
    x->keepalive_interval = 100 * kMillisecond;
    x->keepalive_timeout = kSecond;
  }
  auto a = rig->make(o), b = rig->make(p);
  rig->join(*a, *b);
  bool cut = true;
  hub->set_delay_model([&](Incarnation, Incarnation, uint64_t) -> std::optional<Nanos> {
    if (cut) return std::nullopt;
    return kMillisecond;
  });
  // What is lost takes no room for ever.
  for (uint64_t i = 1; i <= 2000; ++i) ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, i, 1, 8)).ok());
  ASSERT_TRUE(rig->saw<TransportEvent::PeerDown>(*a, 1, 2 * kSecond));
  ASSERT_TRUE(rig->saw<TransportEvent::PeerDown>(*b, 1, 2 * kSecond));
  EXPECT_EQ(a->get<TransportEvent::PeerDown>().second.cause.code(), StatusCode::kDeadlineExceeded);
  a->connect(*b);  // into the void: the connect deadline ends it
  ASSERT_TRUE(rig->saw<TransportEvent::PeerDown>(*a, 2, 3 * kSecond));
  cut = false;
  rig->join(*a, *b);
}

TEST(Loopback, OneSideLosesTheConnectionAndConnectsAnew) {
  auto hub = std::make_shared<LoopbackHub>();
  auto rig = sim_rig(4, hub);
  auto a = rig->make(), b = rig->make();
  rig->join(*a, *b);
  hub->set_delay_model([](Incarnation, Incarnation, uint64_t bytes) -> std::optional<Nanos> {
    if (bytes == wire::kFixedBytes + 8) return std::nullopt;  // the Bye gets lost
    return kMicrosecond;
  });
  a->close(*b);
  EXPECT_TRUE(b->is_up(a->id)) << "b can't know";
  a->connect(*b);
  ASSERT_TRUE(rig->saw<TransportEvent::PeerUp>(*a, 2));
  ASSERT_TRUE(rig->saw<TransportEvent::PeerUp>(*b, 2));
  EXPECT_EQ(b->count<TransportEvent::PeerDown>(), 1u);
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 1, 4, 64)).ok());
  ASSERT_TRUE(rig->saw<TransportEvent::Dispatch>(*b));
}

// The same seed must give the same run, transports and delays included.
TEST(Loopback, ASimulatedRunIsAFunctionOfItsSeed) {
  const auto run = [](uint64_t seed) {
    auto hub = std::make_shared<LoopbackHub>();
    auto rig = sim_rig(seed, hub);
    hub->set_delay_model([w = &rig->world](Incarnation, Incarnation, uint64_t) -> std::optional<Nanos> {
      if (w->random().chance(0.05)) return std::nullopt;
      return static_cast<Nanos>(w->random().below(kMillisecond));
    });
    TransportOptions o = rig->options(), p = rig->options();
    o.self = Incarnation(100);
    p.self = Incarnation(200);
    auto a = rig->make(o), b = rig->make(p);
    a->connect(*b);
    for (uint64_t i = 1; i <= 100; ++i) {
      (void)a->submit(b->id, make_dispatch(a->id, i, 1, 8));
      rig->pass(kMillisecond);
    }
    return rig->world.trace_hash();
  };
  EXPECT_EQ(run(9), run(9));
  EXPECT_NE(run(9), run(10));
}

// Many threads, connects, closes and traffic at once: for TSan.
TEST(Loopback, ThreadsComeAndGoUnderTraffic) {
  auto rig = thread_rig();
  auto hub_node = rig->make();
  hub_node->on_event = [&](const TransportEvent& e) {
    if (const auto* d = std::get_if<TransportEvent::Dispatch>(&e.what)) {
      (void)hub_node->transport->reply(e.peer, make_combine(d->batch, hub_node->id));
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 15; ++round) {
        auto n = rig->make();
        n->connect(*hub_node);
        ASSERT_TRUE(rig->saw<TransportEvent::PeerUp>(*n));
        for (uint64_t i = 1; i <= 10; ++i) {
          ASSERT_TRUE(n->submit(hub_node->id, make_dispatch(n->id, i, 2, 64)).ok());
        }
        if (round % 3 != 0) {
          ASSERT_TRUE(rig->saw<TransportEvent::Combine>(*n, 10));
        }
        if (round % 3 == 1) n->close(*hub_node);
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_TRUE(rig->wait(*hub_node, [&] { return hub_node->count<TransportEvent::PeerDown>() == 60; }));
}

}  // namespace
}  // namespace conclave::testing
