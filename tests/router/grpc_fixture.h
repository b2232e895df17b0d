// The gRPC front over a fake scheduler, and calls of any bytes.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "conclave/v1/inference.grpc.pb.h"
#include "router_service/grpc/grpc_front.h"
#include "tests/router/fake_scheduler.h"
#include "tests/router/fake_text.h"

namespace conclave::router {

using testing::FakeScheduler;
using testing::FakeText;

class GrpcTest : public ::testing::Test {
 protected:
  explicit GrpcTest(
      std::chrono::microseconds pause = {},
      FakeScheduler::Answer answer = [](const AcceptedRequest& r) { return r.prompt; })
      : scheduler(std::move(answer), pause) {
    auto started = GrpcFront::start({}, gateway);
    EXPECT_TRUE(started.ok()) << started.status();
    front = std::move(started).value();
    front->set_serving(true);
    channel = grpc::CreateChannel(front->address(), grpc::InsecureChannelCredentials());
    stub = v1::Inference::NewStub(channel);
  }
  ~GrpcTest() override {
    gateway.begin_drain();
    gateway.abort_all(unavailable("the test is over"));
    front.reset();
  }

  grpc::Status call(const v1::GenerateRequest& request, v1::GenerateResponse* response = nullptr) {
    grpc::ClientContext context;
    v1::GenerateResponse local;
    const grpc::Status status = stub->Generate(&context, request, response ? response : &local);
    const auto& trailing = context.GetServerTrailingMetadata();
    const auto at = trailing.find("conclave-field");
    field = at == trailing.end() ? "" : std::string(at->second.data(), at->second.size());
    return status;
  }

  FakeText text;
  FakeScheduler scheduler;
  gateway::Gateway gateway{gateway::GatewayOptions{}, testing::fake_model(), scheduler, text};
  std::unique_ptr<GrpcFront> front;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Inference::Stub> stub;
  std::string field;  // that the last call's error named
};

// Health and reflection as any client calls them; their few messages are written by hand, since their
// generated code is not packaged.
inline grpc::Status generic_call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                                 const std::string& message, std::string* answer) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  const auto call = stub.PrepareCall(&context, method, &queue);
  const auto wait = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  EXPECT_TRUE(wait());
  grpc::Slice slice(message);
  call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
  wait();  // fails where the server has answered already; the status says it all
  grpc::ByteBuffer reply;
  call->Read(&reply, nullptr);
  const bool read = wait();
  grpc::Status status;
  call->Finish(&status, nullptr);
  wait();
  std::vector<grpc::Slice> slices;
  answer->clear();
  if (read && reply.Dump(&slices).ok())
    for (const grpc::Slice& s : slices) answer->append(reinterpret_cast<const char*>(s.begin()), s.size());
  return status;
}

}  // namespace conclave::router
