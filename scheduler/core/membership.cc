#include "scheduler/core/membership.h"

#include <algorithm>

#include "libs/base/check.h"

namespace conclave::scheduler {
namespace {

// What a peer may make us keep: of placements (the largest published model has 15,872 experts) and of names.
constexpr uint64_t kMaxExperts = 1'000'000;
constexpr size_t kMaxNameBytes = 1024;
constexpr size_t kMaxAddressBytes = 65536;

std::string_view role_name(Role role) {
  switch (role) {
    case Role::kRouter:
      return "router";
    case Role::kAttention:
      return "attention worker";
    case Role::kExpert:
      return "expert shard";
  }
  return "unknown role";
}

Status check_protocol(const Hello& hello) {
  if (hello.protocol_min <= kProtocolVersionMax && hello.protocol_max >= kProtocolVersionMin &&
      hello.protocol_min <= hello.protocol_max) {
    return OkStatus();
  }
  return with_field(
      failed_precondition("this scheduler speaks protocol versions " + std::to_string(kProtocolVersionMin) +
                          " to " + std::to_string(kProtocolVersionMax) + ", " + hello.name + " speaks " +
                          std::to_string(hello.protocol_min) + " to " + std::to_string(hello.protocol_max) +
                          "; run neighbouring releases"),
      "protocol_min");
}

Status differs(std::string_view field, const std::string& name, const std::string& theirs,
               const std::string& ours) {
  return with_field(failed_precondition(name + " has " + std::string(field) + " " + theirs +
                                        ", this fleet has " + ours + "; a fleet never mixes them"),
                    field);
}

Status check_equal(std::string_view field, const std::string& name, uint32_t theirs, uint32_t ours) {
  if (theirs == ours) return OkStatus();
  return differs(field, name, std::to_string(theirs), std::to_string(ours));
}

// Whether the two can connect: the worker proves its secret, the shard accepts any that it knows (docs/security.md). Of who
// has not told its secrets nothing is said.
bool can_meet(const Hello& a, const Hello& b) {
  const Hello& worker = a.role == Role::kAttention ? a : b;
  const Hello& shard = a.role == Role::kAttention ? b : a;
  if (worker.role == shard.role) return false;
  if (!worker.secrets || !shard.secrets) return true;
  const std::vector<std::string>&proves = worker.secrets->digests, &accepts = shard.secrets->digests;
  if (proves.empty()) return accepts.empty();
  return std::find(accepts.begin(), accepts.end(), proves[0]) != accepts.end();
}

}  // namespace

Status Membership::check(const Hello& hello) const {
  if (hello.role != Role::kAttention && hello.role != Role::kExpert) {
    return invalid_field(
        "role", "a member is an attention worker or an expert shard; routers open a gateway session");
  }
  if (!hello.incarnation) return invalid_field("incarnation", "a member needs one");
  RETURN_IF_ERROR(check_protocol(hello));
  if (hello.numerics_id.empty()) return invalid_field("numerics_id", "a member needs one");
  if (hello.num_layers == 0 || hello.num_experts == 0 || hello.max_positions < 2 || hello.vocab_size == 0) {
    return invalid_field("num_layers", "num_layers, num_experts, max_positions and vocab_size must be given");
  }
  if (hello.num_experts > 65535) return invalid_field("num_experts", "more than 65535 experts a layer");
  if (static_cast<uint64_t>(hello.num_layers) * hello.num_experts > kMaxExperts) {
    return invalid_field("num_layers", "more than " + std::to_string(kMaxExperts) + " experts in all layers");
  }
  if (hello.name.size() > kMaxNameBytes) return invalid_field("name", "too long");
  if (hello.transport_address.size() > kMaxAddressBytes)
    return invalid_field("transport_address", "too long");
  if (hello.numerics_id.size() > kMaxNameBytes) return invalid_field("numerics_id", "too long");
  if (hello.model_fingerprint.size() > kMaxNameBytes) return invalid_field("model_fingerprint", "too long");
  if (hello.role == Role::kAttention && hello.kv_blocks == 0) {
    return invalid_field("kv_blocks", "an attention worker needs at least one page of KV cache");
  }
  if (hello.kv_blocks > options_.max_kv_blocks_per_worker) {
    return invalid_field("kv_blocks", std::to_string(hello.kv_blocks) + " pages are more than " +
                                          std::to_string(options_.max_kv_blocks_per_worker) +
                                          " (max_kv_blocks_per_worker)");
  }
  if (hello.role == Role::kExpert && hello.transport_address.empty()) {
    return invalid_field("transport_address", "an expert shard needs one");
  }
  if (model_) {
    const FleetModel& fleet = *model_;
    if (hello.numerics_id != fleet.numerics_id) {
      return differs("numerics_id", hello.name, hello.numerics_id, fleet.numerics_id);
    }
    if (hello.model_fingerprint != fleet.model_fingerprint) {
      return differs("model_fingerprint", hello.name, hello.model_fingerprint, fleet.model_fingerprint);
    }
    RETURN_IF_ERROR(check_equal("num_layers", hello.name, hello.num_layers, fleet.num_layers));
    RETURN_IF_ERROR(check_equal("num_experts", hello.name, hello.num_experts, fleet.num_experts));
    RETURN_IF_ERROR(check_equal("max_positions", hello.name, hello.max_positions, fleet.max_positions));
    RETURN_IF_ERROR(check_equal("vocab_size", hello.name, hello.vocab_size, fleet.vocab_size));
  }
  if (by_incarnation_.contains(hello.incarnation) || fenced(hello.incarnation)) {
    return with_field(failed_precondition("incarnation " + std::to_string(hello.incarnation.value) + " of " +
                                          hello.name + " was a member before; join again under a new one"),
                      "incarnation");
  }
  RETURN_IF_ERROR(check_secret(hello));
  if (members_.size() >= options_.max_members) {
    return resource_exhausted("the fleet has its " + std::to_string(options_.max_members) +
                              " members (max_members); the " + std::string(role_name(hello.role)) +
                              " must wait");
  }
  return OkStatus();
}

bool Membership::has_peer(const Hello& hello) const {
  return std::any_of(members_.begin(), members_.end(),
                     [&hello](const auto& other) { return can_meet(hello, other.second.hello); });
}

bool Membership::alone(const Hello& hello) const {
  const auto is_peer = [&hello](const auto& other) { return other.second.hello.role != hello.role; };
  return std::any_of(members_.begin(), members_.end(), is_peer) && !has_peer(hello);
}

Status Membership::check_secret(const Hello& hello) const {
  if (!alone(hello)) return OkStatus();
  // Where none has a peer this one may be right, and they wrong; but who has met another keeps that connection.
  const bool any = std::any_of(members_.begin(), members_.end(), [this](const auto& member) {
    return member.second.met || has_peer(member.second.hello);
  });
  if (!any) return OkStatus();
  const Role peers = hello.role == Role::kAttention ? Role::kExpert : Role::kAttention;
  return with_field(
      failed_precondition(hello.name + " knows no secret of the data plane that any " +
                          std::string(role_name(peers)) + " of this fleet does (transport.secret_file)"),
      "transport.secret_file");
}

std::vector<DeadMember> Membership::strangers() {
  bool any = false;
  for (auto& [session, member] : members_) {
    if (!has_peer(member.hello)) continue;
    member.met = true;
    any = true;
  }
  std::vector<DeadMember> out;
  if (!any) return out;
  for (const auto& [session, member] : members_) {
    if (!member.met && alone(member.hello))
      out.push_back({session, failed_precondition("it knows no secret of the data plane that its peers do "
                                                  "(transport.secret_file)")});
  }
  return out;
}

Status Membership::check_gateway(const Hello& hello) const {
  if (hello.role != Role::kRouter) return invalid_field("role", "a gateway session is opened by a router");
  RETURN_IF_ERROR(check_protocol(hello));
  if (!model_) return OkStatus();
  if (!hello.numerics_id.empty() && hello.numerics_id != model_->numerics_id) {
    return differs("numerics_id", hello.name, hello.numerics_id, model_->numerics_id);
  }
  if (!hello.model_fingerprint.empty() && hello.model_fingerprint != model_->model_fingerprint) {
    return differs("model_fingerprint", hello.name, hello.model_fingerprint, model_->model_fingerprint);
  }
  return OkStatus();
}

Member& Membership::add(SessionId session, Hello hello, TimePoint now) {
  if (!model_) {
    model_ = FleetModel{hello.numerics_id, hello.model_fingerprint, hello.num_layers,
                        hello.num_experts, hello.max_positions,     hello.vocab_size};
  }
  CONCLAVE_CHECK(by_incarnation_.emplace(hello.incarnation, session).second);
  next_timer_ = 0;
  Member member;
  member.session = session;
  member.hello = std::move(hello);
  member.joined = now;
  member.last_heard = now;
  const auto [it, fresh] = members_.emplace(session, std::move(member));
  CONCLAVE_CHECK(fresh);
  return it->second;
}

void Membership::remove(SessionId session) {
  const auto it = members_.find(session);
  CONCLAVE_CHECK(it != members_.end());
  const Incarnation incarnation = it->second.hello.incarnation;
  next_timer_ = 0;
  by_incarnation_.erase(incarnation);
  members_.erase(it);
  fenced_.insert(incarnation);
  // Incarnations begin with their start time: forgetting the oldest by a floor keeps them out with bounded
  // memory. A process that is older and never joined is refused too and joins under a new incarnation.
  while (fenced_.size() > options_.max_fenced_incarnations) {
    fence_floor_ = std::max(fence_floor_, *fenced_.begin());
    fenced_.erase(fenced_.begin());
  }
}

Member* Membership::find(SessionId session) {
  const auto it = members_.find(session);
  return it == members_.end() ? nullptr : &it->second;
}

Member* Membership::find(Incarnation incarnation) {
  const auto it = by_incarnation_.find(incarnation);
  return it == by_incarnation_.end() ? nullptr : find(it->second);
}

bool Membership::fenced(Incarnation incarnation) const {
  return incarnation <= fence_floor_ || fenced_.contains(incarnation);
}

void Membership::heard(Member& member, TimePoint now) {
  if (member.suspect) next_timer_ = 0;
  member.last_heard = now;
  member.suspect = false;
  member.suspicion_told = false;
}

void Membership::trouble(Member& shard, const std::string& cause, TimePoint now) {
  if (shard.troubles == 0 || now - shard.trouble_since > options_.peer_trouble_window_ms * kMillisecond) {
    shard.troubles = 0;
    shard.trouble_since = now;
  }
  next_timer_ = 0;
  ++shard.troubles;
  shard.last_trouble = now;
  shard.trouble = cause;
}

void Membership::extend_leases(Nanos by) {
  for (auto& [session, member] : members_) member.last_heard += by;
}

TimePoint Membership::dead_at(const Member& member) const {
  // A complaint counts together with silence since then: a shard that is heard afterwards is only busy.
  const bool in_trouble = member.troubles > 0 && member.last_trouble >= member.last_heard;
  const Nanos patience = (in_trouble ? std::min(options_.dead_after_trouble_ms, options_.dead_after_ms)
                                     : options_.dead_after_ms) *
                         kMillisecond;
  return member.last_heard + patience;
}

bool Membership::data_plane_dead(const Member& member) const {
  return member.troubles >= options_.max_peer_troubles;
}

uint32_t Membership::check_leases(TimePoint now, std::vector<DeadMember>& dead) {
  next_timer_ = 0;
  uint32_t new_suspects = 0;
  for (auto& [session, member] : members_) {
    const Nanos silent = now - member.last_heard;
    if (data_plane_dead(member)) {
      dead.push_back({session, unavailable(member.hello.name + " failed its workers " +
                                           std::to_string(member.troubles) + " times: " + member.trouble)});
    } else if (now >= dead_at(member)) {
      std::string why =
          member.hello.name + " was not heard for " + std::to_string(silent / kMillisecond) + " ms";
      if (member.troubles > 0) why += " after trouble: " + member.trouble;
      dead.push_back({session, unavailable(why)});
    } else if (!member.suspect && silent >= options_.lease_ms * kMillisecond) {
      member.suspect = true;
      ++new_suspects;
    }
  }
  return new_suspects;
}

uint32_t Membership::loaded_permille() const {
  uint64_t sum[2] = {0, 0};
  uint64_t count[2] = {0, 0};
  for (const auto& [session, member] : members_) {
    const size_t kind = member.hello.role == Role::kExpert;
    sum[kind] += std::min(member.loaded_permille, 1000u);
    ++count[kind];
  }
  const auto mean = [&](size_t kind) { return count[kind] == 0 ? 0 : sum[kind] / count[kind]; };
  return static_cast<uint32_t>((mean(0) + mean(1)) / 2);
}

TimePoint Membership::next_timer() const {
  if (next_timer_ > 0) return next_timer_;
  TimePoint next = kNever;
  for (const auto& [session, member] : members_) {
    if (data_plane_dead(member)) return 0;
    const TimePoint suspect_at =
        member.suspect ? kNever : member.last_heard + options_.lease_ms * kMillisecond;
    next = std::min({next, suspect_at, dead_at(member)});
  }
  next_timer_ = next;
  return next;
}

}  // namespace conclave::scheduler
