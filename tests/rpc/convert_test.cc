// Round trips of random values through the wire form, and messages that must be refused.
#include "libs/rpc/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "libs/base/random.h"

namespace conclave::rpc {
namespace {

using ::testing::HasSubstr;

constexpr int kRounds = 200;

class Maker {
 public:
  explicit Maker(uint64_t seed) : r(seed) {}

  uint32_t u(uint32_t below) { return static_cast<uint32_t>(r.below(below)); }
  float f() { return static_cast<float>(r.uniform()); }
  std::string text() {
    std::string out;
    for (uint32_t n = u(20); n > 0; --n) out += "abc \xc3\xa4\n\""[0] + static_cast<char>(u(20));
    return out;
  }
  std::vector<uint32_t> ids(uint32_t most, uint32_t least = 0) {
    std::vector<uint32_t> out(least + u(most - least + 1));
    for (uint32_t& id : out) id = u(200064);
    return out;
  }
  RequestId request() { return {r.next() | 1, r.next()}; }
  SamplingParams sampling() {
    SamplingParams s;
    s.temperature = f() * 2;
    s.top_p = f();
    s.top_k = u(100);
    s.min_p = f();
    s.seed = r.next();
    s.max_tokens = 1 + u(1000);
    s.min_tokens = u(s.max_tokens);
    s.ignore_eos = r.chance(0.5);
    s.stop_token_ids = ids(5);
    s.vocab_limit = u(200064);
    s.top_logprobs = u(20);
    s.logprobs = r.chance(0.5);
    s.repetition_penalty = 0.5f + f();
    s.presence_penalty = f() - 0.5f;
    s.frequency_penalty = f() - 0.5f;
    for (uint32_t i = 0; i < u(4); ++i) s.logit_bias.push_back({i * 7, f() * 10 - 5});
    if (r.chance(0.3)) s.logit_bias.push_back({1000, -std::numeric_limits<float>::infinity()});
    s.prompt_logprobs = r.chance(0.5);
    s.prompt_top_logprobs = u(20);
    s.every_expert = r.chance(0.5);
    return s;
  }
  std::vector<TokenLogprob> top() {
    std::vector<TokenLogprob> out(u(4));
    for (TokenLogprob& t : out) t = {u(1000), -f() * 10};
    return out;
  }
  std::vector<PromptLogprob> prompt_logprobs() {
    std::vector<PromptLogprob> out(u(4));
    for (PromptLogprob& p : out) p = {-f() * 10, top(), u(1000)};
    return out;
  }
  KnownSecrets secrets() {
    KnownSecrets known;
    for (uint32_t n = u(3); n > 0; --n) known.digests.push_back(std::string(16, static_cast<char>(u(256))));
    return known;
  }
  Hello hello() {
    Hello h;
    h.role = static_cast<Role>(1 + u(3));
    h.name = text();
    h.incarnation = Incarnation(r.next() | 1);
    h.protocol_min = u(3);
    h.protocol_max = h.protocol_min + u(3);
    h.numerics_id = text();
    h.model_fingerprint = text();
    h.threads = u(100);
    h.capacity_bytes = r.next();
    h.expert_bytes = r.next();
    h.kv_blocks = u(1000000);
    h.max_batch_tokens = u(4096);
    for (uint32_t n = u(50); n > 0; --n) h.transport_address += static_cast<char>(u(256));  // any bytes
    h.num_layers = u(100);
    h.num_experts = u(300);
    h.max_positions = u(1000000);
    h.vocab_size = u(300000);
    h.ops_address = text();
    h.version = text();
    h.drained = r.chance(0.5);
    if (r.chance(0.5)) h.secrets = secrets();
    return h;
  }
  BatchPlan plan() {
    BatchPlan p;
    p.step = StepId(1 + r.below(1ull << 50));
    for (uint32_t n = u(4); n > 0; --n) {
      SequenceStart s;
      s.seq = SeqId(1 + r.next() / 2);
      s.request = request();
      s.choice = u(4);
      s.tokens = ids(30, 1);
      s.prompt_tokens = 1 + u(static_cast<uint32_t>(s.tokens.size()));
      s.sampling = sampling();
      s.prompt_logprobs_from = 1 + u(9);
      p.starts.push_back(s);
    }
    for (uint32_t n = u(6); n > 0; --n) {
      p.slices.push_back({SeqId(1 + r.next() / 2), u(100000), 1 + u(512), r.chance(0.5), ids(5)});
    }
    for (uint32_t n = u(3); n > 0; --n) p.ends.push_back(SeqId(1 + r.next() / 2));
    for (uint32_t n = u(3); n > 0; --n) p.copies.push_back({u(100), u(100)});
    p.timed = r.chance(0.3);
    return p;
  }
  Nanos nanos() { return static_cast<Nanos>(r.below(1ull << 40)); }
  StepTiming timing() {
    StepTiming t;
    for (Nanos* one :
         {&t.queued_ns, &t.wall_ns, &t.attention_ns, &t.dispatch_ns, &t.combine_ns, &t.head_ns, &t.hidden_ns})
      *one = nanos();
    for (uint32_t* one : {&t.rows, &t.micro_batches, &t.retried_items, &t.deadlines}) *one = u(1000);
    for (uint32_t n = u(kMaxTimedShards + 1); n > 0; --n)
      t.shards.push_back({Incarnation(r.next()), u(100), u(10000), nanos(), nanos(), nanos()});
    return t;
  }
  TraceContext trace() { return {r.next(), r.next(), r.next(), r.chance(0.5)}; }
  SchedulerTimeline timeline() {
    SchedulerTimeline t;
    t.request = request();
    t.trace = trace();
    t.age = nanos();
    t.ended = r.chance(0.5);
    t.prompt_tokens = u(1000);
    for (uint32_t n = u(5); n > 0; --n)
      t.marks.push_back({nanos(),
                         static_cast<TimelineMarkKind>(u(static_cast<uint32_t>(TimelineMarkKind::kCount))),
                         u(4), text()});
    t.dropped_marks = u(9);
    for (uint32_t n = u(5); n > 0; --n) {
      TimelineStep s;
      s.choice = u(4);
      s.step = StepId(r.next());
      s.worker = Incarnation(r.next());
      for (Nanos* one : {&s.planned, &s.reported, &s.compute_ns, &s.expert_wait_ns, &s.plan_wait_ns})
        *one = nanos();
      s.start = u(1000);
      s.count = u(1000);
      s.sampled = r.chance(0.5);
      if (r.chance(0.7)) s.timing = std::make_shared<const StepTiming>(timing());
      t.steps.push_back(s);
    }
    t.dropped_steps = r.next();
    t.first_steps = u(5);
    for (uint32_t n = u(5); n > 0; --n) t.members.push_back({Incarnation(r.next()), text()});
    return t;
  }
  StepResult result() {
    StepResult s;
    s.step = StepId(1 + r.below(1ull << 50));
    for (uint32_t n = u(5); n > 0; --n) {
      s.sampled.push_back(
          {SeqId(1 + r.next() / 2), u(100000), u(200064), static_cast<FinishReason>(u(6)), -f() * 20, top()});
    }
    for (uint32_t n = u(3); n > 0; --n) s.failures.push_back({SeqId(1 + r.next() / 2), text()});
    for (uint32_t n = u(3); n > 0; --n) {
      s.prompt_logprobs.push_back({SeqId(1 + r.next() / 2), 1 + u(1000), prompt_logprobs()});
    }
    for (uint32_t n = u(3); n > 0; --n) s.released.push_back(SeqId(1 + r.next() / 2));
    s.plan_wait_ns = static_cast<Nanos>(r.below(1000));
    s.compute_ns = static_cast<Nanos>(r.below(1ull << 40));
    s.expert_wait_ns = static_cast<Nanos>(r.below(1ull << 40));
    if (r.chance(0.3)) s.timing = timing();
    return s;
  }
  PlacementTable placement() {
    std::vector<ShardEndpoint> shards(u(5));
    for (size_t i = 0; i < shards.size(); ++i)
      shards[i] = {Incarnation(i + 1), text(), std::string(u(9), '\xff')};
    const uint16_t count = static_cast<uint16_t>(shards.size());
    PlacementTable t(Epoch(1 + u(1000)), u(4), u(9), std::move(shards));
    for (uint32_t l = 0; l < t.layers(); ++l) {
      for (uint32_t e = 0; e < t.experts(); ++e) {
        for (uint16_t s = 0; s < count; ++s) {
          if (r.chance(0.4)) t.add_home(l, e, s);
        }
      }
    }
    return t;
  }
  ExpertLoad load() {
    ExpertLoad l;
    for (uint32_t index = u(5); index < 60; index += 1 + u(20))
      l.entries.push_back({index, r.below(1ull << 40)});
    return l;
  }
  AcceptedRequest accepted() {
    AcceptedRequest a;
    a.id = request();
    a.prompt = ids(50, 1);
    a.sampling = sampling();
    a.choices = 1 + u(3);
    a.time_left = static_cast<Nanos>(r.below(600ull * kSecond));
    a.tenant = text();
    for (uint32_t n = u(a.choices + 1); n > 0; --n) a.delivered.push_back({ids(9), r.chance(0.5)});
    a.prompt_logprobs_delivered = u(static_cast<uint32_t>(a.prompt.size()));
    a.resubmitted = r.chance(0.5);
    a.priority = static_cast<int32_t>(u(7)) - 3;
    a.cache_salt = text();
    if (r.chance(0.5)) a.trace = trace();
    return a;
  }
  TokenEvent event() {
    TokenEvent e;
    e.request = request();
    e.choice = u(3);
    e.index = u(1000);
    e.tokens = ids(5);
    if (r.chance(0.5)) {
      for (size_t i = 0; i < e.tokens.size(); ++i) {
        e.logprobs.push_back(-f());
        e.top_logprobs.push_back(top());
      }
    }
    e.finish = static_cast<FinishReason>(u(6));
    e.error = text();
    e.prompt_start = 1 + u(50);
    e.prompt_logprobs = prompt_logprobs();
    if (r.chance(0.5)) e.cached_tokens = u(100);
    return e;
  }

