// Who a request is for, and what is left of their allowance. Any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "router_service/door/key_file.h"

namespace conclave::door {

// An allowance per minute that refills evenly and holds at most one minute's worth. What turns out dearer
// than it looked is taken all the same: the level then lies below zero, and the next one waits longer.
class TokenBucket {
 public:
  // Full at first. 0: no limit.
  explicit TokenBucket(uint64_t per_minute = 0) : per_minute_(per_minute), level_(capacity()) {}

  bool limited() const { return per_minute_ > 0; }
  uint64_t per_minute() const { return per_minute_; }
  // Keeps what was used of the old allowance.
  void set_rate(uint64_t per_minute, TimePoint now);
  // How long until `amount` may be taken; 0: now. More than a minute's worth needs a full bucket.
  Nanos wait_for(double amount, TimePoint now);
  void take(double amount, TimePoint now);
  // Gives back, up to full.
  void put_back(double amount, TimePoint now);
  uint64_t left(TimePoint now);
  // Until it is full again.
  Nanos full_in(TimePoint now);

 private:
  double capacity() const { return static_cast<double>(per_minute_); }
  void refill(TimePoint now);
  Nanos time_for(double amount) const;

  uint64_t per_minute_;
  double level_;
  TimePoint at_ = 0;
};

using HeaderList = std::vector<std::pair<std::string, std::string>>;

class Tenant {
 public:
  Tenant(std::string name, const KeyGrant& grant);

  const std::string& name() const { return name_; }
  bool trusted() const;
  // After a reload of the keys.
  void set_grant(const KeyGrant& grant, TimePoint now);

  // Takes one request and `tokens` (an estimate). RESOURCE_EXHAUSTED with the code "rate_limit_exceeded" when
  // the allowance does not have them; then nothing is taken and *retry_after is set.
  Status charge(uint64_t tokens, TimePoint now, Nanos* retry_after);
  // What the request really took, once it has ended.
  void settle(uint64_t estimated, uint64_t used, TimePoint now);
  // x-ratelimit-{limit,remaining,reset}-{requests,tokens}, as OpenAI writes them; empty without limits.
  HeaderList rate_headers(TimePoint now);

 private:
  const std::string name_;
  mutable std::mutex mutex_;
  bool trusted_;
  TokenBucket requests_;
  TokenBucket tokens_;
};

// Whole seconds, rounded up, at least 1: for Retry-After.
std::string retry_seconds(Nanos wait);

}  // namespace conclave::door
