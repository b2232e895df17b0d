#include "router_service/gateway/timeline.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "libs/base/id_text.h"

namespace conclave::gateway {
namespace {

constexpr size_t kMaxDetail = 200;  // bytes

std::string hex(uint64_t hi, uint64_t lo) { return id_text({hi, lo}); }

}  // namespace

RouterTimeline::RouterTimeline(RequestId id, const Origin& origin, bool resumed, TimePoint arrived)
    : id_(id), arrived_(arrived), trace_id_(hex(origin.trace.trace_hi, origin.trace.trace_lo)) {
  shown_.id = id;
  shown_.request_id = origin.request_id;
  shown_.route = origin.route;
  shown_.tenant = origin.tenant;
  shown_.trace = origin.trace;
  shown_.resumed = resumed;
  shown_.marks.push_back({RouterMarkKind::kReceived, 0, ""});
}

void RouterTimeline::mark(RouterMarkKind kind, std::string_view detail, TimePoint now) {
  std::lock_guard lock(mutex_);
  if (shown_.ended || shown_.marks.size() >= kMaxRouterMarks) return;
  shown_.marks.push_back({kind, now - arrived_, std::string(detail.substr(0, kMaxDetail))});
}

void RouterTimeline::tokens(const TokenEvent& event, TimePoint now) {
  if (event.tokens.empty()) return;
  TokenArrival arrival;
  arrival.at = now - arrived_;
  arrival.choice = event.choice;
  arrival.index = event.index;
  arrival.count = static_cast<uint32_t>(event.tokens.size());
  std::lock_guard lock(mutex_);
  if (shown_.ended) return;
  if (shown_.tokens.size() < kMaxTokenArrivals / 2) {
    shown_.tokens.push_back(arrival);
  } else {
    if (last_.size() >= kMaxTokenArrivals / 2) {
      last_.pop_front();
      ++shown_.dropped_tokens;
    }
    last_.push_back(arrival);
  }
  untaken_ = std::min(untaken_ + 1, shown_.tokens.size() + last_.size());
}

void RouterTimeline::taken(TimePoint now) {
  std::lock_guard lock(mutex_);
  for (size_t i = last_.size(); i > 0 && untaken_ > 0; --i, --untaken_) last_[i - 1].taken = now - arrived_;
  // What was dropped between may have been among them: then these are older, and taken all the same.
  for (size_t i = shown_.tokens.size(); i > 0 && untaken_ > 0; --i, --untaken_)
    shown_.tokens[i - 1].taken = now - arrived_;
}

void RouterTimeline::end(std::string_view how, const Usage& usage, TimePoint now) {
  std::lock_guard lock(mutex_);
  if (std::exchange(shown_.ended, true)) return;
  if (shown_.marks.size() >= kMaxRouterMarks) shown_.marks.pop_back();
  shown_.marks.push_back({RouterMarkKind::kEnded, now - arrived_, std::string(how.substr(0, kMaxDetail))});
  shown_.usage = usage;
}

bool RouterTimeline::ended() const {
  std::lock_guard lock(mutex_);
  return shown_.ended;
}

RouterTimelineView RouterTimeline::view(TimePoint now) const {
  std::lock_guard lock(mutex_);
  RouterTimelineView out = shown_;
  out.age = now - arrived_;
  out.first_tokens = out.tokens.size();
  out.tokens.insert(out.tokens.end(), last_.begin(), last_.end());
  return out;
}

bool RouterTimeline::is_called(std::string_view name) const {
  const auto id = parse_id(name);
  return (id && *id == id_) || name == shown_.request_id || name == trace_id_;  // these never change
}

std::shared_ptr<RouterTimeline> TimelineBook::open(RequestId id, const Origin& origin, bool resumed,
                                                   TimePoint arrived) {
  auto made = std::make_shared<RouterTimeline>(id, origin, resumed, arrived);
  std::lock_guard lock(mutex_);
  if (order_.size() >= max_) {
    const auto oldest =
        std::find_if(order_.begin(), order_.end(), [](const auto& one) { return one->ended(); });
    if (oldest == order_.end()) {
      ++refused_;
      return nullptr;
    }
    order_.erase(oldest);
  }
  ++opened_;
  order_.push_back(made);
  return made;
}

std::shared_ptr<RouterTimeline> TimelineBook::find(std::string_view name) const {
  const auto id = parse_id(name);
  std::lock_guard lock(mutex_);
  const auto newest = [&](const auto& wanted) { return std::find_if(order_.rbegin(), order_.rend(), wanted); };
  auto found = order_.rend();
  // A client may call its request by another's id.
  if (id) found = newest([&](const auto& one) { return one->id() == *id; });
  if (found == order_.rend()) found = newest([&](const auto& one) { return one->is_called(name); });
  return found == order_.rend() ? nullptr : *found;
}

std::vector<RequestId> TimelineBook::namesakes(std::string_view name, RequestId but, size_t max) const {
  std::vector<RequestId> out;
  std::lock_guard lock(mutex_);
  for (auto one = order_.rbegin(); one != order_.rend() && out.size() < max; ++one) {
    const RequestId id = (*one)->id();
    if (id != but && (*one)->is_called(name) && std::find(out.begin(), out.end(), id) == out.end()) out.push_back(id);
  }
  return out;
}

std::vector<RouterTimelineView> TimelineBook::list(size_t max) const {
  std::vector<std::shared_ptr<RouterTimeline>> all;
  {
    std::lock_guard lock(mutex_);
    for (auto one = order_.rbegin(); one != order_.rend() && all.size() < max; ++one) all.push_back(*one);
  }
  std::vector<RouterTimelineView> out;
  out.reserve(all.size());
  for (const auto& one : all) out.push_back(one->view());
  return out;
}

TimelineBook::Counts TimelineBook::counts() const {
  std::lock_guard lock(mutex_);
  return {order_.size(), opened_, refused_};
}

}  // namespace conclave::gateway
