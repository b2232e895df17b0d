#include "router_service/grpc/grpc_front.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <chrono>
#include <mutex>
#include <optional>
#include <utility>

#include "conclave/v1/inference.grpc.pb.h"
#include "libs/rpc/grpc_setup.h"

namespace conclave::router {
namespace {

using gateway::Gateway;
using gateway::Generation;
using gateway::Update;
using OnAnswer = std::function<void(std::string_view, int)>;

constexpr uint64_t kBytesPerToken = 4;  // of a message, about
constexpr char kServiceName[] = "conclave.v1.Inference";

// Client errors name the field in the message and, for programs, in the trailing metadata.
grpc::Status grpc_error(const Status& status, grpc::CallbackServerContext* context) {
  const std::string field = field_of(status);
  if (!field.empty()) context->AddTrailingMetadata("conclave-field", field);
  const std::string code = gateway::code_of(status);
  if (!code.empty()) context->AddTrailingMetadata("conclave-code", code);
  if (field.empty() || status.code() != StatusCode::kInvalidArgument) return rpc::to_grpc(status);
  return rpc::to_grpc(invalid_argument(field + ": " + message_of(status)));
}

std::string_view metadata(const grpc::CallbackServerContext& context, const char* name) {
  const auto at = context.client_metadata().find(name);
  return at == context.client_metadata().end() ? std::string_view()
                                               : std::string_view(at->second.data(), at->second.size());
}

// What every method begins with: the request id (returned in the initial metadata), the caller's key, and the
// allowance for `bytes` of request. The visit is there whatever the status says.
struct Entry {
  std::shared_ptr<door::Visit> visit;
  Status status;
};
Entry enter(door::FrontDoor& door, grpc::CallbackServerContext* context, std::string_view method,
            uint64_t bytes) {
  const std::string_view wanted = metadata(*context, "x-request-id");
  std::string id = door::usable_request_id(wanted) ? std::string(wanted) : door::make_request_id();
  context->AddInitialMetadata("x-request-id", id);
  auto tenant = door.identify(metadata(*context, "authorization"));
  Entry entry;
  entry.visit = door.enter("grpc", method, std::move(id), tenant.ok() ? *tenant : nullptr);
  entry.status = tenant.ok() ? entry.visit->charge(bytes / kBytesPerToken) : tenant.status();
  if (tenant.ok())
    for (const auto& [name, value] : entry.visit->headers()) context->AddTrailingMetadata(name, value);
  return entry;
}

gateway::GenerateRequest to_request(const v1::GenerateRequest& in,
                                    const grpc::CallbackServerContext& context) {
  gateway::GenerateRequest out;
  out.model = in.model();
  if (in.has_token_ids()) {
    out.prompt = gateway::TokenPrompt{{in.token_ids().ids().begin(), in.token_ids().ids().end()}};
    out.prompt_field = "token_ids";
  } else {
    out.prompt = gateway::TextPrompt{in.text()};
    out.prompt_field = in.has_text() ? "text" : "input";
  }
  if (in.has_temperature()) out.temperature = in.temperature();
  if (in.has_top_p()) out.top_p = in.top_p();
  if (in.has_top_k()) out.top_k = in.top_k();
  if (in.has_min_p()) out.min_p = in.min_p();
  if (in.has_seed()) out.seed = in.seed();
  if (in.has_max_tokens()) out.max_tokens = in.max_tokens();
  if (in.has_min_tokens()) out.min_tokens = in.min_tokens();
  if (in.has_ignore_eos()) out.ignore_eos = in.ignore_eos();
  out.stop.assign(in.stop().begin(), in.stop().end());
  out.stop_token_ids.assign(in.stop_token_ids().begin(), in.stop_token_ids().end());
  const auto deadline = context.deadline();
  if (deadline != std::chrono::system_clock::time_point::max()) {
    const auto left =
        std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - std::chrono::system_clock::now());
    out.time_left = std::max<Nanos>(left.count(), 0);
  }
  return out;
}

const char* finish_text(FinishReason finish) { return finish == FinishReason::kLength ? "length" : "stop"; }

Status client_cancelled() { return cancelled("the client cancelled the call"); }

void set_usage(v1::Usage* out, const gateway::Usage& usage) {
  out->set_prompt_tokens(usage.prompt_tokens);
  out->set_completion_tokens(usage.completion_tokens);
}

StatusOr<std::shared_ptr<Generation>> generate(Gateway& gateway, grpc::CallbackServerContext* context,
                                               const v1::GenerateRequest& message, const Entry& entry,
                                               std::function<void()> on_update) {
  RETURN_IF_ERROR(entry.status);
  gateway::GenerateRequest request = to_request(message, *context);
  request.origin = entry.visit->origin(entry.visit);
  return gateway.generate(std::move(request), std::move(on_update));
}

// Between a reactor (which gRPC deletes when the call is done) and its generation (which may still report
// then). Calls into the reactor are made without the lock, and none after Finish.
class CallState {
 public:
  void attach(std::shared_ptr<Generation> generation) {
    std::lock_guard lock(mutex_);
    generation_ = std::move(generation);
  }
  void cancel() {
    std::shared_ptr<Generation> generation;
    {
      std::lock_guard lock(mutex_);
      generation = generation_;
    }
    if (generation) generation->cancel();
  }

