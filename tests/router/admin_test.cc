// The admin routes, and keys that change under a whole router.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>

#include "libs/telemetry/log.h"
#include "router_service/admin_server.h"
#include "tests/router/key_dir.h"
#include "tests/router/raw_http.h"
#include "tests/router/tiny_router.h"

namespace conclave::router {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;
using testing::http_call;
using testing::KeyDir;
using testing::line_of;
using ::testing::Not;
using testing::RawClient;
using testing::TinyRouter;

uint16_t port_of(const std::string& address) {
  return static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
}

TEST(AdminTest, RoutesOfAWholeRouter) {
  KeyDir keys;
  keys.write(format_key_line(line_of("ck-alice", "alice")));
  RouterConfig config;
  config.api_keys_file = keys.path();
  config.access_log = false;
  auto started = TinyRouter::start(config);
  ASSERT_TRUE(started.ok()) << started.status();
  RouterServer& server = *(*started)->server;
  const uint16_t http = server.http_port();
  const uint16_t admin = port_of(server.admin_address());
  ASSERT_NE(admin, http);
  // The admin routes are on their own port alone.
  EXPECT_EQ(http_call(http, "GET", "/admin/requests", "", "authorization: Bearer ck-alice\r\n").status, 404);
  EXPECT_EQ(http_call(admin, "GET", "/v1/models").status, 404);

  RawClient client(http);
  client.send_request(
      "POST", "/v1/completions",
      R"({"prompt":"secretword","max_tokens":3000,"temperature":0,"ignore_eos":true,"stream":true})",
      "authorization: Bearer ck-alice\r\nx-request-id: long-one\r\n");
  ASSERT_TRUE(client.wait_for("data: "));
  auto r = http_call(admin, "GET", "/admin/requests");
  ASSERT_EQ(r.status, 200);
  const json::value list = json::parse(r.body);
  ASSERT_EQ(list.at("requests").as_array().size(), 1u);
  const json::object& open = list.at("requests").as_array()[0].as_object();
  EXPECT_EQ(open.at("request_id"), "long-one");
  EXPECT_EQ(open.at("tenant"), "alice");
  EXPECT_EQ(open.at("route"), "/v1/completions");
  EXPECT_THAT(r.body, Not(HasSubstr("secretword")));
  EXPECT_EQ(http_call(admin, "GET", "/admin/requests?limit=0").status, 400);
  client.close();

  keys.write(format_key_line(line_of("ck-bob", "bob")));
  r = http_call(admin, "POST", "/admin/keys/reload");
  EXPECT_EQ(r.status, 200);
  EXPECT_THAT(r.body, HasSubstr("\"keys\":1"));
  EXPECT_EQ(http_call(http, "GET", "/v1/models", "", "authorization: Bearer ck-alice\r\n").status, 401);
  EXPECT_EQ(http_call(http, "GET", "/v1/models", "", "authorization: Bearer ck-bob\r\n").status, 200);
  // Without being told it looks by itself.
  keys.write(format_key_line(line_of("ck-carol", "carol")));
  int status = 0;
  for (int i = 0; i < 500 && status != 200; ++i) {
    status = http_call(http, "GET", "/v1/models", "", "authorization: Bearer ck-carol\r\n").status;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(status, 200);
  keys.write("nonsense");
  EXPECT_EQ(http_call(admin, "POST", "/admin/keys/reload").status, 400);
  EXPECT_EQ(http_call(http, "GET", "/v1/models", "", "authorization: Bearer ck-carol\r\n").status, 200);
  const std::string metrics = (*started)->metrics.expose();
  EXPECT_THAT(metrics, HasSubstr("conclave_router_api_keys 1"));
  EXPECT_THAT(metrics, HasSubstr("conclave_router_reached_limits_total{limit=\"max_queued_tokens\"} 0"));

  r = http_call(admin, "POST", "/admin/drain");
  EXPECT_EQ(r.status, 200);
  EXPECT_FALSE(server.readiness().ready());
  r = http_call(http, "POST", "/v1/completions", R"({"prompt":"a"})", "authorization: Bearer ck-carol\r\n");
  EXPECT_EQ(r.status, 503);
}

class AdminOnlyTest : public ::testing::Test {
 protected:
  AdminOnlyTest() {
    AdminServer::Hooks hooks;
    hooks.open_requests = [](size_t) { return std::vector<gateway::OpenRequest>{}; };
    hooks.drain = [this] { drained = true; };
    hooks.reload_keys = []() -> StatusOr<size_t> { return failed_precondition("no keys are configured"); };
    auto started = AdminServer::start("127.0.0.1:0", std::move(hooks));
    EXPECT_TRUE(started.ok()) << started.status();
    server = std::move(started).value();
  }
  std::atomic<bool> drained{false};
  std::unique_ptr<AdminServer> server;
};

TEST_F(AdminOnlyTest, LogLevel) {
  const LogLevel before = log_enabled(LogLevel::kInfo) ? LogLevel::kInfo : LogLevel::kWarn;
  for (const char* level : {"debug", "info", "warn", "error"}) {
    auto r = http_call(server->port(), "PUT", std::string("/admin/log_level?level=") + level);
    EXPECT_EQ(r.status, 200);
    r = http_call(server->port(), "GET", "/admin/log_level");
    EXPECT_THAT(r.body, HasSubstr(level));
  }
  const auto r = http_call(server->port(), "PUT", "/admin/log_level?level=loud");
  EXPECT_EQ(r.status, 400);
  EXPECT_THAT(r.body, HasSubstr("level"));
  EXPECT_EQ(http_call(server->port(), "PUT", "/admin/log_level").status, 400);
  log_threshold(before);
}

TEST_F(AdminOnlyTest, WrongMethodsAndBrowsersChangeNothing) {
  EXPECT_EQ(http_call(server->port(), "GET", "/admin/drain").status, 405);
  EXPECT_EQ(http_call(server->port(), "POST", "/admin/log_level?level=debug").status, 405);
  EXPECT_EQ(http_call(server->port(), "POST", "/admin/requests").status, 405);
  EXPECT_EQ(http_call(server->port(), "POST", "/admin/drain", "", "origin: http://evil.example\r\n").status,
            403);
  EXPECT_EQ(http_call(server->port(), "POST", "/admin/drain", "", "sec-fetch-site: cross-site\r\n").status,
            403);
  EXPECT_FALSE(drained.load());
  EXPECT_EQ(http_call(server->port(), "POST", "/admin/keys/reload").status, 400);
  EXPECT_EQ(http_call(server->port(), "GET", "/admin").status, 404);
  EXPECT_EQ(http_call(server->port(), "POST", "/admin/drain").status, 200);
  EXPECT_TRUE(drained.load());
}

}  // namespace
}  // namespace conclave::router
