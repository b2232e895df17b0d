// Drives a SchedulerCore by hand: sessions by number, everything it says kept per session.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/core/core.h"
#include "tests/scheduler/model_worker.h"

namespace conclave::scheduler {

// Everything a choice of the request generates when nobody stops it.
inline std::vector<TokenId> oracle_answer(const AcceptedRequest& request, uint32_t choice = 0) {
  return oracle_answer(request.prompt, request.sampling, choice);
}

struct Harness {
  explicit Harness(SchedulerOptions o = {}, PlantedFaults faults = {}) : options(o), core(o, faults) {}

  struct WorkerSide {
    ModelWorker model{1};
    std::deque<BatchPlan> plans;
    PlacementTable placement;
  };
  struct GatewaySide {
    std::map<RequestId, Status> replies;
    std::map<RequestId, bool> resumable;
    std::map<RequestId, std::vector<ReplyAdopt>> adopt_replies;
    // Of choice 0: tokens as reassembled by index, and the event with its finish.
    std::map<RequestId, std::vector<TokenId>> tokens;
    std::map<RequestId, TokenEvent> last;
    // Of every choice.
    std::map<std::pair<RequestId, uint32_t>, std::vector<TokenId>> choice_tokens;
    std::map<std::pair<RequestId, uint32_t>, std::vector<FinishReason>> choice_ends;
    std::map<RequestId, std::vector<PromptLogprob>> prompt_logprobs;  // from position 1
    std::vector<TokenEvent> events;
    FleetInfo fleet;
    bool welcomed = false;
    Status closed;
  };

  static Hello member_hello(Role role, uint64_t incarnation, uint32_t kv_blocks = 64) {
    Hello hello;
    hello.role = role;
    hello.name = (role == Role::kAttention ? "attention-" : "expert-") + std::to_string(incarnation);
    hello.incarnation = Incarnation(incarnation);
    hello.numerics_id = "k1-cpu";
    hello.model_fingerprint = "abc";
    hello.num_layers = 2;
    hello.num_experts = 8;
    hello.max_positions = 4096;
    hello.vocab_size = kOracleVocab;
    if (role == Role::kAttention) hello.kv_blocks = kv_blocks;
    hello.transport_address = "address-" + std::to_string(incarnation);
    return hello;
  }

  void event(Event e, bool plan = true) {
    take(core.on_event(std::move(e), now));
    if (plan) take(core.plan(now));
    confirm(plan);
  }
  // Workers tell which placement they use.
  void confirm(bool plan = true) {
    while (workers_confirm && !confirms.empty()) {
      const auto [session, epoch] = confirms.front();
      confirms.pop_front();
      if (closed.contains(session)) continue;
      take(core.on_event(MemberMessage{session, Heartbeat{epoch}}, now));
      if (plan) take(core.plan(now));
    }
  }
  void advance(Nanos by) {
    const TimePoint end = now + by;
    while (core.next_timer() <= end) {
      now = std::max(now, core.next_timer());
      event(Tick{});
    }
    now = end;
  }

  SessionId join(const Hello& hello) {
    const SessionId session(next_session++);
    sessions[hello.incarnation] = session;
    if (hello.role == Role::kAttention) workers[session].model = ModelWorker(hello.kv_blocks);
    event(MemberMessage{session, hello});
    return session;
  }
  SessionId join_worker(uint64_t incarnation, uint32_t kv_blocks = 64) {
    return join(member_hello(Role::kAttention, incarnation, kv_blocks));
  }
  // With everybody's lease kept, a shard and its placement at once.
  SessionId join_shard(uint64_t incarnation) {
    const SessionId session = join(member_hello(Role::kExpert, incarnation));
    advance(options.placement_settle_ms * kMillisecond);
    ready_all();
    return session;
  }
  // Shards get ready for what they are to prepare, and for what follows it.
  void ready_all() {
    for (int change = 0; change < 8 && !to_prepare.empty(); ++change) ready_once();
  }
  void ready_once() {
    for (const auto& [session, table] : std::exchange(to_prepare, {})) {
      if (!closed.contains(session)) event(MemberMessage{session, PlacementReady{table.epoch()}});
    }
  }
  SessionId join_gateway(uint64_t incarnation = 900) {
    const SessionId session(next_session++);
    gateways[session];
    Hello hello;
    hello.incarnation = Incarnation(incarnation);
    hello.name = "router";
    event(GatewayJoined{session, hello});
    return session;
  }
  // A worker (64 pages), a shard and a gateway, ready.
  void make_ready() {
    worker = join_worker(101);
    join_shard(201);
    gateway = join_gateway();
  }

