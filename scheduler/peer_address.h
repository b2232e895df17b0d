// Where a process that listens on every interface is found by others.
#pragma once

#include <string>
#include <string_view>

namespace conclave::scheduler {

// `announced` is host:port as the process itself knows it. An unspecified host (0.0.0.0, ::) is replaced by
// that of `peer`, gRPC's name of the connection it came by ("ipv4:10.0.0.7:4242", "ipv6:%5Bfd00::7%5D:4242").
// What cannot be understood is empty: nothing is better than a wrong address.
std::string reachable_from(std::string_view announced, std::string_view peer);

}  // namespace conclave::scheduler
