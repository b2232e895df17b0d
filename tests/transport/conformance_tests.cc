#include "tests/transport/conformance_tests.h"

#include <algorithm>
#include <map>

namespace conclave::testing {
namespace {
using E = TransportEvent;
using std::vector;
}  // namespace

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TransportConformance);

TEST_P(TransportConformance, ConnectBringsBothEndsUp) {
  auto a = rig->make(), b = rig->make();
  EXPECT_FALSE(a->is_up(b->id));
  rig->join(*a, *b);
  EXPECT_TRUE(a->is_up(b->id));
  EXPECT_TRUE(b->is_up(a->id));
  EXPECT_EQ(a->get<E::PeerUp>().first, b->id);
  EXPECT_EQ(b->get<E::PeerUp>().first, a->id);
}

TEST_P(TransportConformance, RoundTripsOfManySizes) {
  auto a = rig->make(), b = rig->make();
  rig->join(*a, *b);
  struct Shape {
    uint32_t rows, hidden, per_row;
    RowDtype dtype;
  };
  const vector<Shape> shapes = {
      {0, 3072, 0, RowDtype::kBf16},  {1, 1, 1, RowDtype::kBf16},      {1, 3, 0, RowDtype::kF32},
      {1, 3072, 8, RowDtype::kBf16},  {3, 127, 5, RowDtype::kF32},     {16, 3072, 4, RowDtype::kBf16},
      {64, 3072, 2, RowDtype::kBf16}, {256, 3072, 1, RowDtype::kBf16}, {300, 2048, 1, RowDtype::kF32},
      {2000, 4, 8, RowDtype::kBf16},  {8192, 16, 8, RowDtype::kBf16},  {340, 3072, 2, RowDtype::kBf16},
      {3, 3072, 8, RowDtype::kFp8},   {5, 129, 2, RowDtype::kFp8},     {1, 1, 1, RowDtype::kFp8},
  };
  uint64_t seq = 0;
  for (const Shape& s : shapes) {
    SCOPED_TRACE("rows " + std::to_string(s.rows) + " hidden " + std::to_string(s.hidden));
    a->clear();
    b->clear();
    const DispatchBatch d = make_dispatch(a->id, ++seq, s.rows, s.hidden, s.per_row, s.dtype);
    ASSERT_TRUE(a->submit(b->id, d).ok());
    ASSERT_TRUE(rig->saw<E::Dispatch>(*b));
    const auto [from, got] = b->get<E::Dispatch>();
    EXPECT_EQ(from, a->id);
    expect_equal(got.batch, d);
    const CombineBatch c = make_combine(d, b->id);
    ASSERT_TRUE(b->reply(a->id, c).ok());
    ASSERT_TRUE(rig->saw<E::Combine>(*a));
    expect_equal(a->get<E::Combine>().second.batch, c);
  }
  EXPECT_EQ(a->stats().rejected_messages, 0u);
  EXPECT_EQ(b->stats().rejected_messages, 0u);
}

TEST_P(TransportConformance, BothDirectionsAtOnce) {
  auto a = rig->make(), b = rig->make();
  rig->join(*a, *b);
  constexpr uint64_t kEach = 200;
  for (uint64_t i = 1; i <= kEach; ++i) {
    ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, i, 1 + i % 7, 256)).ok());
    ASSERT_TRUE(b->submit(a->id, make_dispatch(b->id, i, 1 + i % 5, 256)).ok());
  }
  ASSERT_TRUE(rig->saw<E::Dispatch>(*a, kEach));
  ASSERT_TRUE(rig->saw<E::Dispatch>(*b, kEach));
  for (Node* node : {a.get(), b.get()}) {
    vector<uint64_t> seqs;
    for (uint64_t i = 0; i < kEach; ++i) seqs.push_back(node->get<E::Dispatch>(i).second.batch.id.seq);
    std::sort(seqs.begin(), seqs.end());
    for (uint64_t i = 0; i < kEach; ++i) ASSERT_EQ(seqs[i], i + 1) << "each once";
  }
}

