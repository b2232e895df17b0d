#include <algorithm>
#include <array>
#include <map>
#include <unordered_set>

#include "libs/base/check.h"
#include "libs/base/json_escape.h"
#include "libs/checkpoint/make_internal.h"

namespace conclave::make {
namespace {

// M2's added tokens in their order; the last four are not "special" there.
constexpr std::array<const char*, 54> kAddedTokens = {"]!p~[",
                                                      "<fim_prefix>",
                                                      "<fim_middle>",
                                                      "<fim_suffix>",
                                                      "<fim_pad>",
                                                      "<reponame>",
                                                      "<filename>",
                                                      "<gh_stars>",
                                                      "<issue_start>",
                                                      "<issue_comment>",
                                                      "<issue_closed>",
                                                      "<jupyter_start>",
                                                      "<jupyter_text>",
                                                      "<jupyter_code>",
                                                      "<jupyter_output>",
                                                      "<empty_output>",
                                                      "<commit_before>",
                                                      "<commit_msg>",
                                                      "<commit_after>",
                                                      "]~b]",
                                                      "[e~[",
                                                      "]!d~[",
                                                      "<function_call>",
                                                      "<code_interpreter>",
                                                      "]<]speech[>[",
                                                      "]<]image[>[",
                                                      "]<]video[>[",
                                                      "]<]start of speech[>[",
                                                      "]<]end of speech[>[",
                                                      "]<]start of image[>[",
                                                      "]<]end of image[>[",
                                                      "]<]start of video[>[",
                                                      "]<]end of video[>[",
                                                      "]<]vision pad[>[",
                                                      "]~!b[",
                                                      "<jupyter_error>",
                                                      "<add_file>",
                                                      "<delete_file>",
                                                      "<rename_file>",
                                                      "<edit_file>",
                                                      "<commit_message>",
                                                      "<empty_source_file>",
                                                      "<repo_struct>",
                                                      "<code_context>",
                                                      "<file_content>",
                                                      "<source_files>",
                                                      "<pr_start>",
                                                      "<review_comment>",
                                                      "<filepath>",
                                                      "<file_sep>",
                                                      "<think>",
                                                      "</think>",
                                                      "<minimax:tool_call>",
                                                      "</minimax:tool_call>"};
constexpr uint32_t kSpecialTokens = 50;
constexpr uint32_t kBosOffset = 19;  // "]~b]", as generation_config.json of M2 has it
constexpr uint32_t kEosOffset = 20;  // "[e~["
// Rows of the embedding that have no token, as in M2; fewer where the vocabulary is too small.
constexpr uint32_t kUnusedRows = 10;

// What the merges are learned from. Any text would do; this one covers the words of the examples and tests.
constexpr const char* kText =
    "A cluster is a set of machines that work together on one task. In this cluster the attention workers "
    "keep the keys "
    "and values of every sequence, and the expert shards keep the weights of the experts. A request comes in "
    "at the "
    "gateway, waits in the queue of the scheduler, and is given to a worker. The worker reads the tokens, "
    "computes the "
    "hidden states layer by layer, and sends each row to the shards that hold the chosen experts. The shards "
    "answer "
    "with one output for each row, and the worker adds them up in a fixed order, so that the answer does not "
    "depend on "
    "who computed it or when. Then the next token is chosen and the sequence goes on until it ends.\n\n"
    "What happens when a machine fails? Nothing is lost. The scheduler knows what it gave to whom, and gives "
    "it to "
    "someone else. The tokens that were delivered are fed in again, and the stream continues where it was. "
    "It may be "
    "slower for a moment, but it is the same stream. The quick brown fox jumps over the lazy dog, and the "
    "dog sleeps "
    "on. Tell me about the weather today. Please write a short story about the sea and the ship that sailed "
    "on it. "
    "Hello, how are you? I am fine, thank you. You are a helpful assistant. Once upon a time there was a "
    "little "
    "village between the mountains and the river, where the people made bread, boats and bells.\n\n"
    "Numbers are written in tens: 1, 2, 3, 10, 20, 30, 100, 200, 1000, 2024. One and one is two; two and two "
    "is four; "
    "three times three is nine. The first, the second and the third are not the last. There is more to say "
    "about "
    "this than there is room for, so we will say it another time, in other words, with other examples.\n\n"
    "int main(int argc, char** argv) {\n  for (int i = 0; i < argc; ++i) {\n    std::printf(\"%s\\n\", "
    "argv[i]);\n  }\n"
    "  return 0;\n}\n\n"
    "def add(self, name, value=None):\n    if value is None:\n        return self.get(name)\n    "
    "self.items[name] = value\n"
    "    return value\n\n"
    "{\"name\": \"get_weather\", \"description\": \"The weather of a city\", \"parameters\": {\"type\": "
    "\"object\", "
    "\"properties\": {\"city\": {\"type\": \"string\"}, \"unit\": {\"type\": \"string\"}}, \"required\": "
    "[\"city\"]}}\n"
    "system user ai tool assistant <invoke name=\"get_weather\"> <parameter name=\"city\"> </parameter> "
    "</invoke> "
    "<response> </response>\n";

// The text cut like the split pattern would cut it, near enough for learning: a word with the space before
// it, up to three digits, a run of other signs with the space before it, or white space.
std::vector<std::string> pieces(const std::string& text) {
  auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  auto digit = [](char c) { return c >= '0' && c <= '9'; };
  auto space = [](char c) { return c == ' ' || c == '\n'; };
  std::vector<std::string> out;
  for (size_t i = 0; i < text.size();) {
    size_t j = i;
    if (text[j] == ' ' && j + 1 < text.size() && !space(text[j + 1]) && !digit(text[j + 1])) ++j;
    if (letter(text[j])) {
      while (j < text.size() && letter(text[j])) ++j;
    } else if (digit(text[j])) {
      while (j < text.size() && digit(text[j]) && j - i < 3) ++j;
    } else if (space(text[j])) {
      while (j < text.size() && space(text[j])) ++j;
      if (j < text.size() && j - i > 1 && text[j - 1] == ' ') --j;
    } else {
      while (j < text.size() && !letter(text[j]) && !digit(text[j]) && !space(text[j])) ++j;
    }
    out.push_back(text.substr(i, j - i));
    i = j;
  }
  return out;
}

using Merge = std::pair<uint32_t, uint32_t>;

// Token k >= 256 is the k-256th merge. `strings` has the bytes of every token.
struct Vocabulary {
  std::vector<std::string> strings;
  std::vector<Merge> merges;
  std::unordered_set<std::string> known;

