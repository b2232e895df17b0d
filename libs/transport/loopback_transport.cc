#include "libs/transport/loopback_transport.h"

#include <cstdio>
#include <utility>

#include "libs/base/check.h"

namespace conclave {
namespace {
std::string loopback_address(Incarnation id) {
  char text[32];
  std::snprintf(text, sizeof text, "loopback:%016llx", static_cast<unsigned long long>(id.value));
  return text;
}
}  // namespace

void LoopbackHub::set_delay_model(DelayModel model) {
  std::lock_guard lock(mutex_);
  delay_model_ = std::move(model);
}

void LoopbackHub::add(const std::string& address, std::shared_ptr<Node> node) {
  std::lock_guard lock(mutex_);
  const bool added = nodes_.emplace(address, std::move(node)).second;
  CONCLAVE_CHECK(added);  // an incarnation is one process
}

void LoopbackHub::remove(const std::string& address, const Node* node) {
  std::lock_guard lock(mutex_);
  auto it = nodes_.find(address);
  if (it != nodes_.end() && it->second.get() == node) nodes_.erase(it);
}

std::shared_ptr<LoopbackHub::Node> LoopbackHub::find(std::string_view address) const {
  std::lock_guard lock(mutex_);
  auto it = nodes_.find(address);
  return it == nodes_.end() ? nullptr : it->second;
}

std::optional<Nanos> LoopbackHub::delay(Incarnation from, Incarnation to, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  return delay_model_ ? delay_model_(from, to, bytes) : Nanos{0};
}

bool LoopbackHub::deliver(Incarnation from, const std::shared_ptr<Node>& to, uint64_t bytes,
                          std::function<void(LoopbackTransport&)> act) {
  const auto wait = delay(from, to->id, bytes);
  if (!wait) return false;
  auto arrive = [to, act = std::move(act)] {
    if (to->transport) act(*to->transport);
  };
  std::lock_guard lock(to->mutex);
  if (!to->executor) return true;  // gone: the bytes went out all the same
  if (*wait <= 0) {
    to->executor->post(std::move(arrive));
  } else {
    to->executor->post([to, when = to->executor->now() + *wait, arrive = std::move(arrive)] {
      if (to->transport) to->transport->executor_.post_at(when, arrive);
    });
  }
  return true;
}

LoopbackTransport::LoopbackTransport(std::shared_ptr<LoopbackHub> hub, Executor& executor,
                                     TransportOptions options)
    : SessionTransport(executor, std::move(options)),
      hub_(std::move(hub)),
      address_(loopback_address(self())),
      node_(std::make_shared<LoopbackHub::Node>()) {
  node_->id = self();
  node_->executor = &executor_;
  node_->transport = this;
  hub_->add(address_, node_);
}

LoopbackTransport::~LoopbackTransport() {
  hub_->remove(address_, node_.get());
  {
    std::lock_guard lock(node_->mutex);
    node_->executor = nullptr;
  }
  node_->transport = nullptr;
  shut_down();
}

Status LoopbackTransport::link_open(LinkId link, std::string_view address) {
  auto node = hub_->find(address);
  if (!node) return unavailable("nobody at " + std::string(address));
  links_to_[link] = std::move(node);
  return OkStatus();
}

SessionTransport::SendResult LoopbackTransport::link_send(LinkId link, OutMessage message) {
  auto it = links_to_.find(link);
  CONCLAVE_CHECK(it != links_to_.end());
  const uint64_t bytes = message.header.size() + (message.rows ? message.rows->size() : 0);
  const bool arrives = hub_->deliver(self(), it->second, bytes,
                                     [header = std::make_shared<wire::Bytes>(std::move(message.header)),
                                      rows = std::move(message.rows)](LoopbackTransport& to) {
                                       to.receive(*header, rows);
                                       if (header.use_count() == 1) to.recycle(std::move(*header));
                                     });
  return arrives ? SendResult::kTaken : SendResult::kLost;
}

void LoopbackTransport::link_close(LinkId link) { links_to_.erase(link); }

}  // namespace conclave
