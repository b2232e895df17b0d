// Messages of one stream are handed on in the order they were sent: nothing that makes room in its read
// window may begin the next message while the one before is still being handed on.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "conclave/v1/cluster.grpc.pb.h"
#include "libs/rpc/convert.h"
#include "tests/rpc/cluster_fixture.h"

namespace conclave::scheduler {
namespace {

namespace pb = ::conclave::v1;

constexpr int kMessages = 100;                  // of a stream; a few of them make room
constexpr Nanos kLookOut = 300 * kMillisecond;  // for one that overtakes; it would come within moments

// Runs the server's credits at once and on another thread, as an executor that is quicker than the thread of
// the message. The first time it keeps the message's thread there, to see whether another one goes past it.
class QuickExecutor final : public Executor {
 public:
  explicit QuickExecutor(std::function<bool()> overtaken) : overtaken_(std::move(overtaken)) {}

  TimePoint now() const override { return steady_now(); }
  void post(Task task) override {
    std::thread(std::move(task)).join();
    if (held_.exchange(true)) return;
    const TimePoint end = steady_now() + kLookOut;
    while (!overtaken_() && steady_now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    watch.change([&] { verdict = overtaken_() ? "overtaken" : "in order"; });
  }
  TimerId post_at(TimePoint, Task) override {
    ADD_FAILURE() << "the server has no timers here";
    return {};
  }
  void cancel(TimerId) override {}

  Watch watch;
  std::string verdict;

 private:
  const std::function<bool()> overtaken_;
  std::atomic<bool> held_{false};
};

// A server whose sessions are those of the real scheduler. The last message of each test is one of no kind:
// it is counted when it is handed on.
struct MessageOrderTest : ::testing::Test {
  MessageOrderTest() {
    auto started = GrpcServer::start({}, loop, executor);
    EXPECT_TRUE(started.ok()) << started.status();
    server = *std::move(started);
    stub = pb::Cluster::NewStub(grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials()));
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  }
  ~MessageOrderTest() override {
    server.reset();
    thread.stop();
  }

  template <class Stream, class Up, class Down>
  void expect_order(Stream stream, const Up& hello, const Up& more, Down down) {
    stream->Write(hello);
    for (int i = 0; i < kMessages; ++i) stream->Write(more);
    stream->Write(Up());
    ASSERT_TRUE(executor.watch.wait([&] { return !executor.verdict.empty(); }));
    EXPECT_EQ(executor.watch.read(executor.verdict), "in order");
    while (stream->Read(&down)) {
    }
    const grpc::Status end = stream->Finish();
    EXPECT_EQ(end.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << end.error_message();
    EXPECT_EQ(server->metrics().invalid_messages, 1u);
  }

  void join() {
    pb::MemberUp hello, beat;
    rpc::to_proto(FromMember(Harness::member_hello(Role::kAttention, make_incarnation().value)), &hello);
    rpc::to_proto(FromMember(Heartbeat{}), &beat);
    expect_order(stub->Join(&context), hello, beat, pb::MemberDown());
  }
  void gateway() {
    pb::GatewayUp hello, cancel;
    Hello router;
    router.role = Role::kRouter;
    router.name = "raw";
    router.incarnation = make_incarnation();
    rpc::to_proto(router, hello.mutable_hello());
    rpc::to_proto(RequestId{1, 2}, cancel.mutable_cancel()->mutable_id());
    expect_order(stub->Gateway(&context), hello, cancel, pb::GatewayDown());
  }

  LoopThread thread;
  SchedulerLoop loop{quick_options(), thread.loop()};
  std::unique_ptr<GrpcServer> server;
  QuickExecutor executor{[this] { return server->metrics().invalid_messages > 0; }};
  std::unique_ptr<pb::Cluster::Stub> stub;
  grpc::ClientContext context;
};

TEST_F(MessageOrderTest, OfAMember) { join(); }
TEST_F(MessageOrderTest, OfAGateway) { gateway(); }

// A stream that comes to the service comes to this test too.
TEST(MessageOrder, EveryStreamOfTheServiceIsTested) {
  const auto* service = pb::GatewayUp::descriptor()->file()->FindServiceByName("Cluster");
  ASSERT_NE(service, nullptr);
  std::vector<std::string> streams;
  for (int i = 0; i < service->method_count(); ++i) {
    if (service->method(i)->client_streaming()) streams.push_back(service->method(i)->name());
  }
  EXPECT_THAT(streams, ::testing::UnorderedElementsAre("Join", "Gateway"));
}

}  // namespace
}  // namespace conclave::scheduler
