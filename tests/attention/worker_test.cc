#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>

#include "tests/attention/worker_fixture.h"

namespace conclave {
namespace {

TEST_F(WorkerTest, ChunkedPrefillAndDecodeInABatchGiveTheTokensOfALoneRun) {
  make();
  const auto want = alone(1, prompt, 3);
  BatchPlan p;
  p.starts = {sequence(2, prompt), sequence(3, {1, 2, 3})};
  p.slices = {{SeqId(3), 0, 3, true, {40}}, {SeqId(2), 0, 7, false, {30}}};
  plan(p);
  p = {};
  p.slices = {{SeqId(2), 7, 11, true, {31}}, {SeqId(3), 3, 1, true, {}}};
  plan(p);
  p = {};
  p.slices = {{SeqId(3), 4, 1, true, {}}, {SeqId(2), 18, 1, true, {}}};
  plan(p);
  p = {};
  p.slices = {{SeqId(2), 19, 1, true, {}}};
  plan(p);
  run();
  std::vector<TokenId> got;
  std::vector<uint32_t> positions;
  for (const auto& r : link.all<StepResult>()) {
    for (const auto& s : r.sampled) {
      if (s.seq != SeqId(2)) continue;
      got.push_back(s.token);
      positions.push_back(s.position);
    }
  }
  EXPECT_EQ(got, want);
  EXPECT_EQ(positions, (std::vector<uint32_t>{18, 19, 20}));
}

TEST_F(WorkerTest, MicroBatchesInFlightChangeNothing) {
  options.micro_batches = 3;
  options.micro_batch_min_rows = 2;
  make();
  const auto want = alone(1, prompt, 4);  // the prompt itself is cut into three
  options.micro_batches = 1;
  worker.reset();
  make();
  EXPECT_EQ(alone(1, prompt, 4), want);
}

TEST_F(WorkerTest, AttentionOfOneMicroBatchOverlapsExpertsOfAnother) {
  options.micro_batches = 2;
  options.micro_batch_min_rows = 2;
  make();
  BatchPlan p;
  p.starts = {sequence(1, {1, 2}), sequence(2, {3, 4})};
  p.slices = {{SeqId(1), 0, 2, true, {0}}, {SeqId(2), 0, 2, true, {1}}};
  plan(p);
  settle();
  std::map<uint32_t, int> layers;
  for (const auto& [peer, d] : transport.submits) layers[d.layer] += static_cast<int>(d.row_count());
  EXPECT_GE(layers[0], 4) << "both micro-batches have asked before either is answered";
  run();
  EXPECT_EQ(last().sampled.size(), 2u);
}

TEST_F(WorkerTest, FinishReasons) {
  make();
  const auto want = alone(1, prompt, 4);
  const auto length = static_cast<uint32_t>(prompt.size());
  const auto finish = [&](uint64_t seq, SequenceStart start, uint32_t steps) {
    BatchPlan p;
    p.starts = {std::move(start)};
    p.slices = {{SeqId(seq), 0, length, true, {8, 9}}};
    plan(p);
    for (uint32_t i = 1; i < steps; ++i) {
      p = {};
      p.slices = {{SeqId(seq), length + i - 1, 1, true, {}}};
      plan(p);
    }
    run();
    std::vector<std::pair<TokenId, FinishReason>> out;
    for (const auto& r : link.all<StepResult>()) {
      for (const auto& s : r.sampled) {
        if (s.seq == SeqId(seq)) out.emplace_back(s.token, s.finish);
      }
    }
    return out;
  };
  auto start = sequence(2, prompt, 2);
  auto got = finish(2, start, 4);
  ASSERT_EQ(got.size(), 2u) << "slices past the end are skipped";
  EXPECT_EQ(got[1], std::make_pair(want[1], FinishReason::kLength));

  start = sequence(3, prompt);
  start.sampling.stop_token_ids = {want[1]};
  got = finish(3, start, 4);
  const size_t stops_at = want[0] == want[1] ? 1 : 2;
  ASSERT_EQ(got.size(), stops_at);
  EXPECT_EQ(got.back(), std::make_pair(want[1], FinishReason::kStop));

  // ignore_eos drops the checkpoint's own ids at the gateway; those that are here still count.
  start.seq = SeqId(4);
  start.sampling.ignore_eos = true;
  got = finish(4, start, 4);
  ASSERT_EQ(got.size(), stops_at);
  EXPECT_EQ(got.back(), std::make_pair(want[1], FinishReason::kStop));

  start.seq = SeqId(5);
  start.sampling.ignore_eos = false;
  start.sampling.min_tokens = 3;
  got = finish(5, start, 3);
  ASSERT_EQ(got.size(), 3u) << "no stop token before min_tokens";
  for (const auto& [token, reason] : got) EXPECT_NE(token, want[1]);

  // Delivered tokens count as generated.
  start = sequence(6, prompt, 2);
  start.prompt_tokens = length - 1;
  got = finish(6, start, 2);
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(got[0].second, FinishReason::kLength);
}

TEST_F(WorkerTest, SampledDrawsDependOnSeedChoiceAndPositionAlone) {
  make();
  const auto sampled = [&](uint64_t seq, uint64_t seed, uint32_t choice) {
    BatchPlan p;
    auto s = sequence(seq, prompt);
    s.sampling.temperature = 2.0f;
    s.sampling.seed = seed;
    s.choice = choice;
    p.starts = {s};
    p.slices = {{SeqId(seq), 0, 18, true, {0, 1}}};
    std::vector<TokenId> out;
    for (uint32_t i = 0; i < 6; ++i) {
      plan(p);
      run();
      out.push_back(last().sampled.at(0).token);
      p = {};
      p.slices = {{SeqId(seq), 18 + i, 1, true, {}}};
    }
    p = {};
    p.ends = {SeqId(seq)};
    plan(p);
    run();
    return out;
  };
  const auto a = sampled(1, 11, 0);
  EXPECT_EQ(sampled(2, 11, 0), a);
  EXPECT_NE(sampled(3, 12, 0), a);
  EXPECT_NE(sampled(4, 11, 1), a);
}

TEST_F(WorkerTest, LostAndMissedDispatchesChangeNoToken) {
  make();
  const auto want = alone(1, prompt, 1);
  BatchPlan p;
  p.starts = {sequence(2, prompt)};
  p.slices = {{SeqId(2), 0, 18, true, {8, 9}}};
  plan(p);
  settle();
  const size_t lost = transport.submits.size();
  served = lost;  // the first layer's dispatches are lost
  world.run_until([&] { return transport.submits.size() > lost; }, world.now() + kSecond);
  EXPECT_GT(transport.submits.size(), lost);
  transport.push_down(kS2);
  settle();
  served = transport.submits.size() - 1;
  place(2, {kS1});
  for (int i = 0; i < 50 && link.all<StepResult>().back().sampled.empty(); ++i) {
    run();
    world.run_until(world.now() + kSecond);
  }
  ASSERT_EQ(last().sampled.size(), 1u);
  EXPECT_EQ(last().sampled[0].token, want[0]);
  EXPECT_FALSE(link.all<PeerTrouble>().empty());
}

TEST_F(WorkerTest, AnEndedSequenceIsMaskedWhileItsStepRuns) {
  make();
  const auto want = alone(1, {1, 2, 3}, 1);
  BatchPlan p;
  p.starts = {sequence(2, prompt), sequence(3, {1, 2, 3})};
  p.slices = {{SeqId(2), 0, 18, true, {8, 9}}, {SeqId(3), 0, 3, true, {10}}};
  plan(p);
  settle();
  const size_t first_layer = transport.submits.size();
  p = {};
  p.ends = {SeqId(2)};
  plan(p);
  run();
  for (size_t i = first_layer; i < transport.submits.size(); ++i) {
    EXPECT_LE(transport.submits[i].second.row_count(), 3u) << "rows of the ended sequence still travel";
  }
  const auto results = link.all<StepResult>();
  ASSERT_GE(results.size(), 2u);
  const auto& step = results[results.size() - 2];
  ASSERT_EQ(step.sampled.size(), 1u);
  EXPECT_EQ(step.sampled[0].seq, SeqId(3));
  EXPECT_EQ(step.sampled[0].token, want[0]);
  EXPECT_TRUE(step.failures.empty());
  EXPECT_EQ(worker->metrics().masked_rows, 18u);
}

TEST_F(WorkerTest, AStepOfOneCancelledSequenceEndsWithoutItsShards) {
  make();
  place(2, {});
  BatchPlan p;
  p.starts = {sequence(2, prompt)};
  p.slices = {{SeqId(2), 0, 18, true, {8, 9}}};
  plan(p);
  settle();
  EXPECT_TRUE(link.all<StepResult>().empty()) << "no home: held";
  p = {};
  p.ends = {SeqId(2)};
  plan(p);
  settle();
  EXPECT_EQ(link.all<StepResult>().size(), 2u);
  EXPECT_EQ(worker->metrics().sequences, 0u);
}

TEST_F(WorkerTest, BadPlansFailTheirSequenceAndNoOther) {
  make();
  BatchPlan p;
  auto bad = sequence(5, prompt);
  bad.tokens[2] = 100000;
  p.starts = {sequence(2, prompt), sequence(3, {1, 2, 3}), sequence(4, {1, 2, 3}), bad};
  p.slices = {{SeqId(2), 1, 4, false, {8}},
              {SeqId(3), 0, 3, true, {999}},
              {SeqId(4), 0, 3, true, {10}},
              {SeqId(5), 0, 3, false, {11}},
              {SeqId(6), 0, 3, true, {12}}};
  plan(p);
  run();
  ASSERT_EQ(last().sampled.size(), 1u);
  EXPECT_EQ(last().sampled[0].seq, SeqId(4));
  std::map<uint64_t, std::string> causes;
  for (const auto& f : last().failures) causes[f.seq.value] += f.cause;
  EXPECT_EQ(causes.size(), 4u);
  EXPECT_NE(causes[2].find("plan.slices.start"), std::string::npos) << causes[2];
  EXPECT_NE(causes[3].find("plan.slices.new_blocks"), std::string::npos) << causes[3];
  EXPECT_NE(causes[5].find("plan.starts.tokens"), std::string::npos) << causes[5];
  EXPECT_NE(causes[6].find("unknown sequence"), std::string::npos) << causes[6];

  p = {};
  p.starts = {sequence(7, std::vector<TokenId>(65, 1))};
  p.slices = {{SeqId(7), 0, 65, true, {1, 2, 3, 4, 5}}};
  plan(p);
  run();
  ASSERT_EQ(last().failures.size(), 1u);
  EXPECT_NE(last().failures[0].cause.find("max_batch_tokens"), std::string::npos);
}

// Else it would wait for the plan that is missing, and everything on it with it.
TEST_F(WorkerTest, PlansBeyondTheBoundEndTheIncarnation) {
  options.max_queued_plans = 2;
  make();
  std::vector<std::string> reasons;
  worker->set_on_refused([&](const Refusal& refusal) { reasons.push_back(refusal.reason); });
  for (int i = 0; i < 2; ++i) plan({});
  EXPECT_TRUE(reasons.empty());
  plan({});
  ASSERT_EQ(reasons.size(), 1u);
  EXPECT_NE(reasons[0].find("max_queued_plans, 2"), std::string::npos) << reasons[0];
  EXPECT_EQ(worker->metrics().plans_dropped, 1u);
}

TEST_F(WorkerTest, PlansRunInOrderAndAreNeverSkipped) {
  make();
  next_step = 2;
  plan({});
  settle();
  EXPECT_TRUE(link.all<StepResult>().empty());
  EXPECT_EQ(worker->metrics().plans_out_of_order, 1u);
  next_step = 1;
  plan({});
  plan({});
  settle();
  ASSERT_EQ(link.all<StepResult>().size(), 2u);
  EXPECT_EQ(link.all<StepResult>()[1].step, StepId(2));
}

TEST_F(WorkerTest, ANewSchedulerConnectionStartsFromNothing) {
  make();
  const auto want = alone(1, prompt, 1);
  BatchPlan p;
  p.starts = {sequence(2, prompt)};
  p.slices = {{SeqId(2), 0, 18, true, {8, 9}}};
  plan(p);
  settle();
  const size_t results = link.all<StepResult>().size();
  worker->on_down(unavailable("scheduler gone"));
  EXPECT_FALSE(worker->ready());
  run();
  EXPECT_EQ(link.all<StepResult>().size(), results) << "nothing of the old connection is reported";
  welcome();
  EXPECT_EQ(worker->epoch(), Epoch());
  place(1, {kS2});  // epochs start over
  EXPECT_EQ(worker->epoch(), Epoch(1));
  EXPECT_EQ(worker->metrics().sequences, 0u);
  EXPECT_EQ(alone(2, prompt, 1), want);
}

TEST_F(WorkerTest, ObserverSeesEveryPosition) {
  std::map<uint32_t, std::vector<float>> seen;
  options.logits_observer = [&](RequestId, uint32_t position, std::span<const float> logits) {
    seen[position].assign(logits.begin(), logits.end());
  };
  options.max_logit_rows = 4;
  make();
  const auto tokens = alone(1, prompt, 1);
  ASSERT_EQ(seen.size(), prompt.size());
  const auto& row = seen[17];
  EXPECT_EQ(row.size(), model.spec.vocab_size);
  EXPECT_EQ(std::max_element(row.begin(), row.end()) - row.begin(), tokens[0]);
}

// --- penalties, bias, prompt log-probabilities

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

class WorkerSamplingTest : public WorkerTest {
 protected:
  // Runs a sequence to its end and forgets it: what was sampled, and its prompt's log-probabilities.
  std::vector<SampledToken> generate(SequenceStart start, uint32_t chunk = 64) {
    const auto known = static_cast<uint32_t>(start.tokens.size());
    const uint32_t steps = start.sampling.max_tokens - (known - start.prompt_tokens);
    const SeqId seq = start.seq;
    BatchPlan p;
    p.starts = {std::move(start)};
    std::vector<SampledToken> out;
    prompt_rows.clear();
    failure.clear();
    const auto step = [&] {
      plan(p);
      run();
      p = {};
      for (const SampledToken& token : last().sampled) out.push_back(token);
      for (const PromptLogprobs& piece : last().prompt_logprobs) {
        if (prompt_rows.empty()) prompt_start = piece.start;
        EXPECT_EQ(piece.start, prompt_start + prompt_rows.size());
        prompt_rows.insert(prompt_rows.end(), piece.tokens.begin(), piece.tokens.end());
      }
      for (const auto& f : last().failures) failure = f.cause;
    };
    for (uint32_t at = 0; at < known; at += chunk) {
      const uint32_t count = std::min(chunk, known - at);
      PlanSlice slice{seq, at, count, at + count == known, {}};
      for (uint32_t b = (at + 15) / 16; b < (at + count + 15) / 16; ++b) slice.new_blocks.push_back(b);
      p.slices = {slice};
      step();
    }
    for (uint32_t i = 0; i + 1 < steps; ++i) {
      const uint32_t at = known + i;
      p.slices = {{seq, at, 1, true, {}}};
      if (at % 16 == 0) p.slices[0].new_blocks = {at / 16};
      step();
    }
    p.ends = {seq};
    step();
    return out;
  }
  static std::vector<TokenId> tokens_of(const std::vector<SampledToken>& sampled) {
    std::vector<TokenId> out;
    for (const SampledToken& s : sampled) out.push_back(s.token);
    return out;
  }