  SplitMix64 r;
};

// value -> proto -> bytes -> proto -> value -> proto: the two protos must be equal, which covers every field
// that to_proto writes; the spot checks below see that it writes them.
template <class Proto, class T>
T round_trip(const T& value) {
  Proto first;
  to_proto(value, &first);
  Proto parsed;
  EXPECT_TRUE(parsed.ParseFromString(first.SerializeAsString()));
  auto back = from_proto(parsed);
  EXPECT_TRUE(back.ok()) << back.status() << "\n" << first.DebugString();
  if (!back.ok()) return T();
  Proto second;
  to_proto(*back, &second);
  EXPECT_EQ(first.SerializeAsString(), second.SerializeAsString());
  return *back;
}

TEST(ConvertTest, RandomValuesSurviveTheWire) {
  for (uint64_t seed = 0; seed < kRounds; ++seed) {
    Maker make(seed);
    const Hello hello = make.hello();
    const Hello hello2 = round_trip<pb::Hello>(hello);
    EXPECT_EQ(hello2.transport_address, hello.transport_address);
    EXPECT_EQ(hello2.capacity_bytes, hello.capacity_bytes);
    EXPECT_EQ(hello2.expert_bytes, hello.expert_bytes);
    EXPECT_EQ(hello2.role, hello.role);
    EXPECT_EQ(hello2.vocab_size, hello.vocab_size);
    EXPECT_EQ(hello2.ops_address, hello.ops_address);
    EXPECT_EQ(hello2.version, hello.version);
    EXPECT_EQ(hello2.secrets, hello.secrets);
    EXPECT_EQ(hello2.drained, hello.drained);

    const BatchPlan plan = make.plan();
    const BatchPlan plan2 = round_trip<pb::BatchPlan>(plan);
    ASSERT_EQ(plan2.starts.size(), plan.starts.size());
    ASSERT_EQ(plan2.slices.size(), plan.slices.size());
    EXPECT_EQ(plan2.ends, plan.ends);
    EXPECT_EQ(plan2.timed, plan.timed);
    for (size_t i = 0; i < plan.starts.size(); ++i) {
      EXPECT_EQ(plan2.starts[i].tokens, plan.starts[i].tokens);
      EXPECT_EQ(plan2.starts[i].request, plan.starts[i].request);
      EXPECT_EQ(plan2.starts[i].sampling.seed, plan.starts[i].sampling.seed);
      EXPECT_EQ(plan2.starts[i].sampling.temperature, plan.starts[i].sampling.temperature);
      EXPECT_EQ(plan2.starts[i].sampling.stop_token_ids, plan.starts[i].sampling.stop_token_ids);
      EXPECT_EQ(plan2.starts[i].sampling.repetition_penalty, plan.starts[i].sampling.repetition_penalty);
      EXPECT_EQ(plan2.starts[i].sampling.presence_penalty, plan.starts[i].sampling.presence_penalty);
      EXPECT_EQ(plan2.starts[i].sampling.frequency_penalty, plan.starts[i].sampling.frequency_penalty);
      EXPECT_EQ(plan2.starts[i].sampling.logit_bias.size(), plan.starts[i].sampling.logit_bias.size());
      EXPECT_EQ(plan2.starts[i].sampling.prompt_logprobs, plan.starts[i].sampling.prompt_logprobs);
      EXPECT_EQ(plan2.starts[i].sampling.prompt_top_logprobs, plan.starts[i].sampling.prompt_top_logprobs);
      EXPECT_EQ(plan2.starts[i].prompt_logprobs_from, plan.starts[i].prompt_logprobs_from);
    }
    for (size_t i = 0; i < plan.slices.size(); ++i) {
      EXPECT_EQ(plan2.slices[i].new_blocks, plan.slices[i].new_blocks);
      EXPECT_EQ(plan2.slices[i].start, plan.slices[i].start);
      EXPECT_EQ(plan2.slices[i].sample, plan.slices[i].sample);
    }

    const StepResult result = make.result();
    const StepResult result2 = round_trip<pb::StepResult>(result);
    ASSERT_EQ(result2.sampled.size(), result.sampled.size());
    for (size_t i = 0; i < result.sampled.size(); ++i) {
      EXPECT_EQ(result2.sampled[i].token, result.sampled[i].token);
      EXPECT_EQ(result2.sampled[i].finish, result.sampled[i].finish);
      EXPECT_EQ(result2.sampled[i].top_logprobs.size(), result.sampled[i].top_logprobs.size());
    }
    EXPECT_EQ(result2.failures.size(), result.failures.size());
    EXPECT_EQ(result2.released, result.released);
    ASSERT_EQ(result2.timing.has_value(), result.timing.has_value());
    if (result.timing) {
      EXPECT_EQ(result2.timing->queued_ns, result.timing->queued_ns);
      EXPECT_EQ(result2.timing->wall_ns, result.timing->wall_ns);
      EXPECT_EQ(result2.timing->attention_ns, result.timing->attention_ns);
      EXPECT_EQ(result2.timing->dispatch_ns, result.timing->dispatch_ns);
      EXPECT_EQ(result2.timing->combine_ns, result.timing->combine_ns);
      EXPECT_EQ(result2.timing->head_ns, result.timing->head_ns);
      EXPECT_EQ(result2.timing->hidden_ns, result.timing->hidden_ns);
      EXPECT_EQ(result2.timing->rows, result.timing->rows);
      EXPECT_EQ(result2.timing->micro_batches, result.timing->micro_batches);
      EXPECT_EQ(result2.timing->retried_items, result.timing->retried_items);
      EXPECT_EQ(result2.timing->deadlines, result.timing->deadlines);
      ASSERT_EQ(result2.timing->shards.size(), result.timing->shards.size());
      for (size_t i = 0; i < result.timing->shards.size(); ++i) {
        EXPECT_EQ(result2.timing->shards[i].shard, result.timing->shards[i].shard);
        EXPECT_EQ(result2.timing->shards[i].replies, result.timing->shards[i].replies);
        EXPECT_EQ(result2.timing->shards[i].items, result.timing->shards[i].items);
        EXPECT_EQ(result2.timing->shards[i].outstanding_ns, result.timing->shards[i].outstanding_ns);
        EXPECT_EQ(result2.timing->shards[i].slowest_ns, result.timing->shards[i].slowest_ns);
        EXPECT_EQ(result2.timing->shards[i].compute_ns, result.timing->shards[i].compute_ns);
      }
    }

    const SchedulerTimeline timeline = make.timeline();
    const SchedulerTimeline timeline2 = round_trip<pb::TimelineReply>(timeline);
    EXPECT_EQ(timeline2.age, timeline.age);
    EXPECT_EQ(timeline2.ended, timeline.ended);
    EXPECT_EQ(timeline2.dropped_steps, timeline.dropped_steps);
    EXPECT_EQ(timeline2.first_steps, timeline.first_steps);
    EXPECT_EQ(timeline2.dropped_marks, timeline.dropped_marks);
    EXPECT_EQ(timeline2.members.size(), timeline.members.size());
    ASSERT_EQ(timeline2.marks.size(), timeline.marks.size());
    for (size_t i = 0; i < timeline.marks.size(); ++i) {
      EXPECT_EQ(timeline2.marks[i].at, timeline.marks[i].at);
      EXPECT_EQ(timeline2.marks[i].kind, timeline.marks[i].kind);
      EXPECT_EQ(timeline2.marks[i].choice, timeline.marks[i].choice);
    }
    ASSERT_EQ(timeline2.steps.size(), timeline.steps.size());
    for (size_t i = 0; i < timeline.steps.size(); ++i) {
      EXPECT_EQ(timeline2.steps[i].worker, timeline.steps[i].worker);
      EXPECT_EQ(timeline2.steps[i].step, timeline.steps[i].step);
      EXPECT_EQ(timeline2.steps[i].planned, timeline.steps[i].planned);
      EXPECT_EQ(timeline2.steps[i].reported, timeline.steps[i].reported);
      EXPECT_EQ(timeline2.steps[i].start, timeline.steps[i].start);
      EXPECT_EQ(timeline2.steps[i].sampled, timeline.steps[i].sampled);
      EXPECT_EQ(timeline2.steps[i].compute_ns, timeline.steps[i].compute_ns);
      EXPECT_EQ(timeline2.steps[i].expert_wait_ns, timeline.steps[i].expert_wait_ns);
      EXPECT_EQ(timeline2.steps[i].plan_wait_ns, timeline.steps[i].plan_wait_ns);
      EXPECT_EQ(timeline2.steps[i].timing == nullptr, timeline.steps[i].timing == nullptr);
    }
    ASSERT_EQ(result2.prompt_logprobs.size(), result.prompt_logprobs.size());
    for (size_t i = 0; i < result.prompt_logprobs.size(); ++i) {
      EXPECT_EQ(result2.prompt_logprobs[i].start, result.prompt_logprobs[i].start);
      EXPECT_EQ(result2.prompt_logprobs[i].tokens.size(), result.prompt_logprobs[i].tokens.size());
    }

    const PlacementTable table = make.placement();
    const PlacementTable table2 = round_trip<pb::Placement>(table);
    ASSERT_EQ(table2.layers(), table.layers());
    for (uint32_t l = 0; l < table.layers(); ++l) {
      for (uint32_t e = 0; e < table.experts(); ++e) EXPECT_EQ(table2.homes(l, e), table.homes(l, e));
    }

    const AcceptedRequest request = make.accepted();
    const AcceptedRequest request2 = round_trip<pb::SubmitRequest>(request);
    EXPECT_EQ(request2.prompt, request.prompt);
    EXPECT_EQ(request2.trace.trace_hi, request.trace.trace_hi);
    EXPECT_EQ(request2.trace.span, request.trace.span);
    EXPECT_EQ(request2.trace.followed, request.trace.followed);
    ASSERT_EQ(request2.delivered.size(), request.delivered.size());
    for (size_t i = 0; i < request.delivered.size(); ++i) {
      EXPECT_EQ(request2.delivered[i].tokens, request.delivered[i].tokens);
      EXPECT_EQ(request2.delivered[i].ended, request.delivered[i].ended);
    }
    EXPECT_EQ(request2.prompt_logprobs_delivered, request.prompt_logprobs_delivered);
    EXPECT_EQ(request2.priority, request.priority);
    EXPECT_EQ(request2.cache_salt, request.cache_salt);
    EXPECT_EQ(request2.resubmitted, request.resubmitted);
    EXPECT_EQ(request2.time_left, request.time_left);

    const TokenEvent event = make.event();
    const TokenEvent event2 = round_trip<pb::TokenEvent>(event);
    EXPECT_EQ(event2.tokens, event.tokens);
    EXPECT_EQ(event2.logprobs, event.logprobs);
    EXPECT_EQ(event2.finish, event.finish);
    EXPECT_EQ(event2.cached_tokens, event.cached_tokens);

    FleetInfo fleet{make.r.chance(0.5), make.text(), make.u(1000), make.text(), make.text()};
    fleet.loaded_permille = make.u(1001);
    fleet.shard_set = make.r.next();
    fleet.max_router_context_bytes = make.u(5000);
    const FleetInfo fleet2 = round_trip<pb::FleetInfo>(fleet);
    EXPECT_EQ(fleet2.loaded_permille, fleet.loaded_permille);
    EXPECT_EQ(fleet2.shard_set, fleet.shard_set);
    EXPECT_EQ(fleet2.max_router_context_bytes, fleet.max_router_context_bytes);
    Heartbeat beat{Epoch(make.u(9)), make.r.chance(0.5) ? std::optional(make.u(1001)) : std::nullopt, make.u(500)};
    if (make.r.chance(0.5)) beat.secrets = make.secrets();
    const auto beat2 = std::get<Heartbeat>(round_trip<pb::MemberUp>(FromMember(beat)));
    EXPECT_EQ(beat2.loaded_permille, beat.loaded_permille);
    EXPECT_EQ(beat2.held_experts, beat.held_experts);
    EXPECT_EQ(beat2.epoch, beat.epoch);
    EXPECT_EQ(beat2.secrets, beat.secrets);
    const PlacementUpdate update{table, make.r.chance(0.5), make.r.chance(0.5)};
    const auto update2 = std::get<PlacementUpdate>(round_trip<pb::MemberDown>(ToMember(update)));
    EXPECT_EQ(update2.urgent, update.urgent);
    EXPECT_EQ(update2.release, update.release);
    const ExpertLoad load = make.load();
    const auto load2 = std::get<ExpertLoad>(round_trip<pb::MemberUp>(FromMember(load)));
    ASSERT_EQ(load2.entries.size(), load.entries.size());
    for (size_t i = 0; i < load.entries.size(); ++i) {
      EXPECT_EQ(load2.entries[i].index, load.entries[i].index);
      EXPECT_EQ(load2.entries[i].count, load.entries[i].count);
    }
    round_trip<pb::Welcome>(Welcome{Incarnation(make.r.next() | 1), static_cast<Nanos>(make.u(1000))});
    for (const ToMember& down : {ToMember(plan), ToMember(PlacementUpdate{table}), ToMember(Drained{}),
                                 ToMember(Refusal{StatusCode::kFailedPrecondition, make.text()}),
                                 ToMember(Welcome{Incarnation(1), 1})}) {
      EXPECT_EQ(round_trip<pb::MemberDown>(down).index(), down.index());
    }
    for (const FromMember& up :
         {FromMember(hello), FromMember(result), FromMember(Heartbeat{Epoch(make.u(9))}), FromMember(load),
          FromMember(PlacementReady{Epoch(4)}), FromMember(PeerTrouble{Incarnation(5), "x"}),
          FromMember(Leaving{})}) {
      EXPECT_EQ(round_trip<pb::MemberUp>(up).index(), up.index());
    }
  }
}

TEST(ConvertTest, APlanOfDecodesCarriesNoColumnsThatAreTheSameForAll) {
  BatchPlan plan;
  plan.step = StepId(4);
  for (uint32_t i = 1; i <= 3; ++i) plan.slices.push_back({SeqId(i), 10 * i, 1, true, {}});
  pb::BatchPlan wire;
  to_proto(plan, &wire);
  EXPECT_EQ(wire.slices().count_size() + wire.slices().sample_size() + wire.slices().block_count_size(), 0);
  const auto back = from_proto(wire);
  ASSERT_TRUE(back.ok());
  ASSERT_EQ(back->slices.size(), 3u);
  for (uint32_t i = 1; i <= 3; ++i) {
    const PlanSlice& slice = back->slices[i - 1];
    EXPECT_EQ(slice.seq, SeqId(i));
    EXPECT_EQ(slice.start, 10 * i);
    EXPECT_EQ(slice.count, 1u);
    EXPECT_TRUE(slice.sample);
    EXPECT_TRUE(slice.new_blocks.empty());
  }
}

TEST(ConvertTest, SubmitRepliesCarryCodeMessageAndField) {
  pb::SubmitReply reply;
  to_proto(RequestId{1, 2}, invalid_field("max_tokens", "is too large"), &reply);
  auto answer = from_proto(reply);
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(field_of(answer->status), "max_tokens");
  EXPECT_EQ(retry_after_of(answer->status), 0);
  reply.Clear();
  to_proto(RequestId{1, 2}, with_retry_after(resource_exhausted("full"), 7 * kSecond), &reply);
  EXPECT_EQ(retry_after_of(from_proto(reply)->status), 7 * kSecond);
  reply.Clear();
  to_proto(RequestId{1, 2}, OkStatus(), &reply);
  EXPECT_TRUE(from_proto(reply)->status.ok());
}

TEST(ConvertTest, TextIsCutAndMadeValid) {
  EXPECT_EQ(wire_text("a\xff"
                      "b\xc3"),
            "a?b?");
  EXPECT_EQ(wire_text("\xc3\xa4\xc3\xa4", 3), "\xc3\xa4");
  EXPECT_EQ(wire_text("\xed\xa0\x80"), "???");  // a surrogate
  EXPECT_EQ(wire_text("\xf0\x9f\x98\x80"), "\xf0\x9f\x98\x80");
  EXPECT_EQ(wire_text("\xc0\xaf"), "??");  // overlong
  EXPECT_EQ(wire_text(std::string(100000, 'x')).size(), kMaxTextBytes);
  pb::MemberUp up;
  to_proto(FromMember(PeerTrouble{Incarnation(1), "broken \xff text"}), &up);
  pb::MemberUp parsed;
  EXPECT_TRUE(parsed.ParseFromString(up.SerializeAsString()));
}

// Each edit of a valid message must be refused, naming the field.
template <class Proto>
void refuses(const Proto& valid, const std::function<void(Proto&)>& edit, const std::string& field) {
  ASSERT_TRUE(from_proto(valid).ok()) << from_proto(valid).status();
  Proto broken = valid;
  edit(broken);
  auto result = from_proto(broken);
  ASSERT_FALSE(result.ok()) << field;
  EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(message_of(result.status()) + " " + field_of(result.status()), HasSubstr(field));
}

TEST(ConvertTest, InvalidHellosAreRefused) {
  pb::Hello hello;
  Maker make(1);
  to_proto(make.hello(), &hello);
  refuses<pb::Hello>(
      hello, [](auto& m) { m.set_role(pb::ROLE_UNSPECIFIED); }, "hello.role");
  refuses<pb::Hello>(
      hello, [](auto& m) { m.set_role(static_cast<pb::Role>(77)); }, "hello.role");
  refuses<pb::Hello>(
      hello, [](auto& m) { m.set_incarnation(0); }, "hello.incarnation");
  refuses<pb::Hello>(
      hello, [](auto& m) { m.set_name(std::string(300, 'x')); }, "hello.name");
  refuses<pb::Hello>(
      hello, [](auto& m) { m.set_protocol_min(m.protocol_max() + 1); }, "hello.protocol_min");
  refuses<pb::Hello>(
      hello, [](auto& m) { m.set_num_experts(70000); }, "hello.num_experts");
  refuses<pb::Hello>(
      hello, [](auto& m) { m.set_num_layers(5000); }, "hello.num_layers");
  refuses<pb::Hello>(
      hello, [](auto& m) { m.set_transport_address(std::string(70000, 'x')); }, "transport_address");
}

TEST(ConvertTest, InvalidLoadReportsAreRefused) {
  pb::ExpertLoad valid;
  to_proto(ExpertLoad{{{3, 1}, {5, 2}}}, &valid);
  using L = pb::ExpertLoad;
  refuses<L>(
      valid, [](L& m) { m.add_index(9); }, "expert_load.count");
  refuses<L>(
      valid, [](L& m) { m.set_index(1, 3); }, "expert_load.index");
  refuses<L>(
      valid, [](L& m) { m.set_count(0, ~0ull); }, "expert_load.count");
}

TEST(ConvertTest, InvalidPlansAreRefused) {
  BatchPlan plan;
  plan.step = StepId(1);
  SequenceStart start;
  start.seq = SeqId(1);
  start.request = {1, 1};
  start.tokens = {1, 2, 3};
  start.prompt_tokens = 2;
  start.sampling.max_tokens = 4;
  plan.starts.push_back(start);
  plan.slices.push_back({SeqId(1), 0, 3, true, {0}});
  plan.slices.push_back({SeqId(2), 0, 2, false, {1}});  // so that no column is left out
  pb::BatchPlan valid;
  to_proto(plan, &valid);
  using P = pb::BatchPlan;
  refuses<P>(
      valid, [](P& m) { m.set_step(0); }, "plan.step");
  refuses<P>(
      valid, [](P& m) { m.add_ends(0); }, "plan.ends");
  refuses<P>(
      valid, [](P& m) { m.mutable_slices()->set_count(0, 0); }, "slices.count");
  refuses<P>(
      valid, [](P& m) { m.mutable_slices()->set_seq(0, 0); }, "slices.seq");
  refuses<P>(
      valid, [](P& m) { m.mutable_slices()->set_start(0, 0xffffffffu); }, "slices.start");
  refuses<P>(
      valid, [](P& m) { m.mutable_slices()->set_count(0, 0xffffffffu); }, "slices.count");
  // Every column must have its entry, and every page its slice.
  refuses<P>(
      valid, [](P& m) { m.mutable_slices()->add_seq(5); }, "slices.start");
  refuses<P>(
      valid, [](P& m) { m.mutable_slices()->add_start(5); }, "slices.start");
  refuses<P>(
      valid, [](P& m) { m.mutable_slices()->mutable_count()->RemoveLast(); }, "slices.count");
  refuses<P>(
      valid, [](P& m) { m.mutable_slices()->add_sample(true); }, "slices.sample");
  refuses<P>(
      valid, [](P& m) { m.mutable_slices()->clear_block_count(); }, "slices.block_count");
  refuses<P>(
      valid, [](P& m) { m.mutable_slices()->set_block_count(0, 2); }, "slices.block_count");
  refuses<P>(
      valid, [](P& m) { m.mutable_slices()->add_new_blocks(2); }, "slices.block_count");
  refuses<P>(
      valid,
      [](P& m) {  // sums that wrap around 32 bits
        for (int i = 0; i < 2; ++i) {
          m.mutable_slices()->add_seq(7);
          m.mutable_slices()->add_start(0);
          m.mutable_slices()->add_count(1);
          m.mutable_slices()->add_sample(false);
          m.mutable_slices()->add_block_count(0x80000000u);
        }
      },
      "slices.block_count");
  refuses<P>(
      valid,
      [](P& m) {
        for (int i = 0; i < 2; ++i) {
          m.mutable_slices()->add_seq(7);
          m.mutable_slices()->add_start(0);
          m.mutable_slices()->add_count(kMaxPlanRows);
          m.mutable_slices()->add_sample(false);
          m.mutable_slices()->add_block_count(0);
        }
      },
      "plan rows");
  refuses<P>(
      valid, [](P& m) { m.mutable_starts(0)->clear_tokens(); }, "starts.tokens");
  refuses<P>(
      valid, [](P& m) { m.mutable_starts(0)->set_tokens(1, 0xffffffffu); }, "starts.tokens");
  refuses<P>(
      valid, [](P& m) { m.mutable_starts(0)->set_prompt_tokens(4); }, "starts.prompt_tokens");
  refuses<P>(
      valid, [](P& m) { m.mutable_starts(0)->clear_request(); }, "request.id");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  refuses<P>(
      valid, [&](P& m) { m.mutable_starts(0)->mutable_sampling()->set_temperature(nan); }, "temperature");
  refuses<P>(
      valid, [&](P& m) { m.mutable_starts(0)->mutable_sampling()->set_top_p(1.5f); }, "top_p");
  refuses<P>(
      valid, [&](P& m) { m.mutable_starts(0)->mutable_sampling()->set_max_tokens(0); }, "max_tokens");
  refuses<P>(
      valid, [&](P& m) { m.mutable_starts(0)->mutable_sampling()->set_min_tokens(9); }, "min_tokens");
  refuses<P>(
      valid, [](P& m) { m.mutable_starts(0)->mutable_sampling()->set_repetition_penalty(0); },
      "sampling.repetition_penalty");
  refuses<P>(
      valid, [](P& m) { m.mutable_starts(0)->mutable_sampling()->add_logit_bias()->set_token(0xffffffffu); },
      "sampling.logit_bias");
  refuses<P>(
      valid, [&](P& m) { m.mutable_starts(0)->mutable_sampling()->add_logit_bias()->set_bias(nan); },
      "sampling.logit_bias");
}

TEST(ConvertTest, InvalidResultsAreRefused) {
  StepResult result;
  result.step = StepId(1);
  result.sampled.push_back({SeqId(1), 3, 4, FinishReason::kNone, -1.0f, {}});
  pb::StepResult valid;
  to_proto(result, &valid);
  using R = pb::StepResult;
  refuses<R>(
      valid, [](R& m) { m.set_step(0); }, "result.step");
  refuses<R>(
      valid, [](R& m) { m.set_compute_ns(-1); }, "result.compute_ns");
  refuses<R>(
      valid, [](R& m) { m.mutable_sampled()->set_token(0, 0xffffffffu); }, "sampled.token");
  refuses<R>(
      valid, [](R& m) { m.mutable_sampled()->set_position(0, 0xffffffffu); }, "sampled.position");
  refuses<R>(
      valid, [](R& m) { m.mutable_sampled()->set_seq(0, 0); }, "sampled.seq");
  refuses<R>(
      valid, [](R& m) { m.mutable_sampled()->add_seq(2); }, "sampled.position");
  refuses<R>(
      valid, [](R& m) { m.mutable_sampled()->clear_token(); }, "sampled.token");
  refuses<R>(
      valid, [](R& m) { m.mutable_sampled()->add_logprob(-1); }, "sampled.logprob");
  refuses<R>(
      valid, [](R& m) { m.mutable_sampled()->add_top_logprobs()->set_row(1); }, "sampled.top_logprobs.row");
  refuses<R>(
      valid,
      [](R& m) {
        m.mutable_sampled()->add_top_logprobs();
        m.mutable_sampled()->add_top_logprobs();
      },
      "sampled.top_logprobs.row");
  refuses<R>(
      valid, [](R& m) { m.mutable_sampled()->add_finish(static_cast<pb::FinishReason>(9)); }, "finish");
  refuses<R>(
      valid,
      [](R& m) {
        m.mutable_sampled()->add_finish(pb::FINISH_REASON_STOP);
        m.mutable_sampled()->add_finish(pb::FINISH_REASON_STOP);
      },
      "finish");
  refuses<R>(
      valid, [](R& m) { m.mutable_sampled()->set_logprob(0, 5); }, "sampled.logprob");
  refuses<R>(
      valid, [](R& m) { m.add_failures(); }, "failures.seq");
  refuses<R>(
      valid, [](R& m) { m.add_prompt_logprobs(); }, "prompt_logprobs.seq");
  const auto piece = [](R& m) {
    m.add_prompt_logprobs()->set_seq(1);
    m.mutable_prompt_logprobs(0)->set_start(1);
    return m.mutable_prompt_logprobs(0);
  };
  refuses<R>(
      valid, [&](R& m) { piece(m)->add_tokens()->set_logprob(1); }, "prompt_logprobs.logprob");
  refuses<R>(
      valid, [&](R& m) { piece(m)->add_tokens()->add_top()->set_token(0xffffffffu); }, "prompt_logprobs.top");
  refuses<R>(
      valid, [&](R& m) { piece(m)->add_tokens(), m.mutable_prompt_logprobs(0)->set_start(0); },
      "prompt_logprobs.start");
}

TEST(ConvertTest, InvalidPlacementsAreRefused) {
  PlacementTable table(Epoch(1), 2, 2, {{Incarnation(1), "a", "x"}, {Incarnation(2), "b", "y"}});
  for (uint32_t l = 0; l < 2; ++l) {
    for (uint32_t e = 0; e < 2; ++e) table.add_home(l, e, static_cast<uint16_t>(e));
  }
  pb::Placement valid;
  to_proto(table, &valid);
  using P = pb::Placement;
  refuses<P>(
      valid, [](P& m) { m.set_epoch(0); }, "placement.epoch");
  refuses<P>(
      valid, [](P& m) { m.set_layers(4096), m.set_experts(65535); }, "placement.home_begin");
  refuses<P>(
      valid, [](P& m) { m.set_home_begin(1, 3); }, "placement.home_begin");
  refuses<P>(
      valid, [](P& m) { m.set_home_begin(0, 1); }, "placement.home_begin");
  refuses<P>(
      valid, [](P& m) { m.set_home_begin(4, 5); }, "placement.home_begin");
  refuses<P>(
      valid, [](P& m) { m.set_home_shards(0, 2); }, "placement.home_shards");
  refuses<P>(
      valid, [](P& m) { m.mutable_shards(0)->set_incarnation(0); }, "incarnation");
  refuses<P>(
      valid, [](P& m) { m.clear_home_begin(); }, "placement.home_begin");
}

TEST(ConvertTest, InvalidGatewayMessagesAreRefused) {
  Maker make(3);
  pb::SubmitRequest request;
  to_proto(make.accepted(), &request);
  using S = pb::SubmitRequest;
  refuses<S>(
      request, [](S& m) { m.clear_id(); }, "request.id");
  refuses<S>(
      request, [](S& m) { m.clear_prompt(); }, "prompt");
  refuses<S>(
      request, [](S& m) { m.set_choices(0); }, "choices");
  refuses<S>(
      request, [](S& m) { m.set_time_left_ns(-5); }, "time_left_ns");
  refuses<S>(
      request, [](S& m) { m.set_cache_salt(std::string(300, 'x')); }, "cache_salt");
  refuses<S>(
      request,
      [](S& m) {
        m.clear_delivered();
        m.add_delivered()->add_tokens(0xffffffffu);
      },
      "delivered");
  refuses<S>(
      request,
      [](S& m) {
        while (m.delivered_size() <= static_cast<int>(m.choices())) m.add_delivered();
      },
      "delivered");
  refuses<S>(
      request, [](S& m) { m.set_prompt_logprobs_delivered(0xffffffffu); }, "prompt_logprobs_delivered");
  TokenEvent event;
  event.request = {1, 1};
  event.tokens = {1, 2};
  event.logprobs = {-1, -2};
  pb::TokenEvent tokens;
  to_proto(event, &tokens);
  using T = pb::TokenEvent;
  refuses<T>(
      tokens, [](T& m) { m.add_logprobs(0); }, "tokens.logprobs");
  refuses<T>(
      tokens, [](T& m) { m.add_top_logprobs(); }, "tokens.top_logprobs");
  refuses<T>(
      tokens, [](T& m) { m.set_index(0xffffffffu); }, "tokens.index");
  refuses<T>(
      tokens, [](T& m) { m.set_finish(static_cast<pb::FinishReason>(-1)); }, "tokens.finish");
}

TEST(ConvertTest, InvalidTokenBatchesAreRefused) {
  pb::TokenBatch none;
  none.add_id_hi(1);
  none.add_id_lo(1);
  none.add_index(0);
  none.add_token(1);
  EXPECT_TRUE(from_proto(none).ok());
  using B = pb::TokenBatch;
  refuses<B>(
      none, [](B& m) { m.set_id_hi(0, 0), m.set_id_lo(0, 0); }, "token_batch.id");
  refuses<B>(
      none, [](B& m) { m.add_id_hi(3); }, "token_batch.id_hi");
  refuses<B>(
      none, [](B& m) { m.clear_id_lo(); }, "token_batch.id_lo");
  refuses<B>(
      none, [](B& m) { m.clear_index(); }, "token_batch.index");
  refuses<B>(
      none, [](B& m) { m.add_token(3); }, "token_batch.id_hi");
  refuses<B>(
      none, [](B& m) { m.set_index(0, 0xffffffffu); }, "token_batch.index");
  refuses<B>(
      none, [](B& m) { m.set_token(0, 0xffffffffu); }, "token_batch.token");
  refuses<B>(
      none, [](B& m) { m.add_choice(kMaxChoices); }, "token_batch.choice");
  refuses<B>(
      none, [](B& m) { m.add_choice(0), m.add_choice(0); }, "token_batch.choice");
  refuses<B>(
      none, [](B& m) { m.add_finish(static_cast<pb::FinishReason>(9)); }, "token_batch.finish");
  refuses<B>(
      none, [](B& m) { m.add_finish(pb::FINISH_REASON_NONE), m.add_finish(pb::FINISH_REASON_NONE); },
      "token_batch.finish");
}

TEST(ConvertTest, EmptyEnvelopesAreRefused) {
  EXPECT_FALSE(from_proto(pb::MemberUp()).ok());
  EXPECT_FALSE(from_proto(pb::MemberDown()).ok());
}

// Random damage to valid bytes: parsed or not, accepted or refused, nothing crashes.
TEST(ConvertTest, DamagedBytesNeverCrash) {
  google::protobuf::LogSilencer silence;  // it reports every invalid string
  int refused = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Maker make(seed);
    pb::MemberDown down;
    to_proto(seed % 2 == 0 ? ToMember(make.plan()) : ToMember(PlacementUpdate{make.placement()}), &down);
    std::string bytes = down.SerializeAsString();
    for (uint32_t n = 1 + make.u(3); n > 0 && !bytes.empty(); --n) {
      bytes[make.u(static_cast<uint32_t>(bytes.size()))] = static_cast<char>(make.u(256));
    }
    pb::MemberDown damaged;
    if (damaged.ParseFromString(bytes)) refused += !from_proto(damaged).ok();
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace conclave::rpc
