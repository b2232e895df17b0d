// The reactors of calls that generate: one whole answer, or a stream. They speak bytes, so that bytes that
// are no message get an answer of ours.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "libs/rpc/grpc_setup.h"
#include "router_service/grpc/call_entry.h"
#include "router_service/grpc/inference_convert.h"

namespace conclave::router {

using OnGrpcAnswer = std::function<void(std::string_view method, int code)>;

// Client errors name the field in the message and, for programs, in the trailing metadata.
grpc::Status grpc_error(const Status& status, grpc::CallbackServerContext* context);

// What one call asks for, as its method read it.
struct GenerationPlan {
  gateway::GenerateRequest request;
  std::function<std::unique_ptr<AnswerSink>(RequestId)> sink;
};

// Of a call that goes on with a stream.
struct ResumePlan {
  std::string id;
  uint64_t after = 0;
  SinkOptions sink;  // but for what the stream itself says
};

// Between a reactor (which gRPC deletes when the call is done) and its generation (which may still report
// then). Calls into the reactor are made without the lock, and none after Finish.
class CallState {
 public:
  void attach(std::shared_ptr<gateway::Generation> generation, std::unique_ptr<AnswerSink> sink,
              bool wants_prompt) {
    std::lock_guard lock(mutex_);
    generation_ = std::move(generation);
    sink_ = std::move(sink);
    wants_prompt_ = wants_prompt;
  }
  void attach(std::shared_ptr<gateway::Generation> generation) {
    std::lock_guard lock(mutex_);
    generation_ = std::move(generation);
  }
  // Of a stream that is resumed: known once its context was read.
  void set_sink(std::unique_ptr<AnswerSink> sink, bool wants_prompt) {
    std::lock_guard lock(mutex_);
    sink_ = std::move(sink);
    wants_prompt_ = wants_prompt;
  }
  void cancel() {
    std::shared_ptr<gateway::Generation> generation;
    {
      std::lock_guard lock(mutex_);
      generation = generation_;
    }
    if (generation) generation->cancel();
  }

 protected:
  // Expects the lock, and a generation.
  gateway::Update take() {
    gateway::Update update = generation_->take();
    if (wants_prompt_ && update.accepted) {
      wants_prompt_ = false;
      sink_->set_prompt(generation_->prompt());
    }
    return update;
  }

  std::mutex mutex_;
  std::shared_ptr<gateway::Generation> generation_;
  std::unique_ptr<AnswerSink> sink_;
  bool wants_prompt_ = false;
  bool finished_ = false;
};

class UnaryState : public CallState {
 public:
  // The end, once, when it has come; `response` is then filled.
  std::optional<Status> advance(grpc::ByteBuffer* response);
  // True for the one who may finish the call as cancelled.
  bool give_up() {
    std::lock_guard lock(mutex_);
    return !std::exchange(finished_, true);
  }
};

class UnaryCall : public grpc::ServerUnaryReactor {
 public:
  UnaryCall(gateway::Gateway& gateway, grpc::CallbackServerContext* context, std::string_view method,
            CallEntry entry, StatusOr<GenerationPlan> plan, grpc::ByteBuffer* response,
            const OnGrpcAnswer& on_answer);
  void OnCancel() override;
  void OnDone() override { delete this; }

 private:
  static void finish_if(UnaryCall* self, UnaryState& state);
  void answered(const Status& status) const;
  void finish(const Status& status);

  grpc::CallbackServerContext* const context_;
  const std::string method_;
  const CallEntry entry_;
  grpc::ByteBuffer* const response_;
  const OnGrpcAnswer& on_answer_;
  const std::shared_ptr<UnaryState> state_;
};

class StreamState : public CallState {
 public:
  struct Step {
    bool write = false;
    bool last = false;  // write (if any) and finish
    Status status;
    std::string stream_id;  // of a resumable stream, with its first message
  };
  // Before it is attached: its messages are those of a Resume call.
  void resume_after(uint64_t after) {
    after_ = after;
    wrapped_ = true;
  }
  // What to do now; nothing while a write is under way. What the client has not taken stays with the
  // generation, which bounds it: only when all that was taken is written is more taken.
  Step advance(grpc::ByteBuffer& message);
  // True when the call was given up during the write: it is to be finished now.
  bool written();
  // True for the one who may finish the call as cancelled. While a write is under way (or about to start, on
  // another thread) that is written()'s caller, so that the reactor lives until then.
  bool give_up();

 private:
  // Expects the lock, and a generation. False: nothing more is there now.
  bool take_pieces();

  std::deque<grpc::ByteBuffer> queue_;  // of one update
  bool accepted_ = false;
  bool resumable_ = false;
  bool id_told_ = false;
  bool wrapped_ = false;
  uint64_t after_ = 0;
  bool ended_ = false;  // the queue holds the last of it
  Status end_;
  bool writing_ = false;
  bool given_up_ = false;  // during a write
};

class StreamCall : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  StreamCall(gateway::Gateway& gateway, grpc::CallbackServerContext* context, std::string_view method,
             CallEntry entry, StatusOr<GenerationPlan> plan, const OnGrpcAnswer& on_answer);
  StreamCall(gateway::Gateway& gateway, grpc::CallbackServerContext* context, std::string_view method,
             CallEntry entry, StatusOr<ResumePlan> plan, const OnGrpcAnswer& on_answer);
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override { delete this; }

 private:
  static void advance(StreamCall* self, StreamState& state);
  void begin(const Status& started);
  void answered(const Status& status) const;
  void finish(const Status& status);

  grpc::CallbackServerContext* const context_;
  const std::string method_;
  const CallEntry entry_;
  const OnGrpcAnswer& on_answer_;
  const std::shared_ptr<StreamState> state_;
  grpc::ByteBuffer message_;
};

}  // namespace conclave::router
