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

// What a client that reads a resumable stream has of it, from the bytes it received of one answer, headers
// and chunk headers included.
inline constexpr char kResumable[] = "x-conclave-resumable: 1\r\n";
// The events that came whole.
std::string whole_events(const std::string& received);
// The ID to resume it by; empty: none was granted.
std::string stream_id(const std::string& received);
// The ID of the last of these events; 0: none.
uint64_t last_id(const std::string& events);

// A streamed completion that is taken up again wherever it breaks, until it is whole. `lost` counts the
// breaks. The text, or "failed: " and what was wrong: another answer than 200, IDs that do not count up from
// 1, a stream that the router does not know any more. A router that does not listen, or says 503 to one that
// resumes, is asked again for kCompletionLimit.
std::string complete_resuming(const std::string& address, uint32_t number, uint32_t max_tokens,
                              uint32_t& lost, const std::function<void(std::string_view)>& on_bytes);

}  // namespace conclave
