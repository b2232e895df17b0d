#include "libs/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "libs/base/random.h"
#include "tests/checkpoint/test_files.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;
using testing::safetensors_bytes;

std::vector<TensorInfo> parse(const std::string& file, FaultList& faults) {
  return parse_safetensors(std::as_bytes(std::span(file.data(), file.size())), "f", faults);
}

std::string fault_text(const std::string& json, size_t data_bytes) {
  FaultList faults;
  parse(safetensors_bytes(json, std::string(data_bytes, 'x')), faults);
  return faults.empty() ? "fine" : message_of(faults.to_status("file"));
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
         "}";
}

TEST(Safetensors, ReadsAValidFile) {
  const std::string json = "{\"__metadata__\":{\"format\":\"pt\"}," + entry("b", "BF16", "[3]", "[8,14]") +
                           "," + entry("a", "F32", "[2,1]", "[0,8]") + "," +
                           entry("none", "F32", "[0,7]", "[14,14]") + "," +
                           entry("scalar", "U8", "[]", "[14,15]") + "}   ";
  const std::string file = safetensors_bytes(json, "0123456789abcde");
  FaultList faults;
  const auto tensors = parse(file, faults);
  ASSERT_TRUE(faults.empty()) << message_of(faults.to_status(""));
  ASSERT_EQ(tensors.size(), 4u);
  EXPECT_EQ(tensors[0].name, "b");
  EXPECT_EQ(tensors[0].dtype, "BF16");
  EXPECT_EQ(tensors[0].bytes, 6u);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(tensors[0].data), 6), "89abcd");
  EXPECT_EQ(tensors[1].shape, (std::vector<uint64_t>{2, 1}));
}

TEST(Safetensors, AnUnknownDtypeIsNoFaultByItself) {
  EXPECT_EQ(fault_text("{" + entry("a", "F4_E2M1", "[16]", "[0,8]") + "}", 8), "fine");
}

TEST(Safetensors, EscapedNamesAreRead) {
  FaultList faults;
  const auto tensors =
      parse(safetensors_bytes("{" + entry("mod\\u0065l\\\"x", "U8", "[1]", "[0,1]") + "}", "x"), faults);
  ASSERT_EQ(tensors.size(), 1u);
  EXPECT_EQ(tensors[0].name, "model\"x");
}

