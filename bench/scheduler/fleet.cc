#include "bench/scheduler/fleet.h"

#include <string>
#include <utility>

#include "libs/base/check.h"

namespace conclave::bench {
namespace {

Hello hello_of(Role role, uint64_t incarnation, const FleetShape& shape) {
  Hello hello;
  hello.role = role;
  hello.name = "bench-" + std::to_string(incarnation);
  hello.incarnation = Incarnation(incarnation);
  hello.numerics_id = "bench";
  hello.model_fingerprint = "bench";
  hello.num_layers = 1;
  hello.num_experts = 8;
  hello.max_positions = shape.max_positions;
  hello.vocab_size = shape.vocab_size;
  hello.transport_address = hello.name;
  if (role == Role::kAttention) {
    hello.kv_blocks = shape.kv_blocks;
    hello.max_batch_tokens = shape.max_batch_tokens;
  }
  return hello;
}

}  // namespace

Fleet join_fleet(scheduler::SchedulerCore& core, const scheduler::SchedulerOptions& options,
                 const FleetShape& shape, TimePoint& now) {
  Fleet fleet;
  uint64_t next = 1;
  fleet.shard = scheduler::SessionId(next++);
  core.on_event(scheduler::MemberMessage{fleet.shard, hello_of(Role::kExpert, 1'000'000, shape)}, now);
  for (uint32_t i = 0; i < shape.workers; ++i) {
    fleet.workers.push_back(scheduler::SessionId(next++));
    core.on_event(
        scheduler::MemberMessage{fleet.workers.back(), hello_of(Role::kAttention, 2'000'000 + i, shape)},
        now);
  }
  now += options.placement_settle_ms * kMillisecond;
  for (const scheduler::Action& action : core.on_event(scheduler::Tick{}, now)) {
    const auto* send = std::get_if<scheduler::SendMember>(&action);
    const auto* update = send ? std::get_if<PlacementUpdate>(&send->message) : nullptr;
    if (update == nullptr || send->session != fleet.shard) continue;
    core.on_event(scheduler::MemberMessage{fleet.shard, PlacementReady{update->table.epoch()}}, now);
    break;
  }
  fleet.gateway = scheduler::SessionId(next++);
  Hello router;
  router.name = "router";
  router.incarnation = Incarnation(3'000'000);
  core.on_event(scheduler::GatewayJoined{fleet.gateway, std::move(router)}, now);
  CONCLAVE_CHECK(core.fleet().ready);
  return fleet;
}

}  // namespace conclave::bench
