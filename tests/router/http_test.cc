// What the HTTP API answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/router/http_fixture.h"

namespace conclave::router {
namespace {

using ::testing::HasSubstr;
using testing::http_call;
using testing::RawClient;

TEST(Http, CompletionWithTextAndTokenIds) {
  Server server;
  auto r = http_call(server.port, "POST", "/v1/completions",
                     R"({"model":"fake-m2","prompt":"hello","max_tokens":100,"return_token_ids":true})");
  ASSERT_EQ(r.status, 200) << r.body;
  EXPECT_FALSE(r.headers["x-request-id"].empty());
  json::object body = parse(r.body);
  EXPECT_EQ(body.at("object"), "text_completion");
  EXPECT_EQ(body.at("model"), "fake-m2");
  const json::object& choice = body.at("choices").as_array().at(0).as_object();
  EXPECT_EQ(choice.at("text"), "hello");
  EXPECT_EQ(choice.at("finish_reason"), "stop");
  EXPECT_EQ(json::serialize(choice.at("token_ids")), "[104,101,108,108,111,256]");
  EXPECT_EQ(json::serialize(choice.at("prompt_token_ids")), "[104,101,108,108,111]");
  EXPECT_EQ(json::serialize(body.at("usage")),
            R"({"prompt_tokens":5,"completion_tokens":6,"total_tokens":11})");

  r = http_call(server.port, "POST", "/v1/completions", R"({"prompt":[72,105],"max_tokens":1})");
  ASSERT_EQ(r.status, 200) << r.body;
  body = parse(r.body);
  EXPECT_EQ(body.at("choices").as_array().at(0).at("text"), "H");
  EXPECT_EQ(body.at("choices").as_array().at(0).at("finish_reason"), "length");
  // One prompt in a list is that prompt; OpenAI's default of 16 tokens holds.
  r = http_call(server.port, "POST", "/v1/completions", R"({"prompt":["0123456789abcdefghij"]})");
  EXPECT_EQ(parse(r.body).at("choices").as_array().at(0).at("text"), "0123456789abcdef");
  r = http_call(server.port, "POST", "/v1/completions", R"({"prompt":[[72,105]]})");
  EXPECT_EQ(parse(r.body).at("choices").as_array().at(0).at("text"), "Hi");
}

TEST(Http, StreamedCompletionEqualsTheWholeOne) {
  Server server;
  const auto r = http_call(server.port, "POST", "/v1/completions",
                           R"({"prompt":"h\u00e9llo w\u00f6rld","max_tokens":100,"stream":true})");
  ASSERT_EQ(r.status, 200);
  EXPECT_TRUE(r.complete);
  EXPECT_THAT(r.headers.at("content-type"), HasSubstr("text/event-stream"));
  std::string text;
  std::string finish;
  for (const json::object& event : events(r.body)) {
    EXPECT_FALSE(event.contains("usage"));
    const json::object& choice = event.at("choices").as_array().at(0).as_object();
    text += choice.at("text").as_string();
    if (choice.at("finish_reason").is_string()) finish = choice.at("finish_reason").as_string();
  }
  EXPECT_EQ(text, "h\xc3\xa9llo w\xc3\xb6rld");
  EXPECT_EQ(finish, "stop");
}

TEST(Http, ChatWholeAndStreamedWithUsage) {
  Server server;
  const std::string messages = R"("messages":[{"role":"user","content":"hi"}])";
  auto r = http_call(server.port, "POST", "/v1/chat/completions", "{" + messages + "}");
  ASSERT_EQ(r.status, 200) << r.body;
  json::object body = parse(r.body);
  const std::string expected = R"([chat][{"role": "user", "content": "hi"}])";
  EXPECT_EQ(body.at("object"), "chat.completion");
  EXPECT_EQ(body.at("choices").as_array().at(0).at("message").at("content"), json::string(expected));
  EXPECT_EQ(body.at("choices").as_array().at(0).at("message").at("role"), "assistant");

  r = http_call(server.port, "POST", "/v1/chat/completions",
                "{" + messages +
                    R"(,"stream":true,"stream_options":{"include_usage":true},"max_completion_tokens":9})");
  ASSERT_EQ(r.status, 200) << r.body;
  const auto all = events(r.body);
  ASSERT_GE(all.size(), 3u);
  EXPECT_EQ(all[0].at("choices").as_array().at(0).at("delta").at("role"), "assistant");
  std::string text;
  for (size_t i = 0; i + 1 < all.size(); ++i) {
    EXPECT_TRUE(all[i].at("usage").is_null());
    EXPECT_EQ(all[i].at("id"), all[0].at("id"));
    const json::object& delta = all[i].at("choices").as_array().at(0).at("delta").as_object();
    if (delta.contains("content")) text += delta.at("content").as_string();
  }
  EXPECT_EQ(text, expected.substr(0, 9));
  EXPECT_EQ(all[all.size() - 2].at("choices").as_array().at(0).at("finish_reason"), "length");
  EXPECT_TRUE(all.back().at("choices").as_array().empty());
  EXPECT_EQ(all.back().at("usage").at("completion_tokens"), 9);
}

TEST(Http, LargeBodiesAreReadOffTheConnectionsThreads) {
  Server server({}, {}, {}, 400000);
  std::string ids = "65";
  for (int i = 1; i < 190000; ++i) ids += ",66";
  auto r = http_call(server.port, "POST", "/v1/completions", "{\"prompt\":[" + ids + "],\"max_tokens\":3}");
  ASSERT_EQ(r.status, 200) << r.body;
  const json::object body = parse(r.body);
  EXPECT_EQ(body.at("choices").as_array().at(0).at("text"), "ABB");
  EXPECT_EQ(body.at("usage").at("prompt_tokens"), 190000);
  r = http_call(server.port, "POST", "/v1/completions", "{\"prompt\":[" + ids + "],\"max_tokens\":-3}");
  EXPECT_EQ(r.status, 400);
  EXPECT_EQ(param_of(r), "max_tokens");
  r = http_call(server.port, "POST", "/v1/completions", "{\"prompt\":[" + ids + "}");
  EXPECT_EQ(r.status, 400);
  EXPECT_EQ(param_of(r), "body");
  for (int i = 0; i < 20; ++i) {  // clients that leave while theirs is read
    RawClient leaving(server.port);
    leaving.send_request("POST", "/v1/completions", "{\"prompt\":[" + ids + "],\"max_tokens\":100000}");
  }
  EXPECT_EQ(http_call(server.port, "GET", "/health").status, 200);
}

TEST(Http, StopStringsEndAnswersAndAreNotShown) {
  Server server;
  const auto r = http_call(server.port, "POST", "/v1/completions",
                           R"({"prompt":"one two three","max_tokens":50,"stop":[" t","zzz"]})");
  const json::object body = parse(r.body);
  EXPECT_EQ(body.at("choices").as_array().at(0).at("text"), "one");
  EXPECT_EQ(body.at("choices").as_array().at(0).at("finish_reason"), "stop");
  EXPECT_EQ(body.at("usage").at("completion_tokens"), 5);
}

TEST(Http, BadInputIsAnAnswerThatNamesTheField) {
  Server server;
  struct Case {
    const char* body;
    int status;
    const char* param;
  };
  const Case completions[] = {
      {"", 400, "body"},
      {"{", 400, "body"},
      {"nonsense", 400, "body"},
      {"[1,2]", 400, "body"},
      {"\"text\"", 400, "body"},
      {"{\"prompt\":\"a\"} trailing", 400, "body"},
      {"{\"prompt\":\"\xff\xfe\"}", 400, "body"},
      {R"({})", 400, "prompt"},
      {R"({"prompt":null})", 400, "prompt"},
      {R"({"prompt":""})", 400, "prompt"},
      {R"({"prompt":[]})", 400, "prompt"},
      {R"({"prompt":[[]]})", 400, "prompt"},
      {R"({"prompt":7})", 400, "prompt"},
      {R"({"prompt":{"a":1}})", 400, "prompt"},
      {R"({"prompt":["a",7]})", 400, "prompt"},
      {R"({"prompt":[[1],2]})", 400, "prompt"},
      {R"({"prompt":[[1],["a"]]})", 400, "prompt"},
      {R"({"prompt":["a",""]})", 400, "prompt"},
      {R"({"prompt":["a",[264]]})", 400, "prompt"},
      {R"({"prompt":[1,"a"]})", 400, "prompt"},
      {R"({"prompt":[1,2.5]})", 400, "prompt"},
      {R"({"prompt":[1,true]})", 400, "prompt"},
      {R"({"prompt":[-1]})", 400, "prompt"},
      {R"({"prompt":[264]})", 400, "prompt"},
      {R"({"prompt":[99999999999]})", 400, "prompt"},
      {R"({"prompt":"a","max_tokens":-1})", 400, "max_tokens"},
      {R"({"prompt":"a","max_tokens":0})", 400, "max_tokens"},
      {R"({"prompt":"a","max_tokens":"ten"})", 400, "max_tokens"},
      {R"({"prompt":"a","max_tokens":1.5})", 400, "max_tokens"},
      {R"({"prompt":"a","max_tokens":18446744073709551615})", 400, "max_tokens"},
      {R"({"prompt":"a","max_tokens":5000})", 400, "max_tokens"},
      {R"({"prompt":"a","temperature":"hot"})", 400, "temperature"},
      {R"({"prompt":"a","temperature":-1})", 400, "temperature"},
      {R"({"prompt":"a","temperature":1e999})", 400, "temperature"},
      {R"({"prompt":"a","top_p":0})", 400, "top_p"},
      {R"({"prompt":"a","top_p":1.5})", 400, "top_p"},
      {R"({"prompt":"a","top_k":-5})", 400, "top_k"},
      {R"({"prompt":"a","min_p":-0.5})", 400, "min_p"},
      {R"({"prompt":"a","seed":"x"})", 400, "seed"},
      {R"({"prompt":"a","stop":5})", 400, "stop"},
      {R"({"prompt":"a","stop":["a",5]})", 400, "stop[1]"},
      {R"({"prompt":"a","stop":""})", 400, "stop"},
      {R"({"prompt":"a","ignore_eos":1})", 400, "ignore_eos"},
      {R"({"prompt":"a","min_tokens":-3})", 400, "min_tokens"},
      {R"({"prompt":"a","min_tokens":5,"max_tokens":4})", 400, "min_tokens"},
      {R"({"prompt":"a","stop_token_ids":[1,-2]})", 400, "stop_token_ids"},
      {R"({"prompt":"a","stream":"yes"})", 400, "stream"},
      {R"({"prompt":"a","stream_options":{"include_usage":true}})", 400, "stream_options"},
      {R"({"prompt":"a","stream":true,"stream_options":[]})", 400, "stream_options"},
      {R"({"prompt":"a","n":0})", 400, "n"},
      {R"({"prompt":"a","n":-1})", 400, "n"},
      {R"({"prompt":"a","n":65})", 400, "n"},
      {R"({"prompt":"a","n":1.5})", 400, "n"},
      {R"({"prompt":["a","b","c"],"n":60})", 400, "n"},
      {R"({"prompt":"a","n":2,"best_of":3})", 400, "best_of"},
      {R"({"prompt":"a","logprobs":21})", 400, "logprobs"},
      {R"({"prompt":"a","logprobs":-1})", 400, "logprobs"},
      {R"({"prompt":"a","logprobs":true})", 400, "logprobs"},
      {R"({"prompt":"a","prompt_logprobs":21})", 400, "prompt_logprobs"},
      {R"({"prompt":"a","prompt_logprobs":1,"stream":true})", 400, "prompt_logprobs"},
      {R"({"prompt":"a","echo":1})", 400, "echo"},
      {R"({"prompt":"a","suffix":"b"})", 400, "suffix"},
      {R"({"prompt":"a","presence_penalty":2.5})", 400, "presence_penalty"},
      {R"({"prompt":"a","frequency_penalty":-2.5})", 400, "frequency_penalty"},
      {R"({"prompt":"a","repetition_penalty":0})", 400, "repetition_penalty"},
      {R"({"prompt":"a","repetition_penalty":"x"})", 400, "repetition_penalty"},
      {R"({"prompt":"a","logit_bias":{"x":1}})", 400, "logit_bias"},
      {R"({"prompt":"a","logit_bias":{"1":101}})", 400, "logit_bias"},
      {R"({"prompt":"a","logit_bias":{"1":"a"}})", 400, "logit_bias"},
      {R"({"prompt":"a","logit_bias":{"264":1}})", 400, "logit_bias"},
      {R"({"prompt":"a","logit_bias":{"1":1,"01":2}})", 400, "logit_bias"},
      {R"({"prompt":"a","logit_bias":[1]})", 400, "logit_bias"},
      {R"({"prompt":"a","seed":9223372036854775808})", 400, "seed"},
      {R"({"prompt":"a","timeout":0})", 400, "timeout"},
      {R"({"prompt":"a","timeout":"1"})", 400, "timeout"},
      {R"({"prompt":"a","priority":5000000000})", 400, "priority"},
      {R"({"prompt":"a","cache_salt":""})", 400, "cache_salt"},
      {R"({"prompt":"a","user":5})", 400, "user"},
      {R"({"prompt":"a","metadata":[]})", 400, "metadata"},
      {R"({"prompt":"a","guided_json":{"type":"object"}})", 400, "guided_json"},
      {R"({"prompt":"a","guided_regex":"a+"})", 400, "guided_regex"},
      {R"({"prompt":"a","structured_outputs":{"choice":["a"]}})", 400, "structured_outputs"},
      {R"({"prompt":"a","use_beam_search":true})", 400, "use_beam_search"},
      {R"({"prompt":"a","bad_words":["b"]})", 400, "bad_words"},
      {R"({"prompt":"a","model":7})", 400, "model"},
      {R"({"prompt":"a","model":"other"})", 404, "model"},
  };
  for (const Case& c : completions) {
    const auto r = http_call(server.port, "POST", "/v1/completions", c.body);
    EXPECT_EQ(r.status, c.status) << c.body << " -> " << r.body;
    EXPECT_EQ(param_of(r), c.param) << c.body << " -> " << r.body;
  }
  const Case chats[] = {
      {R"({})", 400, "messages"},
      {R"({"messages":[]})", 400, "messages"},
      {R"({"messages":"hi"})", 400, "messages"},
      {R"({"messages":["hi"]})", 400, "messages[0]"},
      {R"({"messages":[{"content":"hi"}]})", 400, "messages[0].role"},
      {R"({"messages":[{"role":"robot","content":"hi"}]})", 400, "messages[0].role"},
      {R"({"messages":[{"role":5,"content":"hi"}]})", 400, "messages[0].role"},
      {R"({"messages":[{"role":"user"}]})", 400, "messages[0].content"},
      {R"({"messages":[{"role":"user","content":null}]})", 400, "messages[0].content"},
      {R"({"messages":[{"role":"user","content":5}]})", 400, "messages[0].content"},
      {R"({"messages":[{"role":"user","content":[7]}]})", 400, "messages[0].content[0]"},
      {R"({"messages":[{"role":"user","content":[{"type":"image_url"}]}]})", 400,
       "messages[0].content[0].type"},
      {R"({"messages":[{"role":"user","content":[{"type":"text"}]}]})", 400, "messages[0].content[0].text"},
      {R"({"messages":[{"role":"user","content":"refuse-me"}]})", 400, "messages"},
      {R"({"messages":[{"role":"assistant"}]})", 400, "messages[0].content"},
      {R"({"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":[{"function":{"name":"f",)"
       R"("arguments":"{broken"}}]}]})",
       400, "messages[1].tool_calls[0].function.arguments"},
      {R"({"messages":[{"role":"user","content":"a"}],"tools":[{}]})", 400, "tools[0].name"},
      {R"({"messages":[{"role":"user","content":"a"}],"tools":{}})", 400, "tools"},
      {R"({"messages":[{"role":"user","content":"a"}],"tool_choice":"required"})", 400, "tool_choice"},
      {R"({"messages":[{"role":"user","content":"a"}],"tool_choice":{"type":"function","function":{"name":"f"}}})",
       400, "tool_choice"},
      {R"({"messages":[{"role":"user","content":"a"}],"tool_choice":"sometimes"})", 400, "tool_choice"},
      {R"({"messages":[{"role":"user","content":"a"}],"functions":[{"name":"f"}]})", 400, "functions"},
      {R"({"messages":[{"role":"user","content":"a"}],"function_call":"auto"})", 400, "function_call"},
      {R"({"messages":[{"role":"user","content":"a"}],"reasoning_format":"inline"})", 400,
       "reasoning_format"},
      {R"({"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":[]})", 400,
       "chat_template_kwargs"},
      {R"({"messages":[{"role":"user","content":"a"}],"modalities":["text","audio"]})", 400, "modalities"},
      {R"({"messages":[{"role":"user","content":"a"}],"audio":{"voice":"x"}})", 400, "audio"},
      {R"({"messages":[{"role":"user","content":"a"}],"echo":true})", 400, "echo"},
      {R"({"messages":[{"role":"user","content":"a"}],"logprobs":3})", 400, "logprobs"},
      {R"({"messages":[{"role":"user","content":"a"}],"top_logprobs":3})", 400, "top_logprobs"},
      {R"({"messages":[{"role":"user","content":"a"}],"logprobs":true,"top_logprobs":21})", 400,
       "top_logprobs"},
      {R"({"messages":[{"role":"user","content":"a"}],"continue_final_message":true})", 400,
       "continue_final_message"},
      {R"({"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema","json_schema":{}}})",
       400, "response_format.type"},
      {R"({"messages":[{"role":"user","content":"a"}],"max_completion_tokens":-1})", 400,
       "max_completion_tokens"},
      {R"({"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_object"}})", 400,
       "response_format.type"},
  };
  for (const Case& c : chats) {
    const auto r = http_call(server.port, "POST", "/v1/chat/completions", c.body);
    EXPECT_EQ(r.status, c.status) << c.body << " -> " << r.body;
    EXPECT_EQ(param_of(r), c.param) << c.body << " -> " << r.body;
  }
  const int rendered = server.text.chats.load();
  // Too long for the context, as text and as ids, streamed or not: a status, never a broken stream.
  for (const char* stream : {"false", "true"}) {
    auto r = http_call(server.port, "POST", "/v1/completions",
                       "{\"prompt\":\"" + std::string(5000, 'x') + "\",\"stream\":" + stream + "}");
    EXPECT_EQ(r.status, 400);
    EXPECT_EQ(param_of(r), "prompt");
    EXPECT_EQ(parse(r.body).at("error").at("code"), "context_length_exceeded");
    r = http_call(server.port, "POST", "/v1/chat/completions",
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"" + std::string(5000, 'x') +
                      "\"}],\"stream\":" + stream + "}");
    EXPECT_EQ(r.status, 400);
    EXPECT_EQ(param_of(r), "messages[0].content");
    EXPECT_EQ(server.text.chats.load(), rendered) << "a message that cannot fit was rendered";
  }
  EXPECT_EQ(server.scheduler.submitted(), 0u);
  EXPECT_EQ(http_call(server.port, "POST", "/v1/completions", R"({"prompt":"still here"})").status, 200);
}

TEST(Http, DeepNestingIsRefused) {
  Server server;
  for (const size_t depth : {1000u, 100000u, 2000000u}) {
    const auto r =
        http_call(server.port, "POST", "/v1/completions", "{\"prompt\":" + std::string(depth, '['));
    EXPECT_EQ(r.status, 400);
    EXPECT_EQ(param_of(r), "body");
  }
}

TEST(Http, RoutesMethodsAndModels) {
  Server server;
  EXPECT_EQ(http_call(server.port, "GET", "/nothing").status, 404);
  EXPECT_EQ(http_call(server.port, "POST", "/v1/embeddings", "{}").status, 404);
  const auto wrong = http_call(server.port, "GET", "/v1/completions");
  EXPECT_EQ(wrong.status, 405);
  EXPECT_THAT(wrong.headers.at("allow"), HasSubstr("POST"));
  EXPECT_EQ(http_call(server.port, "DELETE", "/v1/models").status, 405);
  const auto options = http_call(server.port, "OPTIONS", "/v1/chat/completions");
  EXPECT_EQ(options.status, 204);
  EXPECT_THAT(options.headers.at("allow"), HasSubstr("POST"));
  const auto head = http_call(server.port, "HEAD", "/v1/models");
  EXPECT_EQ(head.status, 200);
  EXPECT_NE(head.headers.at("content-length"), "0");

  const json::object models = parse(http_call(server.port, "GET", "/v1/models").body);
  EXPECT_EQ(models.at("object"), "list");
  EXPECT_EQ(models.at("data").as_array().at(0).at("id"), "fake-m2");
  EXPECT_EQ(http_call(server.port, "GET", "/v1/models/fake-m2").status, 200);
  EXPECT_EQ(http_call(server.port, "GET", "/v1/models/other").status, 404);
  EXPECT_EQ(http_call(server.port, "GET", "/v1/models?limit=3").status, 200);
  EXPECT_EQ(http_call(server.port, "GET", "/health").status, 200);
}

TEST(Http, NotReadySaysWhyAndWhenToRetry) {
  Server server;
  server.scheduler.set_fleet({false, "no worker has joined", 0, "", ""});
  for (const auto& r : {http_call(server.port, "POST", "/v1/completions", R"({"prompt":"a"})"),
                        http_call(server.port, "GET", "/health")}) {
    EXPECT_EQ(r.status, 503);
    EXPECT_THAT(r.body, HasSubstr("no worker has joined"));
    EXPECT_FALSE(r.headers.at("retry-after").empty());
  }
  EXPECT_EQ(http_call(server.port, "GET", "/v1/models").status, 200);
}

TEST(Http, RequestIdsAreReturned) {
  Server server;
  auto r = http_call(server.port, "GET", "/health", "", "x-request-id: abc-123\r\n");
  EXPECT_EQ(r.headers.at("x-request-id"), "abc-123");
  r = http_call(server.port, "GET", "/health", "", "x-request-id: " + std::string(300, 'a') + "\r\n");
  EXPECT_EQ(r.headers.at("x-request-id").size(), 32u);
}

}  // namespace
}  // namespace conclave::router
