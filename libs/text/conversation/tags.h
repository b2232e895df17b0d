// Finding tags in text that arrives in pieces.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace conclave::text {

// At the end of an output, so many bytes of a tag's beginning are no accident: they are dropped, not shown as
// half a tag. Fewer (a lone "<") are text.
inline constexpr size_t kTellingTagBytes = 4;

enum class TagMatch { kNone, kPartial, kFull };

// Whether `text` begins with `tag`, or ends too early to tell.
inline TagMatch match_tag(std::string_view text, std::string_view tag) {
  if (text.size() >= tag.size()) return text.starts_with(tag) ? TagMatch::kFull : TagMatch::kNone;
  return tag.starts_with(text) ? TagMatch::kPartial : TagMatch::kNone;
}

struct TagHit {
  size_t at = std::string_view::npos;  // text.size() when there is nothing
  size_t tag = 0;                      // index into `tags`, when kFull
  TagMatch match = TagMatch::kNone;
};

// The first place in `text` where one of `tags` begins, or may begin when more text comes. All before it is
// free of tags, whatever follows. No tag may be the beginning of another.
inline TagHit find_tag(std::string_view text, std::span<const std::string_view> tags) {
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] != '<' && text[at] != '\n') continue;  // what tags begin with
    bool partial = false;
    for (size_t k = 0; k < tags.size(); ++k) {
      const TagMatch match = match_tag(text.substr(at), tags[k]);
      if (match == TagMatch::kFull) return {at, k, match};
      partial = partial || match == TagMatch::kPartial;
    }
    if (partial) return {at, 0, TagMatch::kPartial};
  }
  return {text.size(), 0, TagMatch::kNone};
}

// What is left of text held back as the possible beginning of a tag, now that no more comes.
inline std::string_view release_held(std::string_view held) {
  const size_t newline = held.starts_with('\n') ? 1 : 0;
  return held.size() - newline >= kTellingTagBytes ? held.substr(0, newline) : held;
}

}  // namespace conclave::text
