// Seeded mutation loops over a checkpoint's files; fast enough for every run. The libFuzzer entry of the same
// targets is checkpoint_libfuzzer.cc (built where clang is the compiler).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#include "libs/base/random.h"
#include "libs/checkpoint/binding.h"
#include "libs/checkpoint/inspect.h"
#include "libs/checkpoint/make.h"
#include "tests/checkpoint/test_files.h"
#include "tests/fuzz/checkpoint_target.h"

namespace conclave::fuzz {
namespace {

using testing::read_text;
using testing::TempDir;
using testing::write_text;

constexpr size_t kDirectories = 600;

const char* const kPieces[] = {"{",
                               "}",
                               "[",
                               "]",
                               "\"",
                               ",",
                               ":",
                               "-1",
                               "0",
                               "1",
                               "2",
                               "0.5",
                               "1e308",
                               "-1e-400",
                               "4294967296",
                               "9223372036854775807",
                               "18446744073709551615",
                               "99999999999999999999",
                               "null",
                               "true",
                               "{}",
                               "[]",
                               "\"\"",
                               "\\u0000",
                               "\\ud800\\udc00",
                               "\\ud800",
                               "\xff",
                               "\"__metadata__\"",
                               "\"shape\"",
                               "\"dtype\"",
                               "\"F32\"",
                               "\"F8_E4M3\"",
                               "\"data_offsets\""};

std::string mutated(const std::string& valid, SplitMix64& random) {
  std::string s = valid;
  for (uint64_t edits = 1 + random.below(4); edits > 0; --edits) {
    const size_t at = random.below(s.size() + 1);
    switch (random.below(7)) {
      case 0:
        s.resize(at);
        break;
      case 1:
        s.insert(at, kPieces[random.below(std::size(kPieces))]);
        break;
      case 2:
        s.erase(at, 1 + random.below(16));
        break;
      case 3:
        s.insert(at, s.substr(random.below(s.size() + 1), random.below(80)));
        break;
      case 4: {  // another number: what is nearly right
        const size_t digit = s.find_first_of("0123456789", at);
        if (digit != std::string::npos) s[digit] = static_cast<char>('0' + random.below(10));
        break;
      }
      case 5: {  // another value
        const size_t colon = s.find(':', at);
        if (colon == std::string::npos) break;
        const size_t end = std::min(s.find_first_of(",}", colon), s.size());
        s.replace(colon + 1, end - colon - 1, kPieces[random.below(std::size(kPieces))]);
        break;
      }
      default:
        if (at < s.size()) s[at] = static_cast<char>(random.next());
    }
  }
  return s;
}

MakeOptions small(const std::string& out) {
  MakeOptions o;
  o.out = out;
  o.layers = 1;
  o.dtype = "fp8";
  o.set = {{"num_local_experts", "3"}, {"num_experts_per_tok", "2"},
           {"vocab_size", "320"},      {"hidden_size", "32"},
           {"head_dim", "8"},          {"rotary_dim", "4"},
           {"intermediate_size", "16"}};
  return o;
}

TEST(CheckpointFuzz, SafetensorsAndConfig) {
  TempDir dir;
  MakeOptions o = small(dir / "m");
  o.single_file = true;
  ASSERT_TRUE(make_checkpoint(o).ok());
  const std::string file = read_text(o.out + "/model.safetensors");
  const std::string config = read_text(o.out + "/config.json");
  uint64_t n = 0;
  std::memcpy(&n, file.data(), 8);
  const std::string header = file.substr(8, n);
  const size_t data = file.size() - 8 - n;
  ASSERT_TRUE(try_safetensors(std::as_bytes(std::span(file.data(), file.size()))));
  ASSERT_TRUE(try_safetensors_header(header, data));
  SplitMix64 random(41);
  size_t headers = 0, configs = 0;
  for (int i = 0; i < 20'000; ++i) {
    headers += try_safetensors_header(mutated(header, random), data);
    configs += try_config(mutated(config, random));
    if (i % 4 == 0) {
      const std::string s = mutated(file, random);
      try_safetensors(std::as_bytes(std::span(s.data(), s.size())));
    }
  }
  std::printf("of 20,000 each, %zu headers and %zu configs were still valid\n", headers, configs);
  EXPECT_LT(headers, 15'000u);
  EXPECT_LT(configs, 15'000u);
}

// Whole directories: each of the files damaged in turn. Whatever loads must be a model whose every view lies
// in memory.
TEST(CheckpointFuzz, Directories) {
  TempDir dir;
  for (const bool single : {true, false}) {
    MakeOptions o = small(dir / (single ? "single" : "sharded"));
    o.single_file = single;
    o.file_bytes = 16 << 10;
    ASSERT_TRUE(make_checkpoint(o).ok());
    std::vector<std::string> files = {"config.json", "generation_config.json", "tokenizer_config.json"};
    if (!single) files.push_back("model.safetensors.index.json");
    for (const auto& entry : std::filesystem::directory_iterator(o.out)) {
      if (entry.path().extension() == ".safetensors") files.push_back(entry.path().filename().string());
    }
    std::sort(files.begin(), files.end());
    SplitMix64 random(43);
    size_t loaded = 0;
    for (size_t i = 0; i < kDirectories; ++i) {
      const std::string path = o.out + "/" + files[random.below(files.size())];
      const std::string valid = read_text(path);
      std::string damaged;
      if (path.ends_with(".safetensors")) {  // the header: damage to data is another model
        uint64_t n = 0;
        std::memcpy(&n, valid.data(), 8);
        damaged = random.chance(0.1)
                      ? mutated(valid, random)
                      : testing::safetensors_bytes(mutated(valid.substr(8, n), random), valid.substr(8 + n));
      } else {
        damaged = mutated(valid, random);
      }
      write_text(path, damaged);
      const auto model = load_model(o.out);
      if (model.ok()) {
        ++loaded;
        [[maybe_unused]] volatile unsigned char touched = 0;
        for (const auto& layer : (*model)->experts) {
          for (const ExpertWeights& e : layer) {
            for (const WeightView* w : {&e.w1, &e.w2, &e.w3}) {
              ASSERT_NE(w->data, nullptr);
              touched = static_cast<const unsigned char*>(w->data)[w->bytes() - 1];
            }
          }
        }
      } else {
        EXPECT_FALSE(message_of(model.status()).empty());
      }
      (void)inspect_checkpoint(o.out).ok();
      write_text(path, valid);
    }
    std::printf("%zu of %zu damaged directories still load\n", loaded, kDirectories);
    EXPECT_LT(loaded, kDirectories * 3 / 4);
    EXPECT_TRUE(load_model(o.out).ok());
  }
}

}  // namespace
}  // namespace conclave::fuzz
