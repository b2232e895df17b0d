// A transport under a test's control: records what is submitted, delivers what the test pushes.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "libs/ports/executor.h"
#include "libs/ports/expert_transport.h"
#include "libs/ports/member_link.h"

namespace conclave::testing {

class FakeTransport final : public ExpertTransport {
 public:
  FakeTransport(Executor& executor, Incarnation self) : executor_(executor), self_(self) {}

  std::string address() const override { return "fake:" + std::to_string(self_.value); }
  Incarnation self() const override { return self_; }
  void connect(Incarnation peer, std::string_view) override {
    connects.push_back(peer);
    if (auto_up) push_up(peer);
  }
  void close(Incarnation peer) override {
    closes.push_back(peer);
    up_[peer] = false;
  }
  bool is_up(Incarnation peer) const override {
    const auto it = up_.find(peer);
    return it != up_.end() && it->second;
  }
  Status submit(Incarnation peer, const DispatchBatch& batch) override {
    if (!is_up(peer)) return unavailable("not up");
    if (!submit_status.ok()) return submit_status;
    submits.emplace_back(peer, batch);
    return OkStatus();
  }
  Status reply(Incarnation peer, const CombineBatch& batch) override {
    if (!reply_status.ok()) return reply_status;
    replies.emplace_back(peer, batch);
    return OkStatus();
  }
  void cancel(Incarnation peer, DispatchId id) override { cancels.emplace_back(peer, id); }
  void poll(std::vector<TransportEvent>& out) override {
    ++polls;
    for (auto& e : events_) out.push_back(std::move(e));
    events_.clear();
  }
  void set_ready(std::function<void()> ready) override { ready_ = std::move(ready); }

  // Delivers an event in a task of the executor.
  void push(Incarnation peer, decltype(TransportEvent::what) what) {
    events_.push_back({peer, std::move(what)});
    executor_.post([this] {
      if (ready_) ready_();
    });
  }
  void push_up(Incarnation peer) {
    up_[peer] = true;
    push(peer, TransportEvent::PeerUp{});
  }
  void push_down(Incarnation peer) {
    up_[peer] = false;
    push(peer, TransportEvent::PeerDown{unavailable("killed by the test")});
  }

  bool auto_up = true;
  Status submit_status;
  Status reply_status;
  int polls = 0;
  std::vector<Incarnation> connects;
  std::vector<Incarnation> closes;
  std::vector<std::pair<Incarnation, DispatchBatch>> submits;
  std::vector<std::pair<Incarnation, CombineBatch>> replies;
  std::vector<std::pair<Incarnation, DispatchId>> cancels;

 private:
  Executor& executor_;
  Incarnation self_;
  std::map<Incarnation, bool> up_;
  std::deque<TransportEvent> events_;
  std::function<void()> ready_;
};

class FakeLink final : public MemberLink {
 public:
  void send(FromMember message) override { sent.push_back(std::move(message)); }
  template <class T>
  std::vector<T> all() const {
    std::vector<T> found;
    for (const auto& m : sent) {
      if (const T* t = std::get_if<T>(&m)) found.push_back(*t);
    }
    return found;
  }
  std::vector<FromMember> sent;
};

}  // namespace conclave::testing