TEST_P(TransportConformance, AnotherSecretGetsNoAnswer) {
  auto a = rig->make();
  TransportOptions other = rig->options();
  other.secret = "a guess";
  auto b = rig->make(other);
  a->connect(*b);
  ASSERT_TRUE(rig->saw<E::PeerDown>(*a));
  const Status cause = a->get<E::PeerDown>().second.cause;
  EXPECT_EQ(cause.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(message_of(cause).find("secret"), std::string::npos) << cause;
  EXPECT_FALSE(a->is_up(b->id));
  EXPECT_EQ(b->count<E::PeerUp>(), 0u);
  EXPECT_EQ(b->stats().hellos_refused, 1u);
  EXPECT_EQ(a->submit(b->id, make_dispatch(a->id, 1, 1, 8)).code(), StatusCode::kUnavailable);
}

TEST_P(TransportConformance, AnotherFleetIsRefusedWithBothNames) {
  auto a = rig->make();
  TransportOptions other = rig->options();
  other.fleet = "k2-other";
  auto b = rig->make(other);
  a->connect(*b);
  ASSERT_TRUE(rig->saw<E::PeerDown>(*a));
  const Status cause = a->get<E::PeerDown>().second.cause;
  EXPECT_EQ(cause.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(message_of(cause).find("k2-other"), std::string::npos) << cause;
  EXPECT_NE(message_of(cause).find("k1-test"), std::string::npos) << cause;
}

TEST_P(TransportConformance, UnknownPeersAndNonsenseConnects) {
  auto a = rig->make(), b = rig->make();
  EXPECT_EQ(a->submit(b->id, make_dispatch(a->id, 1, 1, 8)).code(), StatusCode::kUnavailable);
  EXPECT_EQ(a->reply(b->id, make_combine(make_dispatch(b->id, 1, 1, 8), a->id)).code(),
            StatusCode::kUnavailable);
  a->run([&] {
    a->transport->cancel(b->id, {a->id, 1});  // nothing happens
    a->transport->close(b->id);
    a->transport->connect(a->id, a->address);
    a->transport->connect(Incarnation(5), "");
    a->transport->connect(Incarnation(6), "no such place");
  });
  ASSERT_TRUE(rig->saw<E::PeerDown>(*a, 3));
  EXPECT_EQ(a->count<E::PeerUp>(), 0u);
}

TEST_P(TransportConformance, AnotherIncarnationAtTheAddressIsRefused) {
  auto a = rig->make(), b = rig->make();
  a->run([&] { a->transport->connect(Incarnation(42), b->address); });
  ASSERT_TRUE(rig->saw<E::PeerDown>(*a));
  EXPECT_EQ(a->get<E::PeerDown>().first, Incarnation(42));
  EXPECT_EQ(a->get<E::PeerDown>().second.cause.code() == StatusCode::kUnavailable, false);
  EXPECT_EQ(b->count<E::PeerUp>(), 0u);
}

TEST_P(TransportConformance, DuplicateConnectsChangeNothing) {
  auto a = rig->make(), b = rig->make();
  a->run([&] {
    for (int i = 0; i < 3; ++i) a->transport->connect(b->id, b->address);
  });
  ASSERT_TRUE(rig->saw<E::PeerUp>(*a));
  ASSERT_TRUE(rig->saw<E::PeerUp>(*b));
  a->connect(*b);
  b->connect(*a);
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 1, 2, 64)).ok());
  ASSERT_TRUE(rig->saw<E::Dispatch>(*b));
  EXPECT_EQ(a->count<E::PeerUp>(), 1u);
  EXPECT_EQ(b->count<E::PeerUp>(), 1u);
  EXPECT_EQ(a->count<E::PeerDown>() + b->count<E::PeerDown>(), 0u);
}

TEST_P(TransportConformance, ConnectingToEachOtherAtOnce) {
  for (int round = 0; round < 10; ++round) {
    auto a = rig->make(), b = rig->make();
    a->connect(*b);
    b->connect(*a);
    ASSERT_TRUE(rig->saw<E::PeerUp>(*a));
    ASSERT_TRUE(rig->saw<E::PeerUp>(*b));
    ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 1, 2, 64)).ok());
    ASSERT_TRUE(b->submit(a->id, make_dispatch(b->id, 1, 2, 64)).ok());
    ASSERT_TRUE(rig->saw<E::Dispatch>(*a));
    ASSERT_TRUE(rig->saw<E::Dispatch>(*b));
    EXPECT_EQ(a->count<E::PeerUp>(), 1u);
    EXPECT_EQ(b->count<E::PeerUp>(), 1u);
  }
}

