#include "libs/text/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "libs/text/unicode_additions.h"
#include "libs/text/utf8.h"

namespace conclave::text {
namespace {

// Bounds on one match: backtracking steps, and the JIT's stack. Patterns that need more get
// RESOURCE_EXHAUSTED.
constexpr uint32_t kMatchLimit = 200'000'000;
constexpr size_t kJitStackStartBytes = 32 * 1024;
constexpr size_t kJitStackMaxBytes = 8 * 1024 * 1024;

// What a match writes to; one per thread, for every pattern.
struct MatchScratch {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(kJitStackStartBytes, kJitStackMaxBytes, nullptr);
  std::string shadow;

  MatchScratch() {
    pcre2_set_match_limit(context, kMatchLimit);
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~MatchScratch() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
  MatchScratch(const MatchScratch&) = delete;
  MatchScratch& operator=(const MatchScratch&) = delete;
};

MatchScratch& scratch() {
  thread_local MatchScratch instance;
  return instance;
}

std::string error_text(int code) {
  PCRE2_UCHAR buffer[256] = {};
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

struct SplitPattern::Compiled {
  pcre2_code* code = nullptr;
  bool jit = false;
  Compiled() = default;
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;
  ~Compiled() { pcre2_code_free(code); }
};

SplitPattern::SplitPattern() = default;
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;
SplitPattern::~SplitPattern() = default;

StatusOr<SplitPattern> SplitPattern::literal(std::string_view text) {
  if (text.empty()) return invalid_argument("the string to split at is empty");
  SplitPattern out;
  out.literal_ = text;
  return out;
}

StatusOr<SplitPattern> SplitPattern::regex(std::string_view oniguruma_pattern) {
  ASSIGN_OR_RETURN(const std::string pattern, oniguruma_to_pcre2(oniguruma_pattern));
  SplitPattern out;
  out.compiled_ = std::make_unique<Compiled>();
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  // Ruby's ^ and $ match at every line.
  out.compiled_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &offset, context);
  pcre2_compile_context_free(context);
  if (out.compiled_->code == nullptr) {
    return invalid_argument("regular expression: " + error_text(error) + " (offset " +
                            std::to_string(offset) + " of " + pattern + ")");
  }
  out.compiled_->jit = pcre2_jit_compile(out.compiled_->code, PCRE2_JIT_COMPLETE) == 0;
  return out;
}

Status SplitPattern::find_all(std::string_view text, std::vector<ByteRange>& out) const {
  if (compiled_ == nullptr) {
    for (size_t at = 0; (at = text.find(literal_, at)) != std::string_view::npos; at += literal_.size()) {
      out.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(at + literal_.size())});
    }
    return OkStatus();
  }
  MatchScratch& s = scratch();
  const std::string_view subject =
      replace_unicode_additions(text, s.shadow) ? std::string_view(s.shadow) : text;
  const auto* begin = reinterpret_cast<PCRE2_SPTR>(subject.data());
  const auto match = compiled_->jit ? pcre2_jit_match : pcre2_match;
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(s.data);
  size_t at = 0;
  bool matched_before = false;
  while (at <= subject.size()) {
    const int rc = match(compiled_->code, begin, subject.size(), at, PCRE2_NO_UTF_CHECK, s.data, s.context);
    if (rc == PCRE2_ERROR_NOMATCH) break;
    // 0 means that the pattern has more groups than we asked for, which is fine.
    if (rc < 0) return resource_exhausted("splitting the text: " + error_text(rc));
    const size_t first = bounds[0];
    const size_t last = bounds[1];
    // An empty match right where the last one ended is passed over, one character on.
    if (first == last && matched_before && last == at) {
      at += at < subject.size() ? utf8_length(subject[at]) : 1;
      matched_before = false;
      continue;
    }
    out.push_back({static_cast<uint32_t>(first), static_cast<uint32_t>(last)});
    at = last;
    matched_before = true;
  }
  return OkStatus();
}

}  // namespace conclave::text
