#include "cli/npy.h"

#include <cstdint>
#include <fstream>

#include "libs/base/check.h"

namespace conclave::cli {

Status write_npy(const std::string& path, std::span<const float> values, size_t rows, size_t cols) {
  CONCLAVE_CHECK(values.size() == rows * cols);
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(rows) + ", " +
                       std::to_string(cols) + "), }";
  // Magic, version and length take 10 bytes; the whole is padded to a multiple of 64 and ends in a newline.
  while ((10 + header.size() + 1) % 64 != 0) header.push_back(' ');
  header.push_back('\n');
  const uint16_t length = static_cast<uint16_t>(header.size());
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write("\x93NUMPY\x01\x00", 8);
  out.put(static_cast<char>(length & 0xff)).put(static_cast<char>(length >> 8));
  out.write(header.data(), static_cast<std::streamsize>(header.size()));
  out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size_bytes()));
  return out.flush() ? OkStatus() : failed_precondition("cannot write " + path);
}

}  // namespace conclave::cli