TEST_P(TransportConformance, WhatBreaksTheLimitsIsRefusedAtTheSender) {
  TransportOptions small = rig->options();
  small.limits.max_rows = 4;
  small.limits.max_items = 8;
  small.limits.max_hidden = 64;
  small.limits.max_message_bytes = 1000;
  auto a = rig->make(small), b = rig->make();
  rig->join(*a, *b);
  const auto field = [&](const DispatchBatch& d) {
    const Status s = a->submit(b->id, d);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument) << s;
    return field_of(s);
  };
  EXPECT_EQ(field(make_dispatch(a->id, 1, 5, 8)), "rows");
  EXPECT_EQ(field(make_dispatch(a->id, 1, 3, 8, 3)), "items");
  EXPECT_EQ(field(make_dispatch(a->id, 1, 1, 65)), "hidden");
  EXPECT_EQ(field(make_dispatch(a->id, 1, 1, 0)), "hidden");
  DispatchBatch large = make_dispatch(a->id, 1, 4, 64, 2, RowDtype::kF32);
  EXPECT_EQ(field(large), "rows_bytes");
  DispatchBatch d = make_dispatch(a->id, 1, 4, 32);
  d.rows = std::make_shared<vector<std::byte>>(d.rows->size() - 1);
  EXPECT_EQ(field(d), "rows_bytes");
  d = make_dispatch(a->id, 1, 4, 32);
  d.expert_begin[2] = 8;
  EXPECT_EQ(field(d), "expert_begin");
  d = make_dispatch(a->id, 1, 4, 32);
  d.dtype = static_cast<RowDtype>(9);
  EXPECT_EQ(field(d), "dtype");
  d = make_dispatch(b->id, 1, 4, 32);
  EXPECT_EQ(field(d), "id.worker");
  CombineBatch c = make_combine(make_dispatch(b->id, 1, 2, 32), a->id);
  std::swap(c.items[0], c.items[1]);
  EXPECT_EQ(field_of(a->reply(b->id, c)), "items");
  // Exactly at the limits is fine.
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 2, 4, 64)).ok());
  ASSERT_TRUE(rig->saw<E::Dispatch>(*b));
}

TEST_P(TransportConformance, WhatBreaksTheReceiversLimitsIsRejectedThere) {
  TransportOptions small = rig->options();
  small.limits.max_rows = 4;
  auto a = rig->make(), b = rig->make(small);
  rig->join(*a, *b);
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 1, 5, 8)).ok());
  ASSERT_TRUE(rig->saw<E::Rejected>(*b));
  EXPECT_EQ(b->get<E::Rejected>().first, a->id);
  EXPECT_EQ(field_of(b->get<E::Rejected>().second.cause), "rows");
  EXPECT_EQ(b->stats().rejected_messages, 1u);
  // The peer stays, and what was rejected gives its room back.
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 2, 4, 8)).ok());
  ASSERT_TRUE(rig->saw<E::Dispatch>(*b));
  EXPECT_TRUE(rig->wait(*a, [&] { return a->inflight(b->id).messages == 0; }));
}

TEST_P(TransportConformance, TheBoundOfMessagesHoldsAndWritableFollows) {
  TransportOptions o = rig->options();
  o.limits.max_inflight_messages = 4;
  auto a = rig->make(o), b = rig->make();
  rig->join(*a, *b);
  b->hold();
  for (uint64_t i = 1; i <= 4; ++i) ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, i, 1, 8)).ok());
  EXPECT_EQ(a->submit(b->id, make_dispatch(a->id, 5, 1, 8)).code(), StatusCode::kResourceExhausted);
  rig->pass(120 * kMillisecond);  // the peer answers pings all the while; that frees nothing
  EXPECT_EQ(a->submit(b->id, make_dispatch(a->id, 5, 1, 8)).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(a->count<E::Writable>(), 0u);
  EXPECT_EQ(a->inflight(b->id).messages, 4u);
  b->release();
  ASSERT_TRUE(rig->saw<E::Writable>(*a));
  EXPECT_EQ(b->count<E::Dispatch>(), 4u) << "nothing was taken of what was refused";
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 5, 1, 8)).ok());
  ASSERT_TRUE(rig->saw<E::Dispatch>(*b, 5));
}

TEST_P(TransportConformance, TheBoundOfBytesHoldsAndOneLargeMessageMayPass) {
  TransportOptions o = rig->options();
  o.limits.max_inflight_bytes = 64 * 1024;
  auto a = rig->make(), b = rig->make(o);  // the receiver's window binds the sender
  rig->join(*a, *b);
  b->hold();
  uint64_t seq = 0;
  Status s;
  while ((s = a->submit(b->id, make_dispatch(a->id, seq + 1, 8, 512))).ok()) ASSERT_LT(++seq, 100u);
  EXPECT_EQ(s.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(seq, 7u);  // of 8 KiB and a header each
  EXPECT_LE(a->inflight(b->id).bytes, 64u * 1024);
  b->release();
  ASSERT_TRUE(rig->saw<E::Writable>(*a));
  ASSERT_TRUE(rig->wait(*a, [&] { return a->inflight(b->id).messages == 0; }))
      << "acknowledged without traffic";
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 50, 64, 1024)).ok()) << "128 KiB, alone";
  ASSERT_TRUE(rig->saw<E::Dispatch>(*b, 8));
}

