// Malformed HTTP, clients that leave or do not read, bounds, drain.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "tests/router/http_fixture.h"

namespace conclave::router {
namespace {

using ::testing::HasSubstr;
using testing::http_call;
using testing::RawClient;

TEST(HttpRobustness, MalformedRequestsNeverEndTheServer) {
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

TEST(HttpRobustness, ExpectContinueChunkedBodiesAndHttp10) {
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

TEST(HttpRobustness, KeepAliveAndPipelinedRequestsAnswerInOrder) {
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

TEST(HttpRobustness, AClientThatLeavesCancelsItsRequest) {
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

TEST(HttpRobustness, TwoHundredConcurrentStreams) {
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

TEST(HttpRobustness, ASlowReaderIsBoundedAndCutOff) {
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

TEST(HttpRobustness, ASlowReaderIsCutOffAtTheTokenBound) {
  gateway::GatewayOptions gateway_options;
  gateway_options.stream.max_pending_tokens = 1000;
  Server server({}, {}, gateway_options, 10000000,
                [](const AcceptedRequest& r) { return std::vector<TokenId>(r.sampling.max_tokens, 'x'); });
  RawClient stuck(server.port, 4096);
  stuck.send_request("POST", "/v1/completions",
                     R"({"prompt":"a","max_tokens":9000000,"stream":true,"return_token_ids":true})");
  EXPECT_TRUE(server.scheduler.wait_cancelled(1, std::chrono::seconds(60)));
}

TEST(HttpRobustness, SlowRequestsTimeOut) {
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

TEST(HttpRobustness, ConnectionsAreBounded) {
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

TEST(HttpRobustness, OpenRequestsAreBounded) {
  gateway::GatewayOptions options;
  options.limits.max_requests = 2;
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

TEST(HttpRobustness, FailuresInTheMiddleOfAStreamAreAnEvent) {
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

TEST(HttpRobustness, DrainLetsStreamsFinishAndTakesNoNewWork) {
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

// A task that a stopping server neither ran nor dropped would keep its connection, and the server, for ever.
TEST(HttpRobustness, NothingPostedWhileAServerStopsIsLeftInIt) {
  for (int round = 0; round < 200; ++round) {
    const auto token = std::make_shared<int>(round);
    std::promise<std::shared_ptr<http::Exchange>> handed;
    auto server = http::HttpServer::start({}, [&](http::Request&, std::shared_ptr<http::Exchange> exchange) {
      handed.set_value(std::move(exchange));
    });
    ASSERT_TRUE(server.ok()) << server.status();
    RawClient client((*server)->port());
    client.send_request("GET", "/");
    std::atomic<bool> posting{false}, stopped{false};
    std::thread poster([&, exchange = handed.get_future().get()] {
      while (!stopped.load()) {
        exchange->post([token] {});
        exchange->wake();
        posting.store(true);
      }
      exchange->respond({});
    });
    while (!posting.load()) std::this_thread::yield();
    server->reset();
    stopped.store(true);
    poster.join();
    ASSERT_EQ(token.use_count(), 1) << "round " << round;
  }
}

}  // namespace
}  // namespace conclave::router
