// The live page for every size of terminal and whatever a cluster says of itself: lines stay within the
// terminal, only printable ASCII comes out, and what matters is there.
#include "cli/status_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <boost/json.hpp>
#include <cmath>
#include <limits>

#include "libs/base/random.h"

namespace conclave::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Figures as no cluster should have them, and ordinary ones.
class Maker {
 public:
  explicit Maker(uint64_t seed) : r_(seed) {}

  double real() {
    constexpr double kOdd[] = {0,
                               -1,
                               1e-9,
                               0.5,
                               3,
                               1234,
                               5e6,
                               1e18,
                               1e300,
                               std::numeric_limits<double>::infinity(),
                               -std::numeric_limits<double>::infinity(),
                               kUnknown,
                               std::numeric_limits<double>::denorm_min()};
    return r_.chance(0.5) ? kOdd[r_.below(std::size(kOdd))] : r_.uniform() * 1000;
  }
  std::string text() {
    constexpr const char* kParts[] = {"expert-0",
                                      "a",
                                      "\x1b[2J",
                                      "\xc3\xa9",
                                      "\xe4\xb8\xad\xe6\x96\x87",
                                      "\xff\xfe",
                                      "\n\r\t",
                                      "%s%n",
                                      "very-long-name-of-a-pod-in-a-namespace-0123456789",
                                      "\x7f"};
    std::string out;
    for (uint64_t n = r_.below(4); n > 0; --n) out += kParts[r_.below(std::size(kParts))];
    return out;
  }
  StatusView view(size_t members) {
    StatusView v;
    v.scheduler = r_.chance(0.3) ? text() : "127.0.0.1:7070";
    v.clock = "15:04:05";
    v.reachable = r_.chance(0.8);
    v.ever_reached = v.reachable || r_.chance(0.7);
    v.problem = text();
    v.since = "15:00:00";
    v.unreachable_s = real();
    v.ready = r_.chance(0.7);
    v.not_ready = text();
    v.age_s = real();
    v.epoch = r_.next();
    v.preparing_epoch = r_.chance(0.5) ? 0 : r_.next();
    v.layers = static_cast<uint32_t>(r_.next());
    v.busiest = real();
    v.running = static_cast<uint32_t>(r_.next());
    v.waiting = static_cast<uint32_t>(r_.below(5));
    v.stalled = static_cast<uint32_t>(r_.below(3));
    v.rates = {real(), real(), real(), real(), real(), real(), real(), real()};
    v.first_token = {real(), real(), real(), real()};
    v.per_token = {real(), real(), real(), real()};
    v.queue = {real(), real(), real(), real()};
    v.whole = {real(), real(), real(), real()};
    v.token_gap = {real(), real(), real(), real()};
    v.latency_window_s = real();
    v.latency_problem = r_.chance(0.5) ? text() : "";
    v.totals.homes_added = r_.next();
    for (size_t i = 0; i < members; ++i) {
      MemberView m;
      m.kind = static_cast<MemberView::Kind>(r_.below(4));
      m.name = text();
      m.incarnation = r_.next();
      m.state = r_.chance(0.8) ? "ready" : text();
      m.age_s = real();
      m.kv_total = static_cast<uint32_t>(r_.below(3) == 0 ? 0 : r_.next());
      m.kv_used = static_cast<uint32_t>(r_.next());
      m.load = real();
      m.ops_address = text();
      v.members.push_back(m);
    }
    for (uint64_t n = r_.below(40); n > 0; --n) {
      EventView e;
      e.kind = r_.chance(0.5) ? "lost" : text();
      e.who = text();
      e.detail = text();
      e.age_s = r_.chance(0.7) ? r_.uniform() * 500 : real();
      e.times = static_cast<uint32_t>(r_.below(3));
      v.events.push_back(e);
    }
    return v;
  }
  uint64_t below(uint64_t bound) { return r_.below(bound); }

 private:
  SplitMix64 r_;
};

std::string plain(const std::vector<PageLine>& page) {
  std::string out;
  for (const PageLine& line : page) out += line_text(line, false) + "\n";
  return out;
}

void check(const StatusView& view, PageSize size) {
  const std::vector<PageLine> page = render_status(view, size);
  ASSERT_FALSE(page.empty());
  if (size.height > 0) {
    ASSERT_LE(page.size(), std::max(size.height, kMinHeight));
  }
  for (const PageLine& line : page) {
    const std::string text = line_text(line, false);
    ASSERT_LE(text.size(), std::max(size.width, kMinWidth)) << text;
    for (const char c : text)
      ASSERT_TRUE(c >= 0x20 && c < 0x7f) << "byte " << static_cast<int>(c) << " in " << text;
    ASSERT_TRUE(text.empty() || text.back() != ' ') << text;
    ASSERT_THAT(text, Not(HasSubstr("nan")));
    // Colours change nothing but colours.
    std::string coloured = line_text(line, true), bare;
    for (size_t i = 0; i < coloured.size(); ++i) {
      if (coloured[i] != '\x1b') {
        bare += coloured[i];
        continue;
      }
      while (coloured[i] != 'm') ++i;
    }
    ASSERT_EQ(bare, text);
  }
}

