// The direct way to bytes and back against protobuf's: the same bytes, the same values, the same refusals.
#include "libs/rpc/session_wire.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "libs/base/random.h"
#include "libs/rpc/convert.h"

namespace conclave::rpc {
namespace {

Allocate into(std::string& bytes) {
  return [&bytes](size_t size) {
    bytes.assign(size, '\xee');
    return bytes.data();
  };
}

class Maker {
 public:
  explicit Maker(uint64_t seed) : r(seed) {}

  uint32_t below(uint32_t limit) { return static_cast<uint32_t>(r.below(limit)); }
  // Of every length that a varint can have, the ends of each length more often than by chance.
  uint64_t any() {
    const uint64_t value = r.next() >> below(64);
    return r.chance(0.2) ? (uint64_t{1} << below(64)) - below(2) : value;
  }
  uint64_t id() { return any() | 1; }
  uint32_t small() { return static_cast<uint32_t>(any()); }
  uint32_t position() { return below(r.chance(0.1) ? kMaxPositions + 1 : 5000); }

  BatchPlan plan() {
    BatchPlan p;
    p.step = StepId(r.chance(0.05) ? 0 : id());
    const bool decodes = r.chance(0.5);
    const uint32_t slices = below(r.chance(0.1) ? 300 : 5);
    for (uint32_t i = 0; i < slices; ++i) {
      PlanSlice& slice = p.slices.emplace_back();
      slice.seq = SeqId(any());
      slice.start = small();
      slice.count = decodes ? 1 : small();
      slice.sample = decodes || r.chance(0.5);
      if (r.chance(0.2)) {
        slice.new_blocks.resize(below(4));
        for (BlockId& block : slice.new_blocks) block = small();
      }
    }
    if (r.chance(0.3)) {
      p.ends.resize(below(4));
      for (SeqId& seq : p.ends) seq = SeqId(any());
    }
    if (r.chance(0.2)) p.copies.resize(below(3));
    if (r.chance(0.2)) {
      p.starts.resize(below(3));
      for (SequenceStart& start : p.starts) {
        start.seq = SeqId(id());
        start.tokens = {1, 2, 3};
      }
    }
    p.timed = r.chance(0.1);
    return p;
  }

