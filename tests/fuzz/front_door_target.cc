#include "tests/fuzz/front_door_target.h"

#include <algorithm>
#include <memory>

#include "libs/base/check.h"
#include "router_service/door/front_door.h"
#include "router_service/door/key_file.h"
#include "router_service/http/timeout_header.h"
#include "tests/router/key_dir.h"

namespace conclave::fuzz {
namespace {

using door::FrontDoor;
using testing::line_of;

FrontDoor& known_door() {
  static FrontDoor* const instance = [] {
    testing::KeyDir keys;
    keys.write(seed_key_file());
    door::FrontDoorOptions options;
    options.keys_file = keys.path();
    auto opened = FrontDoor::open(std::move(options));
    CONCLAVE_CHECK(opened.ok());
    return std::move(*opened).release();
  }();
  return *instance;
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// By the words of the documentation: "Bearer", in any case, spaces, the key, spaces.
bool has_known_key(std::string_view value) {
  constexpr std::string_view kScheme = "bearer ";
  if (value.size() < kScheme.size()) return false;
  for (size_t i = 0; i < kScheme.size(); ++i)
    if (lower(value[i]) != kScheme[i]) return false;
  value.remove_prefix(kScheme.size());
  while (value.starts_with(' ')) value.remove_prefix(1);
  while (value.ends_with(' ')) value.remove_suffix(1);
  return value == kKnownKey;
}

}  // namespace

std::string seed_key_file() {
  return "# keys\n\n" + door::format_key_line(line_of(std::string(kKnownKey), "alice", {600, 200000, true})) +
         "\n" + door::format_key_line(line_of("ck-other", "bob", {})) + "\n" +
         door::format_key_line(line_of("ck-third", "bob", {})) + "\n";
}

bool try_authorization(std::string_view value) {
  const auto tenant = known_door().identify(value);
  CONCLAVE_CHECK(tenant.ok() == has_known_key(value) || (tenant.ok() && (*tenant)->name() == "bob"));
  if (tenant.ok()) return true;
  CONCLAVE_CHECK(tenant.status().code() == StatusCode::kUnauthenticated);
  CONCLAVE_CHECK(gateway::code_of(tenant.status()) == "invalid_api_key");
  // Keys and what looks like one stay out of messages.
  CONCLAVE_CHECK(message_of(tenant.status()).size() < 200);
  return false;
}

bool try_timeout(std::string_view value) {
  const auto parsed = router::parse_timeout_header(value);
  if (!parsed.ok()) {
    CONCLAVE_CHECK(parsed.status().code() == StatusCode::kInvalidArgument);
    CONCLAVE_CHECK(field_of(parsed.status()) == router::kTimeoutHeader);
    return false;
  }
  CONCLAVE_CHECK(parsed->has_value() == !value.empty());
  CONCLAVE_CHECK(!parsed->has_value() || (**parsed >= 0 && **parsed <= 7ll * 86400 * kSecond));
  return true;
}

bool try_request_id(std::string_view value) {
  if (!door::usable_request_id(value)) return false;
  CONCLAVE_CHECK(!value.empty() && value.size() <= 128);
  CONCLAVE_CHECK(std::all_of(value.begin(), value.end(), [](char c) { return c > 0x20 && c < 0x7f; }));
  return true;
}

bool try_key_file(std::string_view text) {
  constexpr size_t kMaxKeys = 100;
  const auto lines = door::parse_key_file(text, kMaxKeys);
  if (!lines.ok()) {
    const StatusCode code = lines.status().code();
    CONCLAVE_CHECK(code == StatusCode::kInvalidArgument || code == StatusCode::kResourceExhausted);
    CONCLAVE_CHECK(code == StatusCode::kResourceExhausted ||
                   message_of(lines.status()).find("line ") != std::string::npos);
    return false;
  }
  CONCLAVE_CHECK(lines->size() <= kMaxKeys);
  std::string again;
  for (const door::KeyLine& line : *lines) {
    CONCLAVE_CHECK(door::check_name(line.name).ok());
    again += door::format_key_line(line) + "\n";
  }
  const auto same = door::parse_key_file(again, kMaxKeys);
  CONCLAVE_CHECK(same.ok() && same->size() == lines->size());
  for (size_t i = 0; i < same->size(); ++i) {
    CONCLAVE_CHECK((*same)[i].hash == (*lines)[i].hash && (*same)[i].name == (*lines)[i].name);
    CONCLAVE_CHECK((*same)[i].grant == (*lines)[i].grant);
  }
  return true;
}

}  // namespace conclave::fuzz
