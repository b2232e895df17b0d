#include "router_service/grpc/inference_convert.h"

#include <utility>

#include <grpcpp/impl/codegen/proto_utils.h>

#include "libs/text/conversation/json_text.h"

namespace conclave::router {
namespace {

// The fields that both requests have, under the same names.
template <class Message>
void sampling_from(const Message& in, gateway::GenerateRequest& out) {
  out.model = in.model();
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
  if (in.has_repetition_penalty()) out.repetition_penalty = in.repetition_penalty();
  if (in.has_presence_penalty()) out.presence_penalty = in.presence_penalty();
  if (in.has_frequency_penalty()) out.frequency_penalty = in.frequency_penalty();
  // A map's order is not one; the ids' is.
  const std::map<int64_t, float> bias(in.logit_bias().begin(), in.logit_bias().end());
  out.logit_bias.assign(bias.begin(), bias.end());
  if (in.has_n()) out.n = in.n();
  out.logprobs = in.logprobs();
  if (in.has_top_logprobs()) out.top_logprobs = in.top_logprobs();
  if (in.has_prompt_logprobs()) out.prompt_logprobs = in.prompt_logprobs();
  if (in.has_priority()) out.priority = in.priority();
  out.cache_salt = in.cache_salt();
  out.name = in.request_id();
  out.include_stop = in.include_stop();
  if (in.has_skip_special_tokens()) out.skip_special_tokens = in.skip_special_tokens();
}

// A JSON object, member by member.
class ObjectText {
 public:
  void add(std::string_view key, std::string_view json) {
    text_ += (text_.size() > 1 ? ", " : "") + json_quoted(key) + ": ";
    text_ += json;
  }
  void add_text(std::string_view key, std::string_view value) { add(key, json_quoted(value)); }
  std::string take() { return text_ + "}"; }

 private:
  std::string text_ = "{";
};

template <class Items>
std::string list_text(const Items& items, const auto& one) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? ", " : "") + one(item);
  return out + "]";
}

std::string call_text(const v1::ToolCall& call) {
  ObjectText function;
  function.add_text("name", call.name());
  function.add_text("arguments", call.arguments());
  ObjectText out;
  out.add_text("id", call.id());
  out.add_text("type", "function");
  out.add("function", function.take());
  return out.take();
}

std::string message_text(const v1::ChatMessage& message) {
  ObjectText out;
  out.add_text("role", message.role());
  if (message.has_content()) {
    out.add_text("content", message.content());
  } else if (message.parts_size() > 0) {
    out.add("content", list_text(message.parts(), [](const std::string& part) {
              return "{\"type\": \"text\", \"text\": " + json_quoted(part) + "}";
            }));
  }
  if (message.has_reasoning_content()) out.add_text("reasoning_content", message.reasoning_content());
  if (message.tool_calls_size() > 0) out.add("tool_calls", list_text(message.tool_calls(), call_text));
  if (!message.tool_call_id().empty()) out.add_text("tool_call_id", message.tool_call_id());
  if (!message.name().empty()) out.add_text("name", message.name());
  return out.take();
}

StatusOr<std::string> tools_text(const v1::ChatRequest& in) {
  std::string out = "[";
  for (int i = 0; i < in.tools_size(); ++i) {
    const v1::Tool& tool = in.tools(i);
    ObjectText function;
    function.add_text("name", tool.name());
    if (!tool.description().empty()) function.add_text("description", tool.description());
    if (!tool.parameters().empty()) {
      const auto schema = text::read_json(tool.parameters());
      if (!schema || schema->kind != text::JsonKind::kObject)
        return invalid_field("tools[" + std::to_string(i) + "].parameters",
                             "is not the text of a JSON object");
      function.add("parameters", schema->text);
    }
    out += (i > 0 ? ", " : "");
    out += "{\"type\": \"function\", \"function\": " + function.take() + "}";
  }
  return out + "]";
}

void set_usage(v1::Usage* out, const gateway::Usage& usage) {
  out->set_prompt_tokens(usage.prompt_tokens);
  out->set_completion_tokens(usage.completion_tokens);
  out->set_reasoning_tokens(usage.reasoning_tokens);
  if (usage.cached_tokens) out->set_cached_tokens(*usage.cached_tokens);
}

const char* finish_text(FinishReason finish) { return finish == FinishReason::kLength ? "length" : "stop"; }

// What the two sinks share.
class Sink : public AnswerSink {
 public:
  Sink(SinkOptions options, RequestId id) : options_(std::move(options)), id_(gateway::id_text(id)) {}
  void set_prompt(std::vector<TokenId> prompt) override { prompt_ = std::move(prompt); }
  void number(uint64_t after, bool wrapped) override {
    numbered_ = true;
    after_ = after;
    wrapped_ = wrapped;
  }

