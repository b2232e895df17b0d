#include "router_service/grpc/generation_call.h"

#include <algorithm>
#include <chrono>

namespace conclave::router {
namespace {

constexpr char kStreamIdMetadata[] = "x-conclave-stream-id";

Status client_cancelled() { return cancelled("the client cancelled the call"); }

// Starts the request with what is left of the call's deadline.
template <class State>
Status start(gateway::Gateway& gateway, const grpc::CallbackServerContext& context, const CallEntry& entry,
             StatusOr<GenerationPlan> plan, State& state, std::function<void()> on_update) {
  RETURN_IF_ERROR(entry.status);
  if (!plan.ok()) {
    gateway.note_limit(plan.status());
    return plan.status();
  }
  plan->request.origin = entry.visit->origin(entry.visit);
  const auto deadline = context.deadline();
  if (deadline != std::chrono::system_clock::time_point::max()) {
    const auto left =
        std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - std::chrono::system_clock::now());
    const Nanos time_left = std::max<Nanos>(left.count(), 0);
    plan->request.time_left = std::min(time_left, plan->request.time_left.value_or(time_left));
  }
  const bool wants_prompt = plan->request.prompt_logprobs.has_value();
  ASSIGN_OR_RETURN(const auto generation, gateway.generate(std::move(plan->request), std::move(on_update)));
  state.attach(generation, plan->sink(generation->id()), wants_prompt);
  return OkStatus();
}

}  // namespace

grpc::Status grpc_error(const Status& status, grpc::CallbackServerContext* context) {
  const std::string field = field_of(status);
  if (!field.empty()) context->AddTrailingMetadata("conclave-field", field);
  const std::string code = gateway::code_of(status);
  if (!code.empty()) context->AddTrailingMetadata("conclave-code", code);
  if (const Nanos wait = retry_after_of(status); wait > 0) {
    context->AddTrailingMetadata("retry-after-ms", std::to_string((wait + kMillisecond - 1) / kMillisecond));
  }
  std::string message = message_of(status);
  if (field.empty() || status.code() != StatusCode::kInvalidArgument || message.starts_with(field))
    return rpc::to_grpc(status);
  return rpc::to_grpc(invalid_argument(field + ": " + message));
}

std::optional<Status> UnaryState::advance(grpc::ByteBuffer* response) {
  std::lock_guard lock(mutex_);
  if (finished_ || !generation_) return std::nullopt;
  gateway::Update update = take();
  const bool ended = update.ended;
  const Status error = update.error;
  sink_->collect(std::move(update));
  if (!ended) return std::nullopt;
  finished_ = true;
  if (error.ok()) *response = sink_->whole();
  return error;
}

UnaryCall::UnaryCall(gateway::Gateway& gateway, grpc::CallbackServerContext* context, std::string_view method,
                     CallEntry entry, StatusOr<GenerationPlan> plan, grpc::ByteBuffer* response,
                     const OnGrpcAnswer& on_answer)
    : context_(context),
      method_(method),
      entry_(std::move(entry)),
      response_(response),
      on_answer_(on_answer),
      state_(std::make_shared<UnaryState>()) {
  const Status started = start(gateway, *context, entry_, std::move(plan), *state_,
                               [this, state = state_] { finish_if(this, *state); });
  if (!started.ok()) {
    if (state_->give_up()) finish(started);
    return;
  }
  finish_if(this, *state_);
}

void UnaryCall::OnCancel() {
  state_->cancel();
  if (state_->give_up()) finish(client_cancelled());
}

// `state` may outlive the reactor `self`; it then has nothing to say, and `self` is not touched.
void UnaryCall::finish_if(UnaryCall* self, UnaryState& state) {
  if (const auto end = state.advance(self->response_)) self->finish(*end);
}

void UnaryCall::answered(const Status& status) const {
  on_answer_(method_, static_cast<int>(status.code()));
  entry_.visit->answered(static_cast<int>(status.code()));
}

void UnaryCall::finish(const Status& status) {
  answered(status);
  Finish(status.ok() ? grpc::Status::OK : grpc_error(status, context_));
}

StreamState::Step StreamState::advance(grpc::ByteBuffer& message) {
  std::lock_guard lock(mutex_);
  Step step;
  if (finished_ || writing_ || !generation_) return step;
  while (queue_.empty() && !ended_ && take_pieces()) {
  }
  if (!queue_.empty()) {
    if (resumable_ && !std::exchange(id_told_, true)) step.stream_id = gateway::id_text(generation_->id());
    step.write = true;
    message = std::move(queue_.front());
    queue_.pop_front();
  }
  step.last = ended_ && queue_.empty();
  step.status = end_;
  writing_ = step.write;
  finished_ = step.last;
  return step;
}

