// Prints docs/one_request.md: one request through the real gateway, scheduler, worker and shards, in virtual
// time, with every message between them written down.
#include <cstdio>
#include <filesystem>
#include <future>
#include <memory>
#include <string>

#include "attention_service/core/worker.h"
#include "expert_service/core/shard.h"
#include "libs/base/check.h"
#include "libs/checkpoint/binding.h"
#include "libs/checkpoint/make.h"
#include "libs/runtime/sim_executor.h"
#include "libs/text/tokenizer.h"
#include "libs/transport/loopback_transport.h"
#include "router_service/gateway/gateway.h"
#include "scheduler/loop.h"
#include "tests/one_request/trace.h"
#include "tests/sim/sim_link.h"

namespace conclave::one_request {
namespace {

constexpr char kPrompt[] = "Hi there";
constexpr int kMaxTokens = 2;

class TokenizerCodec : public gateway::TextCodec {
 public:
  explicit TokenizerCodec(const text::Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  StatusOr<std::vector<TokenId>> encode(std::string_view text, bool special_tokens) const override {
    return tokenizer_.encode(text,
                             special_tokens ? text::SpecialTokens::kParse : text::SpecialTokens::kAsText);
  }
  StatusOr<gateway::EncodedChat> encode_chat(const gateway::ChatPrompt&, TimePoint) const override {
    return failed_precondition("no template here");
  }
  std::unique_ptr<text::TokenDecoder> decoder(bool skip_special) const override {
    return text::make_token_decoder(tokenizer_, {}, skip_special);
  }
  std::string token_bytes(TokenId token) const override { return std::string(tokenizer_.token_bytes(token)); }
  std::string decode(const std::vector<TokenId>& tokens, bool skip_special) const override {
    return tokenizer_.decode(tokens, skip_special);
  }
  uint32_t vocab_limit() const override { return static_cast<uint32_t>(tokenizer_.vocab_size()); }
  uint32_t max_token_bytes() const override { return 64; }

 private:
  const text::Tokenizer& tokenizer_;
};

// The gateway submits from a thread of its own; the request is handed to the simulation's thread, which owns
// the rest.
class HandOver : public SchedulerPort {
 public:
  explicit HandOver(scheduler::SchedulerLoop& loop) : loop_(loop) {}
  using Submission = std::pair<AcceptedRequest, std::shared_ptr<RequestObserver>>;
  void submit(AcceptedRequest request, std::shared_ptr<RequestObserver> observer) override {
    submitted_.set_value({std::move(request), std::move(observer)});
  }
  void cancel(RequestId) override {}
  void cancel_choice(RequestId, uint32_t) override {}
  FleetInfo fleet() const override { return loop_.fleet(); }
  Submission take() { return submitted_.get_future().get(); }

 private:
  scheduler::SchedulerLoop& loop_;
  std::promise<Submission> submitted_;
};

struct TracingObserver : RequestObserver {
  TracingObserver(std::shared_ptr<RequestObserver> o, Trace& t) : inner(std::move(o)), trace(t) {}
  void on_accepted() override {
    trace.add("2", "scheduler -> gateway", "accepted: from here the request ends exactly once");
    inner->on_accepted();
  }
  void on_refused(const Status& cause) override { inner->on_refused(cause); }
  void on_tokens(const TokenEvent& event) override {
    const char* finish = event.finish == FinishReason::kLength ? ", finish: length"
                         : event.finish == FinishReason::kStop ? ", finish: stop"
                                                               : "";
    trace.add("10", "scheduler -> gateway",
              "index " + std::to_string(event.index) + ": ids " + ids_text(event.tokens) + finish);
    inner->on_tokens(event);
    ended = event.finish != FinishReason::kNone;
  }
  std::shared_ptr<RequestObserver> inner;
  Trace& trace;
  bool ended = false;
};

// One simulated process with its core, its transport and its line to the scheduler.
struct Member {
  SimExecutor* executor = nullptr;
  std::unique_ptr<ExpertTransport> transport;
  std::unique_ptr<Worker> worker;
  std::unique_ptr<Shard> shard;
  std::unique_ptr<MemberHandler> handler;
  std::unique_ptr<scheduler::SimLink> line;
  std::unique_ptr<MemberLink> link;
};

class Cluster {
 public:
  explicit Cluster(const BoundModel& model)
      : model_(model), scheduler_process_(world_.add_process("scheduler")) {
    // Computing takes no virtual time; a network of 1 ms one way lets the next plan arrive while a step runs.
    hub_->set_delay_model(
        [](Incarnation, Incarnation, uint64_t) -> std::optional<Nanos> { return kMillisecond; });
    scheduler::SchedulerOptions options;
    options.incarnation = Incarnation(1);
    loop_ = std::make_unique<scheduler::SchedulerLoop>(options, scheduler_process_);
    place_.process = &scheduler_process_;
    place_.loop = loop_.get();
    add_member("attention-0", Role::kAttention);
    add_member("expert-0", Role::kExpert);
    add_member("expert-1", Role::kExpert);
  }
  ~Cluster() {
    for (auto& member : members_) world_.kill(*member->executor);
    world_.kill(scheduler_process_);
    members_.clear();
    loop_.reset();
  }

