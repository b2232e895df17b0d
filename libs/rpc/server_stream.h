// One bidirectional stream as the server sees it, over gRPC's callback API: a bounded queue of messages to
// write, reads with a window, one end. Messages are bytes (session_wire.h), so that no protobuf message waits
// in a queue or is made by gRPC. Included by .cc files of adapters only. Any thread, except where marked.
#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/rpc/grpc_setup.h"

namespace conclave::rpc {

struct ServerStreamLimits {
  size_t queue_messages = 65536;       // waiting to be written
  uint64_t queue_bytes = 64ull << 20;  // of them together
  int read_window = 64;                // messages read and not yet processed()
  Nanos first_message_deadline = 5 * kSecond;
  Nanos finish_deadline = kSecond;  // for a peer that does not read to its end; then the stream is cut
};

class ServerStream : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                     public std::enable_shared_from_this<ServerStream> {
 public:
  explicit ServerStream(ServerStreamLimits limits) : limits_(limits) {}

  // Begins reading. The stream keeps itself alive until its end.
  void start(grpc::CallbackServerContext* context) {
    context_ = context;
    self_ = this->shared_from_this();
    peer_ = context->peer();
    arm(limits_.first_message_deadline, [this] {
      finish(deadline_exceeded("no hello within " +
                               std::to_string(limits_.first_message_deadline / kMillisecond) + " ms"));
    });
    std::lock_guard lock(mutex_);
    reading_ = true;
    this->StartRead(&incoming_);
  }

  // A message that finds the stream over is dropped. One that finds the queue full ends the stream: the peer
  // is too slow to be served.
  void write(grpc::Slice message) {
    const size_t bytes = message.size();
    std::string cause;
    {
      std::lock_guard lock(mutex_);
      if (finishing_) return;
      if (outgoing_.size() >= limits_.queue_messages) {
        cause = std::to_string(outgoing_.size()) + " messages";
      } else if (!outgoing_.empty() && queued_bytes_ + bytes > limits_.queue_bytes) {
        cause = std::to_string(queued_bytes_) + " bytes";
      } else {
        queued_bytes_ += bytes;
        outgoing_.push_back(std::move(message));
        if (!writing_) write_next();
        return;
      }
    }
    finish(resource_exhausted(
        "too slow: " + cause +
        " wait to be written (scheduler.session_queue_messages, scheduler.session_queue_bytes)"));
  }

  // Ends the stream: what is queued is written first when the end is a clean one or a refusal precedes it
  // (`after_queue`), and dropped otherwise.
  void finish(const Status& cause, bool after_queue = false) {
    {
      std::lock_guard lock(mutex_);
      if (finishing_) return;
      finishing_ = true;
      cause_ = cause;
      if (!after_queue) outgoing_.clear();
      if (!writing_ && !write_next()) finish_now();
    }
    arm(limits_.finish_deadline, [this] { cut(); });
  }

  // The receiver has dealt with this many messages.
  void processed(int count) {
    std::lock_guard lock(mutex_);
    unprocessed_ -= count;
    if (!reading_) read_next();
  }

  const std::string& peer() const { return peer_; }

 protected:
  // In order, one at a time, on gRPC's threads. An error ends the stream with it.
  virtual Status on_message(std::string_view bytes) = 0;
  // Once, last. `cause` is what finish() was given, or that the peer went away.
  virtual void on_end(const Status& cause) = 0;

 private:
  // True when a write was started. Starting operations under the mutex is fine: gRPC never runs a reaction
  // inside the call that starts it.
  bool write_next() {
    if (outgoing_.empty() || finished_ || gone_) return false;
    current_ = grpc::ByteBuffer(&outgoing_.front(), 1);  // shares the bytes
    outgoing_.pop_front();
    writing_ = true;
    this->StartWrite(&current_);
    return true;
  }

  void read_next() {
    if (finishing_ || finished_ || gone_ || unprocessed_ >= limits_.read_window) return;
    reading_ = true;
    this->StartRead(&incoming_);
  }

  void finish_now() {
    if (finished_) return;
    finished_ = true;
    this->Finish(to_grpc(cause_));
  }