TEST(StatusPage, EveryWidthAndNumberOfMembers) {
  for (size_t width = 40; width <= 200; ++width) {
    Maker make(width);
    for (const size_t members : {size_t{0}, size_t{1}, size_t{5}, size_t{make.below(200)}, size_t{200}}) {
      check(make.view(members), {width, 0});
      check(make.view(members), {width, 8 + make.below(60)});
    }
  }
}

TEST(StatusPage, ManyHeightsAndSizesThatAreNone) {
  for (size_t height = 1; height <= 120; ++height) {
    Maker make(1000 + height);
    check(make.view(make.below(60)), {80, height});
    check(make.view(make.below(3)), {make.below(40), height});
    check(make.view(make.below(3)), {1000 + make.below(5000), height});
  }
}

StatusView quiet_cluster() {
  StatusView v;
  v.scheduler = "127.0.0.1:7070";
  v.clock = "15:04:05";
  v.reachable = v.ever_reached = v.ready = true;
  v.age_s = 7500;
  v.epoch = 3;
  v.layers = 62;
  v.experts = 256;
  v.busiest = 1.08;
  v.running = 12;
  v.waiting = 3;
  v.rates.generated = 1234;
  v.first_token = {0.12, 0.31, 1.25, 31};
  v.per_token = {0.009, 0.0141, 0.03, 31};
  v.queue = {0.0021, 0.0042, 0.0063, 31};
  v.token_gap = {0.0081, 0.0072, 0.071, 900};
  v.whole = {2.1, 3.2, 4.3, 30};
  v.latency_window_s = 60;
  const auto add = [&v](MemberView::Kind kind, const std::string& name) -> MemberView& {
    MemberView m;
    m.kind = kind;
    m.name = name;
    m.incarnation = 0x0123456789abcdefull;
    m.state = "ready";
    m.age_s = 7200;
    v.members.push_back(m);
    return v.members.back();
  };
  add(MemberView::Kind::kRouter, "router-0");
  MemberView& worker = add(MemberView::Kind::kAttention, "attention-0");
  worker.kv_total = 4096;
  worker.kv_used = 1024;
  worker.sequences = 12;
  for (int i = 0; i < 4; ++i)
    add(MemberView::Kind::kExpert, "expert-" + std::to_string(i)).load = 100.0 * (i + 1);
  return v;
}

TEST(StatusPage, ShowsWhatOperatorsAskFor) {
  StatusView v = quiet_cluster();
  v.events.push_back({1, "lost", "expert-9", "its process ended", 12, 1});
  v.events.push_back({2, "joined", "expert-8", "an expert shard", 4000, 1});
  const std::string page = plain(render_status(v, {80, 30}));
  for (const char* part : {"ready  up 2h 5m",
                           "15:04:05",
                           "1.2k generated",
                           "12 running",
                           "3 waiting",
                           "p50 120 ms",
                           "p90 310 ms",
                           "p99 1.2 s",
                           "p50 9.0 ms",
                           "queue       p50 2.1 ms",
                           "token gaps  p50 8.1 ms",
                           "whole       p50 2.1 s",
                           " 25% of 4.1k pages",
                           "epoch 3",
                           "62x256",
                           "1.08x mean",
                           "attention-0",
                           "12 seq",
                           "~abcdef",
                           "2h 0m",
                           "400 rows/s",
                           "40%",
                           "12 s ago lost",
                           "expert-9: its process ended"})
    EXPECT_THAT(page, HasSubstr(part)) << page;
  EXPECT_THAT(page, Not(HasSubstr("expert-8"))) << page;  // an event of an hour ago
  EXPECT_THAT(plain(render_status(v, {120, 30})), HasSubstr("0123456789abcdef"));
  const std::string small = plain(render_status(v, {80, kRoomyHeight - 1}));
  EXPECT_THAT(small, HasSubstr("first token p50"));
  EXPECT_THAT(small, HasSubstr("per token   p50"));
  EXPECT_THAT(small, Not(HasSubstr("queue       p50")));
}

