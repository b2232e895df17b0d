// One bidirectional stream as the client sees it, over gRPC's callback API: a bounded queue of messages to
// write, reads with a window, one end. Internal to libs/rpc. Any thread; the callbacks come on gRPC's
// threads.
//
// A stream keeps its channel, and gRPC 1.51 stops and joins its callback threads when the last channel goes:
// that must not happen on one of them. So the end hands the stream itself to on_end, which passes it on to a
// thread of ours, and on_end owns nothing of the stream. (Seen without this: an abort in
// grpc_cq_internal_unref.)
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "libs/base/status.h"
#include "libs/rpc/grpc_setup.h"

namespace conclave::rpc {

// Messages delivered and not yet processed(); past it the stream is not read, so that HTTP/2 flow control
// holds the sender back.
inline constexpr int kReadWindow = 64;

template <class Up, class Down>
class ClientStream final : public grpc::ClientBidiReactor<Up, Down>,
                           public std::enable_shared_from_this<ClientStream<Up, Down>> {
 public:
  struct Events {
    std::function<void(Down&& message)> on_message;  // one at a time, in order
    // Once, last. Drop `stream` on a thread of ours.
    std::function<void(const Status& cause, std::shared_ptr<ClientStream> stream)> on_end;
  };

  ClientStream(size_t queue_limit, Events events) : queue_limit_(queue_limit), events_(std::move(events)) {}

  // `begin` starts the RPC with this context and reactor. The stream keeps itself alive until its end.
  void start(const std::function<void(grpc::ClientContext*, grpc::ClientBidiReactor<Up, Down>*)>& begin,
             Up&& first) {
    self_ = this->shared_from_this();
    begin(&context_, this);
    this->AddHold();
    {
      std::lock_guard lock(mutex_);
      outgoing_.push_back(std::move(first));
      reading_ = true;
      this->StartRead(&incoming_);
      write_next();
    }
    this->StartCall();
  }

  // False when the queue is full (the stream then ends with RESOURCE_EXHAUSTED) or the stream is over.
  bool write(Up&& message) {
    {
      std::lock_guard lock(mutex_);
      if (ending_) return false;
      if (outgoing_.size() < queue_limit_) {
        outgoing_.push_back(std::move(message));
        if (!writing_) write_next();
        return true;
      }
    }
    cancel(resource_exhausted("the scheduler does not take messages: " + std::to_string(queue_limit_) +
                              " wait to be written (control.queue_messages)"));
    return false;
  }

  // Messages not yet handed to gRPC.
  size_t queued() const {
    std::lock_guard lock(mutex_);
    return outgoing_.size();
  }

  // Ends the stream; on_end reports the first cause given.
  void cancel(const Status& cause) {
    std::lock_guard lock(mutex_);
    if (cause_.ok()) cause_ = cause;
    end_locked();
    context_.TryCancel();
  }

  // After on_end, on a thread of ours: breaks the cycle with whatever the callbacks own.
  void forget_events() { events_ = {}; }

  // The receiver has dealt with one message.
  void processed() {
    std::lock_guard lock(mutex_);
    --unprocessed_;
    if (!ending_ && !reading_ && unprocessed_ < kReadWindow) {
      reading_ = true;
      this->StartRead(&incoming_);
    }
  }

 private:
  // Starting operations under the mutex is fine: gRPC never runs a reaction inside the call that starts it.
  void write_next() {
    if (outgoing_.empty() || ending_) return;
    current_ = std::move(outgoing_.front());
    outgoing_.pop_front();
    writing_ = true;
    this->StartWrite(&current_);
  }

  // No operation is started from here on; the hold that allowed starting them is given back.
  void end_locked() {
    if (ending_) return;
    ending_ = true;
    outgoing_.clear();
    this->RemoveHold();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      std::lock_guard lock(mutex_);
      reading_ = false;
      end_locked();
      return;
    }
    Down message = std::move(incoming_);
    incoming_ = Down();
    {
      std::lock_guard lock(mutex_);
      if (ending_) {
        reading_ = false;
        return;
      }
      ++unprocessed_;
    }
    events_.on_message(std::move(message));
    std::lock_guard lock(mutex_);
    reading_ = !ending_ && unprocessed_ < kReadWindow;
    if (reading_) this->StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    if (ok) {
      write_next();
    } else if (!ending_) {
      end_locked();
      context_.TryCancel();
    }
  }

  void OnDone(const grpc::Status& status) override {
    Status cause;
    {
      std::lock_guard lock(mutex_);
      cause = cause_;
    }
    if (cause.ok())
      cause = status.ok() ? unavailable("the scheduler closed the connection") : from_grpc(status);
    const auto on_end = std::move(events_.on_end);
    on_end(cause, std::move(self_));  // from here on this may be gone
  }

  const size_t queue_limit_;
  Events events_;
  grpc::ClientContext context_;
  std::shared_ptr<ClientStream> self_;  // until OnDone

  mutable std::mutex mutex_;
  std::deque<Up> outgoing_;
  Up current_;
  Down incoming_;
  Status cause_;
  int unprocessed_ = 0;
  bool writing_ = false;
  bool reading_ = false;
  bool ending_ = false;
};

}  // namespace conclave::rpc
