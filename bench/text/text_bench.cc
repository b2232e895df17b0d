// How fast a tokenizer file loads and encodes, and whether it agrees with vectors made by
// tools/golden_text/make_text_golden.py --compare:
//   text_bench TOKENIZER_JSON [TEXT_FILE ...]
//   text_bench TOKENIZER_JSON --compare VECTORS.jsonl
// Speed is bytes per second of processor time of the one thread, the best of several passes over each file
// after a warm-up pass, so that other load on the machine shows little.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "libs/text/tokenizer.h"
#include "tests/text/golden_file.h"

namespace {

using conclave::TokenId;
using conclave::text::SpecialTokens;
using conclave::text::Tokenizer;
using Clock = std::chrono::steady_clock;

double thread_seconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int compare(const Tokenizer& tokenizer, const std::string& path) {
  const auto golden = conclave::text::read_golden(path);
  size_t wrong = 0;
  for (const auto& c : golden.encode) {
    const auto ids = tokenizer.encode(c.text, SpecialTokens::kParse);
    if (ids.ok() && *ids == c.ids) continue;
    if (++wrong <= 5)
      std::printf("differs: %s\n", boost::json::serialize(boost::json::string(c.text)).c_str());
  }
  for (const auto& c : golden.decode) {
    if (tokenizer.decode(c.ids, false) != c.text || tokenizer.decode(c.ids, true) != c.skipped) ++wrong;
  }
  std::printf("%zu strings and %zu id lists compared, %zu differ\n", golden.encode.size(),
              golden.decode.size(), wrong);
  return wrong == 0 ? 0 : 1;
}

void measure(const Tokenizer& tokenizer, const std::string& path) {
  const std::string text = conclave::text::read_text_file(path);
  double best = 1e9;
  size_t tokens = 0;
  for (int pass = 0; pass < 6; ++pass) {
    const double start = thread_seconds();
    const auto ids = tokenizer.encode(text, SpecialTokens::kParse);
    const double seconds = thread_seconds() - start;
    if (!ids.ok()) {
      std::printf("%s: %s\n", path.c_str(), conclave::message_of(ids.status()).c_str());
      return;
    }
    tokens = ids->size();
    if (pass > 0) best = std::min(best, seconds);
  }
  std::printf("%s: %zu bytes, %zu tokens, %.1f MB/s\n", path.c_str(), text.size(), tokens,
              static_cast<double>(text.size()) / best / 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.empty()) {
    std::fprintf(stderr,
                 "usage: text_bench TOKENIZER_JSON [TEXT_FILE ...] | TOKENIZER_JSON --compare VECTORS\n");
    return 2;
  }
  const auto start = Clock::now();
  const auto tokenizer = Tokenizer::load(args[0]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", conclave::message_of(tokenizer.status()).c_str());
    return 1;
  }
  std::printf("loaded in %.2f s\n", seconds_since(start));
  if (args.size() == 3 && args[1] == "--compare") return compare(**tokenizer, args[2]);
  for (size_t i = 1; i < args.size(); ++i) measure(**tokenizer, args[i]);
  return 0;
}
