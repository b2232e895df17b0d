// Members and gateways over real gRPC: joining, refusals, leases, reconnecting, restarts, bad messages.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "conclave/v1/cluster.grpc.pb.h"
#include "libs/rpc/convert.h"
#include "tests/rpc/cluster_fixture.h"

namespace conclave::scheduler {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace pb = ::conclave::v1;

AcceptedRequest request(uint64_t id, uint32_t prompt, uint32_t max_tokens) {
  AcceptedRequest r = Harness::request(id, prompt, max_tokens, id * 17 + 1);
  r.id = RequestId{id, 99};
  return r;
}

struct SessionTest : ::testing::Test {
  void wait_ready(rpc::SchedulerClient& gateway) {
    ASSERT_TRUE(eventually([&] { return gateway.fleet().ready; })) << gateway.fleet().not_ready;
  }
  SchedulerHost scheduler;
};

TEST_F(SessionTest, AFleetServesRequests) {
  RemoteMember worker(scheduler.client(), Role::kAttention);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  rpc::SchedulerClient gateway(scheduler.client(), "router", make_incarnation());
  wait_ready(gateway);
  EXPECT_EQ(gateway.fleet().max_positions, 4096u);
  EXPECT_EQ(gateway.fleet().numerics_id, "k1-cpu");
  std::vector<std::pair<AcceptedRequest, std::shared_ptr<Collector>>> all;
  for (uint64_t i = 1; i <= 40; ++i) {
    all.push_back({request(i, static_cast<uint32_t>(1 + i * 3), 12), std::make_shared<Collector>()});
    gateway.submit(all.back().first, all.back().second);
  }
  for (auto& [r, seen] : all) {
    ASSERT_TRUE(seen->wait_end());
    EXPECT_EQ(seen->tokens, oracle_answer(r.prompt, r.sampling));
    EXPECT_EQ(seen->accepted, 1);
    EXPECT_EQ(seen->ends, 1);
    EXPECT_EQ(seen->faults, 0);
  }
  EXPECT_EQ(worker.breach(), "");
  EXPECT_TRUE(eventually([&] { return gateway.metrics().open == 0; }));
}

TEST_F(SessionTest, TimelinesAndLoadAreAnsweredBesideTheStream) {
  RemoteMember worker(scheduler.client(), Role::kAttention);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  rpc::SchedulerClient gateway(scheduler.client(), "router", make_incarnation());
  wait_ready(gateway);
  AcceptedRequest followed = request(1, 20, 12);
  followed.trace = {7, 8, 9, true};
  const auto seen = std::make_shared<Collector>();
  gateway.submit(followed, seen);
  ASSERT_TRUE(seen->wait_end());
  const auto ask = [](rpc::SchedulerClient& client, RequestId id) {
    const auto answer = std::make_shared<std::promise<StatusOr<SchedulerTimeline>>>();
    client.timeline(
        id, [answer](StatusOr<SchedulerTimeline> timeline) { answer->set_value(std::move(timeline)); });
    return answer->get_future().get();
  };
  const auto timeline = ask(gateway, followed.id);
  ASSERT_TRUE(timeline.ok()) << timeline.status();
  EXPECT_TRUE(timeline->ended);
  EXPECT_EQ(timeline->trace.trace_lo, 8u);
  EXPECT_EQ(timeline->prompt_tokens, 20u);
  ASSERT_EQ(timeline->marks.size(), 3u);
  EXPECT_THAT(timeline->marks[1].detail, HasSubstr("0 of 20 tokens cached"));
  EXPECT_EQ(timeline->steps.size(), 12u);
  EXPECT_EQ(ask(gateway, RequestId{5, 5}).status().code(), StatusCode::kNotFound);
  const auto load = gateway.load(10 * kSecond);
  ASSERT_TRUE(load.has_value());
  EXPECT_EQ(load->running, 0u);
  EXPECT_LE(load->kv_usage, 1);
  rpc::ClientOptions nobody = scheduler.client();
  nobody.target = "127.0.0.1:1";
  rpc::SchedulerClient lonely(nobody, "router", make_incarnation());
  EXPECT_EQ(ask(lonely, followed.id).status().code(), StatusCode::kUnavailable);
  EXPECT_FALSE(lonely.load(10 * kSecond).has_value());
}

TEST_F(SessionTest, RefusalsNameTheReasonAndTheMemberTriesAgain) {
  RemoteMember worker(scheduler.client(), Role::kAttention);
  ASSERT_TRUE(worker.wait_joined());
  RemoteMember stranger(scheduler.client(), Role::kExpert, 0, [](Hello& h) { h.numerics_id = "another"; });
  ASSERT_TRUE(stranger.watch.wait([&] { return !stranger.refused.empty(); }));
  EXPECT_THAT(stranger.refused, HasSubstr("another"));
  EXPECT_TRUE(eventually([&] {
    return stranger.client->not_joined() ==
           "the scheduler at " + scheduler.client().target +
               " refused this member: " + stranger.watch.read(stranger.refused);
  })) << stranger.client->not_joined();
  const int before = stranger.watch.read(stranger.hellos);
  EXPECT_TRUE(stranger.watch.wait([&] { return stranger.hellos > before + 2; })) << "does not try again";
  EXPECT_EQ(stranger.watch.read(stranger.downs), 0);  // it never was up
}

TEST_F(SessionTest, ABusyExecutorKeepsItsLease) {
  SchedulerOptions options = quick_options();
  options.lease_ms = 60;
  options.dead_after_ms = 150;
  SchedulerHost strict(options);
  RemoteMember worker(strict.client(), Role::kAttention);
  RemoteMember shard(strict.client(), Role::kExpert);
  rpc::SchedulerClient gateway(strict.client(), "router", make_incarnation());
  wait_ready(gateway);
  // The member computes for much longer than it may be silent.
  worker.thread.loop().call([] { std::this_thread::sleep_for(std::chrono::milliseconds(800)); });
  EXPECT_TRUE(gateway.fleet().ready);
  EXPECT_EQ(worker.watch.read(worker.downs), 0);
  EXPECT_EQ(strict.loop->metrics().members_lost, 0u);
}

TEST_F(SessionTest, ALostMemberMakesTheFleetUnreadyAndComesBack) {
  RemoteMember worker(scheduler.client(), Role::kAttention);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  rpc::SchedulerClient gateway(scheduler.client(), "router", make_incarnation());
  wait_ready(gateway);
  shard.leave();
  ASSERT_TRUE(eventually([&] { return !gateway.fleet().ready; }));
  EXPECT_THAT(gateway.fleet().not_ready, HasSubstr("expert"));
  RemoteMember second(scheduler.client(), Role::kExpert);
  wait_ready(gateway);
}

TEST_F(SessionTest, ARestartedSchedulerTakesOpenRequestsAgain) {
  auto worker = std::make_unique<RemoteMember>(scheduler.client(), Role::kAttention, 2 * kMillisecond);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  rpc::SchedulerClient gateway(scheduler.client(), "router", make_incarnation());
  wait_ready(gateway);
  std::vector<std::pair<AcceptedRequest, std::shared_ptr<Collector>>> all;
  for (uint64_t i = 1; i <= 16; ++i) {
    all.push_back({request(i, 5, 240), std::make_shared<Collector>()});
    gateway.submit(all.back().first, all.back().second);
  }
  for (int restart = 1; restart <= 3; ++restart) {
    for (auto& [r, seen] : all) ASSERT_TRUE(seen->wait_tokens(static_cast<size_t>(restart * 10)));
    scheduler.restart();
    // Each restart is one that the router has seen, however late this thread runs.
    const auto connections = static_cast<uint64_t>(restart) + 1;
    ASSERT_TRUE(eventually([&] { return gateway.metrics().connections >= connections; }));
  }
  for (auto& [r, seen] : all) {
    ASSERT_TRUE(seen->wait_end());
    EXPECT_EQ(seen->tokens, oracle_answer(r.prompt, r.sampling));
    EXPECT_EQ(seen->finish, FinishReason::kLength) << seen->error;
    EXPECT_EQ(seen->accepted, 1);
    EXPECT_EQ(seen->ends, 1);
    EXPECT_EQ(seen->faults, 0);
  }
  EXPECT_EQ(worker->breach(), "");
  EXPECT_GE(gateway.metrics().resubmissions, 16u);
  EXPECT_GE(gateway.metrics().connections, 4u);
}

TEST_F(SessionTest, ALostWorkerIsReplacedWithoutLosingTokens) {
  auto worker = std::make_unique<RemoteMember>(scheduler.client(), Role::kAttention, 2 * kMillisecond);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  rpc::SchedulerClient gateway(scheduler.client(), "router", make_incarnation());
  wait_ready(gateway);
  std::vector<std::pair<AcceptedRequest, std::shared_ptr<Collector>>> all;
  for (uint64_t i = 1; i <= 8; ++i) {
    all.push_back({request(i, 5, 40), std::make_shared<Collector>()});
    gateway.submit(all.back().first, all.back().second);
  }
  for (auto& [r, seen] : all) ASSERT_TRUE(seen->wait_tokens(10));
  worker->leave();
  worker = std::make_unique<RemoteMember>(scheduler.client(), Role::kAttention, kMillisecond);
  for (auto& [r, seen] : all) {
    ASSERT_TRUE(seen->wait_end());
    EXPECT_EQ(seen->tokens, oracle_answer(r.prompt, r.sampling));
    EXPECT_EQ(seen->faults, 0);
  }
}

AcceptedRequest resumable(uint64_t id, uint32_t prompt, uint32_t max_tokens) {
  AcceptedRequest r = request(id, prompt, max_tokens);
  r.router_context = "what it takes to go on";
  r.tenant = "alice";
  return r;
}

TEST_F(SessionTest, AnotherRouterAdoptsWhatADeadOneHad) {
  RemoteMember worker(scheduler.client(), Role::kAttention, 2 * kMillisecond);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  auto first = std::make_unique<rpc::SchedulerClient>(scheduler.client(), "first", make_incarnation());
  rpc::SchedulerClient second(scheduler.client(), "second", make_incarnation());
  wait_ready(*first);
  wait_ready(second);
  EXPECT_EQ(second.fleet().max_router_context_bytes, 65'536u);
  std::vector<std::pair<AcceptedRequest, std::shared_ptr<Collector>>> all;
  for (uint64_t i = 1; i <= 8; ++i) {
    all.push_back({resumable(i, 5, 80), std::make_shared<Collector>()});
    first->submit(all.back().first, all.back().second);
  }
  for (auto& [r, seen] : all) {
    ASSERT_TRUE(seen->wait_tokens(5));
    EXPECT_EQ(seen->resumable, 1);
  }
  // Its end must not look like one that cancels: the process is gone from one moment to the next.
  for (auto& [r, seen] : all) first->release(r.id, *seen, false);
  first.reset();
  for (auto& [r, seen] : all) {
    seen = std::make_shared<Collector>();
    second.adopt(r.id, "alice", seen);
  }
  for (auto& [r, seen] : all) {
    ASSERT_TRUE(seen->wait_end());
    ASSERT_EQ(seen->adopted.size(), 1u) << seen->refused;
    EXPECT_EQ(seen->adopted[0].request.prompt, r.prompt);
    EXPECT_EQ(seen->adopted[0].request.router_context, r.router_context);
    EXPECT_GE(seen->adopted[0].generated, 5u);
    EXPECT_EQ(seen->tokens, oracle_answer(r.prompt, r.sampling));
    EXPECT_EQ(seen->faults, 0);
    EXPECT_EQ(seen->accepted, 0);
  }
  EXPECT_TRUE(eventually([&] { return second.metrics().adoptions == 8; }));
  EXPECT_TRUE(eventually([&] { return second.metrics().open == 0; }));
}

TEST_F(SessionTest, AdoptionsAreRefusedInWordsAndGoOnOverARestart) {
  auto worker = std::make_unique<RemoteMember>(scheduler.client(), Role::kAttention, 2 * kMillisecond);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  rpc::SchedulerClient first(scheduler.client(), "first", make_incarnation());
  rpc::SchedulerClient second(scheduler.client(), "second", make_incarnation());
  wait_ready(first);
  wait_ready(second);
  const AcceptedRequest r = resumable(1, 5, 150);
  auto seen = std::make_shared<Collector>();
  first.submit(r, seen);
  ASSERT_TRUE(seen->wait_tokens(5));
  const auto refused = [&](RequestId id, const std::string& tenant) {
    auto asked = std::make_shared<Collector>();
    second.adopt(id, tenant, asked);
    EXPECT_TRUE(asked->wait_end());
    return asked->refused.code();
  };
  EXPECT_EQ(refused(RequestId{5, 5}, "alice"), StatusCode::kNotFound);
  EXPECT_EQ(refused(r.id, "bob"), StatusCode::kNotFound);
  // Taken over while the other still reads it.
  auto taken = std::make_shared<Collector>();
  second.adopt(r.id, "alice", taken);
  ASSERT_TRUE(taken->wait_tokens(10));
  ASSERT_TRUE(seen->wait_end());
  EXPECT_EQ(seen->finish, FinishReason::kCancelled);
  EXPECT_THAT(seen->error, ::testing::HasSubstr("taken the stream over"));
  // Then it is like any other request: resubmitted to a scheduler that restarted.
  scheduler.restart();
  ASSERT_TRUE(taken->wait_end());
  EXPECT_EQ(taken->tokens, oracle_answer(r.prompt, r.sampling));
  EXPECT_EQ(taken->finish, FinishReason::kLength) << taken->error;
  EXPECT_EQ(taken->faults, 0);
  // Without a scheduler the answer is that there is none.
  scheduler.stop();
  ASSERT_TRUE(eventually([&] { return !second.fleet().ready; }));
  EXPECT_EQ(refused(r.id, "alice"), StatusCode::kUnavailable);
}

// A router that has just come back is asked for streams before it knows what its scheduler keeps.
TEST_F(SessionTest, AStreamAskedForTooEarlyIsAskedForAgainNotRefused) {
  for (int i = 0; i < 30; ++i) {
    rpc::SchedulerClient early(scheduler.client(), "early", make_incarnation());
    for (;;) {
      auto asked = std::make_shared<Collector>();
      early.adopt(RequestId{5, 5}, "alice", asked);
      ASSERT_TRUE(asked->wait_end());
      if (asked->refused.code() == StatusCode::kNotFound) break;
      ASSERT_EQ(asked->refused.code(), StatusCode::kUnavailable) << asked->refused;
    }
  }
}

TEST_F(SessionTest, CancelEndsARequest) {
  RemoteMember worker(scheduler.client(), Role::kAttention, 5 * kMillisecond);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  rpc::SchedulerClient gateway(scheduler.client(), "router", make_incarnation());
  wait_ready(gateway);
  auto seen = std::make_shared<Collector>();
  const AcceptedRequest r = request(1, 5, 2000);
  gateway.submit(r, seen);
  ASSERT_TRUE(seen->wait_tokens(3));
  gateway.cancel(r.id);
  ASSERT_TRUE(seen->wait_end());
  EXPECT_EQ(seen->finish, FinishReason::kCancelled);
  EXPECT_LT(seen->tokens.size(), 2000u);
}

TEST_F(SessionTest, WithoutASchedulerASubmissionWaitsThenFails) {
  rpc::ClientOptions options = scheduler.client();
  options.submit_wait = 300 * kMillisecond;
  scheduler.stop();
  rpc::SchedulerClient gateway(options, "router", make_incarnation());
  auto seen = std::make_shared<Collector>();
  const TimePoint begin = steady_now();
  gateway.submit(request(1, 5, 5), seen);
  ASSERT_TRUE(seen->wait_end());
  EXPECT_GE(steady_now() - begin, 300 * kMillisecond);
  EXPECT_EQ(seen->refused.code(), StatusCode::kUnavailable);
  EXPECT_THAT(message_of(seen->refused), HasSubstr("no connection to the scheduler at " + options.target));
  EXPECT_FALSE(gateway.fleet().ready);
  EXPECT_THAT(gateway.fleet().not_ready, HasSubstr(options.target));

  // One that comes within the time is used.
  rpc::ClientOptions patient = options;
  patient.submit_wait = 30 * kSecond;
  rpc::SchedulerClient second(patient, "router", make_incarnation());
  auto late = std::make_shared<Collector>();
  const AcceptedRequest r = request(2, 5, 5);
  second.submit(r, late);
  scheduler.start(quick_options());
  RemoteMember worker(scheduler.client(), Role::kAttention);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  ASSERT_TRUE(late->wait_end());
  ASSERT_EQ(late->accepted, 1) << late->refused;
  EXPECT_EQ(late->tokens, oracle_answer(r.prompt, r.sampling));
}

TEST_F(SessionTest, TheClientsBoundsHold) {
  rpc::ClientOptions options = scheduler.client();
  options.max_open_requests = 3;
  RemoteMember worker(scheduler.client(), Role::kAttention, 20 * kMillisecond);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  rpc::SchedulerClient gateway(options, "router", make_incarnation());
  wait_ready(gateway);
  std::vector<std::shared_ptr<Collector>> all;
  for (uint64_t i = 1; i <= 5; ++i) {
    all.push_back(std::make_shared<Collector>());
    gateway.submit(request(i, 5, 30), all.back());
  }
  for (auto& seen : all) ASSERT_TRUE(seen->wait_end());
  EXPECT_EQ(all[2]->finish, FinishReason::kLength);
  EXPECT_EQ(all[3]->refused.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(message_of(all[4]->refused), HasSubstr("control.max_open_requests"));
}

TEST_F(SessionTest, DestroyingTheClientEndsWhatIsOpen) {
  RemoteMember worker(scheduler.client(), Role::kAttention, 20 * kMillisecond);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  auto gateway = std::make_unique<rpc::SchedulerClient>(scheduler.client(), "router", make_incarnation());
  wait_ready(*gateway);
  auto seen = std::make_shared<Collector>();
  gateway->submit(request(1, 5, 2000), seen);
  ASSERT_TRUE(seen->wait_tokens(1));
  gateway.reset();
  EXPECT_EQ(seen->ends, 1);
  EXPECT_EQ(seen->finish, FinishReason::kCancelled);
}

// --- messages that no client of ours sends

struct RawTest : SessionTest {
  void SetUp() override {
    stub = pb::Cluster::NewStub(
        grpc::CreateChannel(scheduler.client().target, grpc::InsecureChannelCredentials()));
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }
  pb::MemberUp hello() {
    pb::MemberUp up;
    rpc::to_proto(FromMember(Harness::member_hello(Role::kAttention, make_incarnation().value)), &up);
    return up;
  }
  // Reads to the end and returns how the server ended the stream.
  template <class Stream, class Down>
  grpc::Status drain(Stream& stream, Down down) {
    while (stream->Read(&down)) {
    }
    return stream->Finish();
  }
  std::unique_ptr<pb::Cluster::Stub> stub;
  grpc::ClientContext context;
};

TEST_F(RawTest, TheFirstMessageMustBeAHello) {
  auto stream = stub->Join(&context);
  pb::MemberUp up;
  up.mutable_heartbeat()->set_epoch(1);
  stream->Write(up);
  const grpc::Status status = drain(stream, pb::MemberDown());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("the first message must be a hello"));
  EXPECT_EQ(scheduler.grpc->metrics().invalid_messages, 1u);
}

TEST_F(RawTest, AnInvalidHelloNamesTheField) {
  auto stream = stub->Join(&context);
  pb::MemberUp up = hello();
  up.mutable_hello()->set_num_experts(1'000'000);
  stream->Write(up);
  const grpc::Status status = drain(stream, pb::MemberDown());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("hello.num_experts is 1000000"));
}

TEST_F(RawTest, ASecondHelloAndAnInvalidResultCloseTheSession) {
  auto stream = stub->Join(&context);
  stream->Write(hello());
  pb::MemberDown down;
  ASSERT_TRUE(stream->Read(&down));
  EXPECT_TRUE(down.has_welcome());
  EXPECT_GT(down.welcome().lease_ns(), 0);
  stream->Write(hello());
  EXPECT_THAT(drain(stream, pb::MemberDown()).error_message(), HasSubstr("a second hello"));

  grpc::ClientContext again;
  auto second = stub->Join(&again);
  second->Write(hello());
  ASSERT_TRUE(second->Read(&down));
  pb::MemberUp result;
  result.mutable_step_result()->set_step(0);
  second->Write(result);
  EXPECT_THAT(drain(second, pb::MemberDown()).error_message(), HasSubstr("result.step"));
}

TEST_F(RawTest, BytesThatAreNoMessageCloseTheSession) {
  auto channel = grpc::CreateChannel(scheduler.client().target, grpc::InsecureChannelCredentials());
  uint64_t invalid = 0;
  for (const std::string method : {"Join", "Gateway"}) {
    grpc::GenericStub generic(channel);
    grpc::CompletionQueue queue;
    grpc::ClientContext own;
    auto stream = generic.PrepareCall(&own, "/conclave.v1.Cluster/" + method, &queue);
    void* tag = nullptr;
    bool ok = false;
    stream->StartCall(&tag);
    ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
    const grpc::Slice bytes("\x1a\x7fnot as long as it says");
    stream->Write(grpc::ByteBuffer(&bytes, 1), &tag);
    ASSERT_TRUE(queue.Next(&tag, &ok));
    grpc::Status status;
    stream->Finish(&status, &tag);
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("invalid message: not a conclave.v1."));
    EXPECT_EQ(scheduler.grpc->metrics().invalid_messages, ++invalid);
  }
}