  StepResult result() {
    StepResult result;
    result.step = StepId(id());
    result.sampled.resize(below(r.chance(0.1) ? 300 : 4));
    const bool finishes = r.chance(0.3);
    const bool logprobs = r.chance(0.3);
    const bool top = r.chance(0.1);
    for (SampledToken& token : result.sampled) {
      token.seq = SeqId(id());
      token.position = position();
      token.token = below(200'000);
      if (finishes) token.finish = static_cast<FinishReason>(below(6));
      if (logprobs) token.logprob = -static_cast<float>(r.uniform()) * 20;
      if (logprobs && r.chance(0.1)) token.logprob = -std::numeric_limits<float>::infinity();
      if (top) token.top_logprobs = {{below(100), -1.0f}};
    }
    if (r.chance(0.2)) result.failures.push_back({SeqId(id()), "broken"});
    if (r.chance(0.1)) result.prompt_logprobs.push_back({SeqId(id()), 1 + below(9), {{-1.0f, {}, 4}}});
    if (r.chance(0.3)) {
      result.released.resize(below(4));
      for (SeqId& seq : result.released) seq = SeqId(id());
    }
    result.compute_ns = static_cast<Nanos>(r.below(1ull << 40));
    result.expert_wait_ns = static_cast<Nanos>(below(3));
    result.plan_wait_ns = static_cast<Nanos>(below(3));
    if (r.chance(0.1)) {
      result.timing.emplace();
      result.timing->wall_ns = static_cast<Nanos>(r.below(1ull << 40));
      result.timing->shards.resize(below(3));
    }
    return result;
  }

  TokenEvent token(bool choices, bool ends) {
    TokenEvent event;
    event.request = {r.next(), r.next() | 1};
    if (choices && r.chance(0.5)) event.choice = below(kMaxChoices);
    if (ends && r.chance(0.2)) event.finish = static_cast<FinishReason>(below(6));
    event.index = position();
    event.tokens = {small() & kMaxVocab};
    return event;
  }

  SplitMix64 r;
};

// What decode_from_member must equal.
StatusOr<FromMember> by_protobuf(std::string_view bytes) {
  pb::MemberUp message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return invalid_argument("not a conclave.v1.MemberUp");
  }
  return from_proto(message);
}

std::string text(const FromMember& message) {
  pb::MemberUp out;
  to_proto(message, &out);
  return out.SerializeAsString();
}

// True when it was a message.
bool expect_same(const std::string& given) {
  // A copy of exactly this length, so that a sanitizer sees a read past it.
  const std::vector<char> bytes(given.begin(), given.end());
  const std::string_view view(bytes.data(), bytes.size());
  const StatusOr<FromMember> direct = decode_from_member(view);
  const StatusOr<FromMember> expected = by_protobuf(view);
  EXPECT_EQ(message_of(direct.status()), message_of(expected.status()));
  EXPECT_EQ(direct.ok(), expected.ok());
  if (!direct.ok() || !expected.ok()) return false;
  EXPECT_EQ(direct->index(), expected->index());
  EXPECT_EQ(text(*direct), text(*expected));
  return true;
}

TEST(SessionWireTest, PlansAreTheBytesThatProtobufWrites) {
  for (uint64_t seed = 0; seed < 5000; ++seed) {
    const ToMember plan = Maker(seed).plan();
    pb::MemberDown expected;
    to_proto(plan, &expected);
    std::string bytes;
    encode(plan, into(bytes));
    ASSERT_EQ(bytes, expected.SerializeAsString()) << seed << "\n" << expected.DebugString();
  }
}

TEST(SessionWireTest, OtherMessagesToAMemberAreTheBytesThatProtobufWrites) {
  for (const ToMember& message : {ToMember(Welcome{Incarnation(7), 5}), ToMember(Drained{}),
                                  ToMember(Refusal{StatusCode::kFailedPrecondition, "no"}),
                                  ToMember(PlacementUpdate{PlacementTable(Epoch(1), 0, 0, {})})}) {
    pb::MemberDown expected;
    to_proto(message, &expected);
    std::string bytes;
    encode(message, into(bytes));
    EXPECT_EQ(bytes, expected.SerializeAsString());
  }
}

TEST(SessionWireTest, ResultsAreReadAsProtobufReadsThem) {
  for (uint64_t seed = 0; seed < 5000; ++seed) {
    ASSERT_TRUE(expect_same(text(Maker(seed).result()))) << seed;
  }
  for (const FromMember& message :
       {FromMember(Heartbeat{Epoch(4), 7, 3}), FromMember(PlacementReady{Epoch(4)}), FromMember(Leaving{}),
        FromMember(PeerTrouble{Incarnation(5), "x"}), FromMember(ExpertLoad{{{2, 7}, {9, 1}}})}) {
    EXPECT_TRUE(expect_same(text(message)));
  }
}

// Damage, most of it to results of the plain form: whatever comes out is what protobuf makes of it.
TEST(SessionWireTest, DamagedResultsAreReadOrRefusedAsByProtobuf) {
  google::protobuf::LogSilencer silence;
  int taken = 0, refused = 0;
  for (uint64_t seed = 0; seed < 30'000; ++seed) {
    Maker make(seed);
    StepResult result = make.result();
    result.failures.clear();
    result.prompt_logprobs.clear();
    std::string bytes = text(result);
    for (uint32_t n = 1 + make.below(3); n > 0 && !bytes.empty(); --n) {
      const size_t at = make.below(static_cast<uint32_t>(bytes.size()));
      switch (make.below(4)) {
        case 0:
          bytes[at] = static_cast<char>(make.below(256));
          break;
        case 1:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << make.below(8)));
          break;
        case 2:
          bytes.erase(at, 1 + make.below(3));
          break;
        default:
          bytes.insert(at, 1, static_cast<char>(make.below(256)));
      }
    }
    (expect_same(bytes) ? taken : refused) += 1;
    ASSERT_FALSE(::testing::Test::HasFailure()) << seed;
  }
  EXPECT_GT(taken, 1000);
  EXPECT_GT(refused, 1000);
}

// A message of protobuf's may be written in more ways than one.
TEST(SessionWireTest, OddFormsOfAResultAreReadAsByProtobuf) {
  google::protobuf::LogSilencer silence;
  const auto field = [](int number, const std::string& content) {
    return std::string(1, static_cast<char>(number << 3 | 2)) + static_cast<char>(content.size()) + content;
  };
  const auto number = [](int at, const std::string& value) {
    return std::string(1, static_cast<char>(at << 3)) + value;
  };
  const std::string step = number(1, "\x05");
  const std::string row = field(1, "\x07") + field(2, "\x08") + field(3, "\x09");
  const std::string ten(9, '\xff');  // and one more byte
  int read = 0, all = 0;
  for (const std::string& content : {
           step + field(9, row),
           field(9, row) + step,
           field(9, field(3, "\x09") + field(2, "\x08") + field(1, "\x07")) + step,
           step + step + field(9, row),
           step + field(9, row) + field(9, row),     // merged: two rows
           step + field(9, row + field(1, "\x05")),  // columns of two lengths
           step + field(9, number(1, "\x07") + number(2, "\x08") + number(3, "\x09")),  // not packed
           step + field(9, row) + number(15, "\x01"),                                   // unknown
           step + field(9, row) + std::string("\xfa\x01\x01x", 4),  // unknown, of a longer tag
           step + field(9, row + field(4, "")) + field(7, ""),
           step + field(9, row + field(4, "\x06")),
           step + field(9, row + field(5, std::string(4, '\0'))),
           step + field(9, row + field(5, std::string(3, '\0'))),
           step + field(9, row + field(5, std::string("\0\0\xc0\x7f", 4))),  // no number
           number(1, std::string("\x85\x80\x00", 3)) + field(9, row),        // longer than need be
           number(1, ten + "\x01") + field(9, row),
           number(1, ten + "\x02") + field(9, row),
           number(1, ten + "\xff") + field(9, row),
           step + number(4, ten + "\x01") + field(9, row),  // negative
           step + number(4, std::string(8, '\xff') + "\x7f"),
           step + field(7, "\x01\x02\x03"),
           step + field(7, std::string("\x01\x00", 2)),
           step + field(7, "\x01\x82"),
           step + field(9, field(1, ten + "\x01") + field(2, "\x08") + field(3, "\x09")),
           step + field(9, field(1, "\x07") + field(2, "\x88\x80\x80\x80\x10") + field(3, "\x09")),
           step + field(1, row),
           step + number(9, "\x01"),
           step + std::string("\x4a\x7f\x01", 3),
           number(0, "\x01") + step,
           field(9, row),
           step,
           std::string(),
       }) {
    for (const std::string& after : {std::string(), std::string("\x1a\x00", 2), std::string("\x2a\x00", 2),
                                     std::string("\x1a"), std::string("\x00", 1)}) {
      read += expect_same(field(3, content) + after);
      ++all;
    }
    expect_same(content);
    for (size_t cut = 0; cut < content.size(); ++cut) expect_same(field(3, content).substr(0, cut));
  }
  EXPECT_GT(read, 20);
  EXPECT_GT(all - read, 50);
}

