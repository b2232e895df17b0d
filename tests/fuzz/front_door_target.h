// What is done with hostile headers and key files; shared by the seeded loop and libFuzzer. Each aborts when
// a promise is broken.
#pragma once

#include <string>
#include <string_view>

namespace conclave::fuzz {

// The value of an "authorization" header, before a door with kKnownKey: lets in who has that key, and nobody
// else. Returns whether it did.
inline constexpr std::string_view kKnownKey = "ck-known";
bool try_authorization(std::string_view value);
// x-request-timeout: within its range, or an error that names it. Returns whether it was taken.
bool try_timeout(std::string_view value);
// x-request-id: what is usable is safe to send back and to log. Returns whether it is.
bool try_request_id(std::string_view value);
// A file of API keys: what is taken comes out the same when written and read again; a fault names its line.
// Returns whether it was taken.
bool try_key_file(std::string_view text);
// A good one, to begin with.
std::string seed_key_file();

}  // namespace conclave::fuzz