bool StreamState::take_pieces() {
  std::vector<gateway::Update> pieces = generation_->take_pieces();
  for (gateway::Update& piece : pieces) {
    if (piece.accepted && !accepted_) {
      accepted_ = true;
      if (std::exchange(wants_prompt_, false)) sink_->set_prompt(generation_->prompt());
      resumable_ = generation_->resumable();
      if (resumable_) {
        generation_->stream_began();
        sink_->number(after_, wrapped_);
      }
    }
    ended_ = piece.ended;
    end_ = piece.error;
    if (sink_) sink_->chunks(std::move(piece), queue_);
  }
  return !pieces.empty();
}

bool StreamState::written() {
  std::lock_guard lock(mutex_);
  writing_ = false;
  return std::exchange(given_up_, false);
}

bool StreamState::give_up() {
  std::lock_guard lock(mutex_);
  if (std::exchange(finished_, true)) return false;
  given_up_ = writing_;
  return !writing_;
}

StreamCall::StreamCall(gateway::Gateway& gateway, grpc::CallbackServerContext* context,
                       std::string_view method, CallEntry entry, StatusOr<GenerationPlan> plan,
                       const OnGrpcAnswer& on_answer)
    : context_(context),
      method_(method),
      entry_(std::move(entry)),
      on_answer_(on_answer),
      state_(std::make_shared<StreamState>()) {
  const Status started = start(gateway, *context, entry_, std::move(plan), *state_,
                               [this, state = state_] { advance(this, *state); });
  begin(started);
}

StreamCall::StreamCall(gateway::Gateway& gateway, grpc::CallbackServerContext* context,
                       std::string_view method, CallEntry entry, StatusOr<ResumePlan> plan,
                       const OnGrpcAnswer& on_answer)
    : context_(context),
      method_(method),
      entry_(std::move(entry)),
      on_answer_(on_answer),
      state_(std::make_shared<StreamState>()) {
  const auto start = [&]() -> Status {
    RETURN_IF_ERROR(entry_.status);
    RETURN_IF_ERROR(plan.status());
    state_->resume_after(plan->after);
    const auto reopen = [state = state_, options = plan->sink, id = gateway::parse_id(plan->id)](
                            std::string_view bytes) -> StatusOr<gateway::GenerateRequest> {
      ASSIGN_OR_RETURN(ReopenedStream stream, reopen_stream(bytes));
      SinkOptions own = options;
      own.logprobs = stream.request.logprobs;
      state->set_sink(stream.sink(std::move(own), id.value_or(RequestId())),
                      stream.request.prompt_logprobs.has_value());
      return std::move(stream.request);
    };
    ASSIGN_OR_RETURN(const auto generation,
                     gateway.resume(plan->id, entry_.visit->origin(entry_.visit), reopen,
                                    [this, state = state_] { advance(this, *state); }));
    state_->attach(generation);
    return OkStatus();
  };
  begin(start());
}

void StreamCall::begin(const Status& started) {
  if (!started.ok()) {
    if (state_->give_up()) finish(started);
    return;
  }
  advance(this, *state_);
}

void StreamCall::OnWriteDone(bool ok) {
  if (!ok) state_->cancel();  // OnCancel finishes the call
  if (state_->written()) return finish(client_cancelled());
  if (ok) advance(this, *state_);
}

void StreamCall::OnCancel() {
  state_->cancel();
  if (state_->give_up()) finish(client_cancelled());
}

// `state` may outlive the reactor `self`; it then has nothing to do, and `self` is not touched.
void StreamCall::advance(StreamCall* self, StreamState& state) {
  grpc::ByteBuffer message;
  const StreamState::Step step = state.advance(message);
  if (!step.write && !step.last) return;
  if (!step.stream_id.empty()) self->context_->AddInitialMetadata(kStreamIdMetadata, step.stream_id);
  if (step.write) self->message_ = std::move(message);  // the only write under way, so nobody else uses it
  if (step.write && step.last && step.status.ok()) {
    self->answered(OkStatus());
    self->StartWriteAndFinish(&self->message_, grpc::WriteOptions(), grpc::Status::OK);
    return;
  }
  if (step.write) self->StartWrite(&self->message_);
  if (step.last)
    self->finish(step.status);  // a failure ends the stream with its status, after the text before it
}

void StreamCall::answered(const Status& status) const {
  on_answer_(method_, static_cast<int>(status.code()));
  entry_.visit->answered(static_cast<int>(status.code()));
}

void StreamCall::finish(const Status& status) {
  answered(status);
  Finish(status.ok() ? grpc::Status::OK : grpc_error(status, context_));
}

}  // namespace conclave::router