 protected:
  std::mutex mutex_;
  std::shared_ptr<Generation> generation_;
  bool finished_ = false;
};

class UnaryState : public CallState {
 public:
  UnaryState(v1::GenerateResponse* response, std::string model)
      : response_(response), model_(std::move(model)) {}

  // The end, once, when it has come; the response is then filled.
  std::optional<Status> advance() {
    std::lock_guard lock(mutex_);
    if (finished_ || !generation_) return std::nullopt;
    const Update update = generation_->take();
    text_ += update.text;
    tokens_.insert(tokens_.end(), update.tokens.begin(), update.tokens.end());
    if (!update.ended) return std::nullopt;
    finished_ = true;
    if (!update.error.ok()) return update.error;
    response_->set_text(std::move(text_));
    response_->mutable_token_ids()->Add(tokens_.begin(), tokens_.end());
    response_->set_finish_reason(finish_text(update.finish));
    response_->set_model(model_);
    set_usage(response_->mutable_usage(), update.usage);
    return OkStatus();
  }
  // True for the one who may finish the call as cancelled.
  bool give_up() {
    std::lock_guard lock(mutex_);
    return !std::exchange(finished_, true);
  }

 private:
  v1::GenerateResponse* const response_;
  const std::string model_;
  std::string text_;
  std::vector<TokenId> tokens_;
};

class UnaryCall : public grpc::ServerUnaryReactor {
 public:
  UnaryCall(Gateway& gateway, door::FrontDoor& door, grpc::CallbackServerContext* context,
            const v1::GenerateRequest* request, v1::GenerateResponse* response, const OnAnswer& on_answer)
      : context_(context),
        on_answer_(on_answer),
        entry_(enter(door, context, "Generate", request->ByteSizeLong())),
        state_(std::make_shared<UnaryState>(response, gateway.model().name)) {
    auto generation =
        generate(gateway, context, *request, entry_, [this, state = state_] { finish_if(this, *state); });
    if (!generation.ok()) {
      if (state_->give_up()) finish(generation.status());
      return;
    }
    state_->attach(*generation);
    finish_if(this, *state_);
  }

  void OnCancel() override {
    state_->cancel();
    if (state_->give_up()) finish(client_cancelled());
  }
  void OnDone() override { delete this; }

 private:
  // `state` may outlive the reactor `self`; it then has nothing to say, and `self` is not touched.
  static void finish_if(UnaryCall* self, UnaryState& state) {
    if (const auto end = state.advance()) self->finish(*end);
  }
  void finish(const Status& status) {
    on_answer_("Generate", static_cast<int>(status.code()));
    entry_.visit->answered(static_cast<int>(status.code()));
    Finish(status.ok() ? grpc::Status::OK : grpc_error(status, context_));
  }

  grpc::CallbackServerContext* const context_;
  const OnAnswer& on_answer_;
  const Entry entry_;
  const std::shared_ptr<UnaryState> state_;
};

class StreamState : public CallState {
 public:
  struct Step {
    bool write = false;
    bool last = false;  // write (if any) and finish
    Status status;
  };
  // What to do now; nothing while a write is under way.
  Step advance(v1::GenerateChunk& chunk) {
    std::lock_guard lock(mutex_);
    Step step;
    if (finished_ || writing_ || !generation_) return step;
    Update update = generation_->take();
    step.last = update.ended;
    step.status = update.error;
    const bool ok = update.ended && update.error.ok();
    if (!update.text.empty() || !update.tokens.empty() || ok) {
      step.write = true;
      chunk.Clear();
      chunk.set_text(std::move(update.text));
      chunk.mutable_token_ids()->Add(update.tokens.begin(), update.tokens.end());
      if (ok) {
        chunk.set_finish_reason(finish_text(update.finish));
        set_usage(chunk.mutable_usage(), update.usage);
      }
    }
    writing_ = step.write;
    finished_ = step.last;
    return step;
  }
  // True when the call was given up during the write: it is to be finished now.
  bool written() {
    std::lock_guard lock(mutex_);
    writing_ = false;
    return std::exchange(given_up_, false);
  }
  // True for the one who may finish the call as cancelled. While a write is under way (or about to start, on
  // another thread) that is written()'s caller, so that the reactor lives until then.
  bool give_up() {
    std::lock_guard lock(mutex_);
    if (std::exchange(finished_, true)) return false;
    given_up_ = writing_;
    return !writing_;
  }

