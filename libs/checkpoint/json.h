// Reading JSON files of a checkpoint. Private to libs/checkpoint: this header brings Boost.JSON in.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <boost/json.hpp>

#include "libs/base/status.h"

namespace conclave::json {

using boost::json::array;
using boost::json::object;
using boost::json::value;

// Bytes of config.json and its like; tokenizer.json and a tensor index are larger.
inline constexpr uint64_t kMaxConfigBytes = 4ull << 20;
inline constexpr uint64_t kMaxLargeFileBytes = 256ull << 20;

// The file's bytes. NOT_FOUND when there is none; INVALID_ARGUMENT past max_bytes. The status names the file.
StatusOr<std::string> read_file(const std::string& path, uint64_t max_bytes);
// A JSON object; anything else, or text after it, is INVALID_ARGUMENT naming `what` with the byte offset.
StatusOr<object> parse_object(std::string_view text, std::string_view what);

inline std::string_view view(const boost::json::string& s) { return {s.data(), s.size()}; }
// Member lookup; null pointer when absent or JSON null, which configs use for "not set".
const value* find(const object& o, std::string_view key);
// The number when it is one without a fraction in [0, 2^63).
std::optional<uint64_t> as_count(const value& v);
std::optional<double> as_number(const value& v);
std::string type_name(const value& v);

}  // namespace conclave::json
