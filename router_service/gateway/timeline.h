// How followed requests went at this router: marks on its own clock, since their arrival. What workers and
// shards did for them the scheduler knows (libs/model/timeline.h). One bounded account each, for the open
// ones and the last that ended.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/clock.h"
#include "libs/model/request.h"
#include "router_service/gateway/request.h"

namespace conclave::gateway {

enum class RouterMarkKind : uint8_t {
  kReceived,   // the request was here
  kText,       // a thread began with its template and tokens
  kTokenized,  // and was done
  kSubmitted,  // handed to the scheduler (or asked of it, where a stream is resumed)
  kAccepted,   // the scheduler has it
  kEnded,
  kCount
};
constexpr std::string_view router_mark_name(RouterMarkKind kind) {
  constexpr std::string_view kNames[] = {"received", "text", "tokenized", "submitted", "accepted", "ended"};
  return kNames[static_cast<size_t>(kind)];
}

struct RouterMark {
  RouterMarkKind kind = RouterMarkKind::kReceived;
  Nanos at = 0;
  std::string detail;
};

// Tokens of one choice that came together.
struct TokenArrival {
  Nanos at = 0;
  Nanos taken = -1;  // the protocol took them for its client; negative: not yet
  uint32_t choice = 0;
  uint32_t index = 0;  // of the first one
  uint32_t count = 0;
};

inline constexpr size_t kMaxTokenArrivals =
    256;  // of one request: the first half and the last half of so many
inline constexpr size_t kMaxRouterMarks = 16;

struct RouterTimelineView {
  RequestId id;
  std::string request_id;
  std::string route;
  std::string tenant;
  TraceContext trace;
  Nanos age = 0;
  bool ended = false;
  bool resumed = false;
  std::vector<RouterMark> marks;
  std::vector<TokenArrival> tokens;
  uint64_t dropped_tokens = 0;  // arrivals between the first and the last
  uint64_t first_tokens = 0;    // how many of `tokens` come before these
  Usage usage;                  // at the end
};

// Any thread.
class RouterTimeline {
 public:
  RouterTimeline(RequestId id, const Origin& origin, bool resumed, TimePoint arrived);

  void mark(RouterMarkKind kind, std::string_view detail = "", TimePoint now = steady_now());
  void tokens(const TokenEvent& event, TimePoint now);
  // Everything that has come was taken.
  void taken(TimePoint now = steady_now());
  // The first end counts.
  void end(std::string_view how, const Usage& usage, TimePoint now = steady_now());

  bool ended() const;
  RequestId id() const { return id_; }
  RouterTimelineView view(TimePoint now = steady_now()) const;
  // Whether `name` is its id, its client's word for it, or its trace's id. Only the first is nobody else's.
  bool is_called(std::string_view name) const;

 private:
  const RequestId id_;
  const TimePoint arrived_;
  const std::string trace_id_;
  mutable std::mutex mutex_;
  RouterTimelineView shown_;  // with the first arrivals
  std::deque<TokenArrival> last_;
  size_t untaken_ = 0;  // arrivals kept that nobody took yet, the newest ones
};

// Any thread.
class TimelineBook {
 public:
  explicit TimelineBook(uint32_t max) : max_(max) {}

  // Null when as many open requests have one as there may be, which is counted.
  std::shared_ptr<RouterTimeline> open(RequestId id, const Origin& origin, bool resumed, TimePoint arrived);
  // The one with this id, else the newest that is called so; null: none.
  std::shared_ptr<RouterTimeline> find(std::string_view name) const;
  // The other requests that are called so, the newest first.
  std::vector<RequestId> namesakes(std::string_view name, RequestId but, size_t max) const;
  // The newest first.
  std::vector<RouterTimelineView> list(size_t max) const;
  struct Counts {
    uint64_t kept = 0;
    uint64_t opened = 0;
    uint64_t refused = 0;
  };
  Counts counts() const;

 private:
  const uint32_t max_;
  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<RouterTimeline>> order_;  // as they were opened
  uint64_t opened_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace conclave::gateway
