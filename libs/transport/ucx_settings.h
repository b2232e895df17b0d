// The one place for what UCX is told. The defaults are for TCP on one host or one trusted network, and avoid
// what was seen to take a surviving process down with UCX 1.13 as Debian builds it (assertions on);
// docs/wire_format.md has the reasons. An environment variable UCX_<NAME> of the user wins over each of them.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace conclave {

struct UcxSettings {
  std::string tls = "tcp";             // no shared memory: it does not survive a SIGKILL of the peer
  std::string net_devices = "lo";      // the interface; several hosts need theirs here. "all": UCX chooses
  std::string zcopy_thresh = "inf";    // zero copy may complete twice when a peer dies
  std::string rndv_thresh = "inf";     // eager: one trip instead of three
  std::string tcp_max_poll = "1";      // more events a round: an assertion when a peer dies
  std::string tcp_conn_nb = "y";       // a connect to a black hole must not block
  std::string tcp_tx_seg_size = "1m";  // 8k segments: a quarter of the throughput
  std::string tcp_rx_seg_size = "2m";

  // Name (without UCX_) and value. The general ones are set per transport; those of the TCP transport can
  // only be passed by the environment of the process (the names that UCX's API takes for them differ between
  // releases).
  std::vector<std::pair<std::string, std::string>> general() const;
  std::vector<std::pair<std::string, std::string>> environment() const;

  // Sets the UCX_ variables of environment() that are not set yet. UcxTransport::create calls it; a program
  // that starts other threads first calls it at the top of main, since changing the environment later is
  // unsafe.
  void export_to_environment() const;
};

}  // namespace conclave
