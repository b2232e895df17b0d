// The OpenAI-compatible surface: choices, prompts, log-probabilities, usage, streams. The scheduler is
// scripted, so that what the model says is known.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/router/openai_fixture.h"

namespace conclave::router {
namespace {

using testing::fake_logprob;
using ::testing::HasSubstr;
using testing::http_call;

TEST(OpenAi, ChoicesAreNumberedAndCounted) {
  Server server;
  const json::object body = completion(server, R"({"prompt":"abc","n":3})");
  ASSERT_EQ(body.at("choices").as_array().size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(choice_at(body, i).at("index"), i);
    EXPECT_EQ(choice_at(body, i).at("text"), "abc");
    EXPECT_EQ(choice_at(body, i).at("finish_reason"), "stop");
  }
  EXPECT_EQ(body.at("usage").at("prompt_tokens"), 3);
  EXPECT_EQ(body.at("usage").at("completion_tokens"), 12);
  EXPECT_EQ(server.scheduler.submitted(), 1u);

  const auto all = accumulate(stream(server, "/v1/chat/completions", chat_body(R"("n":2,"stream":true)")));
  ASSERT_EQ(all.size(), 2u);
  for (const auto& [index, choice] : all) {
    EXPECT_EQ(choice.roles, 1);
    EXPECT_EQ(choice.finishes, 1);
    EXPECT_THAT(choice.content, HasSubstr("[chat]"));
  }
}

TEST(OpenAi, SeveralPromptsAreSeveralAnswers) {
  Server server;
  for (const char* prompts :
       {R"(["one","two"])", "[[111,110,101],[116,119,111]]", R"(["one",[116,119,111]])"}) {
    const std::string fields = std::string(R"({"prompt":)") + prompts + R"(,"n":2)";
    const json::object body = completion(server, fields + "}");
    ASSERT_EQ(body.at("choices").as_array().size(), 4u);
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(choice_at(body, i).at("index"), i);
      EXPECT_EQ(choice_at(body, i).at("text"), i < 2 ? "one" : "two");
    }
    EXPECT_EQ(body.at("usage").at("prompt_tokens"), 6);
    EXPECT_EQ(body.at("usage").at("completion_tokens"), 16);
    auto all = accumulate(stream(server, "/v1/completions", fields + R"(,"stream":true})"));
    ASSERT_EQ(all.size(), 4u);
    for (auto& [index, choice] : all) {
      EXPECT_EQ(choice.content, index < 2 ? "one" : "two");
      EXPECT_EQ(choice.finishes, 1);
    }
  }
  std::string many = "\"a\"";
  for (int i = 0; i < 64; ++i) many += ",\"a\"";
  const auto r = http_call(server.port, "POST", "/v1/completions", "{\"prompt\":[" + many + "]}");
  EXPECT_EQ(r.status, 400);
  EXPECT_EQ(param_of(r), "prompt");
}

TEST(OpenAi, ChatLogprobs) {
  const std::string script = "a\xc3\xa9<";
  Scripted server(script);
  const std::string fields = R"("logprobs":true,"top_logprobs":2)";
  const json::object body = chat(server, fields);
  const json::array& tokens = choice_at(body, 0).at("logprobs").at("content").as_array();
  ASSERT_EQ(tokens.size(), 5u);  // the end of sequence counts
  EXPECT_EQ(tokens[0].at("token"), "a");
  EXPECT_EQ(tokens[0].at("bytes"), (json::array{97}));
  EXPECT_NEAR(tokens[0].at("logprob").as_double(), fake_logprob('a'), 1e-6);
  ASSERT_EQ(tokens[0].at("top_logprobs").as_array().size(), 2u);
  EXPECT_EQ(tokens[0].at("top_logprobs").as_array()[1].at("token"), "b");
  EXPECT_EQ(tokens[1].at("token"), "\xef\xbf\xbd");  // half a character
  EXPECT_EQ(tokens[1].at("bytes"), (json::array{0xc3}));
  EXPECT_EQ(tokens[4].at("token"), "<eos>");
  // Streamed, they add up to the same.
  auto all = accumulate(stream(server, "/v1/chat/completions", chat_body(fields + R"(,"stream":true)")));
  EXPECT_EQ(all[0].logprobs, tokens);
  EXPECT_EQ(all[0].content, script);

  EXPECT_TRUE(choice_at(chat(server, R"("logprobs":false)"), 0).at("logprobs").is_null());
  const json::object bare = chat(server, R"("logprobs":true)");
  EXPECT_TRUE(
      choice_at(bare, 0).at("logprobs").at("content").as_array()[0].at("top_logprobs").as_array().empty());
  const json::object ids = chat(server, R"("logprobs":true,"return_tokens_as_token_ids":true)");
  EXPECT_EQ(choice_at(ids, 0).at("logprobs").at("content").as_array()[0].at("token"), "token_id:97");
}

TEST(OpenAi, LegacyLogprobsAndEcho) {
  Scripted server("x\xc3\xa9z");
  json::object body = completion(server, R"({"prompt":"ab","logprobs":1,"max_tokens":3})");
  json::object logprobs = choice_at(body, 0).at("logprobs").as_object();
  EXPECT_EQ(logprobs.at("tokens"), (json::array{"x", "\xef\xbf\xbd", "\xef\xbf\xbd"}));
  EXPECT_EQ(logprobs.at("text_offset"), (json::array{0, 1, 2}));
  EXPECT_NEAR(logprobs.at("token_logprobs").as_array()[0].as_double(), fake_logprob('x'), 1e-6);
  EXPECT_TRUE(logprobs.at("top_logprobs").as_array()[0].as_object().contains("x"));
  EXPECT_EQ(logprobs.at("top_logprobs").as_array()[0].as_object().size(), 1u);

  const std::string echoed = R"({"prompt":"ab","logprobs":0,"max_tokens":1,"echo":true)";
  body = completion(server, echoed + "}");
  EXPECT_EQ(choice_at(body, 0).at("text"), "abx");
  logprobs = choice_at(body, 0).at("logprobs").as_object();
  EXPECT_EQ(logprobs.at("tokens"), (json::array{"a", "b", "x"}));
  EXPECT_EQ(logprobs.at("text_offset"), (json::array{0, 1, 2}));
  EXPECT_TRUE(logprobs.at("token_logprobs").as_array()[0].is_null());
  EXPECT_NEAR(logprobs.at("token_logprobs").as_array()[1].as_double(), fake_logprob('b'), 1e-6);
  EXPECT_TRUE(logprobs.at("top_logprobs").as_array()[1].as_object().contains("b"));
  EXPECT_FALSE(body.contains("prompt_logprobs"));

  // Streamed: the same tokens, in order.
  json::array tokens, offsets;
  std::string text;
  for (const json::object& event : stream(server, "/v1/completions", echoed + R"(,"stream":true})")) {
    const json::object& choice = choice_at(event, 0);
    text += choice.at("text").as_string();
    if (!choice.at("logprobs").is_object()) continue;
    for (const json::value& token : choice.at("logprobs").at("tokens").as_array()) tokens.push_back(token);
    for (const json::value& offset : choice.at("logprobs").at("text_offset").as_array())
      offsets.push_back(offset);
  }
  EXPECT_EQ(text, "abx");
  EXPECT_EQ(tokens, logprobs.at("tokens"));
  EXPECT_EQ(offsets, logprobs.at("text_offset"));

  // The prompt alone, as evaluation programs ask for it; token ids become text.
  body = completion(server, R"({"prompt":[97,98],"logprobs":1,"max_tokens":0,"echo":true})");
  EXPECT_EQ(choice_at(body, 0).at("text"), "ab");
  EXPECT_EQ(choice_at(body, 0).at("finish_reason"), "length");
  EXPECT_EQ(choice_at(body, 0).at("logprobs").at("tokens"), (json::array{"a", "b"}));
  EXPECT_EQ(body.at("usage").at("completion_tokens"), 0);
  EXPECT_EQ(http_call(server.port, "POST", "/v1/completions", R"({"prompt":"a","max_tokens":0})").status,
            400);
}

TEST(OpenAi, PromptLogprobs) {
  Scripted server("x");
  const json::object body = completion(server, R"({"prompt":"ab","prompt_logprobs":2})");
  const json::array& list = choice_at(body, 0).at("prompt_logprobs").as_array();
  ASSERT_EQ(list.size(), 2u);
  EXPECT_TRUE(list[0].is_null());
  EXPECT_EQ(list[1].as_object().size(), 2u);
  EXPECT_EQ(list[1].at("98").at("decoded_token"), "b");
  EXPECT_EQ(list[1].at("98").at("rank"), 1);
  EXPECT_EQ(list[1].at("99").at("rank"), 2);
  EXPECT_NEAR(list[1].at("98").at("logprob").as_double(), fake_logprob('b'), 1e-6);
  EXPECT_TRUE(chat(server, R"("prompt_logprobs":0)").at("prompt_logprobs").is_array());
}

TEST(OpenAi, UsageInStreamsOnlyWhereAskedFor) {
  Scripted server("abc");
  for (const json::object& event : stream(server, "/v1/chat/completions", chat_body(R"("stream":true)")))
    EXPECT_FALSE(event.contains("usage"));
  auto all = stream(server, "/v1/chat/completions",
                    chat_body(R"("stream":true,"stream_options":{"include_usage":true})"));
  for (size_t i = 0; i + 1 < all.size(); ++i) EXPECT_TRUE(all[i].at("usage").is_null());
  EXPECT_TRUE(all.back().at("choices").as_array().empty());
  EXPECT_EQ(all.back().at("usage").at("completion_tokens"), 4);
  all = stream(
      server, "/v1/chat/completions",
      chat_body(R"("stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true})"));
  int64_t last = 0;
  for (const json::object& event : all) {
    const int64_t now = event.at("usage").at("completion_tokens").to_number<int64_t>();
    EXPECT_GE(now, last);
    last = now;
  }
  EXPECT_EQ(last, 4);
}

TEST(OpenAi, StopReasons) {
  Scripted server("one two three");
  json::object body = completion(server, R"({"prompt":"a","stop":["zzz"," t"]})");
  EXPECT_EQ(choice_at(body, 0).at("text"), "one");
  EXPECT_EQ(choice_at(body, 0).at("stop_reason"), " t");
  body = completion(server, R"({"prompt":"a","stop":" t","include_stop_str_in_output":true})");
  EXPECT_EQ(choice_at(body, 0).at("text"), "one t");
  body = completion(server, R"({"prompt":"a","max_tokens":50})");
  EXPECT_TRUE(choice_at(body, 0).at("stop_reason").is_null());
  body = completion(server, R"({"prompt":"a","stop_token_ids":[256]})");
  EXPECT_EQ(choice_at(body, 0).at("stop_reason"), 256);
}

TEST(OpenAi, ParametersReachTheScheduler) {
  Server held(std::chrono::milliseconds(2), {}, {}, 4096,
              [](const AcceptedRequest&) { return std::vector<TokenId>(4000, 'a'); });
  testing::RawClient client(held.port);
  client.send_request(
      "POST", "/v1/completions",
      R"({"prompt":"a","temperature":0.5,"top_p":0.5,"top_k":7,"min_p":0.1,"repetition_penalty":1.5,)"
      R"("presence_penalty":-1,"frequency_penalty":2,"logit_bias":{"65":-100,"66":1.5},"seed":-3,)"
      R"("n":2,"max_tokens":3999,"min_tokens":1,"logprobs":4,"prompt_logprobs":3,"timeout":5,)"
      R"("priority":-7,"cache_salt":"mine"})");
  const AcceptedRequest r = held.scheduler.wait_submitted();
  EXPECT_FLOAT_EQ(r.sampling.repetition_penalty, 1.5f);
  EXPECT_FLOAT_EQ(r.sampling.presence_penalty, -1.0f);
  EXPECT_FLOAT_EQ(r.sampling.frequency_penalty, 2.0f);
  ASSERT_EQ(r.sampling.logit_bias.size(), 2u);
  EXPECT_EQ(r.sampling.logit_bias[0].token, 65u);
  EXPECT_FLOAT_EQ(r.sampling.logit_bias[1].bias, 1.5f);
  EXPECT_EQ(r.sampling.seed, static_cast<uint64_t>(-3));
  EXPECT_EQ(r.choices, 2u);
  EXPECT_TRUE(r.sampling.logprobs);
  EXPECT_EQ(r.sampling.top_logprobs, 4u);
  EXPECT_TRUE(r.sampling.prompt_logprobs);
  EXPECT_EQ(r.sampling.prompt_top_logprobs, 3u);
  EXPECT_LE(r.time_left, 5 * kSecond);
  EXPECT_EQ(r.priority, -7);
  EXPECT_EQ(r.cache_salt, "mine");
}

TEST(OpenAi, UnknownAndHarmlessFieldsAreTaken) {
  Server server;
  completion(server, R"({"prompt":"a","frobnicate":1,"user":"u","metadata":{"a":"b"},"store":true,)"
                     R"("service_tier":"auto","guided_json":null,"logit_bias":{},"best_of":1,"suffix":""})");
  chat(server, R"("frobnicate":[],"response_format":{"type":"text"},"modalities":["text"],"functions":[],)"
               R"("function_call":"none","tool_choice":"auto","audio":null,"verbosity":"low")");
}

TEST(OpenAi, TokenizeAndDetokenize) {
  Server server;
  json::object body =
      post(server, "/tokenize", R"({"model":"fake-m2","prompt":"ab","return_token_strs":true})");
  EXPECT_EQ(body.at("tokens"), (json::array{97, 98}));
  EXPECT_EQ(body.at("token_strs"), (json::array{"a", "b"}));
  EXPECT_EQ(body.at("count"), 2);
  EXPECT_EQ(body.at("max_model_len"), 4096);
  body = post(server, "/tokenize", R"({"messages":[{"role":"user","content":"hi"}]})");
  EXPECT_EQ(body.at("count"), std::string(R"([chat][{"role": "user", "content": "hi"}])").size());
  EXPECT_EQ(post(server, "/detokenize", R"({"tokens":[97,98,257]})").at("prompt"), "ab<|x|>");
  for (const auto& [path, text, param] :
       std::vector<std::array<std::string, 3>>{{"/tokenize", "{}", "prompt"},
                                               {"/tokenize", R"({"prompt":7})", "prompt"},
                                               {"/tokenize", R"({"messages":[{}]})", "messages[0].role"},
                                               {"/detokenize", "{}", "tokens"},
                                               {"/detokenize", R"({"tokens":[-1]})", "tokens"},
                                               {"/detokenize", R"({"tokens":[264]})", "tokens"}}) {
    const auto r = http_call(server.port, "POST", path, text);
    EXPECT_EQ(r.status, 400) << r.body;
    EXPECT_EQ(param_of(r), param);
  }
  EXPECT_EQ(http_call(server.port, "POST", "/tokenize", R"({"model":"other","prompt":"a"})").status, 404);
  EXPECT_EQ(http_call(server.port, "GET", "/tokenize").status, 405);
}

TEST(OpenAi, ModelNamesInPathsAreDecoded) {
  Server server;
  EXPECT_EQ(http_call(server.port, "GET", "/v1/models/fake%2Dm2").status, 200);
  EXPECT_EQ(http_call(server.port, "GET", "/v1/models/fake%2dm2").status, 200);
  for (const char* path :
       {"/v1/models/fake%2", "/v1/models/fake%zzm2", "/v1/models/%ff", "/v1/models/a%2fb"}) {
    const auto r = http_call(server.port, "GET", path);
    EXPECT_EQ(r.status, 404) << path;
    EXPECT_EQ(param_of(r), "model");
  }
}

TEST(OpenAi, ATemplateThatIsTooSlowIsOurFaultUnlessTheClientHadNoTime) {
  Server server;
  server.text.stall = true;
  auto r = http_call(server.port, "POST", "/v1/chat/completions", chat_body(""));
  EXPECT_EQ(r.status, 503) << r.body;
  EXPECT_FALSE(r.headers["retry-after"].empty());
  r = http_call(server.port, "POST", "/v1/chat/completions", chat_body(R"("timeout":0.2)"));
  EXPECT_EQ(r.status, 504) << r.body;
}

TEST(OpenAi, AnErrorInTheMiddleOfAStreamIsOneEvent) {
  Server server(std::chrono::milliseconds(2), {}, {}, 4096,
                [](const AcceptedRequest&) { return std::vector<TokenId>(4000, 'a'); });
  testing::RawClient client(server.port);
  client.send_request("POST", "/v1/completions",
                      R"({"prompt":["a","b"],"n":2,"max_tokens":3000,"stream":true})");
  ASSERT_TRUE(client.wait_for("data: "));
  server.gateway.abort_all(unavailable("the scheduler is gone"));
  const auto r = client.read_response();
  EXPECT_TRUE(r.complete);
  const auto all = events(r.body);
  int errors = 0;
  for (const json::object& event : all) errors += event.contains("error") ? 1 : 0;
  EXPECT_EQ(errors, 1);
  EXPECT_EQ(all.back().at("error").at("message"), "the scheduler is gone");
}

TEST(OpenAi, OneFailedPromptEndsTheOthers) {
  Server server(std::chrono::milliseconds(2), {}, {}, 4096, [](const AcceptedRequest& r) {
    return std::vector<TokenId>(r.prompt.size() > 1 ? 5 : 4000, 'a');
  });
  testing::RawClient client(server.port);
  client.send_request("POST", "/v1/completions",
                      R"({"prompt":["a","b"],"max_tokens":3000,"request_id":"mine"})");
  const AcceptedRequest second = server.scheduler.wait_submitted(1);
  EXPECT_EQ(server.gateway.abort(gateway::id_text(second.id)), 1u);
  EXPECT_EQ(client.read_response().status, 499);
  EXPECT_TRUE(server.scheduler.wait_cancelled(2));
  EXPECT_TRUE(server.gateway.wait_idle(5 * kSecond));
}

// What the scheduler expects a client to wait, in whole seconds, rounded up; without it a short default.
TEST(OpenAi, ARefusalSaysWhenToTryAgain) {
  Server server;
  const std::pair<Nanos, const char*> cases[] = {{0, "1"},
                                                 {1, "1"},
                                                 {kSecond, "1"},
                                                 {kSecond + 1, "2"},
                                                 {7300 * kMillisecond, "8"},
                                                 {600 * kSecond, "600"}};
  for (const auto& [wait, header] : cases) {
    server.scheduler.refuse_all(with_retry_after(resource_exhausted("the queue is full"), wait));
    for (const char* body : {R"({"prompt":"hi"})", R"({"prompt":"hi","stream":true})"}) {
      const auto r = http_call(server.port, "POST", "/v1/completions", body);
      EXPECT_EQ(r.status, 503) << r.body;
      EXPECT_EQ(r.headers.at("retry-after"), header) << wait;
      EXPECT_THAT(r.body, HasSubstr("the queue is full"));
    }
  }
}

}  // namespace
}  // namespace conclave::router