TEST(Safetensors, EachDamageIsNamed) {
  const std::string a = entry("a", "F32", "[2]", "[0,8]");
  struct Damage {
    std::string json;
    size_t data;
    const char* expected;
  };
  const Damage kDamages[] = {
      {"{" + a + "}", 4, "a: data ends at byte 8 of the file's data, which has only 4"},
      {"{" + a + "}", 9, "1 bytes after the last tensor belong to none"},
      {"{" + entry("a", "F32", "[3]", "[0,8]") + "}", 8, "a: F32 [3] takes 12 bytes, data_offsets give 8"},
      {"{" + a + "," + entry("b", "F32", "[2]", "[4,12]") + "}", 12, "b: overlaps a by 4 bytes"},
      {"{" + a + "," + entry("b", "F32", "[2]", "[0,8]") + "}", 8, "overlaps"},
      {"{" + a + "," + entry("b", "F32", "[1]", "[12,16]") + "}", 16, "b: a hole of 4 bytes before it"},
      {"{" + entry("a", "F32", "[2]", "[8,0]") + "}", 8, "a: data_offsets end before they begin"},
      {"{" + a + "," + entry("a", "F32", "[2]", "[8,16]") + "}", 16, "a: named twice"},
      {"{" + entry("a", "F32", "[-1]", "[0,8]") + "}", 8, "a: shape must not be or hold a negative number"},
      {"{" + entry("a", "F32", "[2.5]", "[0,8]") + "}", 8,
       "a: shape must not be or hold a number that is not whole"},
      {"{" + entry("a", "F32", "[\"2\"]", "[0,8]") + "}", 8, "a: shape must not be or hold a string"},
      {"{" + entry("a", "F32", "[2]", "[0,4,8]") + "}", 8, "a: data_offsets must be two whole numbers"},
      {"{" + entry("a", "F32", "[4294967296,4294967296,4294967296]", "[0,8]") + "}", 8, "overflows"},
      {"{" + entry("a", "F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]") + "}", 8, "a: more than 8 dimensions"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "a: no data_offsets"},
      {"{\"a\":{}}", 0, "a: no dtype"},
      {"{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
       "a: dtype must not be or hold a number"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":\"2\",\"data_offsets\":[0,8]}}", 8, "a: shape must be an array"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8,
       "a: unknown entry \"x\""},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,[8]]}}", 8,
       "an array where none belongs"},
      {"{\"a\":{\"dtype\":{},\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "an object where none belongs"},
      {"{\"a\":[1]}", 8, "an array where none belongs"},
      {"{\"a\":1}", 8, "a number where a tensor's entry belongs"},
      {"{\"__metadata__\":\"x\"}", 0, "must be an object"},
      {"{\"__metadata__\":{\"x\":1}}", 0, "__metadata__: values must be strings"},
      {"{" + a, 8, "header is not valid"},
      {"{" + a + "} x", 8, "text after the object"},
      {"{" + a + "}" + std::string(3, '\0'), 8, "text after the object"},
      {"[1]", 8, "does not begin with '{'"},
      {" {}", 8, "does not begin with '{'"},
      {"", 8, "does not begin with '{'"},
      {"{\"\xff\":1}", 8, "header is not valid"},
  };
  for (const Damage& d : kDamages) EXPECT_THAT(fault_text(d.json, d.data), HasSubstr(d.expected)) << d.json;
}

TEST(Safetensors, HeaderLengthIsNotTrusted) {
  auto with_length = [](uint64_t n) {
    std::string file(16, '{');
    std::memcpy(file.data(), &n, 8);
    FaultList faults;
    parse(file, faults);
    return message_of(faults.to_status("file"));
  };
  EXPECT_THAT(with_length(9), HasSubstr("header length 9 is more than the file has"));
  EXPECT_THAT(with_length(100'000'001), HasSubstr("above the format's limit of 100000000"));
  EXPECT_THAT(with_length(UINT64_MAX), HasSubstr("above the format's limit"));
  EXPECT_THAT(with_length(UINT64_MAX - 7), HasSubstr("above the format's limit"));
  FaultList faults;
  parse("1234567", faults);
  EXPECT_THAT(message_of(faults.to_status("")), HasSubstr("only 7 bytes"));
}

TEST(Safetensors, AllFaultsOfAFileAreListed) {
  const std::string text =
      fault_text("{" + entry("a", "F32", "[3]", "[0,8]") + "," + entry("b", "F32", "[-2]", "[8,16]") + "," +
                     entry("c", "F32", "[2]", "[16,24]") + "," + entry("d", "F32", "[2]", "[20,28]") + "," +
                     entry("e", "F32", "[2]", "[28,99]") + "}",
                 28);
  for (const char* expected : {"f: a: F32 [3]", "f: b: shape", "f: d: overlaps c", "f: e: data ends"}) {
    EXPECT_THAT(text, HasSubstr(expected));
  }
  EXPECT_THAT(text, HasSubstr("4 faults"));
}

