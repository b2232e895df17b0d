// Keys, allowances and the record of each request, without any protocol around them.
#include "router_service/door/front_door.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/router/key_dir.h"

namespace conclave::door {
namespace {

using conclave::testing::KeyDir;
using conclave::testing::line_of;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

TEST(KeyFileTest, HashesAreSha256) {
  // FIPS 180-2, appendix B.1.
  EXPECT_EQ(format_key_line(line_of("abc", "a")),
            "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad name=a");
  EXPECT_TRUE(same_hash(hash_key("abc"), hash_key("abc")));
  EXPECT_FALSE(same_hash(hash_key("abc"), hash_key("abd")));
}

TEST(KeyFileTest, MadeKeysDiffer) {
  const auto a = make_key(), b = make_key();
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->size(), 51u);
  EXPECT_NE(*a, *b);
}

TEST(KeyFileTest, LinesSurviveTheRoundTrip) {
  const std::vector<KeyLine> lines = {line_of("1", "alice"), line_of("2", "bob@example.org", {60, 0, false}),
                                      line_of("3", "c-3.p_o", {1, 100000, true})};
  std::string text = "# our people\n\n  \t\r\n";
  for (const KeyLine& line : lines) text += format_key_line(line) + "\r\n";
  text.pop_back();  // the last line may lack its end
  text.pop_back();
  const auto read = parse_key_file(text, 3);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ((*read)[i].hash, lines[i].hash);
    EXPECT_EQ((*read)[i].name, lines[i].name);
    EXPECT_EQ((*read)[i].grant, lines[i].grant);
  }
  EXPECT_EQ(parse_key_file(text, 2).status().code(), StatusCode::kResourceExhausted);
}