 protected:
  void set_logprob(v1::LogprobToken* out, TokenId token, float logprob) const {
    out->set_token(token);
    out->set_logprob(logprob);
    out->set_text(options_.text->token_bytes(token));
  }
  void add_tokens(const gateway::ChoiceUpdate& update, auto* out) const {
    for (const gateway::TokenOutput& token : update.tokens) {
      out->add_token_ids(token.token);
      if (!options_.logprobs) continue;
      v1::LogprobEntry* entry = out->add_logprobs();
      set_logprob(entry->mutable_token(), token.token, token.logprob);
      for (const TokenLogprob& top : token.top) set_logprob(entry->add_top(), top.token, top.logprob);
    }
  }
  void add_prompt_logprobs(const gateway::Update& update, auto* out) {
    for (const PromptLogprob& at : update.prompt_logprobs) {
      v1::LogprobEntry* entry = out->add_prompt_logprobs();
      entry->set_rank(at.rank);
      if (++prompt_at_ < prompt_.size()) set_logprob(entry->mutable_token(), prompt_[prompt_at_], at.logprob);
      for (const TokenLogprob& top : at.top) set_logprob(entry->add_top(), top.token, top.logprob);
    }
  }
  // One message for each choice with something new; `fill` writes the choice's part.
  template <class Chunk>
  void write_chunks(const gateway::Update& update, std::deque<grpc::ByteBuffer>& out, const auto& fill) {
    std::vector<Chunk> made;
    if (!update.prompt_logprobs.empty()) add_prompt_logprobs(update, &made.emplace_back());
    for (const gateway::ChoiceUpdate& choice : update.choices) {
      Chunk& chunk = made.emplace_back();
      chunk.set_choice(choice.index);
      add_tokens(choice, &chunk);
      fill(choice, chunk);
    }
    // In pieces the end comes alone.
    if (made.empty() && update.ended && update.error.ok()) made.emplace_back();
    if (made.empty()) return;
    if (!std::exchange(begun_, true)) made.front().set_id(id_);
    if (update.ended && update.error.ok()) set_usage(made.back().mutable_usage(), update.usage);
    for (Chunk& chunk : made) {
      if (numbered_ && ++count_ <= after_) continue;
      if (numbered_) chunk.set_event(count_);
      out.push_back(wrapped_ ? to_bytes(wrap(std::move(chunk))) : to_bytes(chunk));
    }
  }
  static v1::ResumeChunk wrap(v1::GenerateChunk chunk) {
    v1::ResumeChunk out;
    *out.mutable_generate() = std::move(chunk);
    return out;
  }
  static v1::ResumeChunk wrap(v1::ChatChunk chunk) {
    v1::ResumeChunk out;
    *out.mutable_chat() = std::move(chunk);
    return out;
  }

  const SinkOptions options_;
  const std::string id_;
  bool begun_ = false;
  bool numbered_ = false;
  bool wrapped_ = false;
  uint64_t after_ = 0;
  uint64_t count_ = 0;
  std::vector<TokenId> prompt_;
  size_t prompt_at_ = 0;  // the last one reported
};

class GenerateSink final : public Sink {
 public:
  using Sink::Sink;

  void chunks(gateway::Update update, std::deque<grpc::ByteBuffer>& out) override {
    write_chunks<v1::GenerateChunk>(update, out,
                                    [](const gateway::ChoiceUpdate& choice, v1::GenerateChunk& chunk) {
                                      for (const text::OutputEvent& event : choice.events)
                                        chunk.mutable_text()->append(event.text);
                                      if (choice.ended) chunk.set_finish_reason(finish_text(choice.finish));
                                    });
  }

  void collect(gateway::Update update) override {
    add_prompt_logprobs(update, &response_);
    for (const gateway::ChoiceUpdate& choice : update.choices) {
      while (response_.choices_size() <= static_cast<int>(choice.index))
        response_.add_choices()->set_index(static_cast<uint32_t>(response_.choices_size() - 1));
      v1::Choice* to = response_.mutable_choices(static_cast<int>(choice.index));
      for (const text::OutputEvent& event : choice.events) to->mutable_text()->append(event.text);
      add_tokens(choice, to);
      if (choice.ended) to->set_finish_reason(finish_text(choice.finish));
    }
    set_usage(response_.mutable_usage(), update.usage);
  }

  grpc::ByteBuffer whole() override {
    if (response_.choices_size() > 0) {
      const v1::Choice& first = response_.choices(0);
      response_.set_text(first.text());
      *response_.mutable_token_ids() = first.token_ids();
      response_.set_finish_reason(first.finish_reason());
    }
    response_.set_model(options_.model);
    response_.set_id(id_);
    return to_bytes(response_);
  }

 private:
  v1::GenerateResponse response_;
};

class ChatSink final : public Sink {
 public:
  using Sink::Sink;

