// A request as a protocol adapter hands it to the gateway: typed, not yet validated. Signed and wide types
// where a client could write nonsense, so that the refusal can name the field.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/id_text.h"
#include "libs/base/status.h"
#include "libs/model/request.h"
#include "libs/text/conversation/reasoning_parser.h"
#include "libs/text/conversation/tool_set.h"
#include "router_service/gateway/text_codec.h"

namespace conclave::gateway {

struct TextPrompt {
  std::string text;
};
struct TokenPrompt {
  std::vector<int64_t> ids;
};

struct Summary;

// Keeps the account of one request over all its generations; told of each one's end, from any thread.
class RequestRecord {
 public:
  virtual ~RequestRecord() = default;
  virtual void ended(const Summary& summary) = 0;
};

// Where a request comes from. The protocol adapters fill it in from their front door.
struct Origin {
  std::string request_id;  // the client's word for it, or ours
  std::string route;
  std::string tenant;    // whose key it came with; empty without keys
  bool trusted = false;  // may set allow_special_tokens
  TraceContext trace = {};
  std::shared_ptr<RequestRecord> record;  // may be null
};

struct GenerateRequest {
  Origin origin;
  std::string model;  // empty: the served one
  std::variant<TextPrompt, TokenPrompt, ChatPrompt> prompt;

  // Sampling. What is absent comes from the checkpoint's generation_config.json.
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;  // 0 and -1: all
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<double> presence_penalty;
  std::optional<double> frequency_penalty;
  std::vector<std::pair<int64_t, double>> logit_bias;  // token id, what is added to its logit
  std::optional<int64_t> seed;                         // any 64 bits; absent: drawn
  std::optional<int64_t> n;                            // choices

  // Control tokens that a text prompt spells out are tokens; for trusted callers. (Conversations have their
  // own.)
  bool allow_special_tokens = false;

  // Where an answer ends.
  std::optional<int64_t> max_tokens;
  std::optional<int64_t> min_tokens;
  std::optional<bool> ignore_eos;
  std::vector<std::string> stop;
  std::vector<int64_t> stop_token_ids;
  bool include_stop = false;       // the stop string is part of the text
  std::optional<Nanos> time_left;  // the client's own deadline

  // What is reported beside the text.
  bool logprobs = false;
  std::optional<int64_t> top_logprobs;     // alternatives for each token
  std::optional<int64_t> prompt_logprobs;  // alternatives for each prompt token
  // The prompt is part of the answer (completions). With max_tokens 0 it is all of it.
  bool echo = false;
  bool skip_special_tokens = true;

  // How the answer is read. Completions are plain content; chats have reasoning and tool calls.
  bool conversation = false;
  text::ReasoningFormat reasoning = text::ReasoningFormat::kSeparate;
  std::shared_ptr<const text::ToolSet> tools;  // null: tool calls are text
  bool parallel_tool_calls = true;

  // How the request is treated.
  int64_t priority = 0;    // lower ones first
  std::string cache_salt;  // requests share cached prefixes only within one salt
  std::string name;        // the client's own name for the request, for Abort; empty: none
  // What the adapter needs to go on writing the answer at another router; empty: the request is not to be
  // resumable.
  std::string resume_context;

  // max_tokens where the client gave none; 0: all that is left of the context.
  uint32_t default_max_tokens = 0;
  // What the protocol calls these fields, for refusals.
  std::string prompt_field = "prompt";
  std::string max_tokens_field = "max_tokens";
  std::string top_logprobs_field = "top_logprobs";
};

struct Usage {
  uint32_t prompt_tokens = 0;
  uint32_t completion_tokens = 0;         // of all choices
  uint32_t reasoning_tokens = 0;          // of these
  std::optional<uint32_t> cached_tokens;  // of the prompt; absent when unknown
};

// The code of a refusal by a tenant's rate limit: HTTP 429, where other bounds give 503.
inline constexpr char kRateLimitExceeded[] = "rate_limit_exceeded";

// A stable word for programs beside a refusal's message ("context_length_exceeded", "model_not_found"); empty
// when there is none.
Status with_code(Status status, std::string_view code);
std::string code_of(const Status& status);

// "1234..." as clients see a request's id, and back; nullopt for anything else.
using conclave::id_text;
std::optional<RequestId> parse_id(std::string_view text);

}  // namespace conclave::gateway