  SimWorld& world() { return world_; }
  scheduler::SchedulerLoop& loop() { return *loop_; }
  Trace& trace() { return trace_; }

 private:
  void add_member(const std::string& name, Role role) {
    auto member = std::make_unique<Member>();
    member->executor = &world_.add_process(name);
    TransportOptions options;
    options.self = Incarnation(10 + members_.size());
    options.fleet = "page";
    options.random = [this] { return world_.random().next(); };
    trace_.name(options.self, name);
    member->transport =
        trace_transport(std::make_unique<LoopbackTransport>(hub_, *member->executor, options), trace_);
    MemberHandler* core = nullptr;
    scheduler::SimLink::Beat beat;
    if (role == Role::kAttention) {
      WorkerOptions worker;
      worker.name = name;
      worker.numerics_id = numerics_id(Precision::kBf16, "cpu");
      worker.model_fingerprint = model_.fingerprint;
      worker.kv_blocks = 16;
      auto created = Worker::create(*member->executor, *member->transport, model_.spec, model_.dense,
                                    kernels::Context{}, worker);
      CONCLAVE_CHECK(created.ok());
      member->worker = std::move(*created);
      core = member->worker.get();
      beat = [w = member->worker.get()] { return w->heartbeat(); };
    } else {
      ShardOptions shard;
      shard.name = name;
      shard.numerics_id = numerics_id(Precision::kBf16, "cpu");
      shard.model_fingerprint = model_.fingerprint;
      member->shard = std::make_unique<Shard>(*member->executor, *member->transport, model_.spec,
                                              model_.experts, kernels::Context{}, shard);
      core = member->shard.get();
      beat = [s = member->shard.get()] { return s->heartbeat(); };
    }
    member->handler = trace_handler(*core, name, trace_);
    member->line = std::make_unique<scheduler::SimLink>(world_, place_, *member->executor, *member->handler,
                                                        std::move(beat));
    member->link = trace_link(*member->line, name, trace_);
    if (member->worker) {
      member->worker->set_link(member->link.get());
      member->worker->start();
    } else {
      member->shard->set_link(member->link.get());
      member->shard->start();
    }
    members_.push_back(std::move(member));
  }

