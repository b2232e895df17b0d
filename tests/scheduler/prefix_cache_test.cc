// Pages shared between requests: what is computed once, who may share, and what never may be.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

AcceptedRequest like(const AcceptedRequest& first, uint64_t id, uint32_t more = 0) {
  AcceptedRequest r = first;
  r.id = RequestId{1, id};
  for (uint32_t i = 0; i < more; ++i) r.prompt.push_back(static_cast<TokenId>(500 + i));
  return r;
}

struct Prefix : testing::Test {
  uint64_t prefilled(const AcceptedRequest& r) {
    const uint64_t before = h.core.metrics().prefill_tokens;
    h.submit(r);
    h.run_all();
    EXPECT_EQ(h.tokens(r.id.lo), oracle_answer(r)) << "request " << r.id.lo;
    EXPECT_EQ(h.workers[h.worker].model.breach(), "");
    EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();
    return h.core.metrics().prefill_tokens - before;
  }
  Harness h;
};

TEST_F(Prefix, WhatBeginsAlikeIsComputedOnceAndTheLastTokenAlways) {
  h.make_ready();
  const AcceptedRequest first = Harness::request(1, 40, 3);
  EXPECT_EQ(prefilled(first), 40u);
  EXPECT_EQ(prefilled(like(first, 2)), 8u);       // two full pages
  EXPECT_EQ(prefilled(like(first, 3, 30)), 38u);  // the same two pages
  const AcceptedRequest whole = Harness::request(4, 32, 2);
  EXPECT_EQ(prefilled(whole), 32u);
  EXPECT_EQ(prefilled(like(whole, 5)), 16u);  // its second page would leave nothing to compute
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
  EXPECT_GT(h.core.metrics().kv_blocks_cached, 0u);
}

TEST_F(Prefix, TheGatewayIsToldOnceHowMuchOfAPromptWasCached) {
  h.make_ready();
  const AcceptedRequest first = Harness::request(1, 40, 3);
  AcceptedRequest many = like(first, 3);
  many.choices = 3;
  AcceptedRequest fresh = Harness::request(4, 50, 3);
  fresh.choices = 3;  // its second choice may find what its first has computed; the prompt counts once
  const std::vector<std::pair<AcceptedRequest, uint32_t>> cases = {
      {first, 0}, {like(first, 2), 32}, {many, 32}, {fresh, 0}};
  for (const auto& [request, cached] : cases) {
    h.gateways[h.gateway].events.clear();
    h.submit(request);
    h.run_all();
    std::vector<uint32_t> told;
    const std::vector<TokenEvent>& events = h.gateways[h.gateway].events;
    ASSERT_FALSE(events.empty());
    for (const TokenEvent& event : events)
      if (event.cached_tokens) told.push_back(*event.cached_tokens);
    EXPECT_EQ(told, std::vector<uint32_t>{cached}) << "request " << request.id.lo;
    EXPECT_TRUE(events[0].cached_tokens.has_value()) << "it comes with the first tokens";
  }
}

TEST_F(Prefix, AConversationGoesOnFromItsAnswer) {
  h.make_ready();
  const AcceptedRequest first = Harness::request(1, 20, 30);
  prefilled(first);
  AcceptedRequest next = first;
  next.id = RequestId{1, 2};
  const std::vector<TokenId> said = oracle_answer(first);
  next.prompt.insert(next.prompt.end(), said.begin(), said.end());
  for (TokenId i = 0; i < 5; ++i) next.prompt.push_back(i);
  // 20 + 30 tokens were known and 49 of them computed: three pages.
  EXPECT_EQ(prefilled(next), next.prompt.size() - 48);
}

TEST_F(Prefix, AnotherSaltOrTenantSharesNothing) {
  h.make_ready();
  const AcceptedRequest first = Harness::request(1, 40, 3);
  prefilled(first);
  AcceptedRequest salted = like(first, 2);
  salted.cache_salt = "x";
  EXPECT_EQ(prefilled(salted), 40u);
  AcceptedRequest tenant = like(first, 3);
  tenant.tenant = "x";
  EXPECT_EQ(prefilled(tenant), 40u);
  // Names must not run into each other.
  AcceptedRequest both = like(first, 4);
  both.tenant = "a";
  both.cache_salt = "b";
  EXPECT_EQ(prefilled(both), 40u);
  AcceptedRequest joined = like(first, 5);
  joined.tenant = "ab";
  EXPECT_EQ(prefilled(joined), 40u);
}