TEST(StatusPage, BarsFollowTheLoad) {
  const std::string page = plain(render_status(quiet_cluster(), {80, 30}));
  const auto filled = [&page](const std::string& name) {
    const size_t begin = page.find(name);
    const std::string line = page.substr(begin, page.find('\n', begin) - begin);
    return std::count(line.begin(), line.end(), '#');
  };
  EXPECT_LT(filled("expert-0"), filled("expert-1"));
  EXPECT_LT(filled("expert-1"), filled("expert-2"));
  EXPECT_LT(filled("expert-2"), filled("expert-3"));
  EXPECT_GT(filled("attention-0"), 0);
}

TEST(StatusPage, ASchedulerThatIsGoneIsSaidAndTheRestStays) {
  StatusView v = quiet_cluster();
  v.reachable = false;
  v.problem = "no scheduler answers at 127.0.0.1:7070";
  v.since = "15:04:01";
  v.unreachable_s = 4;
  std::string page = plain(render_status(v, {80, 30}));
  EXPECT_THAT(page, HasSubstr("scheduler unreachable since 15:04:01"));
  EXPECT_THAT(page, HasSubstr("what follows is 4 s old"));
  EXPECT_THAT(page, HasSubstr("expert-3"));
  v.ever_reached = false;
  page = plain(render_status(v, {80, 30}));
  EXPECT_THAT(page, HasSubstr("no scheduler answers"));
  EXPECT_THAT(page, Not(HasSubstr("expert-3")));
}

TEST(StatusPage, WhatNeedsAttentionIsShownFirstWhereRoomIsShort) {
  StatusView v = quiet_cluster();
  for (int i = 10; i < 60; ++i) {
    MemberView m = v.members.back();
    m.name = "expert-" + std::to_string(i);
    m.load = i;
    v.members.push_back(m);
  }
  v.members[40].state = "suspect";
  const std::string page = plain(render_status(v, {80, 16}));
  EXPECT_THAT(page, HasSubstr(v.members[40].name)) << page;
  EXPECT_THAT(page, HasSubstr("suspect"));
  EXPECT_THAT(page, HasSubstr("more"));
}

TEST(StatusPage, NumbersTimesAndAges) {
  EXPECT_EQ(short_number(kUnknown), "-");
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(0.52), "0.5");
  EXPECT_EQ(short_number(999), "999");
  EXPECT_EQ(short_number(999.7), "1.0k");
  EXPECT_EQ(short_number(1234), "1.2k");
  EXPECT_EQ(short_number(56'789), "57k");
  EXPECT_EQ(short_number(1e300), ">1000P");
  EXPECT_EQ(short_time(kUnknown), "-");
  EXPECT_EQ(short_time(0.0012), "1.2 ms");
  EXPECT_EQ(short_time(0.34), "340 ms");
  EXPECT_EQ(short_time(1.25), "1.2 s");
  EXPECT_EQ(short_age(59.9), "59 s");
  EXPECT_EQ(short_age(11100), "3h 5m");
  EXPECT_EQ(short_age(4 * 86400 + 7200), "4d 2h");
  EXPECT_EQ(short_age(1e300), ">999 d");
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Maker make(seed);
    const double any = make.real();
    EXPECT_LE(short_number(any).size(), 8u) << any;
    EXPECT_LE(short_time(any).size(), 9u) << any;
    EXPECT_LE(short_age(any).size(), 7u) << any;
  }
}

TEST(StatusJson, IsOneObjectWhateverTheFigures) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Maker make(seed);
    StatusView view = make.view(make.below(20));
    const std::string text = status_json(view);
    EXPECT_EQ(text.find('\n'), std::string::npos);
    boost::system::error_code error;
    const auto parsed = boost::json::parse(text, error);
    // Names come over the wire as UTF-8 (libs/rpc checks them); here they need not be.
    if (error) continue;
    ASSERT_TRUE(parsed.is_object());
    EXPECT_EQ(parsed.at("reachable").as_bool(), view.reachable);
    if (view.reachable) {
      EXPECT_EQ(parsed.at("members").as_array().size(), view.members.size());
    }
  }
  const auto parsed = boost::json::parse(status_json(quiet_cluster()));
  EXPECT_EQ(parsed.at("requests_running").to_number<int>(), 12);
  EXPECT_EQ(parsed.at("rates").at("generated_tokens").to_number<int>(), 1234);
  EXPECT_TRUE(parsed.at("rates").at("steps").is_null());
  for (const char* what :
       {"queue", "time_to_first_token", "time_per_output_token", "inter_token", "request_duration"})
    EXPECT_TRUE(parsed.at("latency_s").at(what).at("p99").is_number()) << what;
  EXPECT_EQ(parsed.at("members").at(1).at("kv_blocks_used").to_number<int>(), 1024);
}

}  // namespace
}  // namespace conclave::cli
