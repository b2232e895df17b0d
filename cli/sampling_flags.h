// Flags that `generate`, `chat` and `bench` share, and the JSON they become.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/http_client.h"

namespace CLI {
class App;
}

namespace conclave::cli {

struct SamplingFlags {
  std::string url = "http://127.0.0.1:8000";
  std::string api_key_file;
  std::string model;
  std::optional<int64_t> max_tokens;
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;
  std::optional<int64_t> seed;
  std::vector<std::string> stop;
  int64_t timeout_s = 600;

  // Adds --url (or CONCLAVE_URL), --api-key-file, --model and the sampling flags.
  void add_to(CLI::App& command);
  // Writes those that were given; the server fills in the rest.
  void write_to(boost::json::object& body) const;
  // Whom to ask, with the key of --api-key-file or else of CONCLAVE_API_KEY. INVALID_ARGUMENT names the flag.
  StatusOr<ServerUrl> server() const;
};

// What a stream of completions (chat or plain) adds up to.
struct StreamResult {
  std::string text;       // content
  std::string reasoning;  // chat only
  std::string finish_reason;
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  Nanos first_token = 0;  // from sending the request
  Nanos total = 0;
  std::vector<TimePoint> arrivals;  // of each piece of text
};

// Sends `body` with stream on to `path`, calls on_piece(text, is_reasoning) for each piece; false stops the
// request.
StatusOr<StreamResult> run_stream(const SamplingFlags& flags, const std::string& path,
                                  boost::json::object body,
                                  const std::function<bool(const std::string&, bool)>& on_piece);

}  // namespace conclave::cli