// What a round gives a gateway in one message arrives as the events it was made of.
TEST(SessionWireTest, TokenBatchesKeepEveryEvent) {
  TokenBatch batch;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Maker make(seed);
    const bool choices = make.r.chance(0.3);
    const bool ends = make.r.chance(0.7);
    std::vector<TokenEvent> events(1 + make.below(make.r.chance(0.1) ? TokenBatch::kMaxTokens : 5));
    pb::GatewayDown expected;
    for (TokenEvent& event : events) {
      event = make.token(choices, ends);
      ASSERT_FALSE(batch.full());
      ASSERT_TRUE(batch.add(event));
      expected.mutable_token_batch()->add_id_hi(event.request.hi);
      expected.mutable_token_batch()->add_id_lo(event.request.lo);
      expected.mutable_token_batch()->add_index(event.index);
      expected.mutable_token_batch()->add_token(event.tokens[0]);
    }
    EXPECT_EQ(batch.full(), events.size() == TokenBatch::kMaxTokens);
    std::string bytes;
    batch.flush(into(bytes));
    EXPECT_TRUE(batch.empty());

    bool chosen = false, finished = false;
    for (const TokenEvent& event : events) {
      chosen = chosen || event.choice != 0;
      finished = finished || event.finish != FinishReason::kNone;
    }
    for (const TokenEvent& event : events) {  // columns of zeros are left out
      if (chosen) expected.mutable_token_batch()->add_choice(event.choice);
      if (finished) expected.mutable_token_batch()->add_finish(static_cast<pb::FinishReason>(event.finish));
    }
    ASSERT_EQ(bytes, expected.SerializeAsString()) << seed;

    pb::GatewayDown parsed;
    ASSERT_TRUE(parsed.ParseFromString(bytes));
    const auto back = from_proto(parsed.token_batch());
    ASSERT_TRUE(back.ok()) << back.status();
    ASSERT_EQ(back->size(), events.size());
    for (size_t i = 0; i < events.size(); ++i) {
      EXPECT_EQ((*back)[i].request, events[i].request);
      EXPECT_EQ((*back)[i].choice, events[i].choice);
      EXPECT_EQ((*back)[i].index, events[i].index);
      EXPECT_EQ((*back)[i].tokens, events[i].tokens);
      EXPECT_EQ((*back)[i].finish, events[i].finish);
    }
  }
}

TEST(SessionWireTest, TokenBatchesTakeNothingRicherAndNoMoreThanTheirBound) {
  TokenBatch batch;
  TokenEvent event;
  event.request = {1, 1};
  EXPECT_FALSE(batch.add(event));
  event.tokens = {1, 2};
  EXPECT_FALSE(batch.add(event));
  event.tokens = {1};
  for (const auto edit : std::initializer_list<void (*)(TokenEvent&)>{
           [](TokenEvent& e) { e.logprobs = {-1}; }, [](TokenEvent& e) { e.top_logprobs.resize(1); },
           [](TokenEvent& e) { e.error = "x"; }, [](TokenEvent& e) { e.prompt_logprobs.resize(1); },
           [](TokenEvent& e) { e.cached_tokens = 0; }}) {
    TokenEvent more = event;
    edit(more);
    EXPECT_FALSE(batch.add(more));
  }
  EXPECT_TRUE(batch.empty());
  for (size_t i = 0; i < TokenBatch::kMaxTokens; ++i) {
    EXPECT_FALSE(batch.full());
    EXPECT_TRUE(batch.add(event));
  }
  EXPECT_TRUE(batch.full());
  EXPECT_DEATH(batch.add(event), "full");
}

}  // namespace
}  // namespace conclave::rpc
