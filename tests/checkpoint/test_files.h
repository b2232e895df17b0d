// Small helpers of the checkpoint tests: a directory that goes away, files as strings, safetensors bytes by
// hand.
#pragma once

#include <stdlib.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace conclave::testing {

class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "conclave-ckpt-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
}

// The file's bytes with the first `from` replaced; the text must be there.
inline void edit(const std::string& path, const std::string& from, const std::string& to) {
  std::string text = read_text(path);
  const size_t at = text.find(from);
  if (at == std::string::npos) throw std::runtime_error(path + " has no " + from);
  write_text(path, text.replace(at, from.size(), to));
}

// 8 bytes of length, the JSON, the data.
inline std::string safetensors_bytes(const std::string& json, const std::string& data) {
  std::string out(8, '\0');
  const uint64_t n = json.size();
  std::memcpy(out.data(), &n, 8);
  return out + json + data;
}

// Rewrites the JSON header of a safetensors file in place of another length, padded to keep the data aligned,
// and adds `data` at the end.
inline void edit_header(const std::string& path, const std::string& from, const std::string& to,
                        const std::string& data = "") {
  const std::string file = read_text(path);
  uint64_t n = 0;
  std::memcpy(&n, file.data(), 8);
  std::string json = file.substr(8, n);
  const size_t at = json.find(from);
  if (at == std::string::npos) throw std::runtime_error(path + " has no " + from);
  for (size_t next = at; next != std::string::npos; next = json.find(from, next + to.size())) {
    json.replace(next, from.size(), to);
  }
  json.resize((json.size() + 7) / 8 * 8, ' ');
  // Not over the old file: it may be mapped.
  write_text(path + ".new", safetensors_bytes(json, file.substr(8 + n) + data));
  std::filesystem::rename(path + ".new", path);
}

// Adds an F32 tensor of `count` zeros behind all others.
inline void add_tensor(const std::string& path, const std::string& name, uint64_t count) {
  const std::string file = read_text(path);
  uint64_t n = 0;
  std::memcpy(&n, file.data(), 8);
  const uint64_t end = file.size() - 8 - n;
  const std::string metadata = "\"__metadata__\":{\"format\":\"pt\"}";
  edit_header(path, metadata,
              metadata + ",\"" + name + "\":{\"dtype\":\"F32\",\"shape\":[" + std::to_string(count) +
                  "],\"data_offsets\":[" + std::to_string(end) + "," + std::to_string(end + 4 * count) + "]}",
              std::string(4 * count, '\0'));
}

}  // namespace conclave::testing