TEST_F(RawTest, AnInvalidSubmissionIsAnsweredAndTheSessionGoesOn) {
  auto stream = stub->Gateway(&context);
  pb::GatewayUp up;
  Hello router;
  router.role = Role::kRouter;
  router.name = "raw";
  router.incarnation = make_incarnation();
  rpc::to_proto(router, up.mutable_hello());
  stream->Write(up);
  pb::GatewayDown down;
  ASSERT_TRUE(stream->Read(&down));
  EXPECT_TRUE(down.has_welcome());
  for (int round = 0; round < 100; ++round) {  // more than the read window
    pb::GatewayUp submit;
    rpc::to_proto(request(static_cast<uint64_t>(round + 1), 3, 4), submit.mutable_submit());
    submit.mutable_submit()->mutable_sampling()->set_top_p(7);
    ASSERT_TRUE(stream->Write(submit));
    do {
      ASSERT_TRUE(stream->Read(&down));
    } while (!down.has_submit_reply());
    EXPECT_EQ(down.submit_reply().code(), static_cast<uint32_t>(StatusCode::kInvalidArgument));
    EXPECT_EQ(down.submit_reply().field(), "sampling.top_p");
  }
  stream->WritesDone();
  drain(stream, pb::GatewayDown());
}

// Tokens of one round share a message; those that carry more come alone, and none overtakes another.
TEST_F(RawTest, TokensOfARoundTravelTogether) {
  RemoteMember worker(scheduler.client(), Role::kAttention, 2 * kMillisecond);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  auto stream = stub->Gateway(&context);
  pb::GatewayUp up;
  Hello router;
  router.role = Role::kRouter;
  router.name = "raw";
  router.incarnation = make_incarnation();
  rpc::to_proto(router, up.mutable_hello());
  stream->Write(up);
  pb::GatewayDown down;
  while (!(down.has_fleet() && down.fleet().ready())) ASSERT_TRUE(stream->Read(&down));
  std::map<RequestId, AcceptedRequest> requests;
  for (uint64_t i = 1; i <= 16; ++i) {
    AcceptedRequest r = request(i, 5, 20 + static_cast<uint32_t>(i));
    r.sampling.logprobs = i == 7;
    requests[r.id] = r;
    rpc::to_proto(r, up.mutable_submit());
    ASSERT_TRUE(stream->Write(up));
  }
  std::map<RequestId, std::vector<TokenId>> tokens;
  size_t ends = 0, alone = 0, together = 0;
  while (ends < requests.size()) {
    ASSERT_TRUE(stream->Read(&down));
    std::vector<TokenEvent> events;
    if (down.has_token_batch()) {
      events = *rpc::from_proto(down.token_batch());
      ASSERT_FALSE(events.empty());
      together += events.size() > 1;
    } else if (down.has_tokens()) {
      events.push_back(*rpc::from_proto(down.tokens()));
      ++alone;
      // With log-probabilities, or what was cached of the prompt beside a request's first token.
      EXPECT_TRUE(requests.at(events[0].request).sampling.logprobs || events[0].cached_tokens);
    }
    for (const TokenEvent& event : events) {
      std::vector<TokenId>& have = tokens[event.request];
      EXPECT_EQ(event.index, have.size());
      have.insert(have.end(), event.tokens.begin(), event.tokens.end());
      ends += event.finish != FinishReason::kNone;
    }
  }
  for (const auto& [id, r] : requests) EXPECT_EQ(tokens[id], oracle_answer(r.prompt, r.sampling));
  EXPECT_EQ(alone, 27u + 15u);
  EXPECT_GT(together, 10u);
  context.TryCancel();
  drain(stream, pb::GatewayDown());
}

