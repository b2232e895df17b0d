#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <boost/json.hpp>
#include <thread>

#include "router_service/http/http_front.h"
#include "tests/router/fake_scheduler.h"
#include "tests/router/fake_text.h"
#include "tests/router/raw_http.h"

namespace conclave::router {
namespace {

namespace json = boost::json;
using testing::byte_tokens;
using testing::FakeScheduler;
using testing::FakeText;
using ::testing::HasSubstr;
using testing::http_call;
using testing::RawClient;
using testing::RawResponse;

// A front over a fake scheduler that answers with the prompt itself.
class Server {
 public:
  explicit Server(
      std::chrono::microseconds pause = {}, HttpFrontOptions options = {},
      gateway::GatewayOptions gateway_options = {}, uint32_t max_positions = 4096,
      FakeScheduler::Answer answer = [](const AcceptedRequest& r) { return r.prompt; })
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

  FakeText text;
  FakeScheduler scheduler;
  gateway::Gateway gateway;
  std::unique_ptr<HttpFront> front;
  uint16_t port = 0;
};

json::object parse(const std::string& text) {
  boost::system::error_code error;
  json::value value = json::parse(text, error);
  EXPECT_FALSE(error) << text;
  return value.is_object() ? value.as_object() : json::object{};
}

// The data of every event of a stream, without the last "[DONE]", which must be there.
std::vector<json::object> events(const std::string& body) {
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

std::string param_of(const RawResponse& response) {
  const json::object body = parse(response.body);
  const json::object& error = body.at("error").as_object();
  EXPECT_TRUE(error.at("message").is_string());
  EXPECT_TRUE(error.at("type").is_string());
  EXPECT_TRUE(error.contains("code"));
  return error.at("param").is_string() ? std::string(error.at("param").as_string()) : "";
}

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
  const std::string expected =
      R"([chat]{"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":true})";
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
      {R"({"prompt":["a","b"]})", 400, "prompt"},
      {R"({"prompt":[[1],[2]]})", 400, "prompt"},
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
      {R"({"prompt":"a","n":2})", 400, "n"},
      {R"({"prompt":"a","logprobs":3})", 400, "logprobs"},
      {R"({"prompt":"a","echo":true})", 400, "echo"},
      {R"({"prompt":"a","presence_penalty":0.5})", 400, "presence_penalty"},
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
      {R"({"messages":[{"role":"user","content":[]}]})", 400, "messages[0].content"},
      {R"({"messages":[{"role":"user","content":["x"]}]})", 400, "messages[0].content[0]"},
      {R"({"messages":[{"role":"user","content":[{"type":"image_url"}]}]})", 400,
       "messages[0].content[0].type"},
      {R"({"messages":[{"role":"user","content":[{"type":"text"}]}]})", 400, "messages[0].content[0].text"},
      {R"({"messages":[{"role":"user","content":"refuse-me"}]})", 400, "messages"},
      {R"({"messages":[{"role":"user","content":"a"}],"tools":[{}]})", 400, "tools"},
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
    EXPECT_EQ(param_of(r), "messages");
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

TEST(Http, MalformedRequestsNeverEndTheServer) {
  HttpFrontOptions options;
  options.limits.max_body_bytes = 100000;
  Server server({}, options);
  const auto raw = [&](std::string_view bytes) {
    RawClient client(server.port);
    client.send(bytes);
    return client.read_response(5000);
  };
  EXPECT_EQ(raw("nonsense\r\n\r\n").status, 400);
  EXPECT_EQ(raw(std::string("\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03", 11) + "\r\n\r\n").status,
            400);  // TLS
  EXPECT_EQ(raw("GET / HTTP/9.9\r\n\r\n").status, 400);
  EXPECT_EQ(raw("GET /health HTTP/1.1\r\nbad header\r\n\r\n").status, 400);
  EXPECT_EQ(raw("POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n").status, 400);
  EXPECT_EQ(raw("POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n").status,
            400);
  EXPECT_EQ(raw("POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n").status, 400);
  EXPECT_EQ(raw("POST /v1/completions HTTP/1.1\r\ncontent-length: 200000\r\n\r\n").status, 413);
  EXPECT_EQ(raw("POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n30d40\r\n" +
                std::string(200000, 'x') + "\r\n0\r\n\r\n")
                .status,
            413);
  EXPECT_EQ(raw("GET /health HTTP/1.1\r\nx: " + std::string(100000, 'a') + "\r\n\r\n").status, 431);
  EXPECT_EQ(raw("GET /" + std::string(100000, 'a') + " HTTP/1.1\r\n\r\n").status, 431);
  {
    std::string many = "GET /health HTTP/1.1\r\n";
    for (int i = 0; i < 10000; ++i) many += "x-" + std::to_string(i) + ": y\r\n";
    EXPECT_EQ(raw(many + "\r\n").status, 431);
  }
  {  // A body that ends early, and a client that leaves in the middle of everything.
    RawClient client(server.port);
    client.send("POST /v1/completions HTTP/1.1\r\ncontent-length: 50\r\n\r\n{\"prompt\"");
    client.finish_sending();
    EXPECT_EQ(client.read_response(5000).status, 400);
    for (std::string_view part :
         {"G", "GET /health HTTP/1.1\r\nho", "POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"}) {
      RawClient leaving(server.port);
      leaving.send(part);
    }
  }
  {  // Error bodies are OpenAI-shaped here too.
    const auto r = raw("nonsense\r\n\r\n");
    EXPECT_EQ(param_of(r), "");
    EXPECT_THAT(r.headers.at("content-type"), HasSubstr("json"));
    EXPECT_EQ(r.headers.at("connection"), "close");
  }
  EXPECT_EQ(http_call(server.port, "GET", "/health").status, 200);
  EXPECT_GE(server.front->counts().malformed, 12u);
}

TEST(Http, ExpectContinueChunkedBodiesAndHttp10) {
  Server server;
  const std::string body = R"({"prompt":"hello","max_tokens":50})";
  RawClient expecting(server.port);
  expecting.send("POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: " +
                 std::to_string(body.size()) + "\r\n\r\n");
  EXPECT_EQ(expecting.read_response(5000).status, 100);
  expecting.send(body);
  EXPECT_EQ(expecting.read_response(5000).status, 200);

  RawClient chunked(server.port);
  chunked.send("POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n");
  for (const char c : body) chunked.send("1\r\n" + std::string(1, c) + "\r\n");
  chunked.send("0\r\n\r\n");
  EXPECT_EQ(chunked.read_response(5000).status, 200);

  RawClient old(server.port);  // HTTP/1.0 knows no chunks: the stream ends with the connection
  const std::string streamed = R"({"prompt":"hello","stream":true})";
  old.send("POST /v1/completions HTTP/1.0\r\ncontent-length: " + std::to_string(streamed.size()) +
           "\r\n\r\n" + streamed);
  const auto r = old.read_response(5000);
  EXPECT_EQ(r.status, 200);
  EXPECT_TRUE(r.complete);
  EXPECT_EQ(r.headers.count("transfer-encoding"), 0u);
  EXPECT_GE(events(r.body).size(), 2u);
}

TEST(Http, KeepAliveAndPipelinedRequestsAnswerInOrder) {
  Server server;
  RawClient client(server.port);
  for (int i = 0; i < 5; ++i) {
    client.send_request("POST", "/v1/completions", R"({"prompt":"again"})");
    EXPECT_EQ(client.read_response().status, 200);
  }
  std::string all;
  for (int i = 0; i < 20; ++i) {
    const std::string body =
        "{\"prompt\":\"number " + std::to_string(i) + "\",\"stream\":" + (i % 2 ? "true" : "false") + "}";
    all +=
        "POST /v1/completions HTTP/1.1\r\ncontent-length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  }
  client.send(all);
  for (int i = 0; i < 20; ++i) {
    const auto r = client.read_response();
    ASSERT_EQ(r.status, 200);
    std::string text;
    if (i % 2 == 0) {
      text = std::string(parse(r.body).at("choices").as_array().at(0).at("text").as_string());
    } else {
      for (const auto& event : events(r.body))
        text += event.at("choices").as_array().at(0).at("text").as_string();
    }
    EXPECT_EQ(text, "number " + std::to_string(i));
  }
  client.send_request("GET", "/health", "", "connection: close\r\n");
  EXPECT_EQ(client.read_response().status, 200);
  EXPECT_TRUE(client.wait_closed());
}

TEST(Http, AClientThatLeavesCancelsItsRequest) {
  Server server(std::chrono::milliseconds(2));
  const std::string prompt(3000, 'x');
  {
    RawClient client(server.port);
    client.send_request("POST", "/v1/completions",
                        "{\"prompt\":\"" + prompt + "\",\"max_tokens\":1000,\"stream\":true}");
    ASSERT_TRUE(client.wait_for("data: "));
  }
  EXPECT_TRUE(server.scheduler.wait_cancelled(1));
  {
    RawClient client(server.port);
    client.send_request("POST", "/v1/completions", "{\"prompt\":\"" + prompt + "\",\"max_tokens\":1000}");
    server.scheduler.wait_submitted(1);
  }
  EXPECT_TRUE(server.scheduler.wait_cancelled(2));
  EXPECT_TRUE(server.gateway.wait_idle(5 * kSecond));
  EXPECT_EQ(server.scheduler.open(), 0u);
  EXPECT_EQ(server.front->counts().clients_gone, 2u);
}

TEST(Http, TwoHundredConcurrentStreams) {
  Server server(std::chrono::microseconds(200));
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 200; ++i) {
    clients.push_back(std::make_unique<RawClient>(server.port));
    ASSERT_TRUE(clients.back()->connected());
    ASSERT_TRUE(clients.back()->send_request("POST", "/v1/completions",
                                             "{\"prompt\":\"stream number " + std::to_string(i) +
                                                 " of many\",\"max_tokens\":100,\"stream\":true}"));
  }
  for (int i = 0; i < 200; ++i) {
    const auto r = clients[i]->read_response(60000);
    ASSERT_EQ(r.status, 200);
    ASSERT_TRUE(r.complete);
    std::string text;
    for (const auto& event : events(r.body))
      text += event.at("choices").as_array().at(0).at("text").as_string();
    EXPECT_EQ(text, "stream number " + std::to_string(i) + " of many");
  }
  EXPECT_TRUE(server.gateway.wait_idle(5 * kSecond));
}

TEST(Http, ASlowReaderIsBoundedAndCutOff) {
  HttpFrontOptions options;
  options.limits.write_timeout = 300 * kMillisecond;
  gateway::GatewayOptions gateway_options;
  gateway_options.stream.max_pending_tokens = 2000000;  // so that the writing limits decide
  // Each token's event is some 200 bytes, so these streams are far larger than what sockets buffer.
  Server server({}, options, gateway_options, 2000000,
                [](const AcceptedRequest& r) { return std::vector<TokenId>(r.sampling.max_tokens, 'x'); });
  RawClient stuck(server.port, 4096);
  stuck.send_request("POST", "/v1/completions", R"({"prompt":"a","max_tokens":1900000,"stream":true})");
  ASSERT_TRUE(stuck.wait_for("data: "));  // and then reads no more
  for (int i = 0; i < 1000 && server.front->counts().slow_clients == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(server.front->counts().slow_clients, 1u);
  EXPECT_EQ(http_call(server.port, "POST", "/v1/completions", R"({"prompt":"ok"})").status, 200);
}

TEST(Http, ASlowReaderIsCutOffAtTheTokenBound) {
  gateway::GatewayOptions gateway_options;
  gateway_options.stream.max_pending_tokens = 1000;
  Server server({}, {}, gateway_options, 10000000,
                [](const AcceptedRequest& r) { return std::vector<TokenId>(r.sampling.max_tokens, 'x'); });
  RawClient stuck(server.port, 4096);
  stuck.send_request("POST", "/v1/completions",
                     R"({"prompt":"a","max_tokens":9000000,"stream":true,"return_token_ids":true})");
  EXPECT_TRUE(server.scheduler.wait_cancelled(1, std::chrono::seconds(60)));
}

TEST(Http, SlowRequestsTimeOut) {
  HttpFrontOptions options;
  options.limits.header_timeout = 200 * kMillisecond;
  options.limits.body_timeout = 200 * kMillisecond;
  Server server({}, options);
  RawClient slow_header(server.port), slow_body(server.port), idle(server.port);
  slow_header.send("GET /health HTTP/1.1\r\nx: ");
  slow_body.send("POST /v1/completions HTTP/1.1\r\ncontent-length: 50\r\n\r\n{");
  EXPECT_EQ(slow_header.read_response(5000).status, 408);
  EXPECT_EQ(slow_body.read_response(5000).status, 408);
  EXPECT_TRUE(idle.wait_closed());
}

TEST(Http, ConnectionsAreBounded) {
  HttpFrontOptions options;
  options.limits.max_connections = 3;
  Server server({}, options);
  std::vector<RawClient> held;
  for (int i = 0; i < 3; ++i) {
    held.emplace_back(server.port);
    held.back().send_request("GET", "/health");
    EXPECT_EQ(held.back().read_response().status, 200);
  }
  RawClient refused(server.port);
  EXPECT_EQ(refused.read_response(5000).status, 503);
  refused.close();
  held.clear();
  for (int i = 0; i < 500; ++i) {  // the places come back
    if (http_call(server.port, "GET", "/health").status == 200) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  FAIL() << "no connection is taken any more";
}

TEST(Http, OpenRequestsAreBounded) {
  gateway::GatewayOptions options;
  options.max_requests = 2;
  Server server(std::chrono::milliseconds(5), {}, options);
  RawClient a(server.port), b(server.port);
  const std::string body =
      "{\"prompt\":\"" + std::string(2000, 'x') + "\",\"max_tokens\":2000,\"stream\":true}";
  a.send_request("POST", "/v1/completions", body);
  b.send_request("POST", "/v1/completions", body);
  ASSERT_TRUE(a.wait_for("data: ") && b.wait_for("data: "));
  const auto r = http_call(server.port, "POST", "/v1/completions", R"({"prompt":"a"})");
  EXPECT_EQ(r.status, 503);
  EXPECT_THAT(r.body, HasSubstr("max_requests"));
  EXPECT_FALSE(r.headers.at("retry-after").empty());
}

TEST(Http, FailuresInTheMiddleOfAStreamAreAnEvent) {
  Server server(std::chrono::milliseconds(2));
  RawClient client(server.port);
  client.send_request("POST", "/v1/completions",
                      "{\"prompt\":\"" + std::string(3000, 'x') + "\",\"max_tokens\":1000,\"stream\":true}");
  ASSERT_TRUE(client.wait_for("data: "));
  server.gateway.abort_all(internal_error("the worker lost the sequence"));
  const auto r = client.read_response();
  ASSERT_TRUE(r.complete);
  const auto all = events(r.body);
  EXPECT_EQ(all.back().at("error").at("message"), "the worker lost the sequence");
}

TEST(Http, DrainLetsStreamsFinishAndTakesNoNewWork) {
  Server server(std::chrono::milliseconds(1));
  RawClient streaming(server.port), idle(server.port);
  streaming.send_request("POST", "/v1/completions",
                         "{\"prompt\":\"" + std::string(300, 'x') + "\",\"max_tokens\":300,\"stream\":true}");
  ASSERT_TRUE(streaming.wait_for("data: "));
  idle.send_request("GET", "/health");
  EXPECT_EQ(idle.read_response().status, 200);
  server.gateway.begin_drain();
  server.front->drain();
  EXPECT_TRUE(idle.wait_closed());
  const auto r = streaming.read_response();
  EXPECT_TRUE(r.complete);
  EXPECT_GE(events(r.body).size(), 3u);
  EXPECT_TRUE(streaming.wait_closed());
  EXPECT_FALSE(RawClient(server.port).connected());
  EXPECT_TRUE(server.gateway.wait_idle(5 * kSecond));
}

}  // namespace
}  // namespace conclave::router
