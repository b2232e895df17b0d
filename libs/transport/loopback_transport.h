// ExpertTransport within one process: between executors of their own threads (`conclave up --in-process`) or
// between simulated processes. Headers take the wire form, so every message exercises the codec; rows are
// shared, not copied.
//
// A hub joins the transports that share it. Destroying a transport closes its connections; peers see
// PeerDown.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "libs/transport/session_transport.h"

namespace conclave {

class LoopbackTransport;

// Any thread. Must outlive nothing: transports share ownership.
class LoopbackHub {
 public:
  // How long a message takes, or nullopt when it is lost. Called under the hub's lock, one call at a time;
  // `bytes` counts header and rows.
  using DelayModel = std::function<std::optional<Nanos>(Incarnation from, Incarnation to, uint64_t bytes)>;

  LoopbackHub() = default;
  // Set before traffic starts, or from a simulation at any time. Without one, messages arrive at the next
  // turn.
  void set_delay_model(DelayModel model);

 private:
  friend class LoopbackTransport;
  // A transport as others see it. Its mutex keeps the executor alive while others post to it.
  struct Node {
    Incarnation id;
    std::mutex mutex;
    Executor* executor = nullptr;            // guarded; null once closed
    LoopbackTransport* transport = nullptr;  // touched on the executor alone
  };

  void add(const std::string& address, std::shared_ptr<Node> node);
  void remove(const std::string& address, const Node* node);
  std::shared_ptr<Node> find(std::string_view address) const;
  std::optional<Nanos> delay(Incarnation from, Incarnation to, uint64_t bytes);
  // Runs `act` with the transport on its executor after the delay, unless it has gone. False: lost on the
  // way.
  bool deliver(Incarnation from, const std::shared_ptr<Node>& to, uint64_t bytes,
               std::function<void(LoopbackTransport&)> act);

  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Node>, std::less<>> nodes_;
  DelayModel delay_model_;
};

class LoopbackTransport final : public SessionTransport {
 public:
  LoopbackTransport(std::shared_ptr<LoopbackHub> hub, Executor& executor, TransportOptions options);
  ~LoopbackTransport() override;

  std::string address() const override { return address_; }

 private:
  friend class LoopbackHub;
  Status link_open(LinkId link, std::string_view address) override;
  SendResult link_send(LinkId link, OutMessage message) override;
  void link_close(LinkId link) override;
  bool link_ordered() const override { return false; }

  const std::shared_ptr<LoopbackHub> hub_;
  const std::string address_;
  std::shared_ptr<LoopbackHub::Node> node_;
  std::unordered_map<LinkId, std::shared_ptr<LoopbackHub::Node>> links_to_;
};

}  // namespace conclave
