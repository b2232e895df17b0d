// Little-endian cursors over bytes, for the wire codecs alone.
#pragma once

#include <bit>
#include <cstring>
#include <string>
#include <type_traits>

#include "libs/base/check.h"
#include "libs/transport/wire.h"

namespace conclave::wire {

static_assert(std::endian::native == std::endian::little, "a big-endian build needs byte swaps here");

class Writer {
 public:
  explicit Writer(Bytes& out) : out_(out) { out_.clear(); }
  template <class T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    append(&value, sizeof value);
  }
  template <size_t N>
  void put(const std::array<std::byte, N>& a) {
    append(a.data(), N);
  }
  void append(const void* data, size_t n) {
    const auto* p = static_cast<const std::byte*>(data);
    out_.insert(out_.end(), p, p + n);
  }
  void zeros(size_t n) { out_.resize(out_.size() + n); }
  void pad8() { out_.resize((out_.size() + 7) & ~size_t{7}); }

 private:
  Bytes& out_;
};

// Callers check has() for the fixed part once; get() beyond the end is our bug.
class Reader {
 public:
  explicit Reader(View data, size_t at = 0) : data_(data), at_(at) {}
  size_t left() const { return data_.size() - at_; }
  size_t at() const { return at_; }
  template <class T>
  T get() {
    T value;
    copy(&value, sizeof value);
    return value;
  }
  void copy(void* to, size_t n) {
    CONCLAVE_CHECK(n <= left());
    if (n > 0) std::memcpy(to, data_.data() + at_, n);
    at_ += n;
  }
  void skip(size_t n) {
    CONCLAVE_CHECK(n <= left());
    at_ += n;
  }
  std::string text(size_t n) {
    std::string s(n, '\0');
    copy(s.data(), n);
    return s;
  }

 private:
  View data_;
  size_t at_;
};

inline constexpr uint64_t pad8(uint64_t n) { return (n + 7) & ~uint64_t{7}; }

// Starts a header; finish() sets lengths and CRC.
void begin(Writer& w, Kind kind, const Envelope& envelope);
void finish(Bytes& out, uint64_t rows_bytes, bool has_rows_crc, uint32_t rows_crc, uint32_t sections_bytes);
// Appends sections, returns their length.
uint32_t append_sections(Writer& w, std::span<const Section> sections);
// That the header is exactly fixed part + `body` bytes (padded) + sections long.
Status expect_body(const Header& h, uint64_t body);

}  // namespace conclave::wire
