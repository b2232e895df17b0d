// A network of this test's own: namespaces joined by conclave-test-relay, whose links can be made slow,
// lossy or dead while it runs.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "libs/base/status.h"
#include "tests/cluster/relay/link_model.h"

namespace conclave {

struct NetworkNode {
  std::string netns;    // for `ip netns exec`; empty: the host's
  std::string device;   // the node's end of the network
  std::string address;  // IPv4
};

class Network {
 public:
  // FAILED_PRECONDITION where the machine does not let us (no root, no TUN); the tests are then skipped.
  // The test itself is the node "host".
  static StatusOr<std::unique_ptr<Network>> start(uint64_t seed, const std::vector<std::string>& nodes);
  // Ends what runs in the namespaces and removes them.
  ~Network();

  const NetworkNode& node(const std::string& name) const { return nodes_.at(name); }
  // Both directions. Returns once it is so; INTERNAL when the relay does not say so.
  Status set(const std::string& a, const std::string& b, const LinkFault& fault);
  // Every link of the node, but that to the host where `host` is false.
  Status set_all(const std::string& name, const LinkFault& fault, bool host);
  StatusOr<LinkCounts> counts(const std::string& from, const std::string& to);

 private:
  Network() = default;
  StatusOr<std::string> line();
  StatusOr<std::string> ask(const std::string& command);

  pid_t pid_ = -1;
  int to_ = -1, from_ = -1;
  std::string read_;
  std::map<std::string, NetworkNode> nodes_;
};

// A socket of the given type inside a namespace, wherever the caller runs; -1 when there is none.
int socket_in(const std::string& netns, int type);

}  // namespace conclave
