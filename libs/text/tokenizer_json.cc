#include "absl/container/flat_hash_map.h"

#include <algorithm>
#include <functional>

#include "libs/text/byte_alphabet.h"
#include "libs/text/json_reader.h"
#include "libs/text/tokenizer_spec.h"

namespace conclave::text {
namespace {

namespace json = boost::json;

constexpr size_t kMaxDepth = 16;
using Vocabulary =
    absl::flat_hash_map<std::string_view, TokenId, std::hash<std::string_view>, std::equal_to<>>;

Status unsupported(const std::string& path, const std::string& what) {
  return invalid_field(path, path + ": " + what + " is not supported");
}

StatusOr<TokenId> token_id(const json::value& value, const std::string& path) {
  if (!value.is_int64() && !value.is_uint64()) return invalid_field(path, path + " is not a whole number");
  const int64_t id = value.is_int64() ? value.get_int64() : static_cast<int64_t>(kMaxTokenId) + 1;
  if (id < 0 || id > static_cast<int64_t>(kMaxTokenId)) {
    return invalid_field(path, path + " is not an id from 0 to " + std::to_string(kMaxTokenId));
  }
  return static_cast<TokenId>(id);
}

StatusOr<const json::array*> array_at(const JsonObject& object, std::string_view key) {
  ASSIGN_OR_RETURN(const json::value* value, object.required(key));
  if (!value->is_array()) return invalid_field(object.path_of(key), object.path_of(key) + " is not an array");
  return &value->get_array();
}

std::string element(const std::string& path, size_t i) { return path + "[" + std::to_string(i) + "]"; }

Status read_normalizer(const json::value& value, const std::string& path, TokenizerSpec& spec) {
  ASSIGN_OR_RETURN(const JsonObject object, JsonObject::of(value, path));
  ASSIGN_OR_RETURN(const std::string_view type, object.string("type"));
  if (type == "NFC") {
    spec.nfc = true;
    return object.only({"type"});
  }
  if (type == "Sequence") {
    RETURN_IF_ERROR(object.only({"type", "normalizers"}));
    ASSIGN_OR_RETURN(const json::array* parts, array_at(object, "normalizers"));
    for (size_t i = 0; i < parts->size(); ++i) {
      RETURN_IF_ERROR(read_normalizer((*parts)[i], element(object.path_of("normalizers"), i), spec));
    }
    return OkStatus();
  }
  return unsupported(object.path_of("type"), "the normalizer \"" + std::string(type) + "\"");
}

Status read_split(const JsonObject& object, TokenizerSpec& spec) {
  RETURN_IF_ERROR(object.only({"type", "pattern", "behavior", "invert"}));
  SplitStep step;
  ASSIGN_OR_RETURN(const json::value* pattern_value, object.required("pattern"));
  ASSIGN_OR_RETURN(const JsonObject pattern, JsonObject::of(*pattern_value, object.path_of("pattern")));
  RETURN_IF_ERROR(pattern.only({"Regex", "String"}));
  step.is_regex = pattern.find("Regex") != nullptr;
  ASSIGN_OR_RETURN(const std::string_view text, pattern.string(step.is_regex ? "Regex" : "String"));
  step.pattern = text;
  ASSIGN_OR_RETURN(const std::string_view behavior, object.string("behavior"));
  if (behavior == "Removed") {
    step.behavior = SplitStep::Behavior::kRemoved;
  } else if (behavior == "Isolated") {
    step.behavior = SplitStep::Behavior::kIsolated;
  } else {
    return unsupported(object.path_of("behavior"), "\"" + std::string(behavior) + "\"");
  }
  ASSIGN_OR_RETURN(step.invert, object.boolean("invert", false));
  spec.splits.push_back(std::move(step));
  return OkStatus();
}

// The splitting expression of GPT-2 (https://github.com/openai/gpt-2, src/encoder.py), which ByteLevel
// implies.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

Status read_pre_tokenizer(const json::value& value, const std::string& path, TokenizerSpec& spec,
                          bool& byte_level) {
  ASSIGN_OR_RETURN(const JsonObject object, JsonObject::of(value, path));
  ASSIGN_OR_RETURN(const std::string_view type, object.string("type"));
  // What follows ByteLevel would see the byte alphabet instead of the text.
  if (byte_level) return unsupported(path, "a step after ByteLevel");
  if (type == "Sequence") {
    RETURN_IF_ERROR(object.only({"type", "pretokenizers"}));
    ASSIGN_OR_RETURN(const json::array* parts, array_at(object, "pretokenizers"));
    for (size_t i = 0; i < parts->size(); ++i) {
      RETURN_IF_ERROR(
          read_pre_tokenizer((*parts)[i], element(object.path_of("pretokenizers"), i), spec, byte_level));
    }
    return OkStatus();
  }
  if (type == "Split") return read_split(object, spec);
  if (type == "ByteLevel") {
    RETURN_IF_ERROR(object.only({"type", "add_prefix_space", "trim_offsets", "use_regex"}));
    byte_level = true;
    ASSIGN_OR_RETURN(spec.add_prefix_space, object.boolean("add_prefix_space", true));
    ASSIGN_OR_RETURN(const bool use_regex, object.boolean("use_regex", true));
    if (use_regex) {
      // The prefix space is added before this expression runs but after every Split.
      if (spec.add_prefix_space && !spec.splits.empty()) {
        return unsupported(object.path_of("use_regex"),
                           "add_prefix_space together with use_regex after a Split");
      }
      SplitStep step;
      step.pattern = kGpt2Pattern;
      spec.splits.push_back(std::move(step));
      spec.prefix_before_splits = spec.add_prefix_space;
    }
    return OkStatus();
  }
  return unsupported(object.path_of("type"), "the pre-tokenizer \"" + std::string(type) + "\"");
}

Status read_decoder(const json::value& value, const std::string& path) {
  ASSIGN_OR_RETURN(const JsonObject object, JsonObject::of(value, path));
  ASSIGN_OR_RETURN(const std::string_view type, object.string("type"));
  if (type != "ByteLevel")
    return unsupported(object.path_of("type"), "the decoder \"" + std::string(type) + "\"");
  return OkStatus();
}

Status read_post_processor(const json::value& value) {
  ASSIGN_OR_RETURN(const JsonObject object, JsonObject::of(value, "post_processor"));
  ASSIGN_OR_RETURN(const std::string_view type, object.string("type"));
  // ByteLevel only moves offsets, which we do not report.
  if (type == "ByteLevel") return OkStatus();
  return unsupported("post_processor.type", "\"" + std::string(type) + "\"");
}

void set_token(TokenizerSpec& spec, TokenId id, std::string_view content) {
  if (spec.tokens.size() <= id) spec.tokens.resize(static_cast<size_t>(id) + 1);
  TokenizerSpec::Token& token = spec.tokens[id];
  // As in the reference's decoder, content outside the byte alphabet stands for itself.
  const auto bytes = bytes_of_alphabet(content);
  const std::string_view decoded = bytes.has_value() ? std::string_view(*bytes) : content;
  token.offset = static_cast<uint32_t>(spec.bytes.size());
  token.length = static_cast<uint32_t>(decoded.size());
  token.present = true;
  spec.bytes.append(decoded);
}

Status read_vocabulary(const JsonObject& model, TokenizerSpec& spec, Vocabulary& vocabulary) {
  ASSIGN_OR_RETURN(const json::value* value, model.required("vocab"));
  if (!value->is_object()) return invalid_field("model.vocab", "model.vocab is not an object");
  const json::object& vocab = value->get_object();
  vocabulary.reserve(vocab.size());
  spec.tokens.reserve(vocab.size() + 1024);
  spec.bytes.reserve(vocab.size() * 8);
  for (const auto& member : vocab) {
    const std::string_view key = view(member.key());
    const auto path = [&] { return "model.vocab[\"" + std::string(key) + "\"]"; };
    if (!member.value().is_int64() || member.value().get_int64() < 0 ||
        member.value().get_int64() > static_cast<int64_t>(kMaxTokenId)) {
      RETURN_IF_ERROR(token_id(member.value(), path()).status());
    }
    const auto id = static_cast<TokenId>(member.value().get_int64());
    if (id < spec.tokens.size() && spec.tokens[id].present) {
      return invalid_field(path(), path() + ": id " + std::to_string(id) + " is taken by another token");
    }
    set_token(spec, id, key);
    vocabulary.emplace(key, id);
  }
  return OkStatus();
}

Status read_merges(const JsonObject& model, TokenizerSpec& spec, const Vocabulary& vocabulary) {
  ASSIGN_OR_RETURN(const json::array* merges, array_at(model, "merges"));
  spec.merges.reserve(merges->size());
  std::string joined;
  for (size_t i = 0; i < merges->size(); ++i) {
    const auto path = [&] { return element("model.merges", i); };
    const json::value& entry = (*merges)[i];
    std::string_view left;
    std::string_view right;
    if (entry.is_string()) {
      const std::string_view text = view(entry.get_string());
      const size_t space = text.find(' ');
      if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
        return invalid_field(path(), path() + " is not two tokens with one space between them");
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (entry.is_array() && entry.get_array().size() == 2 && entry.get_array()[0].is_string() &&
               entry.get_array()[1].is_string()) {
      left = view(entry.get_array()[0].get_string());
      right = view(entry.get_array()[1].get_string());
    } else {
      return invalid_field(path(), path() + " is neither a string nor a pair of strings");
    }
    joined.assign(left).append(right);
    const auto a = vocabulary.find(left);
    const auto b = vocabulary.find(right);
    const auto c = vocabulary.find(std::string_view(joined));
    if (a == vocabulary.end() || b == vocabulary.end() || c == vocabulary.end()) {
      const std::string_view missing = a == vocabulary.end() ? left : b == vocabulary.end() ? right : joined;
      return invalid_field(path(), path() + ": \"" + std::string(missing) + "\" is not in model.vocab");
    }
    spec.merges.push_back({a->second, b->second, c->second});
  }
  return OkStatus();
}

Status read_model(const JsonObject& root, TokenizerSpec& spec, Vocabulary& vocabulary) {
  ASSIGN_OR_RETURN(const json::value* value, root.required("model"));
  ASSIGN_OR_RETURN(const JsonObject model, JsonObject::of(*value, "model"));
  ASSIGN_OR_RETURN(const std::string_view type, model.string("type"));
  if (type != "BPE") return unsupported("model.type", "\"" + std::string(type) + "\"");
  RETURN_IF_ERROR(
      model.only({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                  "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"}));
  if (const json::value* dropout = model.find("dropout");
      dropout != nullptr && !(dropout->is_number() && dropout->to_number<double>() == 0.0)) {
    return unsupported("model.dropout", "dropout");
  }
  for (std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    ASSIGN_OR_RETURN(const std::string_view affix, model.optional_string(key));
    if (!affix.empty()) return unsupported(model.path_of(key), "\"" + std::string(affix) + "\"");
  }
  ASSIGN_OR_RETURN(const bool byte_fallback, model.boolean("byte_fallback", false));
  if (byte_fallback) return unsupported("model.byte_fallback", "true");
  ASSIGN_OR_RETURN(spec.ignore_merges, model.boolean("ignore_merges", false));
  RETURN_IF_ERROR(read_vocabulary(model, spec, vocabulary));
  RETURN_IF_ERROR(read_merges(model, spec, vocabulary));
  bool every_byte = true;
  for (size_t b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    const auto it = vocabulary.find(std::string_view(alphabet_of_bytes({&byte, 1})));
    spec.byte_ids[b] = it == vocabulary.end() ? Bpe::kNoToken : it->second;
    every_byte = every_byte && it != vocabulary.end();
  }
  ASSIGN_OR_RETURN(const std::string_view unknown, model.optional_string("unk_token"));
  if (!unknown.empty() && !every_byte) {
    return unsupported("model.unk_token", "an unknown token with a vocabulary that lacks single bytes");
  }
  return OkStatus();
}

Status read_added_tokens(const JsonObject& root, TokenizerSpec& spec, const Vocabulary& vocabulary) {
  if (root.find("added_tokens") == nullptr) return OkStatus();
  ASSIGN_OR_RETURN(const json::array* entries, array_at(root, "added_tokens"));
  absl::flat_hash_map<std::string_view, size_t, std::hash<std::string_view>, std::equal_to<>> seen;
  for (size_t i = 0; i < entries->size(); ++i) {
    const std::string path = element("added_tokens", i);
    ASSIGN_OR_RETURN(const JsonObject object, JsonObject::of((*entries)[i], path));
    RETURN_IF_ERROR(
        object.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}));
    AddedToken token;
    ASSIGN_OR_RETURN(const json::value* id, object.required("id"));
    ASSIGN_OR_RETURN(token.id, token_id(*id, object.path_of("id")));
    ASSIGN_OR_RETURN(const std::string_view content, object.string("content"));
    if (content.empty())
      return invalid_field(object.path_of("content"), object.path_of("content") + " is empty");
    token.content = content;
    ASSIGN_OR_RETURN(token.special, object.boolean("special", false));
    ASSIGN_OR_RETURN(token.normalized, object.boolean("normalized", !token.special));
    ASSIGN_OR_RETURN(token.single_word, object.boolean("single_word", false));
    ASSIGN_OR_RETURN(token.lstrip, object.boolean("lstrip", false));
    ASSIGN_OR_RETURN(token.rstrip, object.boolean("rstrip", false));
    if (!seen.emplace(content, i).second) {
      return invalid_field(path, path + ": \"" + token.content + "\" is listed twice");
    }
    const auto in_vocab = vocabulary.find(content);
    if (in_vocab != vocabulary.end() ? in_vocab->second != token.id
                                     : token.id < spec.tokens.size() && spec.tokens[token.id].present) {
      return invalid_field(object.path_of("id"), object.path_of("id") + ": id " + std::to_string(token.id) +
                                                     " and the content \"" + token.content +
                                                     "\" contradict model.vocab or another added token");
    }
    set_token(spec, token.id, content);
    spec.tokens[token.id].added = true;
    spec.tokens[token.id].special = token.special;
    spec.added.push_back(std::move(token));
  }
  // A special token that merging could build would let plain text produce it.
  for (size_t i = 0; i < spec.merges.size(); ++i) {
    if (spec.tokens[spec.merges[i].result].special) {
      return unsupported(element("model.merges", i), "a merge that makes a special token");
    }
  }
  return OkStatus();
}

}  // namespace

