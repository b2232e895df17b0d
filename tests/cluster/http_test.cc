// The whole cluster as its users see it: HTTP in front of separate processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <map>
#include <thread>

#include "tests/cluster/cluster.h"
#include "tests/cluster/completions.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

struct HttpTest : ::testing::Test {
  void SetUp() override {
    cluster.start_router();
    ASSERT_TRUE(cluster.wait_ready());
    ASSERT_TRUE(cluster.wait_router_ready());
  }
  std::vector<std::string> alone(uint32_t kinds, uint32_t tokens) {
    std::vector<std::string> out;
    for (uint32_t i = 0; i < kinds; ++i) {
      out.push_back(complete(cluster.http_address(), i, tokens, false));
      EXPECT_THAT(out.back(), ::testing::Not(HasSubstr("failed: ")));
      EXPECT_FALSE(out.back().empty());
    }
    return out;
  }
  ProcessCluster cluster;
};

TEST_F(HttpTest, TwoHundredRequestsEqualTheirLoneRunsAndMemoryStays) {
  const uint32_t kRequests = 200, kConcurrency = 16, kTokens = 16, kKinds = 20;
  const std::vector<std::string> expected = alone(kKinds, kTokens);
  std::map<std::string, Process*> processes = {{"scheduler", &cluster.scheduler},
                                               {"worker", &cluster.worker},
                                               {"router", &cluster.router},
                                               {"shard0", &cluster.shards[0]},
                                               {"shard1", &cluster.shards[1]}};
  std::map<std::string, uint64_t> at_50;
  std::atomic<uint32_t> next{0}, done{0};
  std::vector<std::string> answers(kRequests);
  std::vector<std::thread> clients;
  for (uint32_t c = 0; c < kConcurrency; ++c) {
    clients.emplace_back([&] {
      for (uint32_t i = next++; i < kRequests; i = next++) {
        answers[i] = complete(cluster.http_address(), i % kKinds, kTokens, i % 3 == 0);
        if (++done == 50) {
          for (auto& [name, process] : processes) at_50[name] = process->anonymous_bytes();
        }
      }
    });
  }
  for (std::thread& client : clients) client.join();
  for (uint32_t i = 0; i < kRequests; ++i) EXPECT_EQ(answers[i], expected[i % kKinds]) << "request " << i;
  for (auto& [name, process] : processes) {
    const int64_t growth =
        static_cast<int64_t>(process->anonymous_bytes()) - static_cast<int64_t>(at_50[name]);
    EXPECT_LT(growth, 8 << 20) << name;
    RecordProperty(name + "_growth_kib", std::to_string(growth / 1024));
  }

  const double before = cluster.router.cpu_seconds();
  std::this_thread::sleep_for(std::chrono::seconds(3));  // what is measured is time itself
  EXPECT_LT((cluster.router.cpu_seconds() - before) / 3, 0.02) << "the idle router";
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST_F(HttpTest, SixteenStreamsSurviveEachProcessBehindTheRouter) {
  const uint32_t kStreams = 16, kTokens = 384;
  const std::vector<std::string> expected = alone(kStreams, kTokens);
  for (const char* victim : {"shard", "worker", "scheduler"}) {
    std::vector<std::string> answers(kStreams);
    std::atomic<uint32_t> ended{0};
    std::vector<std::thread> clients;
    auto sampled = [&] {
      auto metrics = http_get(cluster.ops("worker"), "/metrics");
      if (!metrics.ok()) return 0.0;
      const std::string key = "\nconclave_attention_sampled_tokens_total ";
      const size_t at = metrics->body.find(key);
      return at == std::string::npos ? 0.0 : std::atof(metrics->body.c_str() + at + key.size());
    };
    const double before = sampled();
    for (uint32_t i = 0; i < kStreams; ++i) {
      clients.emplace_back([&, i] {
        answers[i] = complete(cluster.http_address(), i, kTokens, true);
        ++ended;
      });
    }
    EXPECT_TRUE(eventually([&] { return sampled() - before > 8 * kStreams; }));
    EXPECT_EQ(ended, 0u) << "the streams were over before the kill of the " << victim;
    if (victim[0] == 's' && victim[1] == 'h') {
      cluster.shards[0].kill();
      cluster.start_shard(0);
    } else if (victim[0] == 'w') {
      cluster.worker.kill();
      cluster.start_worker();
    } else {
      cluster.scheduler.kill();
      cluster.start_scheduler();
    }
    for (std::thread& client : clients) client.join();
    for (uint32_t i = 0; i < kStreams; ++i) EXPECT_EQ(answers[i], expected[i]) << victim << ", stream " << i;
    ASSERT_TRUE(cluster.wait_ready());
  }
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

// "N" after the name in the answer's last usage; "" where there is none.
std::string last_number(const std::string& text, const std::string& name) {
  const size_t at = text.rfind("\"" + name + "\":");
  if (at == std::string::npos) return "";
  const size_t from = at + name.size() + 3;
  return text.substr(from, text.find_first_not_of("0123456789", from) - from);
}

TEST_F(HttpTest, UsageSaysWhatOfARepeatedPromptWasCached) {
  const auto usage = [&](const std::string& path, const std::string& body) {
    auto answer = http_post(cluster.http_address(), path, body, kCompletionLimit);
    EXPECT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->code, 200) << answer->body;
    const std::string cached = last_number(answer->body, "cached_tokens");
    return std::pair(cached.empty() ? -1 : std::stoi(cached),
                     std::stoi("0" + last_number(answer->body, "prompt_tokens")));
  };
  const std::string streamed = R"(,"stream":true,"stream_options":{"include_usage":true})";
  const std::string words(200, 'q');
  for (const bool chat : {false, true}) {
    const std::string path = chat ? "/v1/chat/completions" : "/v1/completions";
    const std::string prompt =
        chat ? R"("messages":[{"role":"user","content":")" + words + "\"}]" : "\"prompt\":\"" + words + "\"";
    const std::string body = "{" + prompt + R"(,"max_tokens":3,"ignore_eos":true,"n":)";
    const auto [none, tokens] = usage(path, body + "3}");
    EXPECT_GT(tokens, 32);
    EXPECT_EQ(none, 0) << path;
    // All whole pages but what the last token needs; once, whatever the number of choices.
    const int cached = (tokens - 1) / 16 * 16;
    EXPECT_EQ(usage(path, body + "1}"), std::pair(cached, tokens)) << path;
    EXPECT_EQ(usage(path, body + "4}"), std::pair(cached, tokens)) << path;
    EXPECT_EQ(usage(path, body + "2" + streamed + "}"), std::pair(cached, tokens)) << path;
    EXPECT_EQ(usage(path, body + R"(1,"cache_salt":"other")" + streamed + "}"), std::pair(0, tokens)) << path;
  }
}

TEST_F(HttpTest, BadInputIsAnAnswerAndTheClusterGoesOn) {
  const std::string text = complete(cluster.http_address(), 2, 8, false);
  const std::map<std::string, std::string> bad = {
      {"{", "400"},
      {R"({"prompt":[]})", "400"},
      {R"({"prompt":"a","max_tokens":-1})", "400"},
      {R"({"prompt":[99999999]})", "400"},
      {R"({"prompt":"a","temperature":"hot"})", "400"},
      {R"({"model":"nobody","prompt":"a"})", "404"},
  };
  for (const auto& [body, code] : bad) {
    auto answer = http_post(cluster.http_address(), "/v1/completions", body, kCompletionLimit);
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(std::to_string(answer->code), code) << body << ": " << answer->body;
    EXPECT_THAT(answer->body, HasSubstr("\"error\"")) << body;
  }
  EXPECT_EQ(complete(cluster.http_address(), 2, 8, false), text);
  // A clean end of the router.
  cluster.router.signal(SIGTERM);
  EXPECT_EQ(cluster.router.wait(15 * kSecond), 0) << cluster.router.log();
}

}  // namespace
}  // namespace conclave
