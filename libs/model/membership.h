// What processes and the scheduler tell each other (design §4), as plain types; protos mirror them
// (libs/rpc).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/model/placement.h"
#include "libs/model/plan.h"
#include "libs/model/request.h"

namespace conclave {

enum class Role : uint8_t { kRouter = 1, kAttention = 2, kExpert = 3 };

// Versions of the control and data protocols a build speaks; two builds interoperate when the ranges meet.
inline constexpr uint32_t kProtocolVersionMin = 1;
inline constexpr uint32_t kProtocolVersionMax = 1;

// First message of a member. Routers leave the model fields empty.
// Which secrets of the data plane a member knows, as digests that say which are the same and nothing else
// (libs/transport/handshake.h). The first is the one it proves to peers, any is accepted from them; none: it has no secret.
struct KnownSecrets {
  std::vector<std::string> digests;
  bool operator==(const KnownSecrets&) const = default;
};

struct Hello {
  Role role = Role::kRouter;
  std::string name;
  Incarnation incarnation;
  uint32_t protocol_min = kProtocolVersionMin;
  uint32_t protocol_max = kProtocolVersionMax;
  std::string numerics_id;
  std::string model_fingerprint;  // of config and tensor directory; equal for equal checkpoints
  uint32_t threads = 0;
  uint64_t capacity_bytes = 0;    // expert: weights it may hold (0: no limit)
  uint64_t expert_bytes = 0;      // expert: weights of one (layer, expert) pair, the largest
  uint32_t kv_blocks = 0;         // attention: pages it has
  uint32_t max_batch_tokens = 0;  // attention: rows one plan may have
  std::string transport_address;  // attention, expert
  std::optional<KnownSecrets> secrets;  // attention, expert; absent: not told, so nothing follows from it
  bool drained = false;  // a scheduler told it that nothing is left here, and it was not started anew since
  // What the scheduler needs of the model; taken from the first member of a fleet, compared for the others.
  uint32_t num_layers = 0;
  uint32_t num_experts = 0;
  uint32_t max_positions = 0;
  uint32_t vocab_size = 0;
  // For people and their tools; nothing depends on them.
  std::string ops_address;  // host:port of /metrics; empty: unknown
  std::string version;      // of the build
};

struct Welcome {
  Incarnation scheduler;
  Nanos lease_ns = 0;  // renew well within it
};
// The member may not join: another numerics_id, model, secret or protocol, or a fenced incarnation. Final for that
// incarnation.
struct Refusal {
  StatusCode code = StatusCode::kFailedPrecondition;
  std::string reason;
};

// --- scheduler -> member ---
// To a shard: what it is to have ready. To a worker: where to go from now on.
struct PlacementUpdate {
  PlacementTable table;
  // Shard: some expert has no home, so map at full speed. Worker: shards that the table does not name are
  // lost; without it they still answer what they were asked.
  bool urgent = false;
  // Shard: no worker uses an older table, so whatever this one does not give it may go.
  bool release = false;
};
// Nothing of the scheduler's is at the member any more, and nothing will come: it may end.
struct Drained {};

using ToMember = std::variant<Welcome, Refusal, BatchPlan, PlacementUpdate, Drained>;

// --- member -> scheduler ---
struct Heartbeat {
  // Worker: the oldest placement in use, rows on their way included. Shard: the newest that it has ready.
  Epoch epoch;
  // Of the weights it needs, how much has been read; absent: no news.
  std::optional<uint32_t> loaded_permille = std::nullopt;
  uint32_t held_experts = 0;  // shard: (layer, expert) pairs it holds
  std::optional<KnownSecrets> secrets = std::nullopt;  // absent: no news
};
struct PlacementReady {  // expert: has what the epoch assigns to it
  Epoch epoch;
};
// Shard: (token, expert) pairs computed since the last report, of experts that had any.
struct ExpertLoad {
  struct Entry {
    uint32_t index = 0;  // layer * experts + expert; ascending
    uint64_t count = 0;
  };
  std::vector<Entry> entries;
};
// Worker: a shard's endpoint failed or its dispatches time out; a source of suspicion.
struct PeerTrouble {
  Incarnation peer;
  std::string cause;
};

// The member means to end: what it runs or holds is to move elsewhere. It goes on as before until it is told
// Drained, or its own patience ends.
struct Leaving {};

using FromMember =
    std::variant<Hello, Heartbeat, StepResult, PlacementReady, PeerTrouble, Leaving, ExpertLoad>;

// What a gateway must know of the fleet before it can validate a request.
struct FleetInfo {
  bool ready = false;     // a worker and a home for every expert are there
  std::string not_ready;  // the reason, for /readyz and 503 bodies
  uint32_t max_positions = 0;
  std::string numerics_id;
  std::string model_fingerprint;
  // When (steady clock of the process that reads this) a fleet that had been ready stopped being it; kNever
  // while it is ready, and before it ever was. Not sent: each port keeps its own, by follow().
  TimePoint unready_since = kNever;
  // How much of their weights the members have read: the mean of the workers' and the shards'. A kind that
  // has no member counts 0. In steps of about 10.
  uint32_t loaded_permille = 0;
  // Grows whenever the set of shards changes that the active placement names, once every worker uses it; 0:
  // there is none.
  uint64_t shard_set = 0;
  // The longest router_context that the scheduler keeps; 0: it keeps none, and requests cannot be adopted.
  // nullopt: it has not said so yet; whoever needs to know lets it decide.
  std::optional<uint32_t> max_router_context_bytes = std::nullopt;

  // The state after this one.
  FleetInfo follow(FleetInfo next, TimePoint now) const {
    next.unready_since = next.ready ? kNever : ready ? now : unready_since;
    return next;
  }
};

}  // namespace conclave
