// The exchange of one request on its connection. Internal to the server.
#pragma once

#include <atomic>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <functional>
#include <memory>
#include <utility>

#include "libs/http/connection.h"

namespace conclave::http {

// Keeps the connection (and with it the context) alive; posts nothing once the server has stopped.
class ExchangeImpl : public Exchange {
 public:
  ExchangeImpl(std::shared_ptr<Connection> connection, uint64_t serial)
      : connection_(std::move(connection)), serial_(serial) {}

  ~ExchangeImpl() override {
    const PostGate gate(*connection_->state_);
    if (answered_.load() || !gate.open()) return;
    asio::post(connection_->socket_.get_executor(), [c = connection_, s = serial_] {
      if (c->serial_ == s && c->phase_ == Connection::State::kHandling && !c->answered_)
        c->error_response(500, "the request was dropped");
    });
  }

  void respond(Response response) override {
    const PostGate gate(*connection_->state_);
    if (answered_.exchange(true) || !gate.open()) return;
    asio::dispatch(
        connection_->socket_.get_executor(),
        [c = connection_, s = serial_, r = std::move(response)]() mutable { c->respond(s, std::move(r)); });
  }
  void stream(Response head, std::shared_ptr<StreamSource> source) override {
    const PostGate gate(*connection_->state_);
    if (answered_.exchange(true) || !gate.open()) return;
    asio::dispatch(connection_->socket_.get_executor(),
                   [c = connection_, s = serial_, h = std::move(head), from = std::move(source)]() mutable {
                     c->begin_stream(s, std::move(h), std::move(from));
                   });
  }
  void wake() override {
    if (wake_pending_->exchange(true)) return;  // one is on its way and will see what is new
    const PostGate gate(*connection_->state_);
    if (!gate.open()) return;
    asio::post(connection_->socket_.get_executor(), [c = connection_, s = serial_, pending = wake_pending_] {
      pending->store(false);
      c->pull(s);
    });
  }
  void post(std::function<void()> task) override {
    const PostGate gate(*connection_->state_);
    if (!gate.open()) return;
    asio::post(connection_->socket_.get_executor(), std::move(task));
  }
  void add_headers(Headers headers) override {
    const PostGate gate(*connection_->state_);
    if (!gate.open()) return;
    asio::dispatch(connection_->socket_.get_executor(),
                   [c = connection_, s = serial_, h = std::move(headers)]() mutable {
                     c->add_headers(s, std::move(h));
                   });
  }
  void on_client_gone(std::function<void()> gone) override {
    const PostGate gate(*connection_->state_);
    if (!gate.open()) return;
    asio::dispatch(
        connection_->socket_.get_executor(),
        [c = connection_, s = serial_, g = std::move(gone)]() mutable { c->set_gone(s, std::move(g)); });
  }

 private:
  const std::shared_ptr<Connection> connection_;
  const uint64_t serial_;
  std::atomic<bool> answered_{false};
  std::shared_ptr<std::atomic<bool>> wake_pending_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace conclave::http
