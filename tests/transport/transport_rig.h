// Runs one test over several transports: a rig makes nodes (a transport on an executor of its own) and waits
// for what they see. Real rigs have a thread a node; the simulated one runs everything in virtual time.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "libs/base/random.h"
#include "libs/runtime/loop_executor.h"
#include "libs/runtime/sim_executor.h"
#include "libs/transport/session_transport.h"

namespace conclave::testing {

class Node {
 public:
  virtual ~Node() = default;
  // Runs on the node's executor and returns when it has run.
  virtual void run(const std::function<void()>& task) = 0;
  // Destroys the transport (on its executor); what it had collected stays.
  void destroy() {
    run([&] { transport.reset(); });
  }

  // Called once the transport is there: collects events as they come, unless held.
  void collect() {
    run([&] {
      transport->set_ready([this] {
        if (!held) drain();
      });
    });
  }
  // Holds events back in the transport, as a busy owner would.
  void hold() {
    run([&] { held = true; });
  }
  void release() {
    run([&] {
      held = false;
      drain();
    });
  }
  template <class T>
  size_t count() const {
    std::lock_guard lock(mutex);
    size_t n = 0;
    for (const auto& e : events) n += std::holds_alternative<T>(e.what);
    return n;
  }
  // The i-th event of kind T (a copy).
  template <class T>
  std::pair<Incarnation, T> get(size_t i = 0) const {
    std::lock_guard lock(mutex);
    for (const auto& e : events) {
      if (const T* t = std::get_if<T>(&e.what)) {
        if (i-- == 0) return {e.peer, *t};
      }
    }
    ADD_FAILURE() << "no such event";
    return {};
  }
  void clear() {
    std::lock_guard lock(mutex);
    events.clear();
  }
  Status submit(Incarnation to, const DispatchBatch& batch) {
    Status s;
    run([&] { s = transport->submit(to, batch); });
    return s;
  }
  Status reply(Incarnation to, const CombineBatch& batch) {
    Status s;
    run([&] { s = transport->reply(to, batch); });
    return s;
  }
  bool is_up(Incarnation peer) {
    bool up = false;
    run([&] { up = transport->is_up(peer); });
    return up;
  }
  void connect(const Node& to) {
    run([&] { transport->connect(to.id, to.address); });
  }
  void close(const Node& to) {
    run([&] { transport->close(to.id); });
  }
  TransportStats stats() {
    TransportStats s;
    run([&] { s = session->stats(); });
    return s;
  }
  SessionTransport::Inflight inflight(Incarnation peer) {
    SessionTransport::Inflight f;
    run([&] { f = session->inflight(peer); });
    return f;
  }

  Incarnation id;
  std::string address;
  std::unique_ptr<ExpertTransport> transport;  // maybe a decorator
  SessionTransport* session = nullptr;         // what is inside
  // Runs on the executor for each event, before it is stored.
  std::function<void(const TransportEvent&)> on_event;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<TransportEvent> events;  // guarded by mutex
  bool held = false;                   // executor only

 private:
  void drain() {
    if (!transport) return;
    std::vector<TransportEvent> got;
    transport->poll(got);
    if (on_event) {
      for (const auto& e : got) on_event(e);
    }
    std::lock_guard lock(mutex);
    for (auto& e : got) events.push_back(std::move(e));
    changed.notify_all();
  }
};

class Rig {
 public:
  virtual ~Rig() = default;
  virtual std::unique_ptr<Node> make(TransportOptions options) = 0;
  // Until done() holds or the limit passes; done() looks at `node`'s events.
  virtual bool wait(Node& node, const std::function<bool()>& done, Nanos limit = 5 * kSecond) = 0;
  // Lets this much time pass for everyone.
  virtual void pass(Nanos time) = 0;

  TransportOptions options() {
    TransportOptions o;
    o.self = make_incarnation();
    o.secret = "the cluster's secret";
    o.fleet = "k1-test|fingerprint";
    o.connect_deadline = 2 * kSecond;
    return o;
  }
  std::unique_ptr<Node> make() { return make(options()); }
  template <class T>
  ::testing::AssertionResult saw(Node& node, size_t at_least = 1, Nanos limit = 5 * kSecond) {
    if (wait(
            node, [&] { return node.count<T>() >= at_least; }, limit))
      return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << node.count<T>() << " events, not " << at_least;
  }
  // Connects a to b and waits for both ends.
  void join(Node& a, Node& b) {
    const size_t ups_a = a.count<TransportEvent::PeerUp>(), ups_b = b.count<TransportEvent::PeerUp>();
    a.connect(b);
    ASSERT_TRUE(saw<TransportEvent::PeerUp>(a, ups_a + 1));
    ASSERT_TRUE(saw<TransportEvent::PeerUp>(b, ups_b + 1));
  }
};

// --- nodes with a thread each ---

class ThreadNode : public Node {
 public:
  ~ThreadNode() override {
    if (transport) destroy();
    thread.stop();
  }
  void run(const std::function<void()>& task) override { thread.loop().call(task); }
  LoopThread thread;
};

class ThreadRig : public Rig {
 public:
  // Builds the transport on the node's executor.
  using Make = std::function<void(Node&, LoopExecutor&, TransportOptions)>;
  explicit ThreadRig(Make make) : make_(std::move(make)) {}
  using Rig::make;
  std::unique_ptr<Node> make(TransportOptions options) override {
    auto node = std::make_unique<ThreadNode>();
    node->id = options.self;
    node->run([&] {
      make_(*node, node->thread.loop(), options);
      node->address = node->transport->address();
    });
    node->collect();
    return node;
  }
  bool wait(Node& node, const std::function<bool()>& done, Nanos limit) override {
    const TimePoint end = steady_now() + limit;
    while (!done()) {
      if (steady_now() > end) return false;
      std::unique_lock lock(node.mutex);
      node.changed.wait_for(lock, std::chrono::milliseconds(1));
    }
    return true;
  }
  void pass(Nanos time) override { std::this_thread::sleep_for(std::chrono::nanoseconds(time)); }