// Whatever the bytes: no crash, and what is returned lies inside the file. A clean verdict means that the
// tensors tile the data exactly, checked here by another way.
void check_parse(const std::string& file) {
  FaultList faults;
  const auto tensors = parse(file, faults);
  uint64_t sum = 0;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const TensorInfo& t : tensors) {
    ASSERT_LE(t.begin, file.size());
    ASSERT_LE(t.bytes, file.size() - t.begin);
    ASSERT_EQ(reinterpret_cast<const char*>(t.data), file.data() + t.begin);
    sum += t.bytes;
    if (t.bytes > 0) ranges.emplace_back(t.begin, t.bytes);
  }
  if (!faults.empty()) {
    ASSERT_FALSE(faults.to_status("f").ok());
    return;
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i)
    ASSERT_EQ(ranges[i - 1].first + ranges[i - 1].second, ranges[i].first);
  uint64_t header = 0;
  std::memcpy(&header, file.data(), 8);
  ASSERT_EQ(8 + header + sum, file.size());
}

TEST(Safetensors, RandomDamageNeverCrashes) {
  std::string json = "{\"__metadata__\":{\"format\":\"pt\"}";
  for (int i = 0; i < 12; ++i) {
    json += "," + entry("model.layers." + std::to_string(i) + ".w", i % 2 ? "BF16" : "U16", "[2,2]",
                        "[" + std::to_string(8 * i) + "," + std::to_string(8 * i + 8) + "]");
  }
  const std::string valid = safetensors_bytes(json + "}", std::string(96, 'd'));
  check_parse(valid);
  SplitMix64 random(20240611);
  size_t clean = 0;
  const char* const kPieces[] = {"{",
                                 "}",
                                 "[",
                                 "]",
                                 "\"",
                                 ",",
                                 ":",
                                 "-1",
                                 "1e400",
                                 "18446744073709551615",
                                 "null",
                                 "\\u0000",
                                 "\\ud800",
                                 "\"shape\"",
                                 "\"__metadata__\"",
                                 "9999999999999999999999",
                                 "0.5",
                                 "{\"a\":{}}",
                                 "true"};
  for (int i = 0; i < 20'000; ++i) {
    std::string file = valid;
    for (uint64_t edits = 1 + random.below(4); edits > 0; --edits) {
      const size_t at = random.below(std::max<size_t>(file.size(), 1));
      switch (random.below(7)) {
        case 0:
          file.resize(at);
          break;
        case 1:
          file.insert(at, kPieces[random.below(std::size(kPieces))]);
          break;
        case 2:
          file.erase(at, 1 + random.below(16));
          break;
        case 3:
          file.insert(at, file.substr(random.below(file.size() + 1), random.below(64)));
          break;
        case 4: {  // another digit: offsets and shapes that are nearly right
          const size_t digit = file.find_first_of("0123456789", at);
          if (digit != std::string::npos) file[digit] = static_cast<char>('0' + random.below(10));
          break;
        }
        default:
          if (!file.empty()) file[std::min(at, file.size() - 1)] = static_cast<char>(random.next());
      }
      if (file.size() >= 8 && random.chance(0.6)) {  // keep the length right, so that the JSON is reached
        const size_t end = file.rfind('}');
        const uint64_t n = end == std::string::npos || end < 8 ? random.below(400) : end - 7;
        std::memcpy(file.data(), &n, 8);
      }
    }
    SCOPED_TRACE(i);
    check_parse(file);
    if (HasFatalFailure()) return;
    FaultList faults;
    parse(file, faults);
    clean += faults.empty();
  }
  EXPECT_LT(clean, 10'000u);  // the damage is damage
}

// A header at the format's limit, full of what costs most, is answered in bounded time and memory.
TEST(Safetensors, HostileHeadersAreBounded) {
  std::string json = "{";
  for (int i = 0; json.size() < 4'000'000; ++i) json += (i ? ",\"" : "\"") + std::to_string(i) + "\":{}";
  EXPECT_THAT(fault_text(json + "}", 0), HasSubstr("more"));
  EXPECT_THAT(fault_text("{\"a\":" + std::string(1'000'000, '['), 0), HasSubstr("header is not valid"));
  EXPECT_THAT(fault_text("{\"" + std::string(1'000'000, 'n') + "\":{}}", 0),
              HasSubstr("header is not valid"));
}

}  // namespace
}  // namespace conclave
