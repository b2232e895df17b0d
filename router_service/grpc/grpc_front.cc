#include "router_service/grpc/grpc_front.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <chrono>
#include <mutex>
#include <new>
#include <utility>

#include "conclave/v1/inference.grpc.pb.h"
#include "libs/rpc/grpc_setup.h"
#include "router_service/grpc/generation_call.h"
#include "router_service/grpc/inference_convert.h"
#include "router_service/task_count.h"

namespace conclave::router {
namespace {

using gateway::Gateway;

constexpr char kServiceName[] = "conclave.v1.Inference";
constexpr char kResumableMetadata[] = "x-conclave-resumable";
constexpr Nanos kTemplateTime = 30 * kSecond;  // for rendering messages in Tokenize

template <class Base>
using RawAnswers = v1::Inference::WithRawCallbackMethod_Generate<
    v1::Inference::WithRawCallbackMethod_GenerateStream<v1::Inference::WithRawCallbackMethod_Chat<
        v1::Inference::WithRawCallbackMethod_ChatStream<v1::Inference::WithRawCallbackMethod_Resume<Base>>>>>;
template <class Base>
using RawTools =
    v1::Inference::WithRawCallbackMethod_Tokenize<v1::Inference::WithRawCallbackMethod_Detokenize<
        v1::Inference::WithRawCallbackMethod_Abort<v1::Inference::WithRawCallbackMethod_ModelInfo<Base>>>>;
// Every method gets the bytes as they came.
using RawService = RawAnswers<RawTools<v1::Inference::Service>>;

class GrpcFrontImpl : public GrpcFront, private RawService {
 public:
  GrpcFrontImpl(GrpcFrontOptions options, Gateway& gateway)
      : options_(std::move(options)), gateway_(gateway) {
    if (!options_.on_answer) options_.on_answer = [](std::string_view, int) {};
  }
  ~GrpcFrontImpl() override {
    shutdown(0);
    tasks_.wait();
  }

