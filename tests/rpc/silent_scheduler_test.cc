// What a router makes of a scheduler that has welcomed it and not described its fleet yet.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <optional>

#include "conclave/v1/cluster.grpc.pb.h"
#include "libs/rpc/convert.h"
#include "tests/rpc/cluster_fixture.h"

namespace conclave::scheduler {
namespace {

using ::testing::HasSubstr;
namespace pb = ::conclave::v1;

AcceptedRequest resumable_request() {
  AcceptedRequest r = Harness::request(1, 5, 5);
  r.router_context = "what it takes to go on";
  r.tenant = "alice";
  return r;
}

// A scheduler that welcomes whoever comes and keeps its fleet to itself until it is told otherwise.
class SilentScheduler final : public pb::Cluster::Service {
 public:
  SilentScheduler() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    options.target = "127.0.0.1:" + std::to_string(port);
    options.reconnect_min = options.reconnect_max = 5 * kMillisecond;
    options.connect_deadline = options.submit_wait = 60 * kSecond;  // however late a test's own threads run
  }
  ~SilentScheduler() override {
    watch.change([&] { over_ = true; });
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }
  // Ready, and keeps contexts of so many bytes.
  void describe(uint32_t max_router_context_bytes) {
    FleetInfo info{true, "", 4096, "k1-cpu", "abc"};
    info.max_router_context_bytes = max_router_context_bytes;
    watch.change([&] { fleet_ = info; });
  }

  Watch watch;
  int welcomes = 0;
  rpc::ClientOptions options;

 private:
  grpc::Status Gateway(grpc::ServerContext*,
                       grpc::ServerReaderWriter<pb::GatewayDown, pb::GatewayUp>* stream) override {
    pb::GatewayUp up;
    if (!stream->Read(&up) || !up.has_hello()) return {grpc::StatusCode::INVALID_ARGUMENT, "no hello"};
    pb::GatewayDown down;
    rpc::to_proto(Welcome{Incarnation(1), kSecond}, down.mutable_welcome());
    stream->Write(down);
    watch.change([&] { ++welcomes; });
    watch.wait([&] { return over_ || fleet_.has_value(); });
    const auto fleet = watch.read(fleet_);
    if (!fleet) return grpc::Status::OK;
    rpc::to_proto(*fleet, down.mutable_fleet());
    stream->Write(down);
    while (stream->Read(&up)) {
      if (up.has_submit()) {
        rpc::to_proto(*rpc::from_proto(up.submit().id()), OkStatus(), down.mutable_submit_reply());
        down.mutable_submit_reply()->set_resumable(!up.submit().router_context().empty());
        stream->Write(down);
      } else if (up.has_adopt()) {
        rpc::to_proto(*rpc::from_proto(up.adopt().id()), not_found("no such stream"), nullptr,
                      down.mutable_adopt_reply());
        stream->Write(down);
      }
    }
    return grpc::Status::OK;
  }

  std::unique_ptr<grpc::Server> server_;
  std::optional<FleetInfo> fleet_;
  bool over_ = false;
};

// What it keeps is unknown until then, which is not the same as nothing.
TEST(SilentSchedulerTest, BeforeItDescribesItsFleetRequestsWaitAndStreamsAreAskedForAgain) {
  SilentScheduler scheduler;
  rpc::SchedulerClient early(scheduler.options, "early", make_incarnation());
  ASSERT_TRUE(eventually([&] {
    return early.fleet().not_ready.find("has not described its fleet yet") != std::string::npos;
  })) << early.fleet().not_ready;
  EXPECT_EQ(early.fleet().max_router_context_bytes, std::nullopt);
  EXPECT_FALSE(early.fleet().ready);
  auto seen = std::make_shared<Collector>();
  early.submit(resumable_request(), seen);
  auto asked = std::make_shared<Collector>();
  early.adopt(RequestId{5, 5}, "alice", asked);
  ASSERT_TRUE(asked->wait_end());
  EXPECT_EQ(asked->refused.code(), StatusCode::kUnavailable);
  EXPECT_THAT(message_of(asked->refused), HasSubstr("has not described its fleet yet"));
  EXPECT_EQ(seen->watch.read(seen->ends), 0);

  scheduler.describe(4096);
  ASSERT_TRUE(seen->watch.wait([&] { return seen->accepted == 1 || seen->ends > 0; }));
  EXPECT_EQ(seen->watch.read(seen->resumable), 1) << seen->refused;
  EXPECT_EQ(early.fleet().max_router_context_bytes, 4096u);
  auto again = std::make_shared<Collector>();
  early.adopt(RequestId{5, 5}, "alice", again);
  ASSERT_TRUE(again->wait_end());
  EXPECT_EQ(again->refused.code(), StatusCode::kNotFound);
}

TEST(SilentSchedulerTest, OneThatKeepsNoStreamsIsNotAskedForAny) {
  SilentScheduler scheduler;
  scheduler.describe(0);
  rpc::SchedulerClient client(scheduler.options, "router", make_incarnation());
  ASSERT_TRUE(eventually([&] { return client.fleet().ready; }));
  auto asked = std::make_shared<Collector>();
  client.adopt(RequestId{5, 5}, "alice", asked);
  ASSERT_TRUE(asked->wait_end());
  EXPECT_EQ(asked->refused.code(), StatusCode::kUnimplemented);
}

TEST(SilentSchedulerTest, OneThatNeverDescribesItsFleetIsLeftAndItsRequestsAreRefused) {
  SilentScheduler scheduler;
  scheduler.options.connect_deadline = 50 * kMillisecond;
  scheduler.options.submit_wait = 300 * kMillisecond;
  rpc::SchedulerClient client(scheduler.options, "router", make_incarnation());
  EXPECT_TRUE(scheduler.watch.wait([&] { return scheduler.welcomes >= 3; })) << "it does not try again";
  auto seen = std::make_shared<Collector>();
  client.submit(resumable_request(), seen);
  ASSERT_TRUE(seen->wait_end());
  EXPECT_EQ(seen->refused.code(), StatusCode::kUnavailable);
  EXPECT_THAT(message_of(seen->refused), HasSubstr("its fleet"));
}

}  // namespace
}  // namespace conclave::scheduler