  static AcceptedRequest request(uint64_t id, uint32_t prompt, uint32_t max_tokens, uint64_t seed = 7) {
    AcceptedRequest r;
    r.id = RequestId{1, id};
    for (uint32_t i = 0; i < prompt; ++i)
      r.prompt.push_back(static_cast<TokenId>((id * 31 + i) % kOracleVocab));
    r.sampling.max_tokens = max_tokens;
    r.sampling.seed = seed;
    return r;
  }
  void submit(AcceptedRequest r) { event(Submit{gateway, std::move(r)}); }
  Status reply(uint64_t id) { return gateways[gateway].replies.at(RequestId{1, id}); }
  const std::vector<TokenId>& tokens(uint64_t id) { return gateways[gateway].tokens[RequestId{1, id}]; }
  FinishReason finish(uint64_t id) {
    const auto& last = gateways[gateway].last;
    const auto it = last.find(RequestId{1, id});
    return it == last.end() ? FinishReason::kNone : it->second.finish;
  }
  // Runs the oldest plan of a worker; false when it has none.
  bool step(SessionId session) {
    WorkerSide& side = workers.at(session);
    if (side.plans.empty()) return false;
    const BatchPlan plan = std::move(side.plans.front());
    side.plans.pop_front();
    event(MemberMessage{session, side.model.run(plan, side.plans)});
    return true;
  }
  void run_all() {
    for (bool busy = true; busy;) {
      busy = false;
      for (auto& [session, side] : workers) {
        if (!closed.contains(session)) busy = step(session) || busy;
      }
    }
  }
  // From everybody but `silent`.
  void heartbeat_all(SessionId silent = {}) {
    for (const auto& [incarnation, session] : sessions) {
      if (session != silent && !closed.contains(session)) event(MemberMessage{session, Heartbeat{}});
    }
  }
  // Time goes by in which every member but `silent` keeps its lease; nobody runs a step.
  void pass(Nanos time, SessionId silent = {}) {
    const Nanos beat = options.lease_ms * kMillisecond / 3;
    for (Nanos done = 0; done < time; done += beat) {
      advance(std::min(beat, time - done));
      heartbeat_all(silent);
    }
  }

  void take(Actions actions) {
    for (Action& action : actions) std::visit([this](auto& a) { on(a); }, action);
  }
  void on(SendMember& a) {
    if (auto* plan = std::get_if<BatchPlan>(&a.message))
      workers.at(a.session).plans.push_back(std::move(*plan));
    if (auto* update = std::get_if<PlacementUpdate>(&a.message)) {
      if (workers.contains(a.session)) {
        EXPECT_GT(update->table.epoch(), workers.at(a.session).placement.epoch());
        workers.at(a.session).placement = update->table;
        confirms.emplace_back(a.session, update->table.epoch());
      } else if (update->release) {
        released[a.session] = update->table;
      } else {
        to_prepare[a.session] = update->table;
      }
    }
    if (std::holds_alternative<Welcome>(a.message)) ++welcomes[a.session];
    if (std::holds_alternative<Drained>(a.message)) ++drained[a.session];
    if (const auto* refusal = std::get_if<Refusal>(&a.message)) refusals[a.session] = refusal->reason;
  }
  void on(CloseMember& a) { closed[a.session] = a.cause; }
  void on(SendWelcome& a) { gateways[a.gateway].welcomed = true; }
  void on(CloseGateway& a) { gateways[a.gateway].closed = a.cause; }
  void on(ReplySubmit& a) {
    gateways[a.gateway].replies[a.request] = a.status;
    gateways[a.gateway].resumable[a.request] = a.resumable;
  }
  void on(ReplyAdopt& a) {
    gateways[a.gateway].adopt_replies[a.request].push_back(a);
    // It begins anew.
    gateways[a.gateway].tokens.erase(a.request);
    for (uint32_t i = 0; a.adopted && i < a.adopted->request.choices; ++i)
      gateways[a.gateway].choice_tokens.erase({a.request, i});
  }
  void on(ReportStall& a) { stalls.push_back(a); }
  void on(ReplyDrain& a) { drain_replies[a.ticket] = a.status; }
  void on(ReplyRebalance& a) { rebalance_replies.emplace(a.ticket, a.result); }
  void on(Note& a) { notes.push_back(a.event + ": " + a.detail); }
  void on(SendTokens& a) {
    GatewaySide& side = gateways[a.gateway];
    const auto key = std::pair(a.event.request, a.event.choice);
    std::vector<TokenId>& have = side.choice_tokens[key];
    have.resize(std::min<size_t>(have.size(), a.event.index));
    have.insert(have.end(), a.event.tokens.begin(), a.event.tokens.end());
    side.events.push_back(a.event);
    if (a.event.finish != FinishReason::kNone) side.choice_ends[key].push_back(a.event.finish);
    std::vector<PromptLogprob>& prompt = side.prompt_logprobs[a.event.request];
    if (!a.event.prompt_logprobs.empty())
      prompt.resize(std::min<size_t>(prompt.size(), a.event.prompt_start - 1));
    prompt.insert(prompt.end(), a.event.prompt_logprobs.begin(), a.event.prompt_logprobs.end());
    if (a.event.choice != 0) return;
    std::vector<TokenId>& first = side.tokens[a.event.request];
    first.resize(std::min<size_t>(first.size(), a.event.index));
    first.insert(first.end(), a.event.tokens.begin(), a.event.tokens.end());
    if (a.event.finish != FinishReason::kNone) side.last[a.event.request] = a.event;
  }
  void on(SendFleet& a) { gateways[a.gateway].fleet = a.fleet; }

  SchedulerOptions options;
  SchedulerCore core;
  TimePoint now = 1 * kSecond;
  uint64_t next_session = 1;
  SessionId worker;
  SessionId gateway;
  std::map<Incarnation, SessionId> sessions;
  std::map<SessionId, WorkerSide> workers;
  std::map<SessionId, GatewaySide> gateways;
  std::map<SessionId, PlacementTable> to_prepare;
  std::map<SessionId, PlacementTable> released;  // the last table with which a shard was told to let go
  bool workers_confirm = true;
  std::deque<std::pair<SessionId, Epoch>> confirms;
  std::map<SessionId, int> welcomes;
  std::map<SessionId, int> drained;
  std::map<uint64_t, Status> drain_replies;
  std::map<uint64_t, StatusOr<RebalanceSummary>> rebalance_replies;
  std::vector<std::string> notes;
  std::map<SessionId, std::string> refusals;
  std::map<SessionId, Status> closed;
  std::vector<ReportStall> stalls;
};

}  // namespace conclave::scheduler
