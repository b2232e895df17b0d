#include "libs/text/nfc.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uniset.h>

#include <algorithm>

#include "libs/base/check.h"

namespace conclave::text {
namespace {

struct Normalizers {
  const icu::Normalizer2* full = nullptr;
  const icu::Normalizer2* unicode9 = nullptr;
};

const Normalizers& normalizers() {
  // Never destroyed: threads may still encode while the process ends.
  static const Normalizers* const instance = [] {
    auto* out = new Normalizers;
    UErrorCode error = U_ZERO_ERROR;
    out->full = icu::Normalizer2::getNFCInstance(error);
    auto* assigned = new icu::UnicodeSet(icu::UnicodeString(u"[:age=9.0:]"), error);
    CONCLAVE_CHECK(U_SUCCESS(error));
    assigned->freeze();
    out->unicode9 = new icu::FilteredNormalizer2(*out->full, *assigned);
    return out;
  }();
  return *instance;
}

}  // namespace

bool to_nfc(std::string_view text, std::string& out) {
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; }))
    return false;
  const icu::StringPiece input(text.data(), static_cast<int32_t>(text.size()));
  UErrorCode error = U_ZERO_ERROR;
  // What is normal by the full rules is normal by the filtered ones, which look at substrings of it.
  if (normalizers().full->isNormalizedUTF8(input, error) != 0 && U_SUCCESS(error)) return false;
  error = U_ZERO_ERROR;
  std::string normalized;
  icu::StringByteSink<std::string> sink(&normalized);
  normalizers().unicode9->normalizeUTF8(0, input, sink, nullptr, error);
  CONCLAVE_CHECK(U_SUCCESS(error));  // valid UTF-8 under 2 GiB cannot fail
  if (normalized == text) return false;
  out = std::move(normalized);
  return true;
}

}  // namespace conclave::text