TEST(KeyFileTest, FaultsNameTheirLine) {
  const std::string good = format_key_line(line_of("k", "a"));
  const std::string hash = good.substr(0, 71);
  const std::pair<std::string, const char*> faults[] = {
      {"sk-plain-text-key name=a", "sha256:"},
      {"sha256:abc name=a", "64 hex digits"},
      {std::string(70, 'z') + "zz name=a", "sha256:"},
      {hash, "name"},
      {hash + " name=", "name"},
      {hash + " name=a/b", "name"},
      {hash + " name=" + std::string(65, 'a'), "name"},
      {hash + " name=a admin", "admin"},
      {hash + " name=a trusted=yes", "trusted"},
      {hash + " name=a requests_per_minute=0", "requests_per_minute"},
      {hash + " name=a requests_per_minute=-5", "requests_per_minute"},
      {hash + " name=a tokens_per_minute=1e9", "tokens_per_minute"},
      {hash + " name=a tokens_per_minute=99999999999999999999999", "tokens_per_minute"},
      {hash + " name=a name=b", "twice"},
      {good, "repeats a key"},
      {format_key_line(line_of("other", "a", {5, 0, false})), "other limits"},
  };
  for (const auto& [line, wanted] : faults) {
    const auto read = parse_key_file("# first\n" + good + "\n" + line + "\n", 10);
    ASSERT_FALSE(read.ok()) << line;
    EXPECT_EQ(read.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(message_of(read.status()), ::testing::AllOf(HasSubstr("line 3"), HasSubstr(wanted)));
    // A key written in plain text by mistake must not end in a log.
    EXPECT_THAT(message_of(read.status()), ::testing::Not(HasSubstr("plain-text-key")));
  }
}

TEST(TokenBucketTest, RefillsEvenlyUpToAMinutesWorth) {
  TimePoint now = 1000 * kSecond;
  TokenBucket bucket(60);
  for (int i = 0; i < 60; ++i) {
    ASSERT_EQ(bucket.wait_for(1, now), 0) << i;
    bucket.take(1, now);
  }
  EXPECT_EQ(bucket.wait_for(1, now), kSecond);
  EXPECT_EQ(bucket.left(now), 0u);
  now += kSecond;
  EXPECT_EQ(bucket.wait_for(1, now), 0);
  now += 3600 * kSecond;
  EXPECT_EQ(bucket.left(now), 60u);
  EXPECT_EQ(bucket.full_in(now), 0);
}

TEST(TokenBucketTest, ALargeOneWaitsForAFullBucketAndIsPaidAfterwards) {
  TimePoint now = 1000 * kSecond;
  TokenBucket bucket(600);
  EXPECT_EQ(bucket.wait_for(6000, now), 0);
  bucket.take(6000, now);
  EXPECT_EQ(bucket.left(now), 0u);
  EXPECT_EQ(bucket.wait_for(1, now), 9 * 60 * kSecond + kSecond / 10);
  bucket.put_back(5400, now);
  EXPECT_EQ(bucket.wait_for(1, now), kSecond / 10);
}

TEST(TokenBucketTest, ANewRateKeepsWhatWasUsed) {
  TimePoint now = 1000 * kSecond;
  TokenBucket bucket(60);
  bucket.take(50, now);
  bucket.set_rate(100, now);
  EXPECT_EQ(bucket.left(now), 50u);
  bucket.set_rate(20, now);
  EXPECT_EQ(bucket.left(now), 0u);
  bucket.set_rate(0, now);
  EXPECT_EQ(bucket.wait_for(1e18, now), 0);
}

TEST(TenantTest, RefusalsSayWhenToComeBack) {
  Tenant tenant("alice", {2, 1000, false});
  const TimePoint now = 1000 * kSecond;
  Nanos retry = 0;
  EXPECT_TRUE(tenant.charge(400, now, &retry).ok());
  EXPECT_THAT(tenant.rate_headers(now),
              UnorderedElementsAre(
                  Pair("x-ratelimit-limit-requests", "2"), Pair("x-ratelimit-remaining-requests", "1"),
                  Pair("x-ratelimit-reset-requests", "30s"), Pair("x-ratelimit-limit-tokens", "1000"),
                  Pair("x-ratelimit-remaining-tokens", "600"), Pair("x-ratelimit-reset-tokens", "24s")));
  // By its tokens, with nothing taken.
  Status refused = tenant.charge(700, now, &retry);
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(gateway::code_of(refused), gateway::kRateLimitExceeded);
  EXPECT_THAT(message_of(refused), HasSubstr("1000 tokens"));
  EXPECT_EQ(retry_seconds(retry), "6");
  EXPECT_TRUE(tenant.charge(600, now, &retry).ok());
  // By its requests.
  refused = tenant.charge(0, now, &retry);
  EXPECT_THAT(message_of(refused), HasSubstr("2 requests"));
  EXPECT_EQ(retry_seconds(retry), "30");
  // The estimate was too high: the rest comes back.
  tenant.settle(600, 100, now);
  EXPECT_THAT(tenant.rate_headers(now), ::testing::Contains(Pair("x-ratelimit-remaining-tokens", "500")));
  // ... or too low: the next ones wait for it.
  tenant.settle(100, 2000, now);
  EXPECT_EQ(tenant.charge(1, now + 60 * kSecond, &retry).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(tenant.charge(1, now + 90 * kSecond, &retry).ok());
}

TEST(FrontDoorTest, WithoutKeysAnybodyMayEnter) {
  for (const bool trust : {false, true}) {
    FrontDoorOptions options;
    options.trust_without_keys = trust;
    auto door = FrontDoor::open(options);
    ASSERT_TRUE(door.ok());
    const auto tenant = (*door)->identify("");
    ASSERT_TRUE(tenant.ok());
    EXPECT_EQ((*tenant)->name(), "");
    EXPECT_EQ((*tenant)->trusted(), trust);
    EXPECT_FALSE((*door)->reload_keys().ok());
  }
}

TEST(FrontDoorTest, TellsKeysApart) {
  KeyDir keys;
  keys.write(format_key_line(line_of("ck-a", "alice")) + "\n" +
             format_key_line(line_of("ck-b", "bob", {0, 0, true})) + "\n");
  FrontDoorOptions options;
  options.keys_file = keys.path();
  auto door = FrontDoor::open(options);
  ASSERT_TRUE(door.ok()) << door.status();
  EXPECT_EQ((*(*door)->identify("Bearer ck-a"))->name(), "alice");
  EXPECT_FALSE((*(*door)->identify("Bearer ck-a"))->trusted());
  EXPECT_EQ((*(*door)->identify("bearer   ck-b  "))->name(), "bob");
  EXPECT_TRUE((*(*door)->identify("BEARER ck-b"))->trusted());
  const std::string wrong[] = {"",          "Bearer",     "Bearer ",      "Bearer ck-c",
                               "ck-a",      "Basic ck-a", "Bearer ck-a2", "Bearer " + std::string(600, 'k'),
                               "Bearerck-a"};
  for (const std::string& authorization : wrong) {
    const auto tenant = (*door)->identify(authorization);
    ASSERT_FALSE(tenant.ok()) << authorization;
    EXPECT_EQ(tenant.status().code(), StatusCode::kUnauthenticated);
    EXPECT_EQ(gateway::code_of(tenant.status()), "invalid_api_key");
    EXPECT_THAT(message_of(tenant.status()), ::testing::Not(HasSubstr("ck-")));
  }
  EXPECT_EQ((*door)->counts().unauthenticated, std::size(wrong));
  EXPECT_EQ((*door)->counts().keys, 2u);
}

TEST(FrontDoorTest, AMissingOrFaultyFileIsNamed) {
  KeyDir keys;
  FrontDoorOptions options;
  options.keys_file = keys.path();
  auto door = FrontDoor::open(options);
  ASSERT_FALSE(door.ok());
  EXPECT_EQ(field_of(door.status()), "router.api_keys_file");
  keys.write("nonsense\n");
  door = FrontDoor::open(options);
  ASSERT_FALSE(door.ok());
  EXPECT_EQ(field_of(door.status()), "router.api_keys_file");
  EXPECT_THAT(message_of(door.status()), HasSubstr("line 1"));
  options.max_keys_file_bytes = 4;
  EXPECT_FALSE(FrontDoor::open(options).ok());
}

TEST(FrontDoorTest, ReloadsWhenTheFileChanges) {
  KeyDir keys;
  keys.write(format_key_line(line_of("ck-a", "alice", {1, 0, false})));
  FrontDoorOptions options;
  options.keys_file = keys.path();
  auto door = FrontDoor::open(options);
  ASSERT_TRUE(door.ok());
  const auto unchanged = (*door)->reload_changed_keys();
  ASSERT_TRUE(unchanged.ok());
  EXPECT_FALSE(*unchanged);
  {
    auto visit = (*door)->enter("http", "/x", "id", *(*door)->identify("Bearer ck-a"));
    EXPECT_TRUE(visit->charge(1).ok());
    EXPECT_FALSE(visit->charge(1).ok());
  }
  EXPECT_EQ((*door)->counts().rate_limited, 1u);

  // A fault leaves the old keys, and is looked at once.
  keys.write("sha256:oops");
  EXPECT_FALSE((*door)->reload_changed_keys().ok());
  EXPECT_TRUE((*door)->reload_changed_keys().ok());
  EXPECT_TRUE((*door)->identify("Bearer ck-a").ok());
  EXPECT_EQ((*door)->counts().failed_key_reloads, 1u);

  // alice gets a second key and keeps what she has used; then the first one goes.
  keys.write(format_key_line(line_of("ck-a", "alice", {1, 0, false})) + "\n" +
             format_key_line(line_of("ck-a2", "alice", {1, 0, false})));
  const auto changed = (*door)->reload_changed_keys();
  ASSERT_TRUE(changed.ok());
  EXPECT_TRUE(*changed);
  {
    auto visit = (*door)->enter("http", "/x", "id", *(*door)->identify("Bearer ck-a2"));
    EXPECT_FALSE(visit->charge(1).ok());
  }
  keys.write(format_key_line(line_of("ck-a2", "alice", {5, 0, false})));
  ASSERT_TRUE((*door)->reload_changed_keys().ok());
  EXPECT_FALSE((*door)->identify("Bearer ck-a").ok());
  auto visit = (*door)->enter("http", "/x", "id", *(*door)->identify("Bearer ck-a2"));
  EXPECT_TRUE(visit->charge(1).ok());
}

TEST(FrontDoorTest, EveryVisitLeavesOneLine) {
  KeyDir keys;
  keys.write(format_key_line(line_of("ck-a", "alice", {0, 1000, true})));
  FrontDoorOptions options;
  options.keys_file = keys.path();
  struct Line {
    std::string id, tenant, route, outcome;
    int status;
    uint64_t prompt, completion;
    Nanos first;
  };
  std::vector<Line> lines;
  options.on_end = [&](const AccessLine& line) {
    lines.push_back({std::string(line.request_id), std::string(line.tenant), std::string(line.route),
                     std::string(line.outcome), line.status, line.prompt_tokens, line.completion_tokens,
                     line.to_first_token});
  };
  auto door = FrontDoor::open(options);
  ASSERT_TRUE(door.ok());
  const auto alice = *(*door)->identify("Bearer ck-a");
  {
    auto visit = (*door)->enter("http", "/v1/completions", "r-1", alice);
    ASSERT_TRUE(visit->charge(300).ok());
    const gateway::Origin origin = visit->origin(visit);
    EXPECT_EQ(origin.tenant, "alice");
    EXPECT_EQ(origin.request_id, "r-1");
    EXPECT_TRUE(origin.trusted);
    visit->answered(200);
    visit.reset();
    EXPECT_TRUE(lines.empty()) << "the generation still has its part";
    gateway::Summary summary;
    summary.finish = FinishReason::kLength;
    summary.usage.prompt_tokens = 10;
    summary.usage.completion_tokens = 90;
    summary.to_first_token = 5 * kMillisecond;
    origin.record->ended(summary);
  }
  { auto gone = (*door)->enter("http", "/v1/models", "r-2", alice); }
  { (*door)->enter("grpc", "Generate", "r-3", nullptr)->answered(16); }
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].status, 200);
  EXPECT_EQ(lines[0].outcome, "length");
  EXPECT_EQ(lines[0].prompt, 10u);
  EXPECT_EQ(lines[0].completion, 90u);
  EXPECT_EQ(lines[0].first, 5 * kMillisecond);
  EXPECT_EQ(lines[1].status, 499);
  EXPECT_EQ(lines[2].tenant, "");
  EXPECT_EQ(lines[2].status, 16);
  // 300 were thought to be needed, 100 were.
  EXPECT_THAT(alice->rate_headers(steady_now()),
              ::testing::Contains(Pair("x-ratelimit-remaining-tokens", ::testing::AnyOf("900", "901"))));
}

