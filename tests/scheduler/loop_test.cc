// The loop on real threads: gateways and members of one process, and an adapter's sessions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "libs/runtime/loop_executor.h"
#include "scheduler/loop.h"
#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

// Waits for a condition that other threads bring about; the limit only bounds a failing test.
class Event {
 public:
  void set() {
    std::lock_guard lock(mutex_);
    set_ = true;
    condition_.notify_all();
  }
  bool wait() {
    std::unique_lock lock(mutex_);
    return condition_.wait_for(lock, std::chrono::seconds(30), [&] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  bool set_ = false;
};

struct Collector : RequestObserver {
  void on_accepted() override { accepted = true; }
  void on_refused(const Status& cause) override {
    refused = cause;
    done.set();
  }
  void on_tokens(const TokenEvent& event) override {
    EXPECT_EQ(event.index, tokens.size());
    tokens.insert(tokens.end(), event.tokens.begin(), event.tokens.end());
    if (!event.tokens.empty()) some.set();
    finish = event.finish;
    if (finish != FinishReason::kNone) done.set();
  }
  bool accepted = false;
  Status refused;
  std::vector<TokenId> tokens;
  FinishReason finish = FinishReason::kNone;
  Event some;
  Event done;
};

// A member on an executor of its own, attached in-process; a shard is ready at once. Made on that executor.
class FakeMember : public MemberHandler {
 public:
  FakeMember(SchedulerLoop& loop, Role role, Executor& executor, uint64_t incarnation)
      : hello_(Harness::member_hello(role, incarnation)), model_(hello_.kv_blocks) {
    link_ = loop.attach_member(*this, executor);
  }
  Hello hello() override { return hello_; }
  void on_message(ToMember message) override {
    if (const auto* update = std::get_if<PlacementUpdate>(&message)) {
      if (hello_.role == Role::kAttention) {
        link_->send(Heartbeat{update->table.epoch()});
      } else if (!update->release) {
        link_->send(PlacementReady{update->table.epoch()});
      }
    } else if (const auto* plan = std::get_if<BatchPlan>(&message)) {
      link_->send(model_.run(*plan));
    } else if (std::holds_alternative<Refusal>(message)) {
      // A live process that may not come back under this incarnation takes a new one.
      hello_.incarnation.value += 1000;
      model_ = ModelWorker(hello_.kv_blocks);
      ++refusals_;
    }
  }
  void on_down(const Status&) override {}
  void drop_link() { link_.reset(); }

  int refusals_ = 0;

 private:
  Hello hello_;
  ModelWorker model_;
  std::unique_ptr<MemberLink> link_;
};

SchedulerOptions quick() {
  SchedulerOptions options;
  options.placement_settle_ms = 5;
  return options;
}

// Threads are stopped before what runs on them is destroyed.
struct Cluster {
  Cluster() {
    loop = std::make_unique<SchedulerLoop>(quick(), scheduler_thread.loop());
    worker = make(Role::kAttention, 101);
    shard = make(Role::kExpert, 201);
  }
  ~Cluster() {
    member_thread.stop();
    scheduler_thread.stop();
    worker.reset();
    shard.reset();
    second.reset();
    loop.reset();
  }
  std::unique_ptr<FakeMember> make(Role role, uint64_t incarnation) {
    std::unique_ptr<FakeMember> member;
    member_thread.loop().call(
        [&] { member = std::make_unique<FakeMember>(*loop, role, member_thread.loop(), incarnation); });
    return member;
  }
  void wait_ready() {
    for (int i = 0; i < 3000 && !loop->fleet().ready; ++i) {
      scheduler_thread.loop().call([] {});
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_TRUE(loop->fleet().ready) << loop->fleet().not_ready;
  }
  LoopThread scheduler_thread;
  LoopThread member_thread;
  std::unique_ptr<SchedulerLoop> loop;
  std::unique_ptr<FakeMember> worker, shard, second;
};

TEST(Loop, ServesRequestsFromSeveralThreads) {
  Cluster cluster;
  cluster.wait_ready();
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 20; ++i) {
        const AcceptedRequest r = Harness::request(100 * t + i, 12, 10, i);
        auto observer = std::make_shared<Collector>();
        cluster.loop->submit(r, observer);
        ASSERT_TRUE(observer->done.wait());
        EXPECT_TRUE(observer->accepted);
        EXPECT_EQ(observer->tokens, oracle_answer(r.prompt, r.sampling));
        EXPECT_EQ(observer->finish, FinishReason::kLength);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  cluster.scheduler_thread.loop().call([] {});  // the round that ended the last one is over
  EXPECT_EQ(cluster.loop->metrics().requests_finished_length, 60u);
}

TEST(Loop, MembersOfThisProcessKeepTheirLease) {
  LoopExecutor executor;  // all on one thread that the test turns
  SchedulerOptions options = quick();
  options.lease_ms = 10;
  options.dead_after_ms = 30;
  options.dead_after_trouble_ms = 30;
  SchedulerLoop loop(options, executor);
  FakeMember worker(loop, Role::kAttention, executor, 101);
  EXPECT_TRUE(executor.run_until([&] { return loop.metrics().workers == 1; }, 30 * kSecond));
  const TimePoint later = executor.now() + 150 * kMillisecond;
  EXPECT_TRUE(executor.run_until([&] { return executor.now() > later; }, 30 * kSecond));
  EXPECT_EQ(loop.metrics().members_lost, 0u);
  EXPECT_EQ(loop.metrics().workers, 1u);
  worker.drop_link();
}

TEST(Loop, RefusesAndCancels) {
  Cluster cluster;
  cluster.wait_ready();
  auto refused = std::make_shared<Collector>();
  cluster.loop->submit(Harness::request(1, 0, 3), refused);
  ASSERT_TRUE(refused->done.wait());
  EXPECT_EQ(field_of(refused->refused), "prompt");
  auto cancelled = std::make_shared<Collector>();
  cluster.member_thread.loop().call([&] { cluster.worker->drop_link(); });  // nobody runs it
  cluster.loop->submit(Harness::request(2, 4, 3), cancelled);
  cluster.loop->cancel(RequestId{1, 2});
  ASSERT_TRUE(cancelled->done.wait());
  EXPECT_EQ(cancelled->finish, FinishReason::kCancelled);
}

TEST(Loop, ALostWorkersRequestsGoOnAtAnother) {
  Cluster cluster;
  cluster.wait_ready();
  AcceptedRequest r = Harness::request(1, 12, 900, 3);
  auto observer = std::make_shared<Collector>();
  cluster.loop->submit(r, observer);
  ASSERT_TRUE(observer->some.wait());
  cluster.member_thread.loop().call([&] { cluster.worker->drop_link(); });
  cluster.second = cluster.make(Role::kAttention, 102);
  ASSERT_TRUE(observer->done.wait());
  EXPECT_EQ(observer->tokens, oracle_answer(r.prompt, r.sampling));
}

TEST(Loop, ARefusedMemberJoinsUnderANewIncarnation) {
  Cluster cluster;
  cluster.wait_ready();
  cluster.member_thread.loop().call([&] { cluster.worker->drop_link(); });
  cluster.second = cluster.make(Role::kAttention, 101);
  auto observer = std::make_shared<Collector>();
  cluster.loop->submit(Harness::request(1, 12, 9), observer);
  ASSERT_TRUE(observer->done.wait());
  EXPECT_EQ(observer->finish, FinishReason::kLength);
  cluster.member_thread.loop().call([&] { EXPECT_EQ(cluster.second->refusals_, 1); });
}

TEST(Loop, AStreamIsTakenOverWithinTheProcess) {
  Cluster cluster;
  cluster.wait_ready();
  AcceptedRequest r = Harness::request(1, 12, 200);
  r.router_context = "c";
  auto first = std::make_shared<Collector>();
  cluster.loop->submit(r, first);
  // Taken over while it runs, by one that then lets go of it, and by a last one.
  auto second = std::make_shared<Collector>();
  cluster.loop->adopt(r.id, "", second);
  cluster.loop->release(r.id, *first, true);  // it has it no more
  cluster.loop->release(r.id, *second, false);
  auto third = std::make_shared<Collector>();
  cluster.loop->adopt(r.id, "", third);
  ASSERT_TRUE(third->done.wait());
  EXPECT_EQ(third->tokens, oracle_answer(r.prompt, r.sampling));
  EXPECT_EQ(third->finish, FinishReason::kLength);
  auto stranger = std::make_shared<Collector>();
  cluster.loop->adopt(r.id, "somebody", stranger);
  ASSERT_TRUE(stranger->done.wait());
  EXPECT_EQ(stranger->refused.code(), StatusCode::kNotFound);
}

TEST(Loop, AnAdaptersSessions) {
  struct Gateway : GatewaySession {
    void welcome(const Welcome&) override { ++welcomes; }
    void reply(RequestId, const Status& status, bool) override { last_reply = status; }
    void reply_adopt(RequestId, const Status&, const AdoptedRequest*) override {}
    void tokens(const TokenEvent& event) override {
      all.insert(all.end(), event.tokens.begin(), event.tokens.end());
      if (event.finish != FinishReason::kNone) done.set();
    }
    void fleet(const FleetInfo& info) override { ready = info.ready; }
    void close(const Status& cause) override { closed = cause; }
    int welcomes = 0;
    bool ready = false;
    Status last_reply, closed;
    std::vector<TokenId> all;
    Event done;
  };
  Cluster cluster;
  cluster.wait_ready();
  auto gateway = std::make_shared<Gateway>();
  Hello hello;
  hello.name = "router-1";
  hello.incarnation = Incarnation(901);
  const SessionId session = cluster.loop->gateway_connected(gateway, hello);
  const AcceptedRequest r = Harness::request(1, 12, 9);
  cluster.loop->on_gateway_submit(session, r);
  ASSERT_TRUE(gateway->done.wait());
  Event seen;
  StatusSnapshot snapshot;
  cluster.loop->status([&](const StatusSnapshot& s) {
    snapshot = s;
    seen.set();
  });
  ASSERT_TRUE(seen.wait());
  EXPECT_TRUE(gateway->ready);
  EXPECT_EQ(gateway->welcomes, 1);
  EXPECT_EQ(gateway->all, oracle_answer(r.prompt, r.sampling));
  EXPECT_EQ(snapshot.members.size(),
            3u);  // worker, shard, this gateway; not the loop's own, which is no process
  cluster.loop->gateway_closed(session, unavailable("over"));
  cluster.scheduler_thread.loop().call([] {});
  EXPECT_EQ(cluster.loop->metrics().gateways, 1u);
}

TEST(Loop, DestroyingTheLoopTellsItsMembers) {
  LoopThread member_thread;
  LoopExecutor scheduler_executor;
  struct Handler : MemberHandler {
    Hello hello() override { return Harness::member_hello(Role::kAttention, 101); }
    void on_message(ToMember) override {}
    void on_down(const Status& cause) override {
      why = cause;
      down.set();
    }
    Status why;
    Event down;
  } handler;
  auto loop = std::make_unique<SchedulerLoop>(quick(), scheduler_executor);
  auto link = loop->attach_member(handler, member_thread.loop());
  EXPECT_TRUE(scheduler_executor.run_until([&] { return loop->metrics().workers == 1; }, 30 * kSecond));
  loop.reset();
  EXPECT_TRUE(handler.down.wait());
  EXPECT_EQ(handler.why.code(), StatusCode::kUnavailable);
  member_thread.stop();
  link.reset();
}

}  // namespace
}  // namespace conclave::scheduler
