// A server whose model says what a test wants, and what an OpenAI client makes of its answers.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/router/http_fixture.h"

namespace conclave::router {

// A server whose model says `script`, whatever it is asked.
struct Scripted : Server {
  explicit Scripted(const std::string& script, HttpFrontOptions options = {})
      : Server({}, std::move(options), {}, 65536,
               [script](const AcceptedRequest&) { return testing::byte_tokens(script); }) {}
};

inline json::object post(const Server& server, const std::string& path, const std::string& body,
                         int status = 200) {
  const auto r = testing::http_call(server.port, "POST", path, body);
  EXPECT_EQ(r.status, status) << r.body;
  return parse(r.body);
}
inline json::object completion(const Server& server, const std::string& body) {
  return post(server, "/v1/completions", body);
}
inline std::string chat_body(const std::string& fields) {
  return R"({"messages":[{"role":"user","content":"hi"}])" + (fields.empty() ? "" : "," + fields) + "}";
}
inline json::object chat(const Server& server, const std::string& fields) {
  return post(server, "/v1/chat/completions", chat_body(fields));
}
inline std::vector<json::object> stream(const Server& server, const std::string& path,
                                        const std::string& body) {
  const auto r = testing::http_call(server.port, "POST", path, body);
  EXPECT_EQ(r.status, 200) << r.body;
  EXPECT_TRUE(r.complete);
  return events(r.body);
}
inline const json::object& choice_at(const json::object& body, size_t i) {
  return body.at("choices").as_array().at(i).as_object();
}
inline std::string text_of(const json::value& value) { return std::string(value.as_string()); }

// What an OpenAI client makes of a stream: deltas added up, one entry a choice.
struct Accumulated {
  std::string content, reasoning, finish;
  json::value stop_reason;
  int finishes = 0;
  int roles = 0;
  struct Call {
    std::string id, type, name, arguments;
  };
  std::vector<Call> calls;
  json::array logprobs;
};
inline std::map<int64_t, Accumulated> accumulate(const std::vector<json::object>& all) {
  std::map<int64_t, Accumulated> out;
  std::string id;
  for (const json::object& event : all) {
    if (id.empty()) id = text_of(event.at("id"));
    EXPECT_EQ(text_of(event.at("id")), id);
    for (const json::value& each : event.at("choices").as_array()) {
      Accumulated& to = out[each.at("index").as_int64()];
      EXPECT_EQ(to.finishes, 0) << "after the end: " << json::serialize(each);
      if (each.at("finish_reason").is_string()) {
        ++to.finishes;
        to.finish = text_of(each.at("finish_reason"));
        to.stop_reason = each.at("stop_reason");
      }
      if (each.at("logprobs").is_object() && each.at("logprobs").as_object().contains("content"))
        for (const json::value& token : each.at("logprobs").at("content").as_array())
          to.logprobs.push_back(token);
      if (each.as_object().contains("text")) {
        to.content += each.at("text").as_string();
        continue;
      }
      const json::object& delta = each.at("delta").as_object();
      if (delta.contains("role")) ++to.roles;
      if (delta.contains("content")) to.content += delta.at("content").as_string();
      if (delta.contains("reasoning_content")) {
        to.reasoning += delta.at("reasoning_content").as_string();
        EXPECT_EQ(delta.at("reasoning"), delta.at("reasoning_content"));
      }
      if (!delta.contains("tool_calls")) continue;
      for (const json::value& call : delta.at("tool_calls").as_array()) {
        const auto index = static_cast<size_t>(call.at("index").as_int64());
        if (index == to.calls.size()) {
          to.calls.push_back({text_of(call.at("id")), text_of(call.at("type")),
                              text_of(call.at("function").at("name")), ""});
        } else {
          EXPECT_FALSE(call.as_object().contains("id"));
        }
        EXPECT_LT(index, to.calls.size());
        if (index >= to.calls.size()) return out;
        to.calls[index].arguments += call.at("function").at("arguments").as_string();
      }
    }
  }
  return out;
}

}  // namespace conclave::router