TEST_F(Prefix, PromptLogprobsComputeEveryPosition) {
  h.make_ready();
  const AcceptedRequest first = Harness::request(1, 40, 3);
  prefilled(first);
  AcceptedRequest asks = like(first, 2);
  asks.sampling.prompt_logprobs = true;
  h.submit(asks);
  ASSERT_FALSE(h.workers[h.worker].plans.empty());
  EXPECT_EQ(h.workers[h.worker].plans.front().slices.front().start, 0u);
}

TEST_F(Prefix, PagesOfAStepThatIsNotReportedAreNotShared) {
  h.options.prefill_chunk_tokens = 16;
  Harness fresh(h.options);
  fresh.make_ready();
  const AcceptedRequest first = Harness::request(1, 64, 2);
  fresh.submit(first);
  fresh.step(fresh.worker);  // one page reported; another is in flight
  fresh.submit(like(first, 2));
  fresh.run_all();
  EXPECT_EQ(fresh.tokens(2), oracle_answer(first));
  EXPECT_EQ(fresh.workers[fresh.worker].model.breach(), "");
}

TEST_F(Prefix, CachedPagesAreGivenUpWhenRoomIsNeededAndNeverBeforeOnesInUse) {
  h.make_ready();  // 64 pages
  for (uint64_t id = 1; id <= 12; ++id) prefilled(Harness::request(100 + id, 200, 8));
  EXPECT_GT(h.core.metrics().kv_evictions, 0u);
  const SchedulerMetrics m = h.core.metrics();
  EXPECT_LE(m.kv_blocks_cached, 64u);
  EXPECT_EQ(prefilled(like(Harness::request(112, 200, 8), 200)), 200u - 192u);
}

// Its keys and values are not those of its tokens: whoever sends the same tokens must not find them.
TEST_F(Prefix, WhatAWarmUpComputedIsNeverShared) {
  h.make_ready();
  AcceptedRequest warm_up = Harness::request(1, 40, 3);
  warm_up.sampling.every_expert = true;
  EXPECT_EQ(prefilled(warm_up), 40u);
  AcceptedRequest same = like(warm_up, 2);
  same.sampling.every_expert = false;
  EXPECT_EQ(prefilled(same), 40u);
  EXPECT_EQ(prefilled(like(warm_up, 3)), 40u) << "nor does it leave anything out that it should go through";
  EXPECT_EQ(prefilled(like(same, 4)), 8u);
}

TEST_F(Prefix, SwitchedOffNothingIsKept) {
  h.options.prefix_cache = false;
  Harness off(h.options);
  off.make_ready();
  for (uint64_t id : {1, 2}) {
    off.submit(like(Harness::request(1, 40, 3), id));
    off.run_all();
  }
  EXPECT_EQ(off.core.metrics().prefill_tokens, 80u);
  EXPECT_EQ(off.core.metrics().kv_blocks_cached, 0u);
}

TEST_F(Prefix, ARequestGoesWhereItsPrefixIs) {
  h.make_ready();
  h.join_worker(102);
  const AcceptedRequest first = Harness::request(1, 100, 3);
  h.submit(first);
  h.run_all();
  const uint64_t before = h.core.metrics().prefill_tokens;
  for (uint64_t id = 2; id < 8; ++id) {
    h.submit(like(first, id, 4));
    h.run_all();
  }
  EXPECT_EQ(h.core.metrics().prefill_tokens - before, 6u * (104 - 96));
}

TEST(PrefixFaults, SharingAcrossSaltsIsSeen) {
  PlantedFaults faults;
  faults.share_any_salt = true;
  Harness h({}, faults);
  h.make_ready();
  AcceptedRequest first = Harness::request(1, 40, 3);
  h.submit(first);
  h.run_all();
  first.id = RequestId{1, 2};
  first.cache_salt = "x";
  h.submit(first);
  h.run_all();
  EXPECT_LT(h.core.metrics().prefill_tokens, 80u);  // what AnotherSaltOrTenantSharesNothing forbids
}

}  // namespace
}  // namespace conclave::scheduler
