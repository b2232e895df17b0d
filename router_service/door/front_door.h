// What stands before the gateway, the same for HTTP and gRPC: who is asking (API keys), how much they may ask
// (rate limits), and one record a request for the access log. Any thread; nothing here blocks but reload.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/base/watched_file.h"
#include "router_service/door/key_file.h"
#include "router_service/door/tenant.h"
#include "router_service/gateway/generation.h"
#include "router_service/gateway/request.h"

namespace conclave::door {

// One request from its arrival to its end, for the access log; never its text.
struct AccessLine {
  std::string_view protocol;  // "http" or "grpc"
  std::string_view request_id;
  std::string_view tenant;
  std::string_view route;
  int status = 0;            // HTTP's, or the gRPC code; 499 and 1: the client left before there was one
  std::string_view outcome;  // "stop", "length", a status code's name; empty for what generates nothing
  uint64_t prompt_tokens = 0;
  uint64_t completion_tokens = 0;
  Nanos to_first_token = -1;  // negative: there was none
  Nanos total = 0;
  TraceContext trace = {};
};

struct FrontDoorOptions {
  std::string keys_file;            // empty: nobody is asked for a key
  bool trust_without_keys = false;  // what an unnamed caller may do while no keys are configured
  uint32_t max_keys = 10000;
  uint64_t max_keys_file_bytes = 4 << 20;
  double trace_share = 0;  // of requests that are followed though their client's tracer does not say so
  // Of every visit that ends before the door does; may be empty. Called one at a time.
  std::function<void(const AccessLine&)> on_end;
};

struct FrontDoorCounts {
  uint64_t keys = 0;
  uint64_t unauthenticated = 0;     // refusals for want of a key, or for a wrong one
  uint64_t rate_limited = 0;        // refusals by a tenant's rate limit
  uint64_t key_reloads = 0;         // the first reading included
  uint64_t failed_key_reloads = 0;  // the file could not be read or has a fault; the old keys stay
};

class FrontDoor;

// What visits need of their door. They may outlive it by a little: the scheduler's thread may be the last
// that lets go of one.
struct DoorBook {
  std::mutex mutex;
  std::function<void(const AccessLine&)>
      on_end;  // guarded by mutex, called under it; empty once it is closed
  std::atomic<uint64_t> rate_limited{0};
};

// One request. The line is written when the last holder lets go of it: the adapter and the generation both
// have their part in it.
class Visit : public gateway::RequestRecord {
 public:
  ~Visit() override;

  // Takes the request and its tokens (an estimate, settled at the end) from the tenant's allowance.
  Status charge(uint64_t estimated_tokens);
  // Of this tenant now, and retry-after once charge() refused.
  HeaderList headers() const;
  // The status that the client is told.
  void answered(int status) { status_.store(status); }
  // For the gateway.
  gateway::Origin origin(std::shared_ptr<Visit> self) const;
  const std::string& id() const { return id_; }
  const std::string& tenant() const { return tenant_->name(); }
  const TraceContext& trace() const { return trace_; }

  // --- RequestRecord ---
  void ended(const gateway::Summary& summary) override;

 private:
  friend class FrontDoor;
  Visit(std::shared_ptr<DoorBook> book, std::string_view protocol, std::string_view route, std::string id,
        std::shared_ptr<Tenant> tenant, const TraceContext& trace);

  const std::shared_ptr<DoorBook> book_;
  const std::string protocol_;
  const std::string route_;
  const std::string id_;
  const std::shared_ptr<Tenant> tenant_;
  const TimePoint arrived_;
  const TraceContext trace_;
  std::atomic<int> status_{0};

  mutable std::mutex mutex_;
  bool charged_ = false;
  uint64_t estimated_ = 0;
  Nanos retry_after_ = 0;
  std::string outcome_;
  uint64_t prompt_tokens_ = 0;
  uint64_t completion_tokens_ = 0;
  Nanos to_first_token_ = -1;
};

class FrontDoor {
 public:
  // Reads the keys; a missing or faulty file is an error that names "router.api_keys_file".
  static StatusOr<std::unique_ptr<FrontDoor>> open(FrontDoorOptions options);
  // Visits that end later write no line.
  ~FrontDoor();

  bool asks_for_keys() const { return !options_.keys_file.empty(); }
  // Whose key an "authorization" value ("Bearer KEY") holds. UNAUTHENTICATED with the code "invalid_api_key"
  // otherwise. Looks at every key whatever it finds, so that the time says nothing.
  StatusOr<std::shared_ptr<Tenant>> identify(std::string_view authorization);
  // `tenant` as identify() gave it; null: nobody that we know. `traceparent`: the client's header, empty
  // where it has none, or several.
  std::shared_ptr<Visit> enter(std::string_view protocol, std::string_view route, std::string id,
                               std::shared_ptr<Tenant> tenant, std::string_view traceparent = "");

  // Reads the keys again and returns how many there are; on an error the old ones stay. Tenants keep what
  // they have used.
  StatusOr<size_t> reload_keys();
  // The same, but only when the file looks other than at the last look; whether it did.
  StatusOr<bool> reload_changed_keys();
  FrontDoorCounts counts() const;

 private:
  struct Key {
    KeyHash hash;
    std::shared_ptr<Tenant> tenant;
  };

  explicit FrontDoor(FrontDoorOptions options);

  const FrontDoorOptions options_;
  const std::shared_ptr<DoorBook> book_ = std::make_shared<DoorBook>();
  const std::shared_ptr<Tenant> anyone_;
  mutable std::mutex mutex_;
  std::shared_ptr<const std::vector<Key>> keys_;            // guarded by mutex_
  std::map<std::string, std::shared_ptr<Tenant>> tenants_;  // guarded by mutex_
  std::mutex reload_mutex_;                                 // one reload at a time
  WatchedFile file_;                                        // guarded by reload_mutex_
  std::atomic<uint64_t> unauthenticated_{0}, reloads_{0}, failed_reloads_{0};
};

// A request id as a client may choose it: 1 to 128 printable ASCII characters without spaces.
bool usable_request_id(std::string_view id);
std::string make_request_id();

}  // namespace conclave::door