TEST_F(RawTest, ASilentConnectionIsClosed) {
  GrpcServerOptions impatient;
  impatient.hello_deadline = 50 * kMillisecond;
  SchedulerHost strict(quick_options(), impatient);
  auto own =
      pb::Cluster::NewStub(grpc::CreateChannel(strict.client().target, grpc::InsecureChannelCredentials()));
  auto stream = own->Join(&context);
  const grpc::Status status = drain(stream, pb::MemberDown());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(status.error_message(), HasSubstr("no hello within 50 ms"));
}

TEST_F(RawTest, AMessageLongerThanTheLimitIsRefused) {
  GrpcServerOptions small;
  small.max_message_bytes = 1000;
  SchedulerHost strict(quick_options(), small);
  auto own =
      pb::Cluster::NewStub(grpc::CreateChannel(strict.client().target, grpc::InsecureChannelCredentials()));
  auto stream = own->Join(&context);
  pb::MemberUp up = hello();
  up.mutable_hello()->set_transport_address(std::string(5000, 'x'));
  stream->Write(up);
  EXPECT_EQ(drain(stream, pb::MemberDown()).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(RawTest, AGatewayThatDoesNotReadIsCutOff) {
  GrpcServerOptions tight;
  tight.session_queue_messages = 64;
  SchedulerHost strict(quick_options(), tight);
  RemoteMember worker(strict.client(), Role::kAttention);
  RemoteMember shard(strict.client(), Role::kExpert);
  ASSERT_TRUE(eventually([&] { return strict.loop->fleet().ready; }));
  auto own =
      pb::Cluster::NewStub(grpc::CreateChannel(strict.client().target, grpc::InsecureChannelCredentials()));
  auto stream = own->Gateway(&context);
  pb::GatewayUp up;
  Hello router;
  router.name = "slow";
  router.incarnation = make_incarnation();
  rpc::to_proto(router, up.mutable_hello());
  stream->Write(up);
  // Nothing is read here, and each answer is long enough to fill the flow control window sooner or later.
  std::thread writer([&] {
    for (uint64_t i = 1; i <= 3000; ++i) {
      pb::GatewayUp submit;
      rpc::to_proto(request(i, 4, 200), submit.mutable_submit());
      if (!stream->Write(submit)) break;
    }
  });
  EXPECT_TRUE(strict.wait_ended("too slow: 64 messages wait to be written"));
  EXPECT_GE(strict.grpc->metrics().slow_peers_cut, 1u);
  context.TryCancel();
  writer.join();
  // The others are served all the while.
  rpc::SchedulerClient gateway(strict.client(), "router", make_incarnation());
  EXPECT_TRUE(eventually([&] { return gateway.fleet().ready; }));
}

TEST_F(RawTest, StatusTellsWhatIsThere) {
  RemoteMember worker(scheduler.client(), Role::kAttention);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  ASSERT_TRUE(eventually([&] { return scheduler.loop->fleet().ready; }));
  pb::StatusReply reply;
  ASSERT_TRUE(stub->Status(&context, pb::StatusRequest(), &reply).ok());
  EXPECT_NE(reply.scheduler_incarnation(), 0u);
  EXPECT_TRUE(reply.fleet().ready());
  uint32_t held = 0, blocks = 0;
  for (const pb::MemberStatus& member : reply.members()) {
    EXPECT_TRUE(member.role() == pb::ROLE_ROUTER || member.state() == "ready") << member.name();
    held += member.experts_held();
    blocks += member.kv_blocks_total();
  }
  EXPECT_EQ(held, 16u);
  EXPECT_EQ(blocks, RemoteMember::kKvBlocks);
}

TEST_F(RawTest, ExpertsAndRebalanceAreAnswered) {
  RemoteMember worker(scheduler.client(), Role::kAttention);
  RemoteMember shard(scheduler.client(), Role::kExpert);
  ASSERT_TRUE(eventually([&] { return scheduler.loop->fleet().ready; }));
  shard.thread.loop().call([&] { shard.client->send(ExpertLoad{{{1, 5}, {9, 3}}}); });
  const auto experts = [&](std::optional<uint32_t> layer, pb::ExpertsReply& reply) {
    grpc::ClientContext call;
    pb::ExpertsRequest request;
    if (layer) request.set_layer(*layer);
    return stub->Experts(&call, request, &reply);
  };
  pb::ExpertsReply all;
  ASSERT_TRUE(eventually([&] {
    all.Clear();
    return experts(std::nullopt, all).ok() && all.load_size() == 16 && all.load(9) > 0;
  }));
  EXPECT_GT(all.load(1), all.load(9));
  EXPECT_EQ(all.load(0), 0);
  EXPECT_EQ(all.experts(), 8u);
  EXPECT_EQ(all.shards_size(), 1);
  EXPECT_EQ(all.home_begin_size(), 17);
  EXPECT_EQ(all.home_shards_size(), 16);
  pb::ExpertsReply one;
  ASSERT_TRUE(experts(1, one).ok());
  EXPECT_EQ(one.first_layer(), 1u);
  EXPECT_EQ(one.load_size(), 8);
  EXPECT_EQ(experts(2, one).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  pb::RebalanceRequest dry;
  dry.set_dry_run(true);
  pb::RebalanceReply summary;
  grpc::ClientContext call;
  ASSERT_TRUE(stub->Rebalance(&call, dry, &summary).ok());
  EXPECT_EQ(summary.added(), 0u);
  EXPECT_EQ(summary.epoch(), 0u);
  EXPECT_NEAR(summary.busiest_before(), 1, 1e-9);
}

// Health and reflection are there for orchestrators and tools, called as those do: by name.
TEST_F(RawTest, HealthAndReflectionAnswer) {
  auto channel = grpc::CreateChannel(scheduler.client().target, grpc::InsecureChannelCredentials());
  grpc::GenericStub generic(channel);
  grpc::CompletionQueue queue;
  const auto health = [&](const std::string& service) {
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    // HealthCheckRequest{service = 1}, HealthCheckResponse{status = 1}.
    std::string wire = "\x0a" + std::string(1, static_cast<char>(service.size())) + service;
    grpc::Slice slice(wire);
    grpc::ByteBuffer request(&slice, 1), response;
    grpc::Status status;
    auto rpc = generic.PrepareUnaryCall(&call, "/grpc.health.v1.Health/Check", request, &queue);
    rpc->StartCall();
    rpc->Finish(&response, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue.Next(&tag, &ok));
    EXPECT_TRUE(status.ok()) << status.error_message();
    grpc::Slice answer;
    if (!status.ok() || !response.DumpToSingleSlice(&answer).ok() || answer.size() != 2) return -1;
    return static_cast<int>(answer.begin()[1]);
  };
  EXPECT_EQ(health("conclave.v1.Cluster"), 2);  // NOT_SERVING until the process says otherwise
  scheduler.grpc->set_serving(true);
  EXPECT_EQ(health("conclave.v1.Cluster"), 1);
  EXPECT_EQ(health(""), 1);

  // ServerReflectionRequest{list_services = 7}: the answer names our service.
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  auto stream =
      generic.PrepareCall(&call, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  stream->StartCall(nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  grpc::Slice list(std::string("\x3a\x00", 2));
  stream->Write(grpc::ByteBuffer(&list, 1), nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  grpc::ByteBuffer response;
  stream->Read(&response, nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  grpc::Slice answer;
  ASSERT_TRUE(response.DumpToSingleSlice(&answer).ok());
  EXPECT_THAT(std::string(answer.begin(), answer.end()), HasSubstr("conclave.v1.Cluster"));
  call.TryCancel();
  grpc::Status status;
  stream->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
}

TEST_F(RawTest, APortInUseIsExplained) {
  LoopThread thread;
  SchedulerLoop loop(quick_options(), thread.loop());
  GrpcServerOptions options;
  options.listen = scheduler.client().target;
  auto second = GrpcServer::start(options, loop, thread.loop());
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(message_of(second.status()),
              AllOf(HasSubstr("cannot listen on " + options.listen), HasSubstr("Address already in use"),
                    HasSubstr("scheduler.listen")));
  options.listen = "nonsense";
  EXPECT_THAT(message_of(GrpcServer::start(options, loop, thread.loop()).status()),
              HasSubstr("lacks a port"));
  thread.stop();
}

}  // namespace
}  // namespace conclave::scheduler
