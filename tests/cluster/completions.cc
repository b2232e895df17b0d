#include "tests/cluster/completions.h"

#include <chrono>
#include <thread>

#include "tests/cluster/cluster.h"

namespace conclave {
namespace {

constexpr std::chrono::milliseconds kAskAgain(20);

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

// Whether the IDs of the events count 1, 2, 3, ...
bool in_order(const std::string& events) {
  uint64_t next = 1;
  for (size_t at = 0; at < events.size();) {
    const size_t end = events.find('\n', at);
    if (events.compare(at, 4, "id: ") == 0 && std::stoull(events.substr(at + 4)) != next++) return false;
    at = end == std::string::npos ? events.size() : end + 1;
  }
  return true;
}

}  // namespace

std::string whole_events(const std::string& received) {
  const size_t head = received.find("\r\n\r\n");
  if (head == std::string::npos) return "";
  std::string body;
  for (size_t at = head + 4; at < received.size();) {
    const size_t line = received.find("\r\n", at);
    if (line == std::string::npos) break;
    const size_t size = std::strtoul(received.c_str() + at, nullptr, 16);
    body += received.substr(line + 2, size);
    at = line + 2 + size + 2;
  }
  const size_t end = body.rfind("\n\n");
  return end == std::string::npos ? "" : body.substr(0, end + 2);
}

std::string stream_id(const std::string& received) {
  const std::string name = "x-conclave-stream-id: ";
  const size_t at = received.find(name);
  return at == std::string::npos ? "" : received.substr(at + name.size(), 32);
}

uint64_t last_id(const std::string& events) {
  const size_t at = events.rfind("id: ");
  return at == std::string::npos ? 0 : std::stoull(events.substr(at + 4));
}

std::string complete_resuming(const std::string& address, uint32_t number, uint32_t max_tokens,
                              uint32_t& lost, const std::function<void(std::string_view)>& on_bytes) {
  std::string received;
  const auto collect = [&](std::string_view bytes) {
    received += bytes;
    on_bytes(bytes);
  };
  const auto first = http_post(address, "/v1/completions", completion_body(number, max_tokens, true),
                               kCompletionLimit, collect, kResumable);
  const std::string id = stream_id(received);
  if (id.empty()) {
    if (!first.ok()) return "failed: " + message_of(first.status());
    return "failed: " + std::to_string(first->code) + " " + first->body;
  }
  std::string events = whole_events(received);
  const TimePoint end = steady_now() + kCompletionLimit;
  while (events.find("data: [DONE]") == std::string::npos) {
    if (steady_now() > end) return "failed: not resumed in time: " + events;
    // A router that does not listen, or is not ready yet, is part of the same break.
    if (received.starts_with("HTTP/1.1 200")) ++lost;
    received.clear();
    const auto rest = http_get(address, "/v1/streams/" + id, kCompletionLimit, collect,
                               "last-event-id: " + std::to_string(last_id(events)) + "\r\n");
    if (received.starts_with("HTTP/1.1 200"))
      events += whole_events(received);
    else if (rest.ok() && rest->code != 503)
      return "failed: resuming: " + std::to_string(rest->code) + " " + rest->body;
    else
      std::this_thread::sleep_for(kAskAgain);
  }
  if (!in_order(events)) return "failed: out of order: " + events;
  if (events.find("\"length\"") == std::string::npos) return "failed: another end: " + events;
  return text_of(events);
}

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
