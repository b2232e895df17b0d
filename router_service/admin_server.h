// The router's admin routes, on a port and a thread of their own. They ask for no key: the port is meant for
// the loopback interface. Requests that a browser sent for another site are refused.
//
//   GET  /admin/requests?limit=N   what is open: ids, tenant, route, age, tokens; never text
//   GET  /admin/log_level          PUT /admin/log_level?level=debug|info|warn|error
//   POST /admin/drain              no new requests; those that are open go on
//   POST /admin/keys/reload        reads router.api_keys_file again
//   GET  /debug/requests?limit=N   whose timelines are kept, the newest first
//   GET  /debug/requests/ID        one of them, as JSON; ?format=chrome: as a Chrome trace. ID is the
//   request's id
//                                  in its answer, its client's x-request-id, or its trace's id
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"
#include "router_service/gateway/gateway.h"
#include "router_service/timeline_json.h"

namespace conclave::router {

class AdminServer {
 public:
  struct Hooks {
    std::function<std::vector<gateway::OpenRequest>(size_t max)> open_requests;
    std::function<void()> drain;                    // begins it and returns
    std::function<StatusOr<size_t>()> reload_keys;  // how many there are now
    std::function<std::vector<gateway::RouterTimelineView>(size_t max)> timelines;
    std::function<StatusOr<WholeTimeline>(std::string_view name)> timeline;  // may wait
  };

  // Port 0 takes a free one. The hooks are called on the server's thread.
  static StatusOr<std::unique_ptr<AdminServer>> start(std::string_view listen, Hooks hooks);
  virtual ~AdminServer() = default;
  virtual std::string address() const = 0;
  virtual uint16_t port() const = 0;
};

}  // namespace conclave::router
