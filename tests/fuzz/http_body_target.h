// What fuzzing of the HTTP API's request bodies calls; aborts when a rule is broken.
#pragma once

#include <string_view>

namespace conclave::fuzz {

// Parses `body` as a completion or as a chat. A refusal must be INVALID_ARGUMENT and name a field; what is
// accepted must keep to the bounds that the gateway relies on. True when it was accepted.
bool try_http_body(std::string_view body, bool chat);
// The same for /tokenize and /detokenize.
bool try_text_body(std::string_view body, bool tokenize);

}  // namespace conclave::fuzz
