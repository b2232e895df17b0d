#include "libs/text/bpe.h"

#include <algorithm>
#include <bit>
#include <queue>

namespace conclave::text {
namespace {

constexpr uint64_t kEmpty = ~uint64_t{0};
constexpr uint32_t kNoRank = 0xffffffff;
// Up to here a scan for the lowest rank beats a heap.
constexpr size_t kShortWord = 48;

uint64_t pair_of(TokenId left, TokenId right) { return (static_cast<uint64_t>(left) << 32) | right; }

uint64_t hash(uint64_t pair) {
  pair *= 0x9e3779b97f4a7c15ull;
  return pair ^ (pair >> 29);
}

}  // namespace

Bpe::Bpe(const std::array<TokenId, 256>& byte_ids, const std::vector<Merge>& merges) : byte_ids_(byte_ids) {
  const size_t slots = std::bit_ceil(std::max<size_t>(16, merges.size() * 2));
  table_.assign(slots, Entry{kEmpty, kNoRank, kNoToken});
  mask_ = slots - 1;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const uint64_t pair = pair_of(merges[rank].left, merges[rank].right);
    uint64_t slot = hash(pair) & mask_;
    while (table_[slot].pair != kEmpty && table_[slot].pair != pair) slot = (slot + 1) & mask_;
    table_[slot] = {pair, static_cast<uint32_t>(rank), merges[rank].result};
  }
}

const Bpe::Entry& Bpe::find(TokenId left, TokenId right) const {
  const uint64_t pair = pair_of(left, right);
  uint64_t slot = hash(pair) & mask_;
  while (table_[slot].pair != kEmpty && table_[slot].pair != pair) slot = (slot + 1) & mask_;
  return table_[slot];
}

void Bpe::encode(std::string_view word, std::vector<TokenId>& out) const {
  if (word.size() <= kShortWord) {
    encode_short(word, out);
  } else {
    encode_long(word, out);
  }
}

void Bpe::encode_short(std::string_view word, std::vector<TokenId>& out) const {
  TokenId ids[kShortWord];
  const Entry* merges[kShortWord];  // of ids[i] with ids[i + 1]
  size_t n = 0;
  for (char c : word) {
    const TokenId id = byte_ids_[static_cast<uint8_t>(c)];
    if (id != kNoToken) ids[n++] = id;
  }
  for (size_t i = 0; i + 1 < n; ++i) merges[i] = &find(ids[i], ids[i + 1]);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i) {
      if (merges[i]->rank < merges[best]->rank) best = i;
    }
    if (merges[best]->rank == kNoRank) break;
    ids[best] = merges[best]->result;
    std::copy(ids + best + 2, ids + n, ids + best + 1);
    std::copy(merges + best + 1, merges + n - 1, merges + best);
    --n;
    if (best > 0) merges[best - 1] = &find(ids[best - 1], ids[best]);
    if (best + 1 < n) merges[best] = &find(ids[best], ids[best + 1]);
  }
  out.insert(out.end(), ids, ids + n);
}

void Bpe::encode_long(std::string_view word, std::vector<TokenId>& out) const {
  constexpr uint32_t kNone = 0xffffffff;
  struct Symbol {
    TokenId id;
    uint32_t previous;
    uint32_t next;
  };
  struct Candidate {
    uint32_t rank;
    uint32_t at;  // left symbol
    TokenId left;
    TokenId right;
    TokenId result;
    bool operator>(const Candidate& o) const { return rank != o.rank ? rank > o.rank : at > o.at; }
  };
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  for (char c : word) {
    const TokenId id = byte_ids_[static_cast<uint8_t>(c)];
    if (id == kNoToken) continue;
    const auto i = static_cast<uint32_t>(symbols.size());
    if (i > 0) symbols.back().next = i;
    symbols.push_back({id, i > 0 ? i - 1 : kNone, kNone});
  }
  if (symbols.empty()) return;

  std::vector<Candidate> start;
  const auto candidate = [&](uint32_t at, auto&& sink) {
    const uint32_t next = symbols[at].next;
    if (next == kNone) return;
    const Entry& e = find(symbols[at].id, symbols[next].id);
    if (e.rank != kNoRank) sink(Candidate{e.rank, at, symbols[at].id, symbols[next].id, e.result});
  };
  for (uint32_t i = 0; i < symbols.size(); ++i) candidate(i, [&](Candidate c) { start.push_back(c); });
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue(std::greater<>{},
                                                                               std::move(start));
  while (!queue.empty()) {
    const Candidate c = queue.top();
    queue.pop();
    // Entries whose symbols have changed since are stale. A symbol merged away has kNoToken.
    if (symbols[c.at].id != c.left) continue;
    const uint32_t right = symbols[c.at].next;
    if (right == kNone || symbols[right].id != c.right) continue;
    symbols[c.at].id = c.result;
    symbols[c.at].next = symbols[right].next;
    if (symbols[right].next != kNone) symbols[symbols[right].next].previous = c.at;
    symbols[right].id = kNoToken;
    const auto push = [&](Candidate fresh) { queue.push(fresh); };
    candidate(c.at, push);
    if (symbols[c.at].previous != kNone) candidate(symbols[c.at].previous, push);
  }
  for (uint32_t i = 0; i != kNone; i = symbols[i].next) out.push_back(symbols[i].id);
}

}  // namespace conclave::text
