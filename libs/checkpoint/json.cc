#include "libs/checkpoint/json.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>

namespace conclave::json {

StatusOr<std::string> read_file(const std::string& path, uint64_t max_bytes) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    const std::string message = path + ": " + std::strerror(error);
    return with_field(error == ENOENT ? not_found(message) : invalid_argument(message), path);
  }
  struct Closer {
    int fd;
    ~Closer() { ::close(fd); }
  } closer{fd};
  struct stat st {};
  if (::fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
    return invalid_field(path, path + ": not a regular file");
  if (static_cast<uint64_t>(st.st_size) > max_bytes) {
    return invalid_field(path, path + ": " + std::to_string(st.st_size) + " bytes, more than the limit of " +
                                   std::to_string(max_bytes));
  }
  std::string text(static_cast<size_t>(st.st_size), '\0');
  size_t have = 0;
  while (have < text.size()) {
    const ssize_t n = ::read(fd, text.data() + have, text.size() - have);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return invalid_field(path, path + ": " + std::strerror(errno));
    if (n == 0) break;  // it shrank meanwhile: what is there decides
    have += static_cast<size_t>(n);
  }
  text.resize(have);
  return text;
}

StatusOr<object> parse_object(std::string_view text, std::string_view what) {
  boost::json::parse_options options;
  options.max_depth = 32;
  boost::json::stream_parser parser({}, options);
  boost::json::error_code error;
  // Some published files begin with a byte order mark.
  if (text.substr(0, 3) == "\xef\xbb\xbf") text.remove_prefix(3);
  const size_t used = parser.write_some(text.data(), text.size(), error);
  if (!error && !parser.done()) {
    return invalid_field(what, std::string(what) + ": not valid JSON: it ends at byte " +
                                   std::to_string(used) + " before its value does");
  }
  size_t rest = used;
  while (!error && rest < text.size() && std::strchr(" \t\r\n", text[rest]) != nullptr) ++rest;
  if (error || rest < text.size()) {
    return invalid_field(what, std::string(what) + ": not valid JSON near byte " +
                                   std::to_string(error ? used : rest) + ": " +
                                   (error ? error.message() : "text after the value"));
  }
  value v = parser.release();
  if (!v.is_object())
    return invalid_field(what, std::string(what) + ": expected a JSON object, got " + type_name(v));
  return std::move(v.get_object());
}

const value* find(const object& o, std::string_view key) {
  const value* v = o.if_contains(boost::json::string_view(key.data(), key.size()));
  return v == nullptr || v->is_null() ? nullptr : v;
}

std::optional<uint64_t> as_count(const value& v) {
  if (v.is_int64() && v.get_int64() >= 0) return static_cast<uint64_t>(v.get_int64());
  if (v.is_uint64() && v.get_uint64() >> 63 == 0) return v.get_uint64();
  if (v.is_double()) {
    const double d = v.get_double();
    if (d >= 0 && d < 9.0e18 && std::floor(d) == d) return static_cast<uint64_t>(d);
  }
  return std::nullopt;
}

std::optional<double> as_number(const value& v) {
  if (v.is_int64()) return static_cast<double>(v.get_int64());
  if (v.is_uint64()) return static_cast<double>(v.get_uint64());
  if (v.is_double() && std::isfinite(v.get_double())) return v.get_double();
  return std::nullopt;
}

std::string type_name(const value& v) {
  switch (v.kind()) {
    case boost::json::kind::null:
      return "null";
    case boost::json::kind::bool_:
      return "a boolean";
    case boost::json::kind::string:
      return "a string";
    case boost::json::kind::array:
      return "an array";
    case boost::json::kind::object:
      return "an object";
    default:
      return "a number";
  }
}

}  // namespace conclave::json
