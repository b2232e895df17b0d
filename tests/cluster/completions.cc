#include "tests/cluster/completions.h"

#include "tests/cluster/cluster.h"

namespace conclave {
namespace {

// The values of every "text" member, joined: one for a whole answer, many for a stream.
std::string text_of(const std::string& body) {
  std::string out;
  const std::string key = "\"text\":\"";
  for (size_t at = body.find(key); at != std::string::npos; at = body.find(key, at)) {
    at += key.size();
    while (at < body.size() && body[at] != '"') {
      if (body[at] == '\\') out += body[at++];
      out += body[at++];
    }
  }
  return out;
}

}  // namespace

std::string completion_body(uint32_t number, uint32_t max_tokens, bool stream) {
  const AcceptedRequest request = numbered_request(number, max_tokens);
  std::string ids;
  for (TokenId token : request.prompt) ids += (ids.empty() ? "" : ",") + std::to_string(token);
  return "{\"prompt\":[" + ids + "],\"max_tokens\":" + std::to_string(max_tokens) +
         ",\"ignore_eos\":true,\"seed\":" + std::to_string(number) +
         ",\"temperature\":" + (number % 2 == 0 ? "0" : "0.9") + (stream ? ",\"stream\":true}" : "}");
}

std::string complete(const std::string& address, uint32_t number, uint32_t max_tokens, bool stream,
                     const std::function<void(std::string_view)>& on_bytes) {
  auto answer = http_post(address, "/v1/completions", completion_body(number, max_tokens, stream),
                          kCompletionLimit, on_bytes);
  if (!answer.ok()) return "failed: " + message_of(answer.status());
  if (answer->code != 200) return "failed: " + std::to_string(answer->code) + " " + answer->body;
  if (stream && answer->body.find("data: [DONE]") == std::string::npos)
    return "failed: no end: " + answer->body;
  if (answer->body.find("\"length\"") == std::string::npos) return "failed: another end: " + answer->body;
  return text_of(answer->body);
}

}  // namespace conclave