 private:
  Make make_;
};

// --- nodes in virtual time ---

class SimNode : public Node {
 public:
  SimNode(SimWorld& w, SimExecutor& e) : world(w), executor(e) {}
  ~SimNode() override { transport.reset(); }
  void run(const std::function<void()>& task) override {
    if (!executor.alive()) return task();
    bool ran = false;
    executor.post([&] {
      task();
      ran = true;
    });
    ASSERT_TRUE(world.run_until([&] { return ran; }));
  }
  SimWorld& world;
  SimExecutor& executor;
};

class SimRig : public Rig {
 public:
  using Make = std::function<void(Node&, Executor&, TransportOptions)>;
  SimRig(uint64_t seed, Make make)
      : world(seed, {.post_jitter = 20 * kMicrosecond}), make_(std::move(make)) {}
  using Rig::make;
  std::unique_ptr<Node> make(TransportOptions options) override {
    options.random = [this] { return world.random().next(); };
    auto& process = world.add_process("node" + std::to_string(++count_));
    auto node = std::make_unique<SimNode>(world, process);
    node->id = options.self;
    make_(*node, process, options);
    node->address = node->transport->address();
    node->collect();
    return node;
  }
  bool wait(Node&, const std::function<bool()>& done, Nanos limit) override {
    return world.run_until(done, world.now() + limit);
  }
  void pass(Nanos time) override { world.run_until(world.now() + time); }
  SimWorld world;

 private:
  Make make_;
  int count_ = 0;
};

// --- messages with recognisable contents ---

inline DispatchBatch make_dispatch(Incarnation worker, uint64_t seq, uint32_t rows, uint32_t hidden,
                                   uint32_t per_row = 2, RowDtype dtype = RowDtype::kBf16) {
  DispatchBatch b;
  b.id = {worker, seq};
  b.epoch = Epoch(7);
  b.layer = static_cast<uint32_t>(seq % 61);
  b.hidden = hidden;
  b.dtype = dtype;
  b.time_left = 250 * kMillisecond;
  SplitMix64 random(seq + 1);
  for (uint32_t r = 0; r < rows; ++r) {
    if (r == 0) b.expert_begin.push_back(0);
    for (uint32_t k = 0; k < per_row; ++k) b.expert_ids.push_back(static_cast<uint16_t>(random.below(256)));
    b.expert_begin.push_back(static_cast<uint32_t>(b.expert_ids.size()));
  }
  b.rows = std::make_shared<std::vector<std::byte>>(rows * b.row_bytes());
  for (auto& byte : *b.rows) byte = static_cast<std::byte>(random.next());
  return b;
}

inline CombineBatch make_combine(const DispatchBatch& d, Incarnation shard) {
  CombineBatch c;
  c.id = d.id;
  c.shard = shard;
  c.layer = d.layer;
  c.hidden = d.hidden;
  c.dtype = d.dtype;
  c.compute_ns = 12345;
  for (uint32_t i = 0; i < d.expert_ids.size(); ++i) c.items.push_back(i);
  c.missing = {250, 3};
  c.outputs = std::make_shared<std::vector<std::byte>>(c.items.size() * c.row_bytes());
  SplitMix64 random(d.id.seq + 77);
  for (auto& byte : *c.outputs) byte = static_cast<std::byte>(random.next());
  return c;
}

inline void expect_equal(const DispatchBatch& a, const DispatchBatch& b) {
  EXPECT_EQ(a.id, b.id);
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.layer, b.layer);
  EXPECT_EQ(a.hidden, b.hidden);
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.time_left, b.time_left);
  EXPECT_EQ(a.expert_begin, b.expert_begin);
  EXPECT_EQ(a.expert_ids, b.expert_ids);
  ASSERT_TRUE(a.rows && b.rows);
  EXPECT_TRUE(*a.rows == *b.rows) << "rows differ";
}

inline void expect_equal(const CombineBatch& a, const CombineBatch& b) {
  EXPECT_EQ(a.id, b.id);
  EXPECT_EQ(a.shard, b.shard);
  EXPECT_EQ(a.layer, b.layer);
  EXPECT_EQ(a.hidden, b.hidden);
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.compute_ns, b.compute_ns);
  EXPECT_EQ(a.items, b.items);
  EXPECT_EQ(a.missing, b.missing);
  ASSERT_TRUE(a.outputs && b.outputs);
  EXPECT_TRUE(*a.outputs == *b.outputs) << "outputs differ";
}

}  // namespace conclave::testing