TEST_P(TransportConformance, SteadyTrafficUnderASmallWindowArrivesWhole) {
  TransportOptions o = rig->options();
  o.limits.max_inflight_messages = 3;
  auto a = rig->make(o);
  o.self = make_incarnation();
  auto b = rig->make(o);
  b->on_event = [&](const TransportEvent& e) {
    if (const auto* d = std::get_if<E::Dispatch>(&e.what)) {
      // May find no room; the sender of this test waits for all dispatches, not for combines.
      (void)b->transport->reply(a->id, make_combine(d->batch, b->id));
    }
  };
  rig->join(*a, *b);
  uint64_t sent = 0;
  while (sent < 300) {
    const size_t writable = a->count<E::Writable>();
    const Status s = a->submit(b->id, make_dispatch(a->id, sent + 1, 1 + sent % 9, 128));
    if (s.ok()) {
      ++sent;
    } else {
      ASSERT_EQ(s.code(), StatusCode::kResourceExhausted);
      ASSERT_TRUE(rig->saw<E::Writable>(*a, writable + 1));
    }
  }
  ASSERT_TRUE(rig->saw<E::Dispatch>(*b, 300));
}

TEST_P(TransportConformance, CloseForgetsAtOnceAndThePeerHearsOfIt) {
  auto a = rig->make(), b = rig->make();
  rig->join(*a, *b);
  for (uint64_t i = 1; i <= 50; ++i) ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, i, 16, 512)).ok());
  a->close(*b);
  EXPECT_FALSE(a->is_up(b->id));
  EXPECT_EQ(a->submit(b->id, make_dispatch(a->id, 99, 1, 8)).code(), StatusCode::kUnavailable);
  ASSERT_TRUE(rig->saw<E::PeerDown>(*b));
  EXPECT_EQ(b->get<E::PeerDown>().first, a->id);
  rig->pass(20 * kMillisecond);
  EXPECT_EQ(a->count<E::PeerDown>(), 0u) << "no event follows for a peer closed by its owner";
}

TEST_P(TransportConformance, AfterCloseTheSamePeersCanConnectAnewAndLateMessagesAreDropped) {
  auto a = rig->make(), b = rig->make();
  for (uint64_t round = 1; round <= 5; ++round) {
    SCOPED_TRACE(round);
    rig->join(*a, *b);
    b->hold();
    for (uint64_t i = 1; i <= 10; ++i) {
      ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, round * 100 + i, 8, 512)).ok());
    }
    b->run([&] { b->transport->close(a->id); });  // with messages unread and on their way
    b->release();
    ASSERT_TRUE(rig->saw<E::PeerDown>(*a, round));
  }
  EXPECT_EQ(b->count<E::Dispatch>(), 0u) << "messages of a closed connection";
  rig->join(*a, *b);
  ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 1, 1, 8)).ok());
  ASSERT_TRUE(rig->saw<E::Dispatch>(*b));
  EXPECT_EQ(b->get<E::Dispatch>().second.batch.id.seq, 1u);
}

TEST_P(TransportConformance, APeerThatGoesAwayIsReportedAndItsSuccessorIsAnotherPeer) {
  auto a = rig->make();
  for (int round = 0; round < 3; ++round) {
    a->clear();
    auto b = rig->make();
    rig->join(*a, *b);
    ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, 1, 64, 512)).ok());
    const Incarnation gone = b->id;
    b->destroy();
    ASSERT_TRUE(rig->saw<E::PeerDown>(*a));
    EXPECT_EQ(a->get<E::PeerDown>().first, gone);
    EXPECT_FALSE(a->is_up(gone));
    EXPECT_EQ(a->submit(gone, make_dispatch(a->id, 2, 1, 8)).code(), StatusCode::kUnavailable);
    a->connect(*b);  // its address leads nowhere now
    ASSERT_TRUE(rig->saw<E::PeerDown>(*a, 2));
    EXPECT_EQ(a->count<E::PeerUp>(), 1u);
  }
}

TEST_P(TransportConformance, CancelReachesThePeer) {
  auto a = rig->make(), b = rig->make();
  rig->join(*a, *b);
  a->run([&] { a->transport->cancel(b->id, {a->id, 77}); });
  ASSERT_TRUE(rig->saw<E::Cancel>(*b));
  EXPECT_EQ(b->get<E::Cancel>().second.id, (DispatchId{a->id, 77}));
}

