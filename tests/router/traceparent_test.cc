// The header traceparent: what of it counts, and what is said back.
#include "router_service/door/traceparent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "router_service/door/front_door.h"

namespace conclave::door {
namespace {

// The standard's own example (https://www.w3.org/TR/trace-context/#examples-of-http-traceparent-headers).
constexpr char kGood[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TEST(TraceparentTest, IsReadAsTheStandardSays) {
  const auto parsed = parse_traceparent(kGood);
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(parsed->trace_hi, 0x4bf92f3577b34da6u);
  EXPECT_EQ(parsed->trace_lo, 0xa3ce929d0e0e4736u);
  EXPECT_EQ(parsed->parent, 0x00f067aa0ba902b7u);
  EXPECT_TRUE(parsed->sampled);
  std::string text = kGood;
  text.back() = '0';
  EXPECT_FALSE(parse_traceparent(text)->sampled);
  text.replace(53, 2, "fe");  // other flags than the first say nothing here
  EXPECT_FALSE(parse_traceparent(text)->sampled);
  text.replace(53, 2, "03");
  EXPECT_TRUE(parse_traceparent(text)->sampled);
  // Later versions may say more, after another dash.
  text = kGood;
  text.replace(0, 2, "cc");
  EXPECT_TRUE(parse_traceparent(text).has_value());
  EXPECT_TRUE(parse_traceparent(text + "-what-the-future-will-be-like").has_value());
}

TEST(TraceparentTest, WhatBreaksTheStandardIsIgnored) {
  const std::string good = kGood;
  std::vector<std::string> wrong = {"",
                                    "00",
                                    good.substr(0, 54),
                                    good + "-extra",
                                    good + "-",
                                    good + "0",
                                    " " + good,
                                    good + " ",
                                    "ff" + good.substr(2),                                      // reserved
                                    "0" + good,                                                 // shifted
                                    "cc" + good.substr(2) + ".what",                            // no dash
                                    "00-00000000000000000000000000000000-00f067aa0ba902b7-01",  // zeros
                                    "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01"};
  for (size_t i = 0; i < good.size(); ++i) {
    for (const char c : {'G', 'A', '/', ':', '`', 'g', '\0', '\xff', '_'}) {
      std::string one = good;
      one[i] = c;
      wrong.push_back(one);
    }
  }
  for (const std::string& text : wrong) EXPECT_FALSE(parse_traceparent(text).has_value()) << text;
}

TEST(TraceparentTest, ATraceIsContinuedUnderASpanOfOurOwn) {
  const TraceContext trace = begin_trace(kGood, 0);
  EXPECT_EQ(trace_id_text(trace), "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_TRUE(trace.followed) << "its tracer samples it";
  EXPECT_NE(trace.span, 0x00f067aa0ba902b7u);
  const std::string back = write_traceparent(trace);
  const auto read = parse_traceparent(back);
  ASSERT_TRUE(read.has_value()) << back;
  EXPECT_EQ(read->trace_hi, trace.trace_hi);
  EXPECT_EQ(read->parent, trace.span);
  EXPECT_TRUE(read->sampled);
}

TEST(TraceparentTest, OneIsBegunWhereThereIsNone) {
  const TraceContext a = begin_trace("", 0), b = begin_trace("garbage", 0);
  EXPECT_NE(trace_id_text(a), trace_id_text(b));
  EXPECT_FALSE(a.followed || b.followed);
  EXPECT_TRUE(parse_traceparent(write_traceparent(a)).has_value());
  EXPECT_FALSE(parse_traceparent(write_traceparent(a))->sampled);
  std::string unsampled = kGood;
  unsampled.back() = '0';
  EXPECT_FALSE(begin_trace(unsampled, 0).followed);
  EXPECT_TRUE(begin_trace(unsampled, 1).followed) << "we may still want to know";
}

TEST(TraceparentTest, TheShareIsAShare) {
  int followed = 0;
  for (int i = 0; i < 20000; ++i) followed += begin_trace("", 0.25).followed;
  EXPECT_NEAR(followed, 5000, 600);  // ten standard deviations
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(begin_trace("", 1).followed);
}

TEST(TraceparentTest, VisitsCarryIt) {
  std::string seen;
  FrontDoorOptions options;
  options.on_end = [&](const AccessLine& line) { seen = trace_id_text(line.trace); };
  auto door = FrontDoor::open(std::move(options));
  ASSERT_TRUE(door.ok());
  {
    const auto visit = (*door)->enter("http", "/v1/completions", "x", nullptr, kGood);
    EXPECT_TRUE(visit->origin(visit).trace.followed);
    EXPECT_EQ(trace_id_text(visit->trace()), "4bf92f3577b34da6a3ce929d0e0e4736");
  }
  EXPECT_EQ(seen, "4bf92f3577b34da6a3ce929d0e0e4736");
}

}  // namespace
}  // namespace conclave::door