StatusOr<TokenizerSpec> parse_tokenizer_json(std::string_view text) {
  json::monotonic_resource arena(std::max<size_t>(text.size() * 2, 4096));
  ASSIGN_OR_RETURN(const json::value document, parse_json(text, kMaxDepth, &arena));
  ASSIGN_OR_RETURN(const JsonObject root, JsonObject::of(document, ""));
  RETURN_IF_ERROR(root.only({"version", "truncation", "padding", "added_tokens", "normalizer",
                             "pre_tokenizer", "post_processor", "decoder", "model"}));
  for (std::string_view key : {"truncation", "padding"}) {
    if (root.find(key) != nullptr) return unsupported(std::string(key), "a value other than null");
  }
  TokenizerSpec spec;
  if (const json::value* value = root.find("normalizer"))
    RETURN_IF_ERROR(read_normalizer(*value, "normalizer", spec));
  bool byte_level = false;
  ASSIGN_OR_RETURN(const json::value* pre, root.required("pre_tokenizer"));
  RETURN_IF_ERROR(read_pre_tokenizer(*pre, "pre_tokenizer", spec, byte_level));
  if (!byte_level) return unsupported("pre_tokenizer", "a pre-tokenizer without ByteLevel");
  if (const json::value* value = root.find("post_processor")) RETURN_IF_ERROR(read_post_processor(*value));
  ASSIGN_OR_RETURN(const json::value* decoder, root.required("decoder"));
  RETURN_IF_ERROR(read_decoder(*decoder, "decoder"));
  Vocabulary vocabulary;
  RETURN_IF_ERROR(read_model(root, spec, vocabulary));
  RETURN_IF_ERROR(read_added_tokens(root, spec, vocabulary));
  if (spec.tokens.empty()) return invalid_field("model.vocab", "model.vocab is empty");
  return spec;
}

}  // namespace conclave::text