TEST_P(TransportConformance, ThreeWorkersAndTwoShardsAllToAll) {
  vector<std::unique_ptr<Node>> workers, shards;
  for (int i = 0; i < 3; ++i) workers.push_back(rig->make());
  for (int i = 0; i < 2; ++i) shards.push_back(rig->make());
  for (auto& s : shards) {
    s->on_event = [node = s.get()](const TransportEvent& e) {
      if (const auto* d = std::get_if<E::Dispatch>(&e.what)) {
        ASSERT_TRUE(node->transport->reply(e.peer, make_combine(d->batch, node->id)).ok());
      }
    };
  }
  for (auto& w : workers) {
    for (auto& s : shards) {
      w->connect(*s);
    }
  }
  for (auto& w : workers) ASSERT_TRUE(rig->saw<E::PeerUp>(*w, 2));
  constexpr uint64_t kEach = 40;
  for (uint64_t i = 1; i <= kEach; ++i) {
    for (auto& w : workers) {
      for (auto& s : shards) ASSERT_TRUE(w->submit(s->id, make_dispatch(w->id, i, 1 + i % 4, 200)).ok());
    }
  }
  for (auto& w : workers) {
    ASSERT_TRUE(rig->saw<E::Combine>(*w, 2 * kEach));
    std::map<std::pair<Incarnation, uint64_t>, int> seen;
    for (size_t i = 0; i < 2 * kEach; ++i) {
      const auto [from, event] = w->get<E::Combine>(i);
      EXPECT_EQ(from, event.batch.shard);
      EXPECT_EQ(event.batch.id.worker, w->id);
      ++seen[{from, event.batch.id.seq}];
    }
    EXPECT_EQ(seen.size(), 2 * kEach);
  }
}

TEST_P(TransportConformance, LinksAreThePeersOfNowWithTheirBytes) {
  auto a = rig->make(), b = rig->make(), c = rig->make();
  EXPECT_TRUE(a->stats().links.empty());
  rig->join(*a, *b);
  rig->join(*a, *c);
  for (uint64_t i = 1; i <= 3; ++i) ASSERT_TRUE(a->submit(b->id, make_dispatch(a->id, i, 2, 64)).ok());
  ASSERT_TRUE(a->submit(c->id, make_dispatch(a->id, 9, 4, 64)).ok());
  ASSERT_TRUE(rig->saw<E::Dispatch>(*b, 3));
  ASSERT_TRUE(rig->saw<E::Dispatch>(*c, 1));
  const TransportStats stats = a->stats();
  ASSERT_EQ(stats.links.size(), 2u);
  EXPECT_LT(stats.links[0].peer, stats.links[1].peer);
  uint64_t bytes = 0, messages = 0;
  for (const LinkStats& link : stats.links) {
    EXPECT_EQ(link.sent_messages, link.peer == b->id ? 3u : 1u);
    EXPECT_LE(link.inflight_bytes, link.sent_bytes);
    bytes += link.sent_bytes;
    messages += link.sent_messages;
  }
  EXPECT_EQ(bytes, stats.sent_bytes);
  EXPECT_EQ(messages, stats.sent_messages);
  ASSERT_EQ(b->stats().links.size(), 1u);
  EXPECT_EQ(b->stats().links[0].peer, a->id);
  EXPECT_EQ(b->stats().links[0].received_bytes, b->stats().received_bytes);
  EXPECT_EQ(b->stats().links[0].received_messages, 3u);
  a->close(*b);
  ASSERT_EQ(a->stats().links.size(), 1u) << "a peer that left has none";
  EXPECT_EQ(a->stats().links[0].peer, c->id);
  EXPECT_EQ(a->stats().sent_bytes, stats.sent_bytes) << "the whole stays";
}

TEST_P(TransportConformance, KeepaliveKeepsAnIdlePeer) {
  TransportOptions o = rig->options();
  o.keepalive_interval = 50 * kMillisecond;
  o.keepalive_timeout = 600 * kMillisecond;
  TransportOptions p = rig->options();
  p.keepalive_interval = 50 * kMillisecond;
  p.keepalive_timeout = 600 * kMillisecond;
  auto a = rig->make(o), b = rig->make(p);
  rig->join(*a, *b);
  rig->pass(1500 * kMillisecond);
  EXPECT_TRUE(a->is_up(b->id));
  EXPECT_TRUE(b->is_up(a->id));
}

}  // namespace conclave::testing
