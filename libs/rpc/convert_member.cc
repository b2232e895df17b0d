// Membership: hello, welcome, placements, and the two envelopes of Cluster.Join.
#include <unordered_set>

#include "libs/rpc/convert.h"
#include "libs/rpc/convert_checks.h"

namespace conclave::rpc {

namespace {

constexpr int kMaxSecrets = 8;
constexpr size_t kMaxDigestBytes = 64;

void to_proto(const KnownSecrets& from, pb::KnownSecrets* to) {
  for (const std::string& digest : from.digests) to->add_digests(digest);
}

StatusOr<KnownSecrets> from_proto(const pb::KnownSecrets& from) {
  if (from.digests_size() > kMaxSecrets) return invalid_field("secrets", "more than 8 secrets");
  KnownSecrets to;
  for (const std::string& digest : from.digests()) {
    RETURN_IF_ERROR(check_text("secrets.digests", digest, kMaxDigestBytes));
    to.digests.push_back(digest);
  }
  return to;
}

}  // namespace

void to_proto(const Hello& from, pb::Hello* to) {
  to->set_role(static_cast<pb::Role>(from.role));
  to->set_name(wire_text(from.name, kMaxNameBytes));
  to->set_incarnation(from.incarnation.value);
  to->set_protocol_min(from.protocol_min);
  to->set_protocol_max(from.protocol_max);
  to->set_numerics_id(wire_text(from.numerics_id, kMaxNameBytes));
  to->set_model_fingerprint(wire_text(from.model_fingerprint, kMaxNameBytes));
  to->set_threads(from.threads);
  to->set_capacity_bytes(from.capacity_bytes);
  to->set_kv_blocks(from.kv_blocks);
  to->set_max_batch_tokens(from.max_batch_tokens);
  to->set_transport_address(from.transport_address);
  to->set_num_layers(from.num_layers);
  to->set_num_experts(from.num_experts);
  to->set_max_positions(from.max_positions);
  to->set_vocab_size(from.vocab_size);
  to->set_expert_bytes(from.expert_bytes);
  to->set_ops_address(wire_text(from.ops_address, kMaxNameBytes));
  to->set_version(wire_text(from.version, kMaxNameBytes));
  to->set_drained(from.drained);
  if (from.secrets) to_proto(*from.secrets, to->mutable_secrets());
}

StatusOr<Hello> from_proto(const pb::Hello& from) {
  RETURN_IF_ERROR(check_enum("hello.role", from.role(), pb::ROLE_ROUTER, pb::ROLE_EXPERT));
  RETURN_IF_ERROR(check_text("hello.name", from.name(), kMaxNameBytes));
  RETURN_IF_ERROR(check_nonzero("hello.incarnation", from.incarnation()));
  if (from.protocol_min() > from.protocol_max()) {
    return invalid_field("hello.protocol_min", "hello.protocol_min is larger than hello.protocol_max");
  }
  RETURN_IF_ERROR(check_text("hello.numerics_id", from.numerics_id(), kMaxNameBytes));
  RETURN_IF_ERROR(check_text("hello.model_fingerprint", from.model_fingerprint(), kMaxNameBytes));
  RETURN_IF_ERROR(check_text("hello.transport_address", from.transport_address(), kMaxAddressBytes));
  RETURN_IF_ERROR(check_text("hello.ops_address", from.ops_address(), kMaxNameBytes));
  RETURN_IF_ERROR(check_text("hello.version", from.version(), kMaxNameBytes));
  RETURN_IF_ERROR(check_at_most("hello.num_layers", from.num_layers(), kMaxLayers));
  RETURN_IF_ERROR(check_at_most("hello.num_experts", from.num_experts(), kMaxExperts));
  RETURN_IF_ERROR(check_at_most("hello.max_positions", from.max_positions(), kMaxPositions));
  RETURN_IF_ERROR(check_at_most("hello.vocab_size", from.vocab_size(), kMaxVocab));
  Hello to;
  to.role = static_cast<Role>(from.role());
  to.name = from.name();
  to.incarnation = Incarnation(from.incarnation());
  to.protocol_min = from.protocol_min();
  to.protocol_max = from.protocol_max();
  to.numerics_id = from.numerics_id();
  to.model_fingerprint = from.model_fingerprint();
  to.threads = from.threads();
  to.capacity_bytes = from.capacity_bytes();
  to.kv_blocks = from.kv_blocks();
  to.max_batch_tokens = from.max_batch_tokens();
  to.transport_address = from.transport_address();
  to.num_layers = from.num_layers();
  to.num_experts = from.num_experts();
  to.max_positions = from.max_positions();
  to.vocab_size = from.vocab_size();
  to.expert_bytes = from.expert_bytes();
  to.ops_address = from.ops_address();
  to.version = from.version();
  to.drained = from.drained();
  if (from.has_secrets()) {
    ASSIGN_OR_RETURN(to.secrets, from_proto(from.secrets()));
  }
  return to;
}

void to_proto(const Welcome& from, pb::Welcome* to) {
  to->set_scheduler_incarnation(from.scheduler.value);
  to->set_lease_ns(from.lease_ns);
}

StatusOr<Welcome> from_proto(const pb::Welcome& from) {
  RETURN_IF_ERROR(check_nonzero("welcome.scheduler_incarnation", from.scheduler_incarnation()));
  RETURN_IF_ERROR(check_duration("welcome.lease_ns", from.lease_ns(), kMaxDuration));
  return Welcome{Incarnation(from.scheduler_incarnation()), from.lease_ns()};
}

void to_proto(const Refusal& from, pb::Refusal* to) {
  to->set_code(static_cast<uint32_t>(from.code));
  to->set_reason(wire_text(from.reason));
}

StatusOr<Refusal> from_proto(const pb::Refusal& from) {
  RETURN_IF_ERROR(check_enum("refusal.code", static_cast<int>(from.code()), 1, 16));
  RETURN_IF_ERROR(check_text("refusal.reason", from.reason(), kMaxTextBytes));
  return Refusal{static_cast<StatusCode>(from.code()), from.reason()};
}

void to_proto(const PlacementTable& from, pb::Placement* to) {
  to->set_epoch(from.epoch().value);
  to->set_layers(from.layers());
  to->set_experts(from.experts());
  for (const ShardEndpoint& shard : from.shards()) {
    pb::ShardEndpoint* out = to->add_shards();
    out->set_incarnation(shard.shard.value);
    out->set_name(wire_text(shard.name, kMaxNameBytes));
    out->set_transport_address(shard.transport_address);
  }
  to->add_home_begin(0);
  for (uint32_t layer = 0; layer < from.layers(); ++layer) {
    for (uint32_t expert = 0; expert < from.experts(); ++expert) {
      for (uint16_t home : from.homes(layer, expert)) to->add_home_shards(home);
      to->add_home_begin(static_cast<uint32_t>(to->home_shards_size()));
    }
  }
}

StatusOr<PlacementTable> from_proto(const pb::Placement& from) {
  RETURN_IF_ERROR(check_nonzero("placement.epoch", from.epoch()));
  RETURN_IF_ERROR(check_at_most("placement.layers", from.layers(), kMaxLayers));
  RETURN_IF_ERROR(check_at_most("placement.experts", from.experts(), kMaxExperts));
  RETURN_IF_ERROR(check_count("placement.shards", from.shards_size(), kMaxShards));
  RETURN_IF_ERROR(check_count("placement.home_shards", from.home_shards_size(), kMaxHomes));
  // Compared before the table is allocated: the message itself bounds the memory.
  const uint64_t entries = static_cast<uint64_t>(from.layers()) * from.experts();
  if (static_cast<uint64_t>(from.home_begin_size()) != entries + 1) {
    return invalid_field("placement.home_begin", "placement.home_begin has " +
                                                     std::to_string(from.home_begin_size()) +
                                                     " entries, expected " + std::to_string(entries + 1));
  }
  std::vector<ShardEndpoint> shards;
  for (const pb::ShardEndpoint& shard : from.shards()) {
    RETURN_IF_ERROR(check_nonzero("placement.shards.incarnation", shard.incarnation()));
    RETURN_IF_ERROR(check_text("placement.shards.name", shard.name(), kMaxNameBytes));
    RETURN_IF_ERROR(
        check_text("placement.shards.transport_address", shard.transport_address(), kMaxAddressBytes));
    shards.push_back({Incarnation(shard.incarnation()), shard.name(), shard.transport_address()});
  }
  const auto& begin = from.home_begin();
  const auto& homes = from.home_shards();
  bool ascending = begin[0] == 0 && begin[begin.size() - 1] == static_cast<uint32_t>(homes.size());
  for (int i = 1; ascending && i < begin.size(); ++i) ascending = begin[i] >= begin[i - 1];
  if (!ascending) {
    return invalid_field("placement.home_begin",
                         "placement.home_begin does not partition placement.home_shards");
  }
  const uint32_t shard_count = static_cast<uint32_t>(shards.size());
  PlacementTable to(Epoch(from.epoch()), from.layers(), from.experts(), std::move(shards));
  std::unordered_set<uint32_t> seen;
  for (uint32_t layer = 0; layer < from.layers(); ++layer) {
    for (uint32_t expert = 0; expert < from.experts(); ++expert) {
      const int entry = static_cast<int>(layer * from.experts() + expert);
      seen.clear();
      for (uint32_t i = begin[entry]; i < begin[entry + 1]; ++i) {
        const uint32_t home = homes[static_cast<int>(i)];
        if (home >= shard_count || !seen.insert(home).second) {
          return invalid_field("placement.home_shards", "placement.home_shards has shard " +
                                                            std::to_string(home) +
                                                            " twice for one expert, or it " +
                                                            "is not below " + std::to_string(shard_count));
        }
        to.add_home(layer, expert, static_cast<uint16_t>(home));
      }
    }
  }
  RETURN_IF_ERROR(to.validate());
  return to;
}

void to_proto(const ExpertLoad& from, pb::ExpertLoad* to) {
  for (const ExpertLoad::Entry& entry : from.entries) {
    to->add_index(entry.index);
    to->add_count(entry.count);
  }
}

StatusOr<ExpertLoad> from_proto(const pb::ExpertLoad& from) {
  RETURN_IF_ERROR(check_count("expert_load.index", from.index_size(), kMaxLoadEntries));
  RETURN_IF_ERROR(check_column("expert_load.count", from.count_size(), from.index_size()));
  RETURN_IF_ERROR(check_all_at_most("expert_load.count", from.count(), kMaxLoadCount));
  ExpertLoad to;
  to.entries.reserve(static_cast<size_t>(from.index_size()));
  for (int i = 0; i < from.index_size(); ++i) {
    if (i > 0 && from.index(i) <= from.index(i - 1)) {
      return invalid_field("expert_load.index", "expert_load.index does not ascend");
    }
    to.entries.push_back({from.index(i), from.count(i)});
  }
  return to;
}

void to_proto(const ToMember& from, pb::MemberDown* to) {
  if (const auto* welcome = std::get_if<Welcome>(&from)) {
    to_proto(*welcome, to->mutable_welcome());
  } else if (const auto* refusal = std::get_if<Refusal>(&from)) {
    to_proto(*refusal, to->mutable_refusal());
  } else if (const auto* plan = std::get_if<BatchPlan>(&from)) {
    to_proto(*plan, to->mutable_plan());
  } else if (const auto* placement = std::get_if<PlacementUpdate>(&from)) {
    to_proto(placement->table, to->mutable_placement());
    to->mutable_placement()->set_urgent(placement->urgent);
    to->mutable_placement()->set_release(placement->release);
  } else {
    to->mutable_drained();
  }
}

StatusOr<ToMember> from_proto(const pb::MemberDown& from) {
  switch (from.what_case()) {
    case pb::MemberDown::kWelcome: {
      ASSIGN_OR_RETURN(Welcome welcome, from_proto(from.welcome()));
      return ToMember(std::move(welcome));
    }
    case pb::MemberDown::kRefusal: {
      ASSIGN_OR_RETURN(Refusal refusal, from_proto(from.refusal()));
      return ToMember(std::move(refusal));
    }
    case pb::MemberDown::kPlan: {
      ASSIGN_OR_RETURN(BatchPlan plan, from_proto(from.plan()));
      return ToMember(std::move(plan));
    }
    case pb::MemberDown::kPlacement: {
      ASSIGN_OR_RETURN(PlacementTable table, from_proto(from.placement()));
      return ToMember(
          PlacementUpdate{std::move(table), from.placement().urgent(), from.placement().release()});
    }
    case pb::MemberDown::kDrained:
      return ToMember(Drained{});
    case pb::MemberDown::WHAT_NOT_SET:
      break;
  }
  return invalid_argument("the scheduler sent a message of an unknown kind");
}

void to_proto(const FromMember& from, pb::MemberUp* to) {
  if (const auto* hello = std::get_if<Hello>(&from)) {
    to_proto(*hello, to->mutable_hello());
  } else if (const auto* heartbeat = std::get_if<Heartbeat>(&from)) {
    to->mutable_heartbeat()->set_epoch(heartbeat->epoch.value);
    if (heartbeat->loaded_permille) to->mutable_heartbeat()->set_loaded_permille(*heartbeat->loaded_permille);
    to->mutable_heartbeat()->set_held_experts(heartbeat->held_experts);
    if (heartbeat->secrets) to_proto(*heartbeat->secrets, to->mutable_heartbeat()->mutable_secrets());
  } else if (const auto* result = std::get_if<StepResult>(&from)) {
    to_proto(*result, to->mutable_step_result());
  } else if (const auto* ready = std::get_if<PlacementReady>(&from)) {
    to->mutable_placement_ready()->set_epoch(ready->epoch.value);
  } else if (const auto* trouble = std::get_if<PeerTrouble>(&from)) {
    to->mutable_peer_trouble()->set_peer(trouble->peer.value);
    to->mutable_peer_trouble()->set_cause(wire_text(trouble->cause));
  } else if (const auto* load = std::get_if<ExpertLoad>(&from)) {
    to_proto(*load, to->mutable_expert_load());
  } else {
    to->mutable_leaving();
  }
}

StatusOr<FromMember> from_proto(const pb::MemberUp& from) {
  switch (from.what_case()) {
    case pb::MemberUp::kHello: {
      ASSIGN_OR_RETURN(Hello hello, from_proto(from.hello()));
      return FromMember(std::move(hello));
    }
    case pb::MemberUp::kHeartbeat: {
      const pb::Heartbeat& beat = from.heartbeat();
      RETURN_IF_ERROR(check_at_most("heartbeat.loaded_permille", beat.loaded_permille(), 1000));
      Heartbeat heartbeat{Epoch(beat.epoch()), std::nullopt, beat.held_experts()};
      if (beat.has_loaded_permille()) heartbeat.loaded_permille = beat.loaded_permille();
      if (beat.has_secrets()) {
        ASSIGN_OR_RETURN(heartbeat.secrets, from_proto(beat.secrets()));
      }
      return FromMember(heartbeat);
    }
    case pb::MemberUp::kStepResult: {
      ASSIGN_OR_RETURN(StepResult result, from_proto(from.step_result()));
      return FromMember(std::move(result));
    }
    case pb::MemberUp::kPlacementReady:
      RETURN_IF_ERROR(check_nonzero("placement_ready.epoch", from.placement_ready().epoch()));
      return FromMember(PlacementReady{Epoch(from.placement_ready().epoch())});
    case pb::MemberUp::kPeerTrouble:
      RETURN_IF_ERROR(check_nonzero("peer_trouble.peer", from.peer_trouble().peer()));
      RETURN_IF_ERROR(check_text("peer_trouble.cause", from.peer_trouble().cause(), kMaxTextBytes));
      return FromMember(PeerTrouble{Incarnation(from.peer_trouble().peer()), from.peer_trouble().cause()});
    case pb::MemberUp::kLeaving:
      return FromMember(Leaving{});
    case pb::MemberUp::kExpertLoad: {
      ASSIGN_OR_RETURN(ExpertLoad load, from_proto(from.expert_load()));
      return FromMember(std::move(load));
    }
    case pb::MemberUp::WHAT_NOT_SET:
      break;
  }
  return invalid_argument("the member sent a message of an unknown kind");
}

}  // namespace conclave::rpc
