#include "scheduler/core/kv_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <utility>

#include "libs/base/random.h"

namespace conclave::scheduler {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<TokenId> pages_of(std::initializer_list<TokenId> firsts) {
  std::vector<TokenId> tokens;
  for (const TokenId first : firsts)
    for (TokenId i = 0; i < kBlockTokens; ++i) tokens.push_back(first + i);
  return tokens;
}

// A sequence as the planner keeps one: its table, and how many of its pages are shareable.
struct Sequence {
  std::string salt;
  std::vector<TokenId> tokens;
  std::vector<BlockId> table;
  uint32_t shared = 0;  // leading pages that are shareable
  bool own = false;     // a page met its equal: what follows stays its own

  void publish_next(KvCache& cache) {
    if (own || shared == table.size()) return;
    KvCache::PageTokens page;
    std::copy_n(tokens.begin() + shared * kBlockTokens, kBlockTokens, page.begin());
    std::optional<BlockId> parent;
    if (shared > 0) parent = table.at(shared - 1);
    if (cache.publish(table[shared], parent, salt, page))
      ++shared;
    else
      own = true;
  }
};

// Runs whole tokens through the cache: what was cached, what had to be computed.
Sequence run(KvCache& cache, const std::string& salt, std::vector<TokenId> tokens) {
  Sequence seq{salt, std::move(tokens), {}, 0, false};
  seq.table = cache.match(salt, seq.tokens);
  seq.shared = static_cast<uint32_t>(seq.table.size());
  const uint32_t pages = static_cast<uint32_t>(seq.tokens.size() / kBlockTokens);
  EXPECT_TRUE(cache.admit(seq.table, pages - seq.shared));
  while (seq.table.size() < pages) seq.table.push_back(cache.take());
  while (seq.shared < pages && !seq.own) seq.publish_next(cache);
  EXPECT_TRUE(cache.audit().ok()) << cache.audit();
  return seq;
}

TEST(KvCacheTest, AReleasedPrefixIsFoundAgainAndCostsNothingNew) {
  KvCache cache(8);
  Sequence first = run(cache, "", pages_of({100, 200, 300}));
  EXPECT_EQ(cache.used(), 3u);
  cache.release(first.table);
  EXPECT_EQ(cache.used(), 0u);
  EXPECT_EQ(cache.cached(), 3u);
  EXPECT_EQ(cache.available(), 8u);
  EXPECT_EQ(cache.match("", pages_of({100, 200, 300, 400})), first.table);
  Sequence second = run(cache, "", pages_of({100, 200, 300, 400}));
  EXPECT_EQ(cache.used(), 4u);
  EXPECT_EQ(cache.free(), 4u);
  EXPECT_THAT(std::vector(second.table.begin(), second.table.begin() + 3),
              testing::ElementsAreArray(first.table));
}

TEST(KvCacheTest, MatchesWholePagesOfThisSaltOnly) {
  KvCache cache(8);
  Sequence seq = run(cache, "a", pages_of({100, 200}));
  EXPECT_THAT(cache.match("b", seq.tokens), IsEmpty());
  EXPECT_THAT(cache.match("", seq.tokens), IsEmpty());
  std::vector<TokenId> tokens = seq.tokens;
  tokens.pop_back();
  EXPECT_THAT(cache.match("a", tokens), ElementsAre(seq.table.at(0)));
  tokens[3] ^= 1;
  EXPECT_THAT(cache.match("a", tokens), IsEmpty());
  // The second page alone is another prefix.
  EXPECT_THAT(cache.match("a", pages_of({200})), IsEmpty());
}

TEST(KvCacheTest, AnEqualPageStaysItsOwnersAndIsFreedWithIt) {
  KvCache cache(8);
  Sequence first = run(cache, "", pages_of({100}));
  ASSERT_TRUE(cache.admit({}, 1));
  Sequence twin{"", first.tokens, std::vector<BlockId>(1, cache.take()), 0, false};
  twin.publish_next(cache);
  EXPECT_TRUE(twin.own);
  cache.release(twin.table);
  EXPECT_EQ(cache.free(), 7u);
  cache.release(first.table);
  EXPECT_EQ(cache.cached(), 1u);
}

TEST(KvCacheTest, GivesUpLeavesFirstAndTheLeastRecentlyUsedOfThem) {
  KvCache cache(4);
  Sequence old = run(cache, "", pages_of({100, 200}));
  cache.release(old.table);
  Sequence recent = run(cache, "", pages_of({300, 400}));
  cache.release(recent.table);
  EXPECT_EQ(cache.cached(), 4u);
  ASSERT_TRUE(cache.admit({}, 3));
  EXPECT_EQ(cache.take(), old.table[1]);
  EXPECT_EQ(cache.take(), old.table[0]);
  EXPECT_EQ(cache.take(), recent.table[1]);
  EXPECT_EQ(cache.evictions(), 3u);
  EXPECT_THAT(cache.match("", recent.tokens), ElementsAre(recent.table[0]));
  EXPECT_TRUE(cache.audit().ok()) << cache.audit();
}

TEST(KvCacheTest, CachedPagesInUseCountAgainstWhatIsAvailable) {
  KvCache cache(4);
  Sequence seq = run(cache, "", pages_of({100, 200, 300}));
  cache.release(seq.table);
  const auto match = cache.match("", seq.tokens);
  EXPECT_EQ(cache.cached_among(match), 3u);
  EXPECT_FALSE(cache.admit(match, 2));
  EXPECT_EQ(cache.cached(), 3u);  // nothing changed
  EXPECT_TRUE(cache.admit(match, 1));
  EXPECT_EQ(cache.available(), 0u);
  EXPECT_TRUE(cache.admit(match, 0));  // shared: costs nothing
  EXPECT_FALSE(cache.admit({}, 1));
}

TEST(KvCacheDeathTest, ReleasingTwiceIsOurBug) {
  KvCache cache(2);
  ASSERT_TRUE(cache.admit({}, 1));
  const BlockId block = cache.take();
  cache.release({&block, 1});
  EXPECT_DEATH(cache.release({&block, 1}), "");
}

// Random sequences against a plain model: what each page holds, recomputed from the sequences' own tokens.
TEST(KvCacheTest, RandomUseServesOnlyTheRightPagesAndLosesNone) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SplitMix64 random(seed);
    const uint32_t total = 4 + random.next() % 30;
    KvCache cache(total);
    std::vector<Sequence> live;
    std::vector<std::vector<TokenId>> content(total);  // the whole prefix that a page ends, salt first
    for (int event = 0; event < 400; ++event) {
      const uint64_t what = random.next() % 8;
      if (what < 4) {  // a new sequence over few distinct pages, so that prefixes meet
        Sequence seq;
        seq.salt = random.next() % 4 == 0 ? "s" : "";
        const uint32_t pages = 1 + random.next() % 5;
        for (uint32_t p = 0; p < pages; ++p)
          for (TokenId t : pages_of({static_cast<TokenId>(100 * (random.next() % 3))}))
            seq.tokens.push_back(t);
        seq.table = cache.match(seq.salt, seq.tokens);
        for (uint32_t p = 0; p < seq.table.size(); ++p) {
          std::vector<TokenId> want(seq.tokens.begin(), seq.tokens.begin() + (p + 1) * kBlockTokens);
          want.push_back(seq.salt.empty() ? 0 : 1);
          ASSERT_EQ(content[seq.table[p]], want) << "seed " << seed;
        }
        seq.shared = static_cast<uint32_t>(seq.table.size());
        const uint32_t available = cache.available(), more = pages - seq.shared;
        const bool fits = cache.cached_among(seq.table) + more <= available;
        ASSERT_EQ(cache.admit(seq.table, more), fits);
        if (fits) live.push_back(std::move(seq));
      } else if (!live.empty()) {
        const size_t at = random.next() % live.size();
        Sequence& seq = live[at];
        const uint32_t pages = static_cast<uint32_t>(seq.tokens.size() / kBlockTokens);
        if (what < 6 && seq.table.size() < pages) {
          const BlockId block = cache.take();
          for (const Sequence& other : live)
            for (const BlockId b : other.table) ASSERT_NE(b, block) << "seed " << seed;
          seq.table.push_back(block);
          std::vector<TokenId> prefix(seq.tokens.begin(),
                                      seq.tokens.begin() + seq.table.size() * kBlockTokens);
          prefix.push_back(seq.salt.empty() ? 0 : 1);
          content[block] = prefix;
        } else if (what < 7) {
          seq.publish_next(cache);
        } else {
          cache.give_up_promise(pages - static_cast<uint32_t>(seq.table.size()));
          cache.release(seq.table);
          live.erase(live.begin() + static_cast<ptrdiff_t>(at));
        }
      }
      std::set<BlockId> used;
      for (const Sequence& seq : live) used.insert(seq.table.begin(), seq.table.end());
      ASSERT_EQ(cache.used(), used.size()) << "seed " << seed;
      ASSERT_EQ(cache.free() + cache.cached() + cache.used(), total);
      ASSERT_TRUE(cache.audit().ok()) << "seed " << seed << ": " << cache.audit();
    }
    for (Sequence& seq : live) {
      cache.give_up_promise(static_cast<uint32_t>(seq.tokens.size() / kBlockTokens - seq.table.size()));
      cache.release(seq.table);
    }
    ASSERT_EQ(cache.used(), 0u);
    ASSERT_EQ(cache.available(), total);
  }
}

}  // namespace
}  // namespace conclave::scheduler
