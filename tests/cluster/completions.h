// Completions over HTTP, as numbered requests.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "libs/base/clock.h"

namespace conclave {

inline constexpr Nanos kCompletionLimit = 120 * kSecond;

// The body that asks for numbered_request(number, max_tokens).
std::string completion_body(uint32_t number, uint32_t max_tokens, bool stream);
// The text of the answer, or "failed: " and what was wrong with it. `on_bytes`: see http_post.
std::string complete(const std::string& address, uint32_t number, uint32_t max_tokens, bool stream,
                     const std::function<void(std::string_view)>& on_bytes = {});

}  // namespace conclave