  // False when the joined string exists already: a token's string is unique.
  bool add(uint32_t a, uint32_t b) {
    std::string joined = strings[a] + strings[b];
    if (!known.insert(joined).second) return false;
    strings.push_back(std::move(joined));
    merges.emplace_back(a, b);
    return true;
  }
};

void learn(Vocabulary& v, size_t limit) {
  std::map<std::string, uint32_t> counts;
  for (const std::string& p : pieces(kText)) ++counts[p];
  struct Word {
    std::vector<uint32_t> ids;
    uint32_t count;
  };
  std::vector<Word> words;
  for (const auto& [piece, count] : counts) {
    Word w{{}, count};
    for (const char c : piece) w.ids.push_back(static_cast<unsigned char>(c));
    words.push_back(std::move(w));
  }
  std::unordered_set<std::string> refused;
  while (v.merges.size() < limit) {
    std::map<Merge, uint32_t> pairs;
    for (const Word& w : words) {
      for (size_t i = 0; i + 1 < w.ids.size(); ++i) pairs[{w.ids[i], w.ids[i + 1]}] += w.count;
    }
    Merge best{};
    uint32_t most = 1;  // a pair that occurs once teaches nothing
    for (const auto& [pair, count] : pairs) {
      if (count > most && v.known.count(v.strings[pair.first] + v.strings[pair.second]) == 0) {
        most = count;
        best = pair;
      }
    }
    if (most == 1) return;
    const uint32_t id = static_cast<uint32_t>(v.strings.size());
    v.add(best.first, best.second);
    for (Word& w : words) {
      for (size_t i = 0; i + 1 < w.ids.size(); ++i) {
        if (w.ids[i] != best.first || w.ids[i + 1] != best.second) continue;
        w.ids[i] = id;
        w.ids.erase(w.ids.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      }
    }
  }
}

// Systematic merges up to the wanted size, so that a real vocabulary has a tokenizer of real size: pairs of
// bytes, then every token with every byte.
void fill(Vocabulary& v, size_t limit) {
  for (uint32_t a = 0; v.merges.size() < limit; ++a) {
    for (uint32_t b = 0; b < 256 && v.merges.size() < limit; ++b) v.add(a, b);
  }
}

// GPT-2's printable stand-ins for bytes, as UTF-8.
std::array<std::string, 256> byte_alphabet() {
  std::array<std::string, 256> out;
  uint32_t next = 256;
  for (uint32_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    const uint32_t cp = printable ? b : next++;
    if (cp < 0x80) {
      out[b] = std::string(1, static_cast<char>(cp));
    } else {
      out[b] = {static_cast<char>(0xc0 | cp >> 6), static_cast<char>(0x80 | (cp & 0x3f))};
    }
  }
  return out;
}

// The split pattern of the published tokenizer.json, JSON-escaped.
constexpr const char* kSplitPattern =
    R"([^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+)";

std::string added_token(uint32_t id, uint32_t index, bool with_id) {
  std::string out = "{";
  if (with_id) out += "\"id\": " + std::to_string(id) + ", ";
  return out + "\"content\": " + json_quoted(kAddedTokens[index]) +
         ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, "
         "\"special\": " +
         (index < kSpecialTokens ? "true" : "false") + "}";
}

}  // namespace

uint32_t min_vocab_size() { return 256 + static_cast<uint32_t>(kAddedTokens.size()); }

MadeTokenizer make_tokenizer(uint32_t vocab_size, uint32_t max_positions) {
  CONCLAVE_CHECK(vocab_size >= min_vocab_size());
  const uint32_t unused = std::min(kUnusedRows, vocab_size - min_vocab_size());
  const uint32_t added_begin = vocab_size - unused - static_cast<uint32_t>(kAddedTokens.size());
  Vocabulary v;
  for (uint32_t b = 0; b < 256; ++b) {
    v.strings.emplace_back(1, static_cast<char>(b));
    v.known.insert(v.strings.back());
  }
  learn(v, added_begin - 256);
  fill(v, added_begin - 256);

  const auto alphabet = byte_alphabet();
  auto spelled = [&](uint32_t id) {
    std::string s;
    for (const char c : v.strings[id]) s += alphabet[static_cast<unsigned char>(c)];
    return s;
  };
  MadeTokenizer out;
  std::string& t = out.tokenizer_json;
  std::string decoder = "{";
  t = "{\n\"version\": \"1.0\",\n\"truncation\": null,\n\"padding\": null,\n\"added_tokens\": [";
  for (uint32_t i = 0; i < kAddedTokens.size(); ++i) {
    const char* comma = i ? "," : "";
    t += comma;
    t += "\n  " + added_token(added_begin + i, i, true);
    decoder += comma;
    decoder += "\n    \"" + std::to_string(added_begin + i) + "\": " + added_token(added_begin + i, i, false);
  }
  t += "\n],\n\"normalizer\": {\"type\": \"NFC\"},\n\"pre_tokenizer\": {\"type\": \"Sequence\", "
       "\"pretokenizers\": [\n";
  t += "  {\"type\": \"Split\", \"pattern\": {\"Regex\": \"";
  t += kSplitPattern;
  t += "\"}, \"behavior\": \"Removed\", \"invert\": true},\n";
  t += "  {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": "
       "false}]},\n";
  t += "\"post_processor\": null,\n\"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, "
       "\"trim_offsets\": true, "
       "\"use_regex\": true},\n";
  t += "\"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
       "\"continuing_subword_prefix\": \"\", "
       "\"end_of_word_suffix\": \"\", \"fuse_unk\": false, \"byte_fallback\": false, \"ignore_merges\": "
       "false,\n\"vocab\": {";
  for (uint32_t id = 0; id < v.strings.size(); ++id) {
    t += (id ? ",\n" : "\n") + json_quoted(spelled(id)) + ": " + std::to_string(id);
  }
  t += "},\n\"merges\": [";
  const char* comma = "\n";
  for (const Merge& m : v.merges) {
    t += comma + json_quoted(spelled(m.first) + " " + spelled(m.second));
    comma = ",\n";
  }
  t += "]}\n}\n";

  out.tokenizer_config_json =
      "{\n  \"add_prefix_space\": false,\n  \"added_tokens_decoder\": " + decoder +
      "\n  },\n  \"bos_token\": " + json_quoted("]~!b[") +
      ",\n  \"clean_up_tokenization_spaces\": false,\n  \"eos_token\": " + json_quoted("[e~[") +
      ",\n  \"model_max_length\": " + std::to_string(max_positions) +
      ",\n  \"tokenizer_class\": \"GPT2Tokenizer\",\n  \"unk_token\": " + json_quoted("]!d~[") + "\n}\n";
  out.generation_config_json =
      "{\n  \"bos_token_id\": " + std::to_string(added_begin + kBosOffset) +
      ",\n  \"do_sample\": true,\n  \"eos_token_id\": " + std::to_string(added_begin + kEosOffset) +
      ",\n  \"temperature\": 1.0,\n  \"top_p\": 0.95,\n  \"top_k\": 40\n}\n";
  return out;
}

}  // namespace conclave::make
