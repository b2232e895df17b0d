#include "libs/text/unicode_additions.h"

#include <algorithm>
#include <iterator>

#include "libs/text/utf8.h"

namespace conclave::text {
namespace {

enum Category : uint8_t { kLu, kLl, kLm, kLo, kMn, kMc, kNd, kNo, kPd, kPo, kSm, kSo, kCf };

struct Range {
  uint32_t first;
  uint32_t last;
  Category category;
};

// General categories of the code points that the Unicode Character Database assigned (or, for 1171E, changed)
// in versions 15.0 to 16.0 (https://www.unicode.org/Public/16.0.0/ucd/), in order.
constexpr Range kAdditions[] = {
    {0x897, 0x897, kMn},     {0xcf3, 0xcf3, kMc},     {0xece, 0xece, kMn},     {0x1b4e, 0x1b4f, kPo},
    {0x1b7f, 0x1b7f, kPo},   {0x1c89, 0x1c89, kLu},   {0x1c8a, 0x1c8a, kLl},   {0x2427, 0x2429, kSo},
    {0x2ffc, 0x2fff, kSo},   {0x31e4, 0x31e5, kSo},   {0x31ef, 0x31ef, kSo},   {0xa7cb, 0xa7cc, kLu},
    {0xa7cd, 0xa7cd, kLl},   {0xa7da, 0xa7da, kLu},   {0xa7db, 0xa7db, kLl},   {0xa7dc, 0xa7dc, kLu},
    {0x105c0, 0x105f3, kLo}, {0x10d40, 0x10d49, kNd}, {0x10d4a, 0x10d4d, kLo}, {0x10d4e, 0x10d4e, kLm},
    {0x10d4f, 0x10d4f, kLo}, {0x10d50, 0x10d65, kLu}, {0x10d69, 0x10d6d, kMn}, {0x10d6e, 0x10d6e, kPd},
    {0x10d6f, 0x10d6f, kLm}, {0x10d70, 0x10d85, kLl}, {0x10d8e, 0x10d8f, kSm}, {0x10ec2, 0x10ec4, kLo},
    {0x10efc, 0x10eff, kMn}, {0x1123f, 0x11240, kLo}, {0x11241, 0x11241, kMn}, {0x11380, 0x11389, kLo},
    {0x1138b, 0x1138b, kLo}, {0x1138e, 0x1138e, kLo}, {0x11390, 0x113b5, kLo}, {0x113b7, 0x113b7, kLo},
    {0x113b8, 0x113ba, kMc}, {0x113bb, 0x113c0, kMn}, {0x113c2, 0x113c2, kMc}, {0x113c5, 0x113c5, kMc},
    {0x113c7, 0x113ca, kMc}, {0x113cc, 0x113cd, kMc}, {0x113ce, 0x113ce, kMn}, {0x113cf, 0x113cf, kMc},
    {0x113d0, 0x113d0, kMn}, {0x113d1, 0x113d1, kLo}, {0x113d2, 0x113d2, kMn}, {0x113d3, 0x113d3, kLo},
    {0x113d4, 0x113d5, kPo}, {0x113d7, 0x113d8, kPo}, {0x113e1, 0x113e2, kMn}, {0x116d0, 0x116e3, kNd},
    {0x1171e, 0x1171e, kMc}, {0x11b00, 0x11b09, kPo}, {0x11bc0, 0x11be0, kLo}, {0x11be1, 0x11be1, kPo},
    {0x11bf0, 0x11bf9, kNd}, {0x11f00, 0x11f01, kMn}, {0x11f02, 0x11f02, kLo}, {0x11f03, 0x11f03, kMc},
    {0x11f04, 0x11f10, kLo}, {0x11f12, 0x11f33, kLo}, {0x11f34, 0x11f35, kMc}, {0x11f36, 0x11f3a, kMn},
    {0x11f3e, 0x11f3f, kMc}, {0x11f40, 0x11f40, kMn}, {0x11f41, 0x11f41, kMc}, {0x11f42, 0x11f42, kMn},
    {0x11f43, 0x11f4f, kPo}, {0x11f50, 0x11f59, kNd}, {0x11f5a, 0x11f5a, kMn}, {0x1342f, 0x1342f, kLo},
    {0x13439, 0x1343f, kCf}, {0x13440, 0x13440, kMn}, {0x13441, 0x13446, kLo}, {0x13447, 0x13455, kMn},
    {0x13460, 0x143fa, kLo}, {0x16100, 0x1611d, kLo}, {0x1611e, 0x16129, kMn}, {0x1612a, 0x1612c, kMc},
    {0x1612d, 0x1612f, kMn}, {0x16130, 0x16139, kNd}, {0x16d40, 0x16d42, kLm}, {0x16d43, 0x16d6a, kLo},
    {0x16d6b, 0x16d6c, kLm}, {0x16d6d, 0x16d6f, kPo}, {0x16d70, 0x16d79, kNd}, {0x18cff, 0x18cff, kLo},
    {0x1b132, 0x1b132, kLo}, {0x1b155, 0x1b155, kLo}, {0x1cc00, 0x1ccef, kSo}, {0x1ccf0, 0x1ccf9, kNd},
    {0x1cd00, 0x1ceb3, kSo}, {0x1d2c0, 0x1d2d3, kNo}, {0x1df25, 0x1df2a, kLl}, {0x1e030, 0x1e06d, kLm},
    {0x1e08f, 0x1e08f, kMn}, {0x1e4d0, 0x1e4ea, kLo}, {0x1e4eb, 0x1e4eb, kLm}, {0x1e4ec, 0x1e4ef, kMn},
    {0x1e4f0, 0x1e4f9, kNd}, {0x1e5d0, 0x1e5ed, kLo}, {0x1e5ee, 0x1e5ef, kMn}, {0x1e5f0, 0x1e5f0, kLo},
    {0x1e5f1, 0x1e5fa, kNd}, {0x1e5ff, 0x1e5ff, kPo}, {0x1f6dc, 0x1f6dc, kSo}, {0x1f774, 0x1f776, kSo},
    {0x1f77b, 0x1f77f, kSo}, {0x1f7d9, 0x1f7d9, kSo}, {0x1f8b2, 0x1f8bb, kSo}, {0x1f8c0, 0x1f8c1, kSo},
    {0x1fa75, 0x1fa77, kSo}, {0x1fa87, 0x1fa89, kSo}, {0x1fa8f, 0x1fa8f, kSo}, {0x1faad, 0x1faaf, kSo},
    {0x1fabb, 0x1fabf, kSo}, {0x1fac6, 0x1fac6, kSo}, {0x1face, 0x1facf, kSo}, {0x1fada, 0x1fadc, kSo},
    {0x1fadf, 0x1fadf, kSo}, {0x1fae8, 0x1fae9, kSo}, {0x1faf7, 0x1faf8, kSo}, {0x1fbcb, 0x1fbef, kSo},
    {0x2b739, 0x2b739, kLo}, {0x2ebf0, 0x2ee5d, kLo}, {0x31350, 0x323af, kLo},
};
constexpr uint32_t kFirstAddition = 0x897;

// A code point of the same category and UTF-8 length that every supported PCRE2 knows.
uint32_t stand_in(Category category, bool four_bytes) {
  switch (category) {
    case kLu:
      return four_bytes ? 0x10400 : 0x1e00;
    case kLl:
      return four_bytes ? 0x10428 : 0x1e01;
    case kLm:
      return four_bytes ? 0x16f93 : 0x1d2c;
    case kLo:
      return four_bytes ? 0x10000 : 0x3041;
    case kMn:
      return four_bytes ? 0x10a01 : 0x0951;
    case kMc:
      return four_bytes ? 0x11000 : 0x0903;
    case kNd:
      return four_bytes ? 0x104a0 : 0x0966;
    case kNo:
      return four_bytes ? 0x10107 : 0x2460;
    case kPd:
      return four_bytes ? 0x10ead : 0x2010;
    case kPo:
      return four_bytes ? 0x10100 : 0x2020;
    case kSm:
      return four_bytes ? 0x1d6c1 : 0x2200;
    case kSo:
      return four_bytes ? 0x1f300 : 0x2300;
    case kCf:
      return four_bytes ? 0x110bd : 0x200b;
  }
  return 0;
}

}  // namespace

bool replace_unicode_additions(std::string_view text, std::string& shadow) {
  bool replaced = false;
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<uint8_t>(text[i]);
    // One- and two-byte characters lie below the first addition.
    if (lead < 0xe0) {
      ++i;
      continue;
    }
    const size_t length = lead < 0xf0 ? 3 : 4;
    const uint32_t code = decode_utf8(text, i);
    const auto* range = std::lower_bound(std::begin(kAdditions), std::end(kAdditions), code,
                                         [](const Range& r, uint32_t c) { return r.last < c; });
    if (code >= kFirstAddition && range != std::end(kAdditions) && range->first <= code) {
      if (!replaced) shadow.assign(text);
      replaced = true;
      std::string stand;
      append_utf8(stand, stand_in(range->category, length == 4));
      shadow.replace(i, length, stand);
    }
    i += length;
  }
  return replaced;
}

}  // namespace conclave::text