  // The peer does not take its end: the call is torn down.
  void cut() {
    std::lock_guard lock(mutex_);
    if (done_) return;
    context_->TryCancel();
    finish_now();
  }

  void arm(Nanos delay, std::function<void()> action) {
    std::lock_guard lock(mutex_);
    if (done_) return;
    // Each deadline has an alarm of its own; the earlier one is forgotten by its generation.
    const uint64_t generation = ++alarm_generation_;
    auto alarm = std::make_shared<grpc::Alarm>();
    alarm_ = alarm;
    alarm->Set(std::chrono::system_clock::now() + std::chrono::nanoseconds(delay),
               [self = this->shared_from_this(), this, generation, action = std::move(action)](bool expired) {
                 {
                   std::lock_guard inner(mutex_);
                   if (!expired || generation != alarm_generation_) return;
                 }
                 action();
               });
  }

  void disarm_locked() {
    ++alarm_generation_;
    if (alarm_ != nullptr) alarm_->Cancel();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      std::lock_guard lock(mutex_);
      reading_ = false;
      if (!finishing_) {
        finishing_ = true;
        cause_ = unavailable("the peer closed the connection");
        outgoing_.clear();
        if (!writing_) finish_now();
      }
      return;
    }
    grpc::Slice message;
    const bool whole = incoming_.TrySingleSlice(&message).ok() || incoming_.DumpToSingleSlice(&message).ok();
    incoming_.Clear();
    {
      std::lock_guard lock(mutex_);
      if (finishing_) {
        reading_ = false;
        return;
      }
      if (!heard_) {
        heard_ = true;
        disarm_locked();
      }
      ++unprocessed_;
    }
    const Status taken = whole ? on_message({reinterpret_cast<const char*>(message.begin()), message.size()})
                               : internal_error("a message that gRPC cannot decompress");
    if (!taken.ok()) {
      finish(taken);
      return;
    }
    // Only now: a read that processed() began while on_message ran could bring the next message to another
    // thread, which would overtake this one.
    std::lock_guard lock(mutex_);
    reading_ = false;
    read_next();
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    queued_bytes_ -= current_.Length();
    current_.Clear();
    if (!ok) {
      gone_ = true;
      if (!finishing_) {
        finishing_ = true;
        cause_ = unavailable("the peer closed the connection");
      }
      outgoing_.clear();
      finish_now();
      return;
    }
    if (!write_next() && finishing_) finish_now();
  }

  void OnCancel() override {
    std::lock_guard lock(mutex_);
    gone_ = true;
    if (!finishing_) {
      finishing_ = true;
      cause_ = unavailable("the peer closed the connection");
    }
    outgoing_.clear();
    if (!writing_) finish_now();
  }

  void OnDone() override {
    Status cause;
    std::shared_ptr<grpc::Alarm> alarm;  // its callback holds this stream; let go of it
    {
      std::lock_guard lock(mutex_);
      done_ = true;
      disarm_locked();
      alarm.swap(alarm_);
      cause = cause_;
    }
    on_end(cause);
    const std::shared_ptr<ServerStream> self = std::move(self_);  // may destroy this on return
  }

  const ServerStreamLimits limits_;
  grpc::CallbackServerContext* context_ = nullptr;  // valid until OnDone
  std::string peer_;
  std::shared_ptr<ServerStream> self_;  // until OnDone

  std::mutex mutex_;
  std::deque<grpc::Slice> outgoing_;
  grpc::ByteBuffer current_;  // being written
  grpc::ByteBuffer incoming_;
  Status cause_;
  uint64_t queued_bytes_ = 0;
  int unprocessed_ = 0;
  bool heard_ = false;
  bool writing_ = false;
  bool reading_ = false;
  bool finishing_ = false;  // no more messages either way, but for what is queued
  bool finished_ = false;   // Finish was called
  bool gone_ = false;       // writes can't succeed
  bool done_ = false;
  uint64_t alarm_generation_ = 0;
  std::shared_ptr<grpc::Alarm> alarm_;
};

}  // namespace conclave::rpc
