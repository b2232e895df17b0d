// A file of API keys in a folder of its own.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include "libs/base/random.h"
#include "router_service/door/key_file.h"

namespace conclave::testing {

inline door::KeyLine line_of(const std::string& key, const std::string& name, door::KeyGrant grant = {}) {
  return {door::hash_key(key), name, grant};
}

class KeyDir {
 public:
  KeyDir()
      : dir_(std::filesystem::temp_directory_path() /
             ("conclave-keys-" + std::to_string(system_random_u64()))) {
    std::filesystem::create_directories(dir_);
  }
  ~KeyDir() {
    std::error_code ignored;
    std::filesystem::remove_all(dir_, ignored);
  }
  std::string path() const { return dir_ / "keys"; }
  // As an editor does it: a new file takes the old one's name.
  void write(const std::string& text) const {
    std::ofstream(dir_ / "keys.new") << text;
    std::filesystem::rename(dir_ / "keys.new", dir_ / "keys");
  }

 private:
  const std::filesystem::path dir_;
};

}  // namespace conclave::testing