  void chunks(gateway::Update update, std::deque<grpc::ByteBuffer>& out) override {
    write_chunks<v1::ChatChunk>(update, out, [](const gateway::ChoiceUpdate& choice, v1::ChatChunk& chunk) {
      for (const text::OutputEvent& event : choice.events) add_event(event, chunk);
      if (choice.ended) chunk.set_finish_reason(std::string(text::chat_finish_name(choice.chat_finish)));
    });
  }

  void collect(gateway::Update update) override {
    add_prompt_logprobs(update, &response_);
    for (const gateway::ChoiceUpdate& choice : update.choices) {
      while (response_.choices_size() <= static_cast<int>(choice.index)) {
        response_.add_choices()->set_index(static_cast<uint32_t>(response_.choices_size() - 1));
        messages_.emplace_back();
      }
      messages_[choice.index].add(choice.events);
      v1::ChatChoice* to = response_.mutable_choices(static_cast<int>(choice.index));
      add_tokens(choice, to);
      if (choice.ended) to->set_finish_reason(std::string(text::chat_finish_name(choice.chat_finish)));
    }
    set_usage(response_.mutable_usage(), update.usage);
  }

  grpc::ByteBuffer whole() override {
    for (int i = 0; i < response_.choices_size(); ++i) {
      const text::AssistantMessage& message = messages_[static_cast<size_t>(i)];
      v1::ChatChoice* to = response_.mutable_choices(i);
      to->set_content(message.content);
      to->set_reasoning_content(message.reasoning);
      for (const text::AssistantMessage::Call& call : message.calls) {
        v1::ToolCall* made = to->add_tool_calls();
        made->set_id(call.id);
        made->set_name(call.name);
        made->set_arguments(call.arguments);
      }
    }
    response_.set_model(options_.model);
    response_.set_id(id_);
    return to_bytes(response_);
  }

 private:
  static void add_event(const text::OutputEvent& event, v1::ChatChunk& chunk) {
    using Kind = text::OutputEvent::Kind;
    const auto delta = [&]() -> v1::ToolCallDelta* {
      const int last = chunk.tool_calls_size() - 1;
      if (last >= 0 && chunk.tool_calls(last).index() == event.call) return chunk.mutable_tool_calls(last);
      v1::ToolCallDelta* made = chunk.add_tool_calls();
      made->set_index(event.call);
      return made;
    };
    switch (event.kind) {
      case Kind::kReasoning:
        chunk.mutable_reasoning_content()->append(event.text);
        break;
      case Kind::kContent:
        chunk.mutable_content()->append(event.text);
        break;
      case Kind::kCallBegin: {
        v1::ToolCallDelta* made = delta();
        made->set_id(event.call_id);
        made->set_name(event.text);
        break;
      }
      case Kind::kArguments:
        delta()->mutable_arguments()->append(event.text);
        break;
      case Kind::kCallEnd:
        break;
    }
  }

  v1::ChatResponse response_;
  std::vector<text::AssistantMessage> messages_;
};

}  // namespace

StatusOr<gateway::GenerateRequest> from_proto(const v1::GenerateRequest& in) {
  gateway::GenerateRequest out;
  sampling_from(in, out);
  if (in.has_token_ids()) {
    out.prompt = gateway::TokenPrompt{{in.token_ids().ids().begin(), in.token_ids().ids().end()}};
    out.prompt_field = "token_ids";
  } else {
    out.prompt = gateway::TextPrompt{in.text()};
    out.prompt_field = in.has_text() ? "text" : "input";
    out.allow_special_tokens = in.allow_special_tokens();
  }
  return out;
}

StatusOr<gateway::GenerateRequest> from_proto(const v1::ChatRequest& in) {
  gateway::GenerateRequest out;
  sampling_from(in, out);
  out.conversation = true;
  out.prompt_field = "messages";
  if (in.messages_size() == 0) return invalid_field("messages", "is required");
  gateway::ChatPrompt chat;
  size_t largest = 0;
  for (int i = 0; i < in.messages_size(); ++i) {
    const size_t bytes = in.messages(i).ByteSizeLong();
    chat.text_bytes += bytes;
    if (bytes <= largest) continue;
    largest = bytes;
    chat.largest_field = "messages[" + std::to_string(i) + "]";
  }
  chat.request.messages_json = list_text(in.messages(), message_text);
  if (!in.tool_choice().empty() && in.tool_choice() != "auto" && in.tool_choice() != "none")
    return invalid_field("tool_choice",
                         "only \"auto\" and \"none\" are supported: a call cannot be forced yet");
  if (in.tools_size() > 0) {
    ASSIGN_OR_RETURN(const std::string tools, tools_text(in));
    ASSIGN_OR_RETURN(auto set, text::ToolSet::parse(tools));
    chat.text_bytes += tools.size();
    if (tools.size() > largest) chat.largest_field = "tools";
    if (in.tool_choice() != "none") {
      chat.request.tools_json = tools;
      out.tools = std::move(set);
    }
  }
  if (in.has_parallel_tool_calls()) out.parallel_tool_calls = in.parallel_tool_calls();
  if (in.reasoning_format() == "append") {
    out.reasoning = text::ReasoningFormat::kAppend;
  } else if (in.reasoning_format() == "none") {
    out.reasoning = text::ReasoningFormat::kNone;
  } else if (!in.reasoning_format().empty() && in.reasoning_format() != "separate") {
    return invalid_field("reasoning_format", "must be \"separate\", \"append\" or \"none\"");
  }
  chat.request.template_kwargs_json = in.chat_template_kwargs();
  if (in.has_add_generation_prompt()) chat.request.add_generation_prompt = in.add_generation_prompt();
  chat.request.allow_special_tokens = in.allow_special_tokens();
  out.prompt = std::move(chat);
  return out;
}

