#include "libs/text/added_tokens.h"

#include <unicode/uchar.h>
#include <unicode/utf8.h>

#include <algorithm>

#include "libs/text/nfc.h"

namespace conclave::text {
namespace {

// \w and \s as Unicode's regular expression rules (UTS 18) define them.
bool is_word(UChar32 c) {
  const uint32_t category = U_GET_GC_MASK(c);
  return u_hasBinaryProperty(c, UCHAR_ALPHABETIC) != 0 || u_hasBinaryProperty(c, UCHAR_JOIN_CONTROL) != 0 ||
         (category & (U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK)) != 0;
}
bool is_space(UChar32 c) { return u_hasBinaryProperty(c, UCHAR_WHITE_SPACE) != 0; }

UChar32 next_code(std::string_view text, size_t& at) {
  auto i = static_cast<int32_t>(at);
  UChar32 c = 0;
  U8_NEXT(text.data(), i, static_cast<int32_t>(text.size()), c);
  at = static_cast<size_t>(i);
  return c;
}
UChar32 previous_code(std::string_view text, size_t& at) {
  auto i = static_cast<int32_t>(at);
  UChar32 c = 0;
  U8_PREV(text.data(), 0, i, c);
  at = static_cast<size_t>(i);
  return c;
}

bool word_before(std::string_view text, size_t at) { return at > 0 && is_word(previous_code(text, at)); }
bool word_after(std::string_view text, size_t at) { return at < text.size() && is_word(next_code(text, at)); }

size_t spaces_start(std::string_view text, size_t end) {
  while (end > 0) {
    size_t before = end;
    if (!is_space(previous_code(text, before))) break;
    end = before;
  }
  return end;
}
size_t spaces_end(std::string_view text, size_t start) {
  while (start < text.size()) {
    size_t after = start;
    if (!is_space(next_code(text, after))) break;
    start = after;
  }
  return start;
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(const std::vector<AddedToken>& tokens, bool normalized, bool nfc) {
  nodes_.emplace_back();
  for (const AddedToken& token : tokens) {
    if (token.normalized != normalized) continue;
    tokens_.push_back(token);
    std::string& content = tokens_.back().content;
    if (normalized && nfc) to_nfc(content, content);
    insert(content, tokens_.size() - 1);
  }
}

void AddedTokenMatcher::insert(std::string_view content, size_t index) {
  uint32_t node = 0;
  first_byte_[static_cast<uint8_t>(content.front())] = true;
  for (char c : content) {
    const auto byte = static_cast<uint8_t>(c);
    auto& children = nodes_[node].children;
    auto it = std::lower_bound(children.begin(), children.end(), std::pair<uint8_t, uint32_t>(byte, 0));
    if (it == children.end() || it->first != byte) {
      const auto fresh = static_cast<uint32_t>(nodes_.size());
      children.insert(it, {byte, fresh});
      nodes_.emplace_back();
      node = fresh;
    } else {
      node = it->second;
    }
  }
  nodes_[node].token = static_cast<int32_t>(index);
}

AddedTokenMatcher::Found AddedTokenMatcher::longest_at(std::string_view text, size_t at) const {
  Found found;
  uint32_t node = 0;
  for (size_t i = at; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    const auto& children = nodes_[node].children;
    const auto it = std::lower_bound(children.begin(), children.end(), std::pair<uint8_t, uint32_t>(byte, 0));
    if (it == children.end() || it->first != byte) break;
    node = it->second;
    if (nodes_[node].token >= 0) found = {&tokens_[static_cast<size_t>(nodes_[node].token)], i + 1};
  }
  return found;
}

void AddedTokenMatcher::split(std::string_view text, std::span<const ByteRange> literal,
                              std::vector<Section>& out) const {
  const auto range = [](size_t begin, size_t end) {
    return ByteRange{static_cast<uint32_t>(begin), static_cast<uint32_t>(end)};
  };
  size_t done = 0;
  size_t at = 0;
  size_t next_literal = 0;
  while (!tokens_.empty() && at < text.size()) {
    if (!first_byte_[static_cast<uint8_t>(text[at])]) {
      ++at;
      continue;
    }
    const Found found = longest_at(text, at);
    if (found.token == nullptr) {
      ++at;
      continue;
    }
    while (next_literal < literal.size() && literal[next_literal].end <= at) ++next_literal;
    if (next_literal < literal.size() && literal[next_literal].begin < found.end) {
      ++at;
      continue;
    }
    size_t begin = at;
    size_t end = found.end;
    at = found.end;
    if (found.token->single_word && (word_before(text, begin) || word_after(text, end))) continue;
    if (found.token->lstrip) begin = std::max(spaces_start(text, begin), done);
    if (found.token->rstrip) end = spaces_end(text, end);
    if (done < begin) out.push_back({range(done, begin), false, 0});
    out.push_back({range(begin, end), true, found.token->id});
    done = end;
  }
  if (done < text.size()) out.push_back({range(done, text.size()), false, 0});
}

}  // namespace conclave::text