  std::vector<PromptLogprob> prompt_rows;
  uint32_t prompt_start = 0;
  std::string failure;
};

TEST_F(WorkerSamplingTest, PenaltiesActOnGreedyTooAndAReplayGivesTheSameTokens) {
  make();
  const auto plain = tokens_of(generate(sequence(1, prompt, 9)));
  uint64_t seq = 2;
  size_t changed = 0;
  for (const float temperature : {0.0f, 1.0f}) {
    for (int kind = kSanitized ? 3 : 0; kind < 4; ++kind) {
      SequenceStart start = sequence(seq++, prompt, 9);
      start.sampling.temperature = temperature;
      start.sampling.seed = 5;
      if (kind == 0 || kind == 3) start.sampling.repetition_penalty = 1.5f;
      if (kind == 1 || kind == 3) start.sampling.presence_penalty = 1.0f;
      if (kind == 2 || kind == 3) start.sampling.frequency_penalty = 1.0f;
      const auto want = tokens_of(generate(start));
      ASSERT_EQ(want.size(), 9u);
      changed += temperature == 0 && want != plain;
      for (const uint32_t delivered : {1u, 8u}) {
        SequenceStart replay = start;
        replay.seq = SeqId(seq++);
        replay.tokens.insert(replay.tokens.end(), want.begin(), want.begin() + delivered);
        const auto rest = tokens_of(generate(replay));
        EXPECT_TRUE(std::equal(rest.begin(), rest.end(), want.begin() + delivered, want.end()))
            << "kind " << kind << ", " << delivered << " delivered";
      }
    }
  }
  EXPECT_GT(changed, 0u);
}

TEST_F(WorkerSamplingTest, ABiasForcesOrForbidsAndLogprobsStayThoseOfTheModel) {
  make();
  SequenceStart start = sequence(1, prompt, 3);
  start.sampling.top_logprobs = 2;
  const auto plain = generate(start);
  start = sequence(2, prompt, 3);
  start.sampling.top_logprobs = 2;
  start.sampling.logit_bias = {{42, 1e9f}};
  const auto forced = generate(start);
  EXPECT_EQ(tokens_of(forced), (std::vector<TokenId>{42, 42, 42}));
  EXPECT_EQ(forced[0].top_logprobs[0].token, plain[0].top_logprobs[0].token);
  EXPECT_EQ(forced[0].top_logprobs[0].logprob, plain[0].top_logprobs[0].logprob);
  EXPECT_LT(forced[0].logprob, plain[0].logprob);
  start = sequence(3, prompt, 3);
  start.sampling.logit_bias = {{plain[0].token, -std::numeric_limits<float>::infinity()}};
  for (const SampledToken& s : generate(start)) EXPECT_NE(s.token, plain[0].token);
}

TEST_F(WorkerSamplingTest, WhenEveryTokenIsForbiddenTheSequenceFailsWithThatCause) {
  make();
  SequenceStart start = sequence(1, prompt, 1);
  for (TokenId t = 0; t < model.spec.vocab_size; ++t) {
    start.sampling.logit_bias.push_back({t, -std::numeric_limits<float>::infinity()});
  }
  EXPECT_TRUE(generate(start).empty());
  EXPECT_NE(failure.find("every token is forbidden"), std::string::npos) << failure;
  const auto fine = generate(sequence(2, prompt, 2));  // and no other
  EXPECT_EQ(fine.size(), 2u);
}

TEST_F(WorkerSamplingTest, PromptLogprobsAreThoseOfTheLogitsHoweverThePromptIsCut) {
  std::map<uint32_t, std::vector<float>> seen;
  options.logits_observer = [&](RequestId, uint32_t position, std::span<const float> logits) {
    seen[position].assign(logits.begin(), logits.end());
  };
  options.max_logit_rows = 5;
  options.micro_batch_min_rows = 4;
  make();
  std::vector<TokenId> text = prompt;
  for (TokenId t = 0; t < 30; ++t) text.push_back((t * 13 + 5) % model.spec.vocab_size);
  std::vector<PromptLogprob> first;
  uint64_t seq = 1;
  for (const uint32_t chunk : {64u, 7u, 1u, 16u, 33u}) {
    if (kSanitized && seq > 2) break;
    SequenceStart start = sequence(seq++, text, 2);
    start.sampling.prompt_logprobs = true;
    start.sampling.prompt_top_logprobs = 3;
    EXPECT_EQ(generate(start, chunk).size(), 2u);
    ASSERT_EQ(prompt_rows.size(), text.size() - 1);
    EXPECT_EQ(prompt_start, 1u);
    if (first.empty()) first = prompt_rows;
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_EQ(prompt_rows[i].logprob, first[i].logprob) << i << ", chunk " << chunk;
      ASSERT_EQ(prompt_rows[i].top.size(), 3u);
      for (size_t k = 0; k < 3; ++k) {
        EXPECT_EQ(prompt_rows[i].top[k].token, first[i].top[k].token);
        EXPECT_EQ(prompt_rows[i].top[k].logprob, first[i].top[k].logprob);
      }
    }
  }
  for (size_t i = 0; i < first.size(); ++i) {
    const std::vector<float>& row = seen.at(static_cast<uint32_t>(i));
    double sum = 0;
    for (const float x : row) sum += std::exp(static_cast<double>(x));
    EXPECT_NEAR(first[i].logprob, row[text[i + 1]] - std::log(sum), 2e-5) << i;
    EXPECT_EQ(first[i].top[0].token, std::max_element(row.begin(), row.end()) - row.begin());
  }
  // A later sequence of the request reports only what is missing.
  SequenceStart start = sequence(seq++, text, 2);
  start.sampling.prompt_logprobs = true;
  start.prompt_logprobs_from = 40;
  generate(start, 16);
  EXPECT_EQ(prompt_start, 40u);
  ASSERT_EQ(prompt_rows.size(), text.size() - 40);
  EXPECT_EQ(prompt_rows[0].logprob, first[39].logprob);
}

TEST_F(WorkerTest, ReadsItsWeightsBitByBitAndSaysHowFarItIs) {
  const WeightWarmer all(model.dense);
  ASSERT_GT(all.total(), 100'000u);
  WeightWarmer warmer(model.dense);
  EXPECT_EQ(warmer.permille(), 0u);
  uint32_t last = 0;
  uint64_t covered = 0;
  while (!warmer.done()) {
    const uint64_t more = warmer.warm(40'000);
    EXPECT_LE(more, 40'000u);
    covered += more;
    EXPECT_GE(warmer.permille(), last);
    last = warmer.permille();
    EXPECT_EQ(last == 1000, warmer.done());
  }
  EXPECT_EQ(covered, all.total());
  options.warm_slice_bytes = 40'000;
  make();
  settle();
  EXPECT_EQ(worker->heartbeat().loaded_permille, 1000u);
  EXPECT_EQ(worker->metrics().weight_bytes_warmed, all.total());
}

TEST_F(WorkerTest, WhatAPlanThatWaitsEndsIsReportedAsReleasedWithTheRunningStep) {
  make();
  BatchPlan p;
  p.starts = {sequence(2, prompt), sequence(3, {1, 2, 3})};
  p.slices = {{SeqId(2), 0, 18, true, {8, 9}}, {SeqId(3), 0, 3, true, {10}}};
  plan(p);
  settle();
  BatchPlan decode;
  decode.slices = {{SeqId(2), 18, 1, true, {}}, {SeqId(3), 3, 1, true, {}}};
  plan(decode);
  p = {};
  p.ends = {SeqId(2)};
  plan(p);
  run();
  const auto results = link.all<StepResult>();
  ASSERT_EQ(results.size(), 3u);
  EXPECT_EQ(results[0].released, std::vector<SeqId>{SeqId(2)});
  EXPECT_TRUE(results[1].released.empty());
  ASSERT_EQ(results[1].sampled.size(), 1u);
  EXPECT_EQ(results[1].sampled[0].seq, SeqId(3));
  EXPECT_TRUE(results[2].released.empty());
}

}  // namespace
}  // namespace conclave
