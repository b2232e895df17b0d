// Peers in processes of their own, for tests that kill and stop them. A peer is this very program, executed
// again with
// "--peer" as its first argument; it answers each dispatch with a combine until it is killed or its parent is
// gone.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "libs/base/ids.h"
#include "libs/transport/transport_options.h"

namespace conclave::testing {

struct PeerProcess {
  pid_t pid = -1;
  int out = -1;  // where it says who it is
  Incarnation id;
  std::string address;

  // Starts one and returns at once.
  static PeerProcess start();
  // Waits until it said who it is (10 s); false when it did not.
  bool learn();
  void kill(int signal);
  // SIGKILL and wait for its end.
  void reap();
};

// Options that both ends use.
TransportOptions process_options(Incarnation self);

// What --peer does; returns only on failure.
int run_peer();

}  // namespace conclave::testing
