#include "cli/sampling_flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "libs/base/watched_file.h"

namespace conclave::cli {
namespace json = boost::json;

namespace {

constexpr size_t kMaxKeyBytes = 4096;

// CLI11 takes an integer beyond the type's range for its largest value.
std::string check_whole(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::string()
                                                                  : "is no whole number of 64 bits: " + text;
}

}  // namespace

void SamplingFlags::add_to(CLI::App& command) {
  command.add_option("--url", url, "The router's address")->envname("CONCLAVE_URL")->capture_default_str();
  command
      .add_option("--api-key-file", api_key_file,
                  "File with the API key, where the router asks for one (or the key itself in CONCLAVE_API_KEY)")
      ->envname("CONCLAVE_API_KEY_FILE");
  command.add_option("--model", model, "Model name to ask for (default: the served one)");
  command.add_option("--max-tokens", max_tokens, "Tokens to generate at most")->check(check_whole);
  command.add_option("--temperature", temperature, "0 is greedy (default: the checkpoint's)")
      ->check(CLI::Range(0.0, 1e6));
  command.add_option("--top-p", top_p, "Nucleus sampling")->check(CLI::Range(0.0, 1.0));
  command.add_option("--top-k", top_k, "Sample among the k likeliest")->check(check_whole);
  command.add_option("--seed", seed, "Same seed, same answer")->check(check_whole);
  command.add_option("--stop", stop, "Stop string; may be repeated");
  command.add_option("--timeout-s", timeout_s, "Longest silence of the server, in seconds")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
}

StatusOr<ServerUrl> SamplingFlags::server() const {
  ASSIGN_OR_RETURN(ServerUrl server, parse_url(url));
  std::string from = "--api-key-file", text;
  if (!api_key_file.empty()) {
    ASSIGN_OR_RETURN(text, WatchedFile(api_key_file, from, kMaxKeyBytes).read());
  } else if (const char* key = std::getenv("CONCLAVE_API_KEY"); key != nullptr && *key != '\0') {
    from = "CONCLAVE_API_KEY";
    text = key;
  } else {
    return server;
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' ')) text.pop_back();
  const auto plain = [](char c) { return c > ' ' && c < '\x7f'; };  // it becomes a part of a header
  if (text.empty() || !std::all_of(text.begin(), text.end(), plain))
    return invalid_field(from, "holds no API key: one word is expected");
  server.api_key = std::move(text);
  return server;
}

void SamplingFlags::write_to(json::object& body) const {
  if (!model.empty()) body["model"] = model;
  if (max_tokens) body["max_tokens"] = *max_tokens;
  if (temperature) body["temperature"] = *temperature;
  if (top_p) body["top_p"] = *top_p;
  if (top_k) body["top_k"] = *top_k;
  if (seed) body["seed"] = *seed;
  if (!stop.empty()) body["stop"] = json::value_from(stop);
}

namespace {

const json::object* object_at(const json::object& object, const char* key) {
  const auto* value = object.if_contains(key);
  return value && value->is_object() ? &value->as_object() : nullptr;
}

std::string string_at(const json::object& object, const char* key) {
  const auto* value = object.if_contains(key);
  return value && value->is_string() ? std::string(value->as_string()) : std::string();
}

int64_t int_at(const json::object& object, const char* key) {
  const auto* value = object.if_contains(key);
  return value && value->is_int64() ? value->as_int64() : 0;
}

}  // namespace

StatusOr<StreamResult> run_stream(const SamplingFlags& flags, const std::string& path, json::object body,
                                  const std::function<bool(const std::string&, bool)>& on_piece) {
  ASSIGN_OR_RETURN(const ServerUrl server, flags.server());
  // JSON has no such numbers, and the parser's range check lets NaN pass.
  if (flags.temperature && std::isnan(*flags.temperature))
    return invalid_field("--temperature", "is not a number");
  if (flags.top_p && std::isnan(*flags.top_p)) return invalid_field("--top-p", "is not a number");
  flags.write_to(body);
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  StreamResult result;
  Status failure = OkStatus();
  const TimePoint start = steady_now();
  auto piece = [&](const std::string& text, bool reasoning) {
    if (text.empty()) return true;
    if (result.arrivals.empty()) result.first_token = steady_now() - start;
    result.arrivals.push_back(steady_now());
    (reasoning ? result.reasoning : result.text) += text;
    return on_piece(text, reasoning);
  };
  auto on_data = [&](std::string_view data) {
    boost::system::error_code error;
    const json::value value = json::parse({data.data(), data.size()}, error);
    if (error || !value.is_object()) {
      failure = data_loss("the server sent a broken event: " + std::string(data.substr(0, 200)));
      return false;
    }
    const json::object& event = value.as_object();
    if (const auto* e = object_at(event, "error")) {
      failure = unavailable("the stream ended with an error: " + string_at(*e, "message"));
      return false;
    }
    if (const auto* usage = object_at(event, "usage")) {
      result.prompt_tokens = int_at(*usage, "prompt_tokens");
      result.completion_tokens = int_at(*usage, "completion_tokens");
    }
    const auto* choices = event.if_contains("choices");
    if (!choices || !choices->is_array() || choices->as_array().empty()) return true;
    const auto& first = choices->as_array()[0];
    if (!first.is_object()) return true;
    const json::object& choice = first.as_object();
    if (const std::string reason = string_at(choice, "finish_reason"); !reason.empty())
      result.finish_reason = reason;
    if (const auto* delta = object_at(choice, "delta")) {
      return piece(string_at(*delta, "reasoning_content"), true) &&
             piece(string_at(*delta, "content"), false);
    }
    return piece(string_at(choice, "text"), false);
  };
  ASSIGN_OR_RETURN(const HttpResponse response,
                   http_stream(server, path, json::serialize(body), flags.timeout_s * kSecond, on_data));
  RETURN_IF_ERROR(failure);
  if (response.status != 200) return error_from(response);
  result.total = steady_now() - start;
  return result;
}

}  // namespace conclave::cli