// The scheduler's thread may be the last to let go of a visit, when the door is closed already.
TEST(FrontDoorTest, AVisitMayOutliveItsDoor) {
  FrontDoorOptions options;
  int lines = 0;
  options.on_end = [&](const AccessLine&) { ++lines; };
  auto door = FrontDoor::open(options);
  ASSERT_TRUE(door.ok());
  auto visit = (*door)->enter("http", "/x", "id", nullptr);
  auto other = (*door)->enter("http", "/x", "id", nullptr);
  other.reset();
  EXPECT_EQ(lines, 1);
  door->reset();
  EXPECT_TRUE(visit->charge(1).ok());
  visit->answered(200);
  visit.reset();
  EXPECT_EQ(lines, 1) << "whoever wanted the line may be gone too";
}

TEST(FrontDoorTest, ReloadsAndVisitsAtOnce) {
  KeyDir keys;
  keys.write(format_key_line(line_of("ck-a", "alice", {1000000, 0, false})));
  FrontDoorOptions options;
  options.keys_file = keys.path();
  auto door = FrontDoor::open(options);
  ASSERT_TRUE(door.ok());
  std::atomic<bool> stop{false};
  std::thread reloading([&] {
    while (!stop.load()) EXPECT_TRUE((*door)->reload_keys().ok());
  });
  for (int i = 0; i < 2000; ++i) {
    auto tenant = (*door)->identify("Bearer ck-a");
    ASSERT_TRUE(tenant.ok());
    EXPECT_TRUE((*door)->enter("http", "/x", "id", *tenant)->charge(1).ok());
  }
  stop.store(true);
  reloading.join();
}

TEST(RequestIdTest, WhatIsUsable) {
  EXPECT_TRUE(usable_request_id("abc-123_X.y:z/=+"));
  EXPECT_TRUE(usable_request_id(std::string(128, 'a')));
  for (const std::string& bad :
       {std::string(), std::string(129, 'a'), std::string("a b"), std::string("a\r\nb"),
        std::string("\xc3\xa9"), std::string("a\0b", 3), std::string("\x7f")})
    EXPECT_FALSE(usable_request_id(bad));
  EXPECT_TRUE(usable_request_id(make_request_id()));
  EXPECT_NE(make_request_id(), make_request_id());
}

}  // namespace
}  // namespace conclave::door
