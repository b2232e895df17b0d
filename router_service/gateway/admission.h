// Every bound that the front door puts on requests, in one place, and how often each was reached.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>

#include "libs/base/status.h"

namespace conclave::gateway {

struct AdmissionLimits {
  // Of one request; past these it is refused for good (HTTP 400, 413, 431).
  uint64_t max_body_bytes = 16ull << 20;
  uint32_t max_header_bytes = 32 << 10;
  uint32_t max_messages = 4096;
  uint32_t max_tools = 512;
  uint32_t max_prompts = 64;       // of one completions request
  uint32_t max_answers = 128;      // prompts times n
  uint32_t max_choices = 64;       // n
  uint32_t max_top_logprobs = 20;  // alternatives for a token, of the answer or the prompt
  uint32_t max_stop_strings = 16;
  uint32_t max_stop_string_bytes = 1024;
  uint32_t max_stop_token_ids = 256;
  uint32_t max_name_bytes = 128;  // the client's own name for a request
  // Text with more bytes than this for each token of the context is refused before it is tokenized. Prose has
  // 4 or 5.
  uint32_t max_bytes_per_token = 32;
  // Of all requests together; past these a new one is refused for now (HTTP 503 with Retry-After), before it
  // is tokenized.
  uint32_t max_requests = 4096;           // open at once
  uint32_t max_queued_requests = 2048;    // without their first token
  uint64_t max_queued_tokens = 16 << 20;  // of their prompts; estimated from the bytes until tokenized
  uint32_t max_waiting_texts = 2048;      // waiting for a text thread
};

// What can be reached; the names are the metric's label and, but for "max_stops", config keys.
enum class Limit : uint8_t {
  kMessages,
  kTools,
  kPrompts,
  kAnswers,
  kChoices,
  kTopLogprobs,
  kStops,
  kRequests,
  kQueuedRequests,
  kQueuedTokens,
  kWaitingTexts,
  kSlowReader,
  kRouterContext,
  kCount
};
std::string_view limit_name(Limit limit);
// INVALID_ARGUMENT for `field`, which exceeds a limit for good; limit_of() finds the limit again.
Status over_limit(Limit limit, std::string_view field, std::string_view message);
std::optional<Limit> limit_of(const Status& status);

class LimitCounters {
 public:
  void reached(Limit limit) { counts_[static_cast<size_t>(limit)].fetch_add(1, std::memory_order_relaxed); }
  uint64_t count(Limit limit) const { return counts_[static_cast<size_t>(limit)].load(); }

 private:
  std::array<std::atomic<uint64_t>, static_cast<size_t>(Limit::kCount)> counts_{};
};

// Requests that wait for their first token, and the tokens of their prompts.
class QueueMeter {
 public:
  // Holds one request's place; gives it back when destroyed. Outlived by the meter.
  class Place {
   public:
    Place(QueueMeter& meter, uint64_t tokens) : meter_(meter), tokens_(tokens) {}
    ~Place() {
      meter_.requests_.fetch_sub(1);
      meter_.tokens_.fetch_sub(tokens_);
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    // The real count, known once the prompt is tokenized. Not while another thread destroys the place.
    void correct(uint64_t tokens) {
      meter_.tokens_.fetch_add(tokens - tokens_);  // wraps, and so does the sum
      tokens_ = tokens;
    }

   private:
    QueueMeter& meter_;
    uint64_t tokens_;
  };

  uint64_t requests() const { return requests_.load(); }
  uint64_t tokens() const { return tokens_.load(); }
  // Takes a place (make a Place of it); false at either bound. A request that is larger than max_tokens alone
  // is taken when nothing else waits: it could never be taken otherwise.
  bool enter(uint64_t tokens, uint64_t max_requests, uint64_t max_tokens, Limit* which) {
    if (requests_.fetch_add(1) >= max_requests) {
      requests_.fetch_sub(1);
      *which = Limit::kQueuedRequests;
      return false;
    }
    const uint64_t before = tokens_.fetch_add(tokens);
    if (before > 0 && before + tokens > max_tokens) {
      tokens_.fetch_sub(tokens);
      requests_.fetch_sub(1);
      *which = Limit::kQueuedTokens;
      return false;
    }
    return true;
  }

 private:
  std::atomic<uint64_t> requests_{0};
  std::atomic<uint64_t> tokens_{0};
};

}  // namespace conclave::gateway