  const BoundModel& model_;
  Trace trace_;
  SimWorld world_{1};
  SimExecutor& scheduler_process_;
  std::shared_ptr<LoopbackHub> hub_ = std::make_shared<LoopbackHub>();
  std::unique_ptr<scheduler::SchedulerLoop> loop_;
  scheduler::SchedulerPlace place_;
  std::vector<std::unique_ptr<Member>> members_;
};

// Bytes that are not printable ASCII as \xNN, so that the page stays text.
std::string printable(const std::string& text) {
  std::string out;
  for (unsigned char c : text) {
    char code[8];
    std::snprintf(code, sizeof code, c >= 0x20 && c < 0x7f && c != '|' && c != '`' ? "%c" : "\\x%02x", c);
    out += code;
  }
  return out;
}

int run(const std::string& directory) {
  MakeOptions make;
  make.out = directory;
  make.layers = 2;
  make.seed = 5;
  CONCLAVE_CHECK(make_checkpoint(make).ok());
  const auto model = load_model(directory);
  CONCLAVE_CHECK(model.ok());
  const auto tokenizer = text::Tokenizer::load(directory + "/tokenizer.json");
  CONCLAVE_CHECK(tokenizer.ok());

  Cluster cluster(**model);
  Trace& trace = cluster.trace();
  const auto limit = [&] { return cluster.world().now() + 60 * kSecond; };
  if (!cluster.world().run_until([&] { return cluster.loop().fleet().ready; }, limit())) {
    std::fprintf(stderr, "not ready: %s\n", cluster.loop().fleet().not_ready.c_str());
    return 1;
  }
  trace.set_on(true);

  TokenizerCodec codec(**tokenizer);
  HandOver port(cluster.loop());
  gateway::Gateway front({}, (*model)->spec, port, codec);
  gateway::GenerateRequest request;
  request.prompt = gateway::TextPrompt{kPrompt};
  request.max_tokens = kMaxTokens;
  request.temperature = 0;
  request.seed = 1;
  const auto generation = front.generate(std::move(request), [] {});
  CONCLAVE_CHECK(generation.ok());
  HandOver::Submission submission = port.take();
  const AcceptedRequest& accepted = submission.first;
  trace.add("1", "client -> gateway",
            "prompt `" + std::string(kPrompt) + "`, max_tokens " + std::to_string(kMaxTokens) +
                ", temperature 0: validated, ids " + ids_text(accepted.prompt));
  trace.add("2", "gateway -> scheduler",
            "submit: " + std::to_string(accepted.prompt.size()) + " prompt tokens, seed " +
                std::to_string(accepted.sampling.seed) + ", ids from " +
                std::to_string(accepted.sampling.vocab_limit) + " on never sampled");
  auto observer = std::make_shared<TracingObserver>(submission.second, trace);
  cluster.loop().submit(accepted, observer);
  CONCLAVE_CHECK(cluster.world().run_until([&] { return observer->ended; }, limit()));
  const gateway::Update update = (*generation)->take();
  text::AssistantMessage message;
  for (const gateway::ChoiceUpdate& choice : update.choices) message.add(choice.events);
  trace.add("11", "gateway -> client",
            "text `" + printable(message.content) + "`, usage " + std::to_string(update.usage.prompt_tokens) +
                " + " + std::to_string(update.usage.completion_tokens) + " tokens");

  std::printf(
      "# One request, hop by hop\n\n"
      "Printed by a run of the real gateway, scheduler, attention worker and two expert shards in virtual "
      "time\n"
      "(`tests/one_request`), on a random checkpoint of %u layers, %u experts and %u experts a token. A test "
      "fails when this\n"
      "page and the code part. Hop numbers: 1-2 admission; 3 a plan; 4 attention, within the worker; 5-7 "
      "expert gate,\n"
      "grouping by shard, dispatch; 8-9 a shard's outputs, accepted once per (token, slot), and the step's "
      "result;\n"
      "10-11 tokens back to the client.\n\n"
      "| hop | between | what moves |\n|---|---|---|\n",
      (*model)->spec.num_layers, (*model)->spec.num_experts, (*model)->spec.experts_per_token);
  for (const TraceLine& line : trace.lines()) {
    std::printf("| %s | %s | %s |\n", line.hop.c_str(), line.where.c_str(), line.what.c_str());
  }
  std::printf(
      "\nWhat to see in it: a token's row goes to a shard once, with all of its experts there; plan 2 is "
      "made before the\n"
      "result of plan 1 is known, and the worker itself knows the token it sampled; weights of the experts "
      "never leave the\n"
      "worker, which sums the outputs in slot order.\n");
  return 0;
}

}  // namespace
}  // namespace conclave::one_request

int main() {
  std::string directory = (std::filesystem::temp_directory_path() / "one-request-XXXXXX").string();
  CONCLAVE_CHECK(mkdtemp(directory.data()) != nullptr);
  const int code = conclave::one_request::run(directory);
  std::filesystem::remove_all(directory);
  return code;
}
