#include "router_service/door/tenant.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "router_service/gateway/request.h"

namespace conclave::door {
namespace {

constexpr double kMinute = 60.0 * static_cast<double>(kSecond);

// "850ms", "12s", "2m5s": how OpenAI writes the time of a reset.
std::string reset_text(Nanos wait) {
  const int64_t ms = (std::max<Nanos>(wait, 0) + kMillisecond - 1) / kMillisecond;
  if (ms < 1000) return std::to_string(ms) + "ms";
  const int64_t seconds = (ms + 999) / 1000;
  if (seconds < 60) return std::to_string(seconds) + "s";
  return std::to_string(seconds / 60) + "m" + std::to_string(seconds % 60) + "s";
}

}  // namespace

void TokenBucket::refill(TimePoint now) {
  if (at_ == 0 || now <= at_) {
    at_ = std::max(at_, now);
    return;
  }
  level_ = std::min(capacity(), level_ + capacity() * static_cast<double>(now - at_) / kMinute);
  at_ = now;
}

Nanos TokenBucket::time_for(double amount) const {
  return amount <= 0 ? 0 : static_cast<Nanos>(std::ceil(amount / capacity() * kMinute));
}

void TokenBucket::set_rate(uint64_t per_minute, TimePoint now) {
  if (per_minute == per_minute_) return;
  refill(now);
  const double used = capacity() - level_;
  per_minute_ = per_minute;
  level_ = capacity() - used;
}

Nanos TokenBucket::wait_for(double amount, TimePoint now) {
  if (!limited()) return 0;
  refill(now);
  return time_for(std::min(amount, capacity()) - level_);
}

void TokenBucket::take(double amount, TimePoint now) {
  if (!limited()) return;
  refill(now);
  level_ -= amount;
}

void TokenBucket::put_back(double amount, TimePoint now) {
  if (!limited()) return;
  refill(now);
  level_ = std::min(capacity(), level_ + amount);
}

uint64_t TokenBucket::left(TimePoint now) {
  refill(now);
  return level_ <= 0 ? 0 : static_cast<uint64_t>(level_);
}

Nanos TokenBucket::full_in(TimePoint now) {
  refill(now);
  return time_for(capacity() - level_);
}

Tenant::Tenant(std::string name, const KeyGrant& grant)
    : name_(std::move(name)),
      trusted_(grant.trusted),
      requests_(grant.requests_per_minute),
      tokens_(grant.tokens_per_minute) {}

bool Tenant::trusted() const {
  std::lock_guard lock(mutex_);
  return trusted_;
}

void Tenant::set_grant(const KeyGrant& grant, TimePoint now) {
  std::lock_guard lock(mutex_);
  trusted_ = grant.trusted;
  requests_.set_rate(grant.requests_per_minute, now);
  tokens_.set_rate(grant.tokens_per_minute, now);
}

Status Tenant::charge(uint64_t tokens, TimePoint now, Nanos* retry_after) {
  std::lock_guard lock(mutex_);
  const double amount = static_cast<double>(tokens);
  const Nanos for_request = requests_.wait_for(1, now);
  const Nanos for_tokens = tokens_.wait_for(amount, now);
  if (for_request > 0 || for_tokens > 0) {
    *retry_after = std::max(for_request, for_tokens);
    const bool by_request = for_request > 0;
    return gateway::with_code(
        resource_exhausted("the rate limit of \"" + name_ + "\" is reached: " +
                           std::to_string(by_request ? requests_.per_minute() : tokens_.per_minute()) +
                           (by_request ? " requests" : " tokens") + " a minute; retry in " +
                           retry_seconds(*retry_after) + " s"),
        gateway::kRateLimitExceeded);
  }
  requests_.take(1, now);
  tokens_.take(amount, now);
  return OkStatus();
}

void Tenant::settle(uint64_t estimated, uint64_t used, TimePoint now) {
  std::lock_guard lock(mutex_);
  if (used > estimated) tokens_.take(static_cast<double>(used - estimated), now);
  if (used < estimated) tokens_.put_back(static_cast<double>(estimated - used), now);
}

HeaderList Tenant::rate_headers(TimePoint now) {
  std::lock_guard lock(mutex_);
  HeaderList out;
  const auto add = [&](const char* what, TokenBucket& bucket) {
    if (!bucket.limited()) return;
    out.emplace_back(std::string("x-ratelimit-limit-") + what, std::to_string(bucket.per_minute()));
    out.emplace_back(std::string("x-ratelimit-remaining-") + what, std::to_string(bucket.left(now)));
    out.emplace_back(std::string("x-ratelimit-reset-") + what, reset_text(bucket.full_in(now)));
  };
  add("requests", requests_);
  add("tokens", tokens_);
  return out;
}

std::string retry_seconds(Nanos wait) {
  return std::to_string(std::max<Nanos>((wait + kSecond - 1) / kSecond, 1));
}

}  // namespace conclave::door
