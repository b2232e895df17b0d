// What surrounds the core in the simulation: member processes, routers and the one who breaks them.
#include <algorithm>

#include "tests/sim/scheduler_sim_entities.h"

namespace conclave::scheduler {
namespace {
constexpr uint32_t kMaxPositions = 96;
constexpr Nanos kBeat = 100 * kMillisecond;
}  // namespace

// --- members
// --------------------------------------------------------------------------------------------------------

SchedulerSim::Node& SchedulerSim::add_node(Role role, const std::string& name) {
  Node& node = nodes_.emplace_back();
  node.role = role;
  node.name = name;
  // In a flood every request fits: one that waits for a larger worker would be nobody's fault.
  node.kv_blocks = static_cast<uint32_t>(between(config_.flood ? kMaxPositions / kBlockTokens : 4, 14));
  node.incarnation = Incarnation(next_incarnation_++);
  return node;
}

// A hung process does nothing until it goes on.
void SchedulerSim::node_later(Node& node, Nanos delay, std::function<void()> task) {
  const TimePoint when = std::max(now_ + delay, node.hung_until);
  if (when == now_) return task();
  at(when, [this, &node, life = node.life, task = std::move(task)]() mutable {
    if (life == node.life) node_later(node, 0, std::move(task));
  });
}

void SchedulerSim::connect(Node& node) {
  if (node.session) return;
  node.session = SessionId(next_session_++);
  sessions_[node.session].node = &node;
  node.model = ModelWorker(node.kv_blocks);
  node.inbox.clear();
  node.plans.clear();
  node.busy = false;
  Hello hello;
  hello.role = node.role;
  hello.name = node.name;
  hello.incarnation = node.incarnation;
  hello.numerics_id = "k1";
  hello.model_fingerprint = "tiny";
  hello.num_layers = 2;
  hello.num_experts = 4;
  hello.max_positions = kMaxPositions;
  hello.vocab_size = kOracleVocab;
  hello.kv_blocks = node.kv_blocks;
  hello.transport_address = node.name;
  send_up(node, std::move(hello));
  heartbeat(node, node.life);
}

// The connection is over on the node's side; it comes back, as a new member unless the scheduler is a new
// one.
void SchedulerSim::disconnect(Node& node) {
  if (!node.session) return;
  sessions_.at(node.session).alive = false;
  node.session = {};
  node.epoch = Epoch();
  node.table = PlacementTable();
  node.inbox.clear();
  ++node.life;
  if (!random_.chance(0.2))
    node.incarnation = Incarnation(next_incarnation_++);  // else it tries the old one again
  after(between(5 * kMillisecond, 400 * kMillisecond), [this, &node, life = node.life] {
    if (life == node.life) connect(node);
  });
}

void SchedulerSim::crash(Node& node) {
  if (!node.session) return;
  count(node.role == Role::kAttention ? "worker crashed" : "shard crashed");
  const SessionId session = node.session;
  disconnect(node);
  node.hung_until = 0;
  const bool silent = random_.chance(0.3);  // the host is gone: only the lease tells
  if (silent) return count("silent crash");
  after(between(kMicrosecond, 20 * kMillisecond), [this, session, life = scheduler_life_] {
    if (life == scheduler_life_) to_core(MemberLost{session, unavailable("connection reset")});
  });
}

void SchedulerSim::heartbeat(Node& node, uint64_t life) {
  if (life != node.life || !node.session) return;
  send_up(node, Heartbeat{node.epoch});
  node_later(node, kBeat, [this, &node, life] { heartbeat(node, life); });
}

void SchedulerSim::send_up(Node& node, FromMember message) {
  Session& session = sessions_.at(node.session);
  if (!session.alive) return;
  session.up_at = std::max(session.up_at, now_ + between(kMicrosecond, 3 * kMillisecond));
  if (config_.lose_a_step_result && !lost_one_ && std::holds_alternative<StepResult>(message)) {
    lost_one_ = true;
    return;
  }
  at(session.up_at,
     [this, id = node.session, life = scheduler_life_, message = std::move(message)]() mutable {
       // What a dead process had sent may or may not arrive; here it does not.
       if (life == scheduler_life_ && sessions_.at(id).alive) to_core(MemberMessage{id, std::move(message)});
     });
}

void SchedulerSim::hang(Node& node, TimePoint until) {
  count("hung");
  node.hung_until = std::max(node.hung_until, until);
  at(node.hung_until, [this, &node] { drain(node); });
}

void SchedulerSim::drain(Node& node) {
  while (!node.inbox.empty() && now_ >= node.hung_until) {
    ToMember message = std::move(node.inbox.front());
    node.inbox.pop_front();
    node_receives(node, std::move(message));
  }
}

void SchedulerSim::node_receives(Node& node, ToMember message) {
  if (auto* plan = std::get_if<BatchPlan>(&message)) {
    node.plans.push_back(std::move(*plan));
    const auto working = std::count_if(node.plans.begin(), node.plans.end(),
                                       [](const BatchPlan& p) { return !p.slices.empty(); });
    if (working > options_.steps_in_flight || node.plans.size() > 2 * options_.steps_in_flight) {
      violate(node.name + " was given too many plans");
    }
    run_next_plan(node);
  } else if (const auto* update = std::get_if<PlacementUpdate>(&message)) {
    const Epoch epoch = update->table.epoch();
    if (update->release ? epoch < node.epoch : epoch <= node.epoch) violate("placements went back");
    if (!update->table.validate().ok()) violate("a placement is invalid");
    node.epoch = epoch;
    if (update->release) {
      count("experts released");
      if (node.role == Role::kAttention) violate("a worker is told to release experts");
    } else if (node.role == Role::kAttention) {
      node.table = update->table;
    } else if (node.role == Role::kExpert) {
      const Nanos load = random_.chance(0.02) ? 5 * kSecond : between(kMillisecond, 100 * kMillisecond);
      node_later(node, load, [this, &node, epoch = node.epoch, session = node.session] {
        if (node.session == session) send_up(node, PlacementReady{epoch});
      });
    }
  } else if (std::holds_alternative<Welcome>(message)) {
    node.epoch = Epoch();
    node.table = PlacementTable();
    count("welcomed");
  } else if (const auto* refusal = std::get_if<Refusal>(&message)) {
    if (refusal->code != StatusCode::kFailedPrecondition) violate("refused: " + refusal->reason);
    node.incarnation = Incarnation(next_incarnation_++);
  } else if (std::holds_alternative<Drained>(message)) {
    count(node.role == Role::kAttention ? "worker drained" : "shard drained");
    if (node.busy || !node.plans.empty() || node.model.owned_blocks() != 0) {
      violate(node.name + " is told that it is drained while it has work");
    }
    const SessionId session = node.session;
    disconnect(node);
    after(0, [this, session, life = scheduler_life_] {
      if (life == scheduler_life_) to_core(MemberLost{session, unavailable("the member left")});
    });
  }
}

// No shard may let go of what a worker that the scheduler knows may ask it for.
void SchedulerSim::check_release(const Node& shard, const PlacementTable& released) {
  const int stays = released.find_shard(shard.incarnation);
  for (const Node& worker : nodes_) {
    if (worker.role != Role::kAttention || !worker.session || !sessions_.at(worker.session).alive) continue;
    const int asked = worker.table.find_shard(shard.incarnation);
    for (uint32_t i = 0; asked >= 0 && i < worker.table.layers() * worker.table.experts(); ++i) {
      const uint32_t layer = i / worker.table.experts(), expert = i % worker.table.experts();
      const auto has = [&](const PlacementTable& table, int index) {
        const auto& homes = table.homes(layer, expert);
        return std::count(homes.begin(), homes.end(), index) > 0;
      };
      if (has(worker.table, asked) && (stays < 0 || !has(released, stays)))
        return violate(shard.name + " is told to release what " + worker.name + " may ask it for");
    }
  }
}

void SchedulerSim::run_next_plan(Node& node) {
  if (node.busy || node.plans.empty()) return;
  node.busy = true;
  node_later(node, between(kMillisecond, 15 * kMillisecond), [this, &node] {
    if (!node.session) return;
    const BatchPlan plan = std::move(node.plans.front());
    node.plans.pop_front();
    node.busy = false;
    StepResult result = node.model.run(plan, node.plans);
    count("pages released early", result.released.size());
    count("prompt pieces", result.prompt_logprobs.size());
    count("pages copied", plan.copies.size());
    if (!node.model.breach().empty()) violate(node.name + ": " + node.model.breach());
    send_up(node, std::move(result));
    run_next_plan(node);
  });
}

// --- gateways
// -------------------------------------------------------------------------------------------------------

void SchedulerSim::connect(Gateway& gateway) {
  if (gateway.session) return;
  gateway.session = SessionId(next_session_++);
  sessions_[gateway.session].gateway = &gateway;
  Hello hello;
  hello.name = gateway.name;
  to_core(GatewayJoined{gateway.session, hello});
  for (auto& [id, client] : gateway.clients) {
    if (client.state != Client::kSubmitted && client.state != Client::kAccepted) continue;
    send_submit(gateway, client);
    count("resubmitted");
  }
}

void SchedulerSim::drop(Gateway& gateway) {
  if (!gateway.session) return;
  count("gateway dropped");
  const SessionId session = gateway.session;
  sessions_.at(session).alive = false;
  gateway.session = {};
  after(between(kMicrosecond, 50 * kMillisecond), [this, session, life = scheduler_life_] {
    if (life == scheduler_life_) to_core(GatewayLost{session, unavailable("connection reset")});
  });
  // Sometimes back before its loss is noticed, sometimes after its requests were given up.
  after(between(kMillisecond, 900 * kMillisecond), [this, &gateway] { connect(gateway); });
}

void SchedulerSim::submit_new(Gateway& gateway) {
  if (now_ > end_of_chaos_) return;
  const Nanos pause = config_.flood ? 8 * kMillisecond : 120 * kMillisecond;
  after(between(kMillisecond, pause), [this, &gateway] { submit_new(gateway); });
  if (!gateway.session) return;
  Client client;
  AcceptedRequest& r = client.request;
  r.id = RequestId{config_.seed, next_request_++};
  const uint64_t prompt = static_cast<uint64_t>(between(0, 100)) < 2 ? 0 : 1 + random_.below(60);
  if (prompt > 0 &&
      random_.chance(0.6)) {  // a few documents in any order: equal pages under unequal prefixes
    for (uint64_t pages = random_.below(4); pages > 0; --pages) {
      SplitMix64 document(random_.below(3));
      for (uint32_t i = 0; i < kBlockTokens; ++i)
        r.prompt.push_back(static_cast<TokenId>(document.below(kOracleVocab)));
    }
  }
  if (prompt > 0 && !said_.empty() && random_.chance(0.2)) {
    const std::vector<TokenId>& said = said_[random_.below(said_.size())];
    r.prompt.insert(r.prompt.end(), said.begin(), said.end());
  }
  for (uint64_t i = 0; i < prompt; ++i) r.prompt.push_back(static_cast<TokenId>(random_.below(kOracleVocab)));
  if (random_.chance(0.2)) r.cache_salt = "salt";
  if (random_.chance(0.3))
    r.tenant = random_.chance(0.5) ? "other" : "tenant-" + std::to_string(random_.below(5));
  r.sampling.max_tokens = static_cast<uint32_t>(1 + random_.below(40));
  r.sampling.seed = random_.next();
  r.sampling.min_tokens = static_cast<uint32_t>(random_.below(3));
  for (int i = 0; i < 20; ++i)
    r.sampling.stop_token_ids.push_back(static_cast<TokenId>(random_.below(kOracleVocab)));
  r.time_left = random_.chance(0.2) ? between(0, kSecond) : between(5 * kSecond, 30 * kSecond);
  client.deadline = now_ + r.time_left;
  r.choices = random_.chance(0.3) ? static_cast<uint32_t>(2 + random_.below(3)) : 1;
  r.priority = static_cast<int32_t>(random_.below(3)) - 1;
  r.sampling.prompt_logprobs = random_.chance(0.3);
  if (config_.flood) {
    r.choices = 1;
    r.priority = 0;
    r.time_left = 600 * kSecond;
    client.deadline = now_ + r.time_left;
    r.tenant = random_.chance(0.06) ? "modest" : "flood";
    if (r.tenant == "modest") modest_.insert(r.id);
  }
  client.choices.resize(r.choices);
  for (uint32_t c = 0; c < r.choices; ++c) {
    client.choices[c].answer = oracle_answer(r.prompt, r.sampling, c);
  }
  constexpr size_t kSaid = 6, kLongestSaid = 64;
  if (r.prompt.size() + client.choices[0].answer.size() <= kLongestSaid) {
    if (said_.size() == kSaid) said_.erase(said_.begin());
    said_.push_back(r.prompt);
    said_.back().insert(said_.back().end(), client.choices[0].answer.begin(), client.choices[0].answer.end());
  }
  Client& kept = gateway.clients.emplace(r.id, std::move(client)).first->second;
  send_submit(gateway, kept);
  if (random_.chance(0.15)) {
    after(between(0, 400 * kMillisecond), [this, &gateway, &kept] {
      if (kept.state != Client::kSubmitted && kept.state != Client::kAccepted) return;
      kept.cancelled = true;
      send_cancel(gateway, kept.request.id, std::nullopt);
    });
  }
  // As a stop string does: it ends one choice that has begun.
  if (kept.request.choices > 1 && random_.chance(0.3)) {
    after(between(0, 400 * kMillisecond), [this, &gateway, &kept] {
      const auto c = static_cast<uint32_t>(random_.below(kept.choices.size()));
      if (kept.state != Client::kAccepted || kept.choices[c].ended) return;
      kept.choices[c].cancelled = true;
      count("choice cancelled");
      send_cancel(gateway, kept.request.id, c);
    });
  }
}

// Without a connection the resubmission carries it.
void SchedulerSim::send_cancel(Gateway& gateway, RequestId request, std::optional<uint32_t> choice) {
  if (!gateway.session) return;
  Session& session = sessions_.at(gateway.session);
  session.up_at = std::max(session.up_at, now_ + between(kMicrosecond, 3 * kMillisecond));
  at(session.up_at, [this, id = gateway.session, life = scheduler_life_, request, choice] {
    if (life == scheduler_life_ && sessions_.at(id).alive) to_core(Cancel{id, request, choice});
  });
}

void SchedulerSim::send_submit(Gateway& gateway, Client& client) {
  AcceptedRequest request = client.request;
  for (const Client::Choice& choice : client.choices) request.delivered.push_back({choice.got, choice.ended});
  request.prompt_logprobs_delivered = client.prompt_got;
  request.resubmitted = client.state == Client::kAccepted;
  request.time_left = std::max<Nanos>(0, client.deadline - now_);
  Session& session = sessions_.at(gateway.session);
  session.up_at = std::max(session.up_at, now_ + between(kMicrosecond, 3 * kMillisecond));
  std::vector<uint32_t> cancelled;
  for (uint32_t c = 0; c < client.choices.size(); ++c) {
    if (client.choices[c].cancelled && !client.choices[c].ended) cancelled.push_back(c);
  }
  at(session.up_at,
     [this, id = gateway.session, life = scheduler_life_, request, cancelled, cancel = client.cancelled] {
       if (life != scheduler_life_ || !sessions_.at(id).alive) return;
       to_core(Submit{id, request});
       for (const uint32_t c : cancelled) to_core(Cancel{id, request.id, c});
       if (cancel) to_core(Cancel{id, request.id, std::nullopt});
     });
}

void SchedulerSim::gateway_replies(Gateway& gateway, RequestId id, const Status& status) {
  Client& client = gateway.clients.at(id);
  if (status.ok()) {
    if (client.state == Client::kRefused || client.state == Client::kEnded) violate("accepted after its end");
    client.state = Client::kAccepted;
    return;
  }
  if (client.state != Client::kSubmitted) {
    return violate("request " + std::to_string(id.lo) + " was accepted, then refused: " + message_of(status));
  }
  client.state = Client::kRefused;
}

void SchedulerSim::gateway_tokens(Gateway& gateway, const TokenEvent& event) {
  Client& client = gateway.clients.at(event.request);
  const std::string name =
      "choice " + std::to_string(event.choice) + " of request " + std::to_string(event.request.lo);
  if (client.state != Client::kAccepted) {
    return violate(name + " got tokens without being accepted, or after its end");
  }
  if (event.choice >= client.choices.size()) return violate(name + " does not exist");
  Client::Choice& choice = client.choices[event.choice];
  if (choice.ended) return violate(name + " got something after its end");
  if (event.index != choice.got.size()) {
    return violate(name + " got index " + std::to_string(event.index) + " where " +
                   std::to_string(choice.got.size()) + " is due");
  }
  const std::vector<TokenId>& prompt = client.request.prompt;
  if (!event.prompt_logprobs.empty()) {
    if (!client.request.sampling.prompt_logprobs || event.choice != 0) {
      return violate(name + " got prompt log-probabilities nobody asked for");
    }
    if (event.prompt_start != client.prompt_got + 1) {
      return violate(name + " got prompt log-probabilities from " + std::to_string(event.prompt_start) +
                     " where " + std::to_string(client.prompt_got + 1) + " is due");
    }
    for (const PromptLogprob& entry : event.prompt_logprobs) {
      const uint32_t position = ++client.prompt_got;
      if (position >= prompt.size() || entry.logprob != oracle_prompt_logprob(prompt, position)) {
        return violate(name + " got a wrong prompt log-probability");
      }
    }
  }
  choice.got.insert(choice.got.end(), event.tokens.begin(), event.tokens.end());
  const size_t have = choice.got.size();
  if (have > choice.answer.size() ||
      !std::equal(choice.got.begin(), choice.got.end(), choice.answer.begin())) {
    return violate(name + " differs from the oracle");
  }
  if (have > 0 && event.choice == 0 && client.request.sampling.prompt_logprobs &&
      client.prompt_got + 1 != prompt.size()) {
    return violate(name + " began before the prompt's log-probabilities were complete");
  }
  if (event.finish == FinishReason::kNone) return;
  choice.ended = true;
  const bool all = std::all_of(client.choices.begin(), client.choices.end(),
                               [](const Client::Choice& c) { return c.ended; });
  if (all) client.state = Client::kEnded;
  if (all && client.choices.size() > 1) count("many choices ended");
  const bool complete = have == choice.answer.size();
  switch (event.finish) {
    case FinishReason::kStop:
    case FinishReason::kLength:
      if (!complete) violate(name + " finished early");
      if (event.finish != oracle_finish(client.request.sampling, choice.got.back(), have)) {
        violate(name + " finished for the wrong reason");
      }
      break;
    case FinishReason::kCancelled:
      if (!client.cancelled && !choice.cancelled) violate(name + " was cancelled by nobody");
      break;
    case FinishReason::kDeadline:
      if (now_ < client.deadline) violate(name + " ended before its deadline");
      break;
    default:
      violate(name + " failed: " + event.error);
  }
}

// --- faults
// ---------------------------------------------------------------------------------------------------------

void SchedulerSim::chaos() {
  if (now_ > end_of_chaos_) return;
  after(between(50 * kMillisecond, 900 * kMillisecond), [this] { chaos(); });
  Node& node = nodes_[random_.below(nodes_.size())];
  switch (random_.below(10)) {
    case 0:
    case 1:
      crash(node);
      break;
    case 2:
      hang(node, now_ + between(50 * kMillisecond, 3 * kSecond));
      break;
    case 3:
    case 4:
      drop(gateways_[random_.below(gateways_.size())]);
      break;
    case 8:
      if (node.session) send_up(node, Leaving{});
      break;
    case 9:
      to_core(DrainMember{1, node.incarnation});
      break;
    case 5:
      stall(now_ + between(10 * kMillisecond, 2500 * kMillisecond));
      break;
    case 6: {  // a worker complains about a shard, rightly or not
      Node& about = nodes_[random_.below(nodes_.size())];
      if (node.role != Role::kAttention || !node.session) break;
      for (uint64_t i = 0; i <= random_.below(6); ++i)
        send_up(node, PeerTrouble{about.incarnation, "endpoint error"});
      break;
    }
    default:
      if (random_.chance(0.3)) restart_scheduler();
  }
}

}  // namespace conclave::scheduler