Status parse_message(const grpc::ByteBuffer& bytes, google::protobuf::Message* out) {
  grpc::ByteBuffer copy(bytes);  // of the references only
  if (grpc::GenericDeserialize<grpc::ProtoBufferReader, google::protobuf::Message>(&copy, out).ok())
    return OkStatus();
  return invalid_field("message", "the bytes are not a valid " + out->GetTypeName());
}

grpc::ByteBuffer to_bytes(const google::protobuf::Message& message) {
  grpc::ByteBuffer out;
  bool own = false;
  grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(message, &out, &own);
  return out;
}

std::unique_ptr<AnswerSink> make_generate_sink(SinkOptions options, RequestId id) {
  return std::make_unique<GenerateSink>(std::move(options), id);
}
std::unique_ptr<AnswerSink> make_chat_sink(SinkOptions options, RequestId id) {
  return std::make_unique<ChatSink>(std::move(options), id);
}

namespace {

// Before the message: which one it is.
constexpr char kGenerateContext = 'G';
constexpr char kChatContext = 'C';

}  // namespace

std::string stream_context(v1::GenerateRequest request) {
  request.clear_input();
  request.clear_logit_bias();
  return kGenerateContext + request.SerializeAsString();
}

std::string stream_context(v1::ChatRequest request) {
  request.clear_messages();
  request.clear_chat_template_kwargs();
  request.clear_logit_bias();
  return kChatContext + request.SerializeAsString();
}

StatusOr<ReopenedStream> reopen_stream(std::string_view context) {
  const Status unreadable =
      failed_precondition("this stream was begun by another protocol or version: it cannot be resumed here");
  if (context.empty()) return unreadable;
  const auto size = static_cast<int>(context.size() - 1);
  ReopenedStream out;
  StatusOr<gateway::GenerateRequest> read = unreadable;
  if (context[0] == kGenerateContext) {
    v1::GenerateRequest request;
    if (!request.ParseFromArray(context.data() + 1, size)) return unreadable;
    request.set_text("-");
    read = from_proto(request);
    out.sink = make_generate_sink;
  } else if (context[0] == kChatContext) {
    v1::ChatRequest request;
    if (!request.ParseFromArray(context.data() + 1, size)) return unreadable;
    request.add_messages()->set_role("user");
    read = from_proto(request);
    out.sink = make_chat_sink;
  }
  if (!read.ok()) return unreadable;
  out.request = *std::move(read);
  return out;
}

v1::ModelInfoResponse model_info(const gateway::Gateway& gateway) {
  const ModelSpec& model = gateway.model();
  v1::ModelInfoResponse out;
  out.set_model(model.name);
  out.set_model_type(model.model_type);
  out.set_context_length(gateway.context_length());
  out.set_vocab_size(model.vocab_size);
  out.set_num_layers(model.num_layers);
  out.set_num_experts(model.num_experts);
  out.set_experts_per_token(model.experts_per_token);
  out.mutable_stop_token_ids()->Add(model.stop_token_ids.begin(), model.stop_token_ids.end());
  if (model.default_temperature) out.set_default_temperature(*model.default_temperature);
  if (model.default_top_p) out.set_default_top_p(*model.default_top_p);
  if (model.default_top_k) out.set_default_top_k(*model.default_top_k);
  if (model.default_min_p) out.set_default_min_p(*model.default_min_p);
  if (model.default_repetition_penalty) out.set_default_repetition_penalty(*model.default_repetition_penalty);
  out.set_has_chat_template(gateway.text().has_chat_template());
  const FleetInfo fleet = gateway.fleet();
  out.set_numerics_id(fleet.numerics_id);
  out.set_fingerprint(fleet.model_fingerprint);
  const Status ready = gateway.ready();
  out.set_ready(ready.ok());
  if (!ready.ok()) out.set_not_ready(message_of(ready));
  return out;
}

}  // namespace conclave::router