 private:
  bool writing_ = false;
  bool given_up_ = false;  // during a write
};

class StreamCall : public grpc::ServerWriteReactor<v1::GenerateChunk> {
 public:
  StreamCall(Gateway& gateway, door::FrontDoor& door, grpc::CallbackServerContext* context,
             const v1::GenerateRequest* request, const OnAnswer& on_answer)
      : context_(context),
        on_answer_(on_answer),
        entry_(enter(door, context, "GenerateStream", request->ByteSizeLong())),
        state_(std::make_shared<StreamState>()) {
    auto generation =
        generate(gateway, context, *request, entry_, [this, state = state_] { advance(this, *state); });
    if (!generation.ok()) {
      if (state_->give_up()) finish(generation.status());
      return;
    }
    state_->attach(*generation);
    advance(this, *state_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) state_->cancel();  // OnCancel finishes the call
    if (state_->written()) return finish(client_cancelled());
    if (ok) advance(this, *state_);
  }
  void OnCancel() override {
    state_->cancel();
    if (state_->give_up()) finish(client_cancelled());
  }
  void OnDone() override { delete this; }

 private:
  // `state` may outlive the reactor `self`; it then has nothing to do, and `self` is not touched.
  static void advance(StreamCall* self, StreamState& state) {
    v1::GenerateChunk chunk;
    const StreamState::Step step = state.advance(chunk);
    if (!step.write && !step.last) return;
    self->chunk_ = std::move(chunk);  // the only write under way, so nobody else uses it
    if (step.write && step.last && step.status.ok()) {
      self->on_answer_("GenerateStream", 0);
      self->StartWriteAndFinish(&self->chunk_, grpc::WriteOptions(), grpc::Status::OK);
      return;
    }
    if (step.write) self->StartWrite(&self->chunk_);
    if (step.last)
      self->finish(step.status);  // a failure ends the stream with its status, after the text before it
  }
  void finish(const Status& status) {
    on_answer_("GenerateStream", static_cast<int>(status.code()));
    entry_.visit->answered(static_cast<int>(status.code()));
    Finish(status.ok() ? grpc::Status::OK : grpc_error(status, context_));
  }

  grpc::CallbackServerContext* const context_;
  const OnAnswer& on_answer_;
  const Entry entry_;
  const std::shared_ptr<StreamState> state_;
  v1::GenerateChunk chunk_;
};

class GrpcFrontImpl : public GrpcFront, private v1::Inference::CallbackService {
 public:
  GrpcFrontImpl(GrpcFrontOptions options, Gateway& gateway)
      : options_(std::move(options)), gateway_(gateway) {
    if (!options_.on_answer) options_.on_answer = [](std::string_view, int) {};
  }
  ~GrpcFrontImpl() override { shutdown(0); }

  Status listen() {
    door_ = options_.door;
    if (door_ == nullptr) {
      ASSIGN_OR_RETURN(own_door_, door::FrontDoor::open({}));
      door_ = own_door_.get();
    }
    static std::once_flag once;  // both are process-wide and must come before the first server
    std::call_once(once, [] {
      grpc::EnableDefaultHealthCheckService(true);
      grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    });
    grpc::ServerBuilder builder;
    rpc::configure_server(builder, options_.listen, options_.max_message_bytes, &port_);
    builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, static_cast<int>(options_.max_metadata_bytes));
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port_ == 0) {
      server_.reset();
      return rpc::explain_listen_failure(options_.listen, "router.grpc_listen");
    }
    set_serving(false);
    return OkStatus();
  }

  std::string address() const override {
    return options_.listen.substr(0, options_.listen.rfind(':') + 1) + std::to_string(port_);
  }
  uint16_t port() const override { return static_cast<uint16_t>(port_); }

  void set_serving(bool serving) override {
    if (server_ == nullptr) return;
    auto* health = server_->GetHealthCheckService();
    if (health == nullptr) return;
    health->SetServingStatus(serving);
    health->SetServingStatus(kServiceName, serving);
  }

  void shutdown(Nanos wait) override {
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::nanoseconds(wait));
    server_->Wait();
    server_.reset();
  }

 private:
  grpc::ServerUnaryReactor* Generate(grpc::CallbackServerContext* context, const v1::GenerateRequest* request,
                                     v1::GenerateResponse* response) override {
    return new UnaryCall(gateway_, *door_, context, request, response, options_.on_answer);
  }
  grpc::ServerWriteReactor<v1::GenerateChunk>* GenerateStream(grpc::CallbackServerContext* context,
                                                              const v1::GenerateRequest* request) override {
    return new StreamCall(gateway_, *door_, context, request, options_.on_answer);
  }

  GrpcFrontOptions options_;
  Gateway& gateway_;
  std::unique_ptr<door::FrontDoor> own_door_;
  door::FrontDoor* door_ = nullptr;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace

StatusOr<std::unique_ptr<GrpcFront>> GrpcFront::start(GrpcFrontOptions options, gateway::Gateway& gateway) {
  auto front = std::make_unique<GrpcFrontImpl>(std::move(options), gateway);
  RETURN_IF_ERROR(front->listen());
  return std::unique_ptr<GrpcFront>(std::move(front));
}

}  // namespace conclave::router