  Status listen() {
    door_ = options_.door;
    if (door_ == nullptr) {
      door::FrontDoorOptions open;
      open.trust_without_keys = true;
      ASSIGN_OR_RETURN(own_door_, door::FrontDoor::open(std::move(open)));
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
  using Bytes = grpc::ByteBuffer;
  using Context = grpc::CallbackServerContext;

  grpc::ServerUnaryReactor* Generate(Context* context, const Bytes* request, Bytes* response) override {
    return new UnaryCall(gateway_, context, "Generate", enter(context, "Generate", *request),
                         plan<v1::GenerateRequest>(*request, make_generate_sink), response,
                         options_.on_answer);
  }
  grpc::ServerWriteReactor<Bytes>* GenerateStream(Context* context, const Bytes* request) override {
    return new StreamCall(gateway_, context, "GenerateStream", enter(context, "GenerateStream", *request),
                          plan<v1::GenerateRequest>(*request, make_generate_sink, wants_resumable(*context)),
                          options_.on_answer);
  }
  grpc::ServerUnaryReactor* Chat(Context* context, const Bytes* request, Bytes* response) override {
    return new UnaryCall(gateway_, context, "Chat", enter(context, "Chat", *request),
                         plan<v1::ChatRequest>(*request, make_chat_sink), response, options_.on_answer);
  }
  grpc::ServerWriteReactor<Bytes>* ChatStream(Context* context, const Bytes* request) override {
    return new StreamCall(gateway_, context, "ChatStream", enter(context, "ChatStream", *request),
                          plan<v1::ChatRequest>(*request, make_chat_sink, wants_resumable(*context)),
                          options_.on_answer);
  }
  grpc::ServerWriteReactor<Bytes>* Resume(Context* context, const Bytes* request) override {
    const auto read = [&]() -> StatusOr<ResumePlan> {
      v1::ResumeRequest in;
      RETURN_IF_ERROR(parse_message(*request, &in));
      if (in.id().empty()) return invalid_field("id", "is required");
      return ResumePlan{in.id(), in.after(), {&gateway_.text(), gateway_.model().name, false}};
    };
    return new StreamCall(gateway_, context, "Resume", enter(context, "Resume", *request), read(),
                          options_.on_answer);
  }

  grpc::ServerUnaryReactor* Tokenize(Context* context, const Bytes* request, Bytes* response) override {
    return on_text_thread<v1::TokenizeRequest>(
        context, "Tokenize", *request, response,
        [this](const v1::TokenizeRequest& in) -> StatusOr<Bytes> { return tokenize(in); });
  }
  grpc::ServerUnaryReactor* Detokenize(Context* context, const Bytes* request, Bytes* response) override {
    return on_text_thread<v1::DetokenizeRequest>(
        context, "Detokenize", *request, response,
        [this](const v1::DetokenizeRequest& in) -> StatusOr<Bytes> { return detokenize(in); });
  }
  grpc::ServerUnaryReactor* Abort(Context* context, const Bytes* request, Bytes* response) override {
    const CallEntry entry = enter(context, "Abort", *request);
    v1::AbortRequest in;
    Status status = entry.status;
    if (status.ok()) status = parse_message(*request, &in);
    if (status.ok() && in.id().empty()) status = invalid_field("id", "is required");
    if (status.ok()) {
      v1::AbortResponse out;
      out.set_aborted(static_cast<uint32_t>(gateway_.abort(in.id(), entry.visit->tenant())));
      *response = to_bytes(out);
    }
    return finish(context, context->DefaultReactor(), "Abort", entry, status);
  }
  grpc::ServerUnaryReactor* ModelInfo(Context* context, const Bytes* request, Bytes* response) override {
    const CallEntry entry = enter(context, "ModelInfo", *request);
    v1::ModelInfoRequest in;
    Status status = entry.status;
    if (status.ok()) status = parse_message(*request, &in);
    if (status.ok()) *response = to_bytes(model_info(gateway_));
    return finish(context, context->DefaultReactor(), "ModelInfo", entry, status);
  }

  // The metadata "x-conclave-resumable"; INVALID_ARGUMENT names it.
  static StatusOr<bool> wants_resumable(const Context& context) {
    const auto at = context.client_metadata().find(kResumableMetadata);
    if (at == context.client_metadata().end()) return false;
    const std::string_view value(at->second.data(), at->second.size());
    if (value == "1" || value == "true") return true;
    if (value == "0" || value == "false") return false;
    return invalid_field(kResumableMetadata, "must be \"1\" or \"0\"");
  }

  template <class Message>
  StatusOr<GenerationPlan> plan(const Bytes& bytes,
                                std::unique_ptr<AnswerSink> (*make)(SinkOptions, RequestId),
                                StatusOr<bool> resumable = false) const {
    Message in;
    RETURN_IF_ERROR(parse_message(bytes, &in));
    RETURN_IF_ERROR(resumable.status());
    GenerationPlan out;
    ASSIGN_OR_RETURN(out.request, from_proto(in));
    if (*resumable) out.request.resume_context = stream_context(in);
    const SinkOptions sink{&gateway_.text(), gateway_.model().name, out.request.logprobs};
    out.sink = [sink, make](RequestId id) { return make(sink, id); };
    return out;
  }

  CallEntry enter(Context* context, std::string_view method, const Bytes& request) const {
    return enter_call(*door_, context, method, request.Length());
  }

  // `reactor`: the call's default one, which gRPC gives once.
  grpc::ServerUnaryReactor* finish(Context* context, grpc::ServerUnaryReactor* reactor,
                                   std::string_view method, const CallEntry& entry,
                                   const Status& status) const {
    options_.on_answer(method, static_cast<int>(status.code()));
    entry.visit->answered(static_cast<int>(status.code()));
    reactor->Finish(status.ok() ? grpc::Status::OK : grpc_error(status, context));
    return reactor;
  }

  // Work that may take milliseconds.
  template <class Message>
  grpc::ServerUnaryReactor* on_text_thread(Context* context, std::string_view method, const Bytes& request,
                                           Bytes* response,
                                           std::function<StatusOr<Bytes>(const Message&)> work) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const CallEntry entry = enter(context, method, request);
    if (!entry.status.ok()) return finish(context, reactor, method, entry, entry.status);
    auto in = std::make_shared<Message>();
    if (const Status status = parse_message(request, in.get()); !status.ok())
      return finish(context, reactor, method, entry, status);
    const bool taken = gateway_.run_on_text_thread(
        [task = tasks_.enter(), this, context, reactor, method, entry, in, response, work = std::move(work)] {
          Status status;
          try {
            auto made = work(*in);
            status = made.status();
            if (made.ok()) *response = *made;
          } catch (const std::bad_alloc&) {
            status = resource_exhausted("there is not enough memory for this request");
          }
          finish(context, reactor, method, entry, status);
        });
    if (!taken)
      finish(context, reactor, method, entry,
             resource_exhausted("too many requests wait to be read; retry later"));
    return reactor;
  }

  Status check_model(const std::string& wanted) const {
    if (wanted.empty() || wanted == gateway_.model().name) return OkStatus();
    return gateway::with_code(
        with_field(not_found("the model \"" + wanted.substr(0, 256) + "\" is not served here"), "model"),
        "model_not_found");
  }

  StatusOr<Bytes> tokenize(const v1::TokenizeRequest& in) const {
    RETURN_IF_ERROR(check_model(in.model()));
    std::vector<TokenId> tokens;
    if (in.has_chat()) {
      ASSIGN_OR_RETURN(const auto request, from_proto(in.chat()));
      auto encoded = gateway_.text().encode_chat(std::get<gateway::ChatPrompt>(request.prompt),
                                                 steady_now() + kTemplateTime);
      if (encoded.status().code() == StatusCode::kDeadlineExceeded)
        return resource_exhausted(message_of(encoded.status()) + "; retry later");
      if (!encoded.ok() && field_of(encoded.status()).empty())
        return with_field(encoded.status(), "messages");
      if (!encoded.ok()) return encoded.status();
      tokens = std::move(encoded->tokens);
    } else if (in.has_text()) {
      ASSIGN_OR_RETURN(tokens, gateway_.text().encode(in.text(), in.allow_special_tokens()));
    } else {
      return invalid_field("input", "text or chat is required");
    }
    v1::TokenizeResponse out;
    out.mutable_ids()->Add(tokens.begin(), tokens.end());
    for (const TokenId token : tokens) out.add_texts(gateway_.text().token_bytes(token));
    out.set_context_length(gateway_.context_length());
    return to_bytes(out);
  }

  StatusOr<Bytes> detokenize(const v1::DetokenizeRequest& in) const {
    RETURN_IF_ERROR(check_model(in.model()));
    for (const uint32_t id : in.ids())
      if (id >= gateway_.model().vocab_size)
        return invalid_field("ids", "the id " + std::to_string(id) + " is not in the vocabulary of " +
                                        std::to_string(gateway_.model().vocab_size));
    v1::DetokenizeResponse out;
    out.set_text(gateway_.text().decode({in.ids().begin(), in.ids().end()}, /*skip_special=*/false));
    return to_bytes(out);
  }

  GrpcFrontOptions options_;
  Gateway& gateway_;
  std::unique_ptr<door::FrontDoor> own_door_;
  door::FrontDoor* door_ = nullptr;
  TaskCount tasks_;
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
