// Mutual TLS between the services of one cluster: both ends of every gRPC connection of the control plane
// show a certificate of the cluster's own authority. Off unless files are named.
#pragma once

#include <cstdint>
#include <string>

#include "libs/base/clock.h"

namespace conclave::tls {

struct Options {
  std::string ca_file;    // PEM: certificates of the authorities that peers' certificates must come from
  std::string cert_file;  // PEM: our certificate, then what leads from it to an authority
  std::string key_file;   // PEM: its private key, without a password
  // The name or address that the scheduler's certificate must hold; empty: the host we connect to.
  std::string server_name;
  // A scheduler lets in only clients whose certificate holds one of these names (DNS or URI), separated by
  // commas; empty: every certificate of ca_file.
  std::string client_names;
  // How often the files are looked at for changes.
  Nanos reload_interval = 10 * kSecond;

  bool enabled() const { return !ca_file.empty() || !cert_file.empty() || !key_file.empty(); }
};

}  // namespace conclave::tls
