#include "router_service/http/openai_resume.h"

#include <boost/json.hpp>
#include <charconv>
#include <utility>

#include "router_service/http/json_fields.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

constexpr int64_t kVersion = 1;
// Of the body; what they say is in the tokens, or changes nothing in how the answer is written.
constexpr std::string_view kLeftOut[] = {"messages", "prompt", "chat_template_kwargs",
                                         "metadata", "user",   "logit_bias"};

}  // namespace

std::string write_stream_context(bool chat, std::string_view body, const StreamHead& head) {
  auto parsed = parse_json_object(body);
  if (!parsed.ok()) return "";  // whoever parsed it for good has said why
  json::object fields = *std::move(parsed);
  for (const std::string_view name : kLeftOut) fields.erase(json::string_view(name.data(), name.size()));
  json::object out;
  out["v"] = kVersion;
  out["api"] = chat ? "chat" : "completions";
  out["model"] = head.model;
  out["fingerprint"] = head.fingerprint;
  out["created"] = head.created;
  out["body"] = std::move(fields);
  return json::serialize(out);
}

StatusOr<StreamContext> read_stream_context(std::string_view context,
                                            const gateway::AdmissionLimits& limits) {
  const Status unreadable =
      failed_precondition("this stream was begun by another protocol or version: it cannot be resumed here");
  const auto parsed = parse_json_object(context);
  if (!parsed.ok()) return unreadable;
  const json::value* version = parsed->if_contains("v");
  const json::value* api = parsed->if_contains("api");
  const json::value* model = parsed->if_contains("model");
  const json::value* fingerprint = parsed->if_contains("fingerprint");
  const json::value* created = parsed->if_contains("created");
  const json::value* body = parsed->if_contains("body");
  const bool known = version && version->is_int64() && version->get_int64() == kVersion && api &&
                     api->is_string() && model && model->is_string() && fingerprint &&
                     fingerprint->is_string() && created && created->is_int64() && body && body->is_object();
  if (!known) return unreadable;
  const bool chat = api->get_string() == "chat";
  if (!chat && api->get_string() != "completions") return unreadable;
  json::object fields = body->get_object();
  if (chat)
    fields["messages"] = json::array{json::object{{"role", "user"}, {"content", ""}}};
  else
    fields["prompt"] = "-";
  const std::string text = json::serialize(fields);
  StatusOr<OpenAiRequest> request =
      chat ? parse_chat_completion(text, limits) : parse_completion(text, limits);
  if (!request.ok())
    return failed_precondition("this router's limits do not allow the request: " +
                               message_of(request.status()));
  StreamContext out;
  out.request = *std::move(request);
  out.head = {to_std(model->get_string()), to_std(fingerprint->get_string()), created->get_int64()};
  return out;
}

StatusOr<uint64_t> parse_last_event_id(std::string_view text) {
  if (text.empty()) return 0;
  uint64_t events = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), events);
  if (error != std::errc() || end != text.data() + text.size())
    return invalid_field(kLastEventIdHeader, "must be the id of an event of this stream: a whole number");
  return events;
}

StatusOr<bool> parse_resumable_header(std::string_view text) {
  if (text == "1" || text == "true") return true;
  if (text.empty() || text == "0" || text == "false") return false;
  return invalid_field(kResumableHeader, "must be \"1\" or \"0\"");
}

}  // namespace conclave::router
