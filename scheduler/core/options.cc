#include "scheduler/core/options.h"

#include <string>

#include "libs/model/request.h"

namespace conclave::scheduler {
namespace {
constexpr uint32_t kMostTimelines = 65'536;
constexpr uint32_t kMostTimelineSteps = 4'096;  // one answer holds all of them

Status at_least_one(std::string_view field, uint64_t value) {
  if (value >= 1) return OkStatus();
  return invalid_field(field, "must be at least 1");
}
}  // namespace

Status SchedulerOptions::validate() const {
  RETURN_IF_ERROR(at_least_one("max_waiting_requests", max_waiting_requests));
  RETURN_IF_ERROR(at_least_one("max_waiting_tokens", max_waiting_tokens));
  RETURN_IF_ERROR(at_least_one("max_prompt_logprob_values", max_prompt_logprob_values));
  RETURN_IF_ERROR(at_least_one("max_inbox_submissions", max_inbox_submissions));
  RETURN_IF_ERROR(at_least_one("max_running_requests", max_running_requests));
  RETURN_IF_ERROR(at_least_one("step_token_budget", step_token_budget));
  RETURN_IF_ERROR(at_least_one("prefill_chunk_tokens", prefill_chunk_tokens));
  RETURN_IF_ERROR(at_least_one("max_batch_sequences", max_batch_sequences));
  RETURN_IF_ERROR(at_least_one("steps_in_flight", steps_in_flight));
  RETURN_IF_ERROR(at_least_one("lease_ms", lease_ms));
  RETURN_IF_ERROR(at_least_one("max_peer_troubles", max_peer_troubles));
  RETURN_IF_ERROR(at_least_one("step_timeout_ms", step_timeout_ms));
  RETURN_IF_ERROR(at_least_one("max_kv_blocks_per_worker", max_kv_blocks_per_worker));
  RETURN_IF_ERROR(at_least_one("default_due_ms", default_due_ms));
  RETURN_IF_ERROR(at_least_one("min_prefill_tokens", min_prefill_tokens));
  RETURN_IF_ERROR(at_least_one("max_members", max_members));
  RETURN_IF_ERROR(at_least_one("max_gateways", max_gateways));
  RETURN_IF_ERROR(at_least_one("max_fenced_incarnations", max_fenced_incarnations));
  RETURN_IF_ERROR(at_least_one("placement_ready_timeout_ms", placement_ready_timeout_ms));
  RETURN_IF_ERROR(at_least_one("min_replicas", min_replicas));
  RETURN_IF_ERROR(at_least_one("load_half_life_s", load_half_life_s));
  if (max_replicas < min_replicas) return invalid_field("max_replicas", "must not be less than min_replicas");
  if (!(rebalance_ratio >= 1.0)) return invalid_field("rebalance_ratio", "must be at least 1");
  if (queue_reserve_percent > 90) return invalid_field("queue_reserve_percent", "at most 90");
  for (const auto& [tenant, weight] : tenant_weights) {
    if (weight < 1 || weight > 1'000) {
      return invalid_field("tenant_weights", tenant + " has " + std::to_string(weight) + "; from 1 to 1000");
    }
  }
  if (steps_in_flight > 16) return invalid_field("steps_in_flight", "at most 16");
  if (max_batch_sequences > step_token_budget) {
    return invalid_field("max_batch_sequences", "is " + std::to_string(max_batch_sequences) +
                                                    ", more than step_token_budget, " +
                                                    std::to_string(step_token_budget));
  }
  if (dead_after_ms < lease_ms) return invalid_field("dead_after_ms", "must not be less than lease_ms");
  if (dead_after_trouble_ms < lease_ms) {
    return invalid_field("dead_after_trouble_ms", "must not be less than lease_ms");
  }
  if (max_router_context_bytes > kMaxRouterContextBytes) {
    return invalid_field("max_router_context_bytes", "at most " + std::to_string(kMaxRouterContextBytes));
  }
  if (max_timelines > kMostTimelines) {
    return invalid_field("max_timelines", "at most " + std::to_string(kMostTimelines));
  }
  if (max_timeline_steps < 2 || max_timeline_steps > kMostTimelineSteps) {
    return invalid_field("max_timeline_steps", "from 2 to " + std::to_string(kMostTimelineSteps));
  }
  if (max_members > 60'000) return invalid_field("max_members", "at most 60000");
  return OkStatus();
}

}  // namespace conclave::scheduler
