// The HTTP front over a fake scheduler, and readers of what it answers.
#pragma once

#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "router_service/http/http_front.h"
#include "tests/router/fake_scheduler.h"
#include "tests/router/fake_text.h"
#include "tests/router/raw_http.h"

namespace conclave::router {

namespace json = boost::json;

// A front over a fake scheduler that answers with the prompt itself.
class Server {
 public:
  explicit Server(
      std::chrono::microseconds pause = {}, HttpFrontOptions options = {},
      gateway::GatewayOptions gateway_options = {}, uint32_t max_positions = 4096,
      testing::FakeScheduler::Answer answer = [](const AcceptedRequest& r) { return r.prompt; })
      : scheduler(std::move(answer), pause),
        gateway(gateway_options, testing::fake_model(max_positions), scheduler, text) {
    auto started = HttpFront::start(std::move(options), gateway);
    EXPECT_TRUE(started.ok()) << started.status();
    front = std::move(started).value();
    port = front->port();
  }
  // Before the gateway goes, as the router does it.
  ~Server() {
    gateway.begin_drain();
    gateway.abort_all(unavailable("the test is over"));
    front.reset();
  }

  testing::FakeText text;
  testing::FakeScheduler scheduler;
  gateway::Gateway gateway;
  std::unique_ptr<HttpFront> front;
  uint16_t port = 0;
};

inline json::object parse(const std::string& text) {
  boost::system::error_code error;
  json::value value = json::parse(text, error);
  EXPECT_FALSE(error) << text;
  return value.is_object() ? value.as_object() : json::object{};
}

// The data of every event of a stream, without the last "[DONE]", which must be there.
inline std::vector<json::object> events(const std::string& body) {
  std::vector<json::object> out;
  size_t at = 0;
  bool done = false;
  while (at < body.size()) {
    const size_t end = body.find("\n\n", at);
    EXPECT_NE(end, std::string::npos);
    if (end == std::string::npos) break;
    const std::string line = body.substr(at, end - at);
    at = end + 2;
    EXPECT_EQ(line.compare(0, 6, "data: "), 0) << line;
    EXPECT_FALSE(done) << "after [DONE]: " << line;
    if (line == "data: [DONE]")
      done = true;
    else
      out.push_back(parse(line.substr(6)));
  }
  EXPECT_TRUE(done);
  return out;
}

inline std::string param_of(const testing::RawResponse& response) {
  const json::object body = parse(response.body);
  const json::object& error = body.at("error").as_object();
  EXPECT_TRUE(error.at("message").is_string());
  EXPECT_TRUE(error.at("type").is_string());
  EXPECT_TRUE(error.contains("code"));
  return error.at("param").is_string() ? std::string(error.at("param").as_string()) : "";
}

}  // namespace conclave::router
