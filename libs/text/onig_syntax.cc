// Translation of the split patterns of tokenizer files from Oniguruma's Ruby syntax to PCRE2's.
#include <algorithm>
#include <array>
#include <cctype>

#include "libs/text/split_pattern.h"

namespace conclave::text {
namespace {

// White_Space of Unicode. PCRE2's \s with UCP also takes U+180E, which stopped being a space in Unicode 6.3.
constexpr std::string_view kSpace =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kNotSpace =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027})"
    R"(\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";

constexpr std::array<std::string_view, 37> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd", "Nl",
    "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk",
    "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Co", "Cn", "Cs"};

Status refused(std::string_view what, size_t at) {
  return invalid_argument("regular expression: " + std::string(what) + " at offset " + std::to_string(at) +
                          " is not supported");
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Translator {
 public:
  explicit Translator(std::string_view in) : in_(in) {}

  StatusOr<std::string> run() {
    while (at_ < in_.size()) RETURN_IF_ERROR(step());
    if (in_class_) return invalid_argument("regular expression: a character class has no end");
    return std::move(out_);
  }

 private:
  Status step() {
    const char c = in_[at_];
    if (c == '\\') return escape();
    if (in_class_) return class_member(c);
    switch (c) {
      case '[':
        return open_class();
      case '(':
        return open_group();
      case '{':
        return interval();
      default:
        copy(1);
        return OkStatus();
    }
  }

  void copy(size_t n) {
    out_.append(in_.substr(at_, n));
    at_ += n;
  }

  Status open_class() {
    in_class_ = true;
    copy(1);
    if (at_ < in_.size() && in_[at_] == '^') copy(1);
    if (at_ < in_.size() && in_[at_] == ']') return refused("an unescaped ']' at the start of a class", at_);
    return OkStatus();
  }

  Status class_member(char c) {
    if (c == '[') return refused("a set or POSIX name inside a character class", at_);
    if (c == '&' && in_.substr(at_, 2) == "&&") return refused("'&&' in a character class", at_);
    if (c == ']') in_class_ = false;
    copy(1);
    return OkStatus();
  }

  Status open_group() {
    if (in_.substr(at_, 2) == "(*") return refused("'(*'", at_);
    if (in_.substr(at_, 2) != "(?") {
      copy(1);
      return OkStatus();
    }
    for (std::string_view known : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"}) {
      if (in_.substr(at_, known.size()) == known) {
        copy(known.size());
        return OkStatus();
      }
    }
    return refused("the group '" + std::string(in_.substr(at_, 4)) + "'", at_);
  }

  // {n}, {n,}, {n,m}; Ruby's {,m} means {0,m}, and a '+' after an interval repeats it there but is possessive
  // here.
  Status interval() {
    size_t i = at_ + 1;
    while (i < in_.size() && is_digit(in_[i])) ++i;
    const bool low = i > at_ + 1;
    bool high = false;
    if (i < in_.size() && in_[i] == ',') {
      const size_t start = ++i;
      while (i < in_.size() && is_digit(in_[i])) ++i;
      high = i > start;
    }
    if (i >= in_.size() || in_[i] != '}' || (!low && !high)) return refused("an unescaped '{'", at_);
    ++i;
    if (i < in_.size() && in_[i] == '+') return refused("'+' after an interval", i);
    if (low) {
      copy(i - at_);
    } else {
      out_ += "{0";
      at_ += 1;
      copy(i - at_);
    }
    return OkStatus();
  }

  Status escape() {
    if (at_ + 1 >= in_.size()) return refused("a trailing backslash", at_);
    const char e = in_[at_ + 1];
    switch (e) {
      case 's':
      case 'S': {
        const std::string_view members = e == 's' ? kSpace : kNotSpace;
        if (in_class_) {
          out_ += members;
        } else {
          out_ += '[';
          out_ += members;
          out_ += ']';
        }
        at_ += 2;
        return OkStatus();
      }
      case 'p':
      case 'P':
        return property();
      case 'v':
        out_ += "\\x{b}";
        at_ += 2;
        return OkStatus();
      case 'u':
        return code_point();
      case 'd':
      case 'D':
      case 'r':
      case 'n':
      case 't':
      case 'f':
      case 'x':
        copy(2);
        return OkStatus();
      case 'A':
      case 'z':
        if (in_class_) break;
        copy(2);
        return OkStatus();
      default:
        if (std::isalnum(static_cast<unsigned char>(e)) != 0) break;
        copy(2);
        return OkStatus();
    }
    return refused("'\\" + std::string(1, e) + "'", at_);
  }

  Status code_point() {
    const std::string_view digits = in_.substr(at_ + 2, 4);
    if (digits.size() != 4 ||
        !std::all_of(digits.begin(), digits.end(), [](unsigned char c) { return std::isxdigit(c) != 0; })) {
      return refused("'\\u' without four hexadecimal digits", at_);
    }
    out_ += "\\x{" + std::string(digits) + "}";
    at_ += 6;
    return OkStatus();
  }

  Status property() {
    const size_t end = in_.find('}', at_);
    if (in_.substr(at_ + 2, 1) != "{" || end == std::string_view::npos)
      return refused("'\\p' without braces", at_);
    std::string_view name = in_.substr(at_ + 3, end - at_ - 3);
    bool negated = in_[at_ + 1] == 'P';
    if (!name.empty() && name.front() == '^') {
      negated = !negated;
      name.remove_prefix(1);
    }
    const bool category = std::find(kCategories.begin(), kCategories.end(), name) != kCategories.end();
    out_ += negated ? "\\P{" : "\\p{";
    // PCRE2 reads a bare script name as "script extensions"; Oniguruma means the script itself.
    if (!category) out_ += "sc:";
    out_.append(name);
    out_ += '}';
    at_ = end + 1;
    return OkStatus();
  }

  std::string_view in_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::string out_;
};

}  // namespace

StatusOr<std::string> oniguruma_to_pcre2(std::string_view pattern) { return Translator(pattern).run(); }

}  // namespace conclave::text
