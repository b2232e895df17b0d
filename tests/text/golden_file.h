// Reads the files that tools/golden_text/make_text_golden.py writes.
#pragma once

#include <boost/json.hpp>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "libs/base/check.h"
#include "libs/base/ids.h"

namespace conclave::text {

struct EncodeCase {
  std::string text;  // possibly not UTF-8
  std::vector<TokenId> ids;
};
struct DecodeCase {
  std::vector<TokenId> ids;
  std::string text;
  std::string skipped;
};
struct GoldenFile {
  boost::json::object head;
  std::vector<EncodeCase> encode;
  std::vector<DecodeCase> decode;
};

inline std::string read_text_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  CONCLAVE_CHECK(in.good());
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

inline std::string to_std(const boost::json::value& v) {
  return {v.as_string().data(), v.as_string().size()};
}

inline std::vector<TokenId> ids_of(const boost::json::value& v) {
  std::vector<TokenId> out;
  for (const auto& id : v.as_array()) out.push_back(static_cast<TokenId>(id.to_number<int64_t>()));
  return out;
}

inline GoldenFile read_golden(const std::string& path) {
  std::ifstream in(path);
  CONCLAVE_CHECK(in.good());
  GoldenFile out;
  std::string line;
  std::getline(in, line);
  out.head = boost::json::parse(line).as_object();
  while (std::getline(in, line)) {
    const boost::json::value value = boost::json::parse(line);
    const auto& o = value.as_object();
    if (o.contains("skipped")) {
      out.decode.push_back({ids_of(o.at("ids")), to_std(o.at("text")), to_std(o.at("skipped"))});
    } else if (o.contains("hex")) {
      const std::string hex = to_std(o.at("hex"));
      std::string raw;
      for (size_t i = 0; i < hex.size(); i += 2) {
        raw.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
      }
      out.encode.push_back({raw, ids_of(o.at("ids"))});
    } else {
      out.encode.push_back({to_std(o.at("text")), ids_of(o.at("ids"))});
    }
  }
  return out;
}

// The small tokenizer with the replacements that a golden file's head asks for.
inline std::string patched_tokenizer(const std::string& data_dir, const GoldenFile& golden) {
  boost::json::value document = boost::json::parse(read_text_file(data_dir + "/small_tokenizer.json"));
  for (const auto& member : golden.head.at("patch").as_object()) {
    if (member.key() != "model_as_pairs") {
      document.as_object()[member.key()] = member.value();
      continue;
    }
    auto& model = document.as_object().at("model").as_object();
    model["ignore_merges"] = true;
    for (auto& merge : model.at("merges").as_array()) {
      if (merge.is_array()) {
        const std::string joined = to_std(merge.as_array()[0]) + " " + to_std(merge.as_array()[1]);
        merge = boost::json::string(joined);
      } else {
        const std::string text = to_std(merge);
        const size_t space = text.find(' ');
        merge = boost::json::array{boost::json::string(text.substr(0, space)),
                                   boost::json::string(text.substr(space + 1))};
      }
    }
  }
  return boost::json::serialize(document);
}

inline std::string data_dir() { return "tests/text/data"; }

// Published files; empty when they are not there.
inline std::string testdata(const std::string& relative) {
  const char* root = std::getenv("CONCLAVE_TESTDATA_DIR");
  if (root == nullptr) return {};
  const std::string path = std::string(root) + "/" + relative;
  return std::ifstream(path).good() ? path : std::string();
}

}  // namespace conclave::text
