#include "tests/cluster/router_load.h"

#include <algorithm>
#include <chrono>

#include "tests/cluster/completions.h"

namespace conclave {
namespace {

constexpr size_t kMaxFaults = 8;
constexpr std::chrono::milliseconds kAskAgain(20);
constexpr int kMaxAttempts = 6000;  // of one request, while its router is gone

}  // namespace

RouterLoad::RouterLoad(std::string address, std::vector<std::string> expected, uint32_t tokens,
                       uint32_t concurrency)
    : address_(std::move(address)), expected_(std::move(expected)), tokens_(tokens), clients_(concurrency) {
  for (Client& client : clients_) threads_.emplace_back([this, &client] { serve(client); });
}

RouterLoad::~RouterLoad() {
  stop();
  for (std::thread& thread : threads_) thread.join();
}

void RouterLoad::heard(Client& client, std::string_view bytes) {
  if (bytes.find("data: {") == std::string_view::npos) return;
  std::lock_guard lock(mutex_);
  const TimePoint now = steady_now();
  if (client.last != 0) longest_gap_ = std::max(longest_gap_, now - client.last);
  client.last = now;
}

void RouterLoad::serve(Client& client) {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const auto kind = static_cast<uint32_t>(next_++ % expected_.size());
    client.busy = true;
    int attempts = 0;
    for (bool answered = false; !answered;) {
      client.last = 0;
      lock.unlock();
      uint32_t broken = 0;
      const std::string text = complete_resuming(address_, kind, tokens_, broken,
                                                 [&](std::string_view bytes) { heard(client, bytes); });
      lock.lock();
      resumed_ += broken;
      answered = true;
      if (text == expected_[kind]) {
        ++report_.completed;
        report_.tokens += tokens_;
      } else if (text.starts_with("failed: 503") || text.starts_with("failed: 429")) {
        ++report_.refused;
        answered = stopping_;
      } else if (text.starts_with("failed: no ")) {
        // Nobody listens, or the router went before it said that the request is accepted.
        answered = stopping_ || ++attempts >= kMaxAttempts;
        if (attempts >= kMaxAttempts) ++report_.wrong;
      } else {
        ++report_.wrong;
        if (report_.faults.size() < kMaxFaults)
          report_.faults.push_back("request " + std::to_string(kind) + ": " + text);
      }
      if (!answered) {
        lock.unlock();
        std::this_thread::sleep_for(kAskAgain);
        lock.lock();
      }
    }
    client.busy = false;
    client.last = 0;
  }
}

void RouterLoad::mark() {
  std::lock_guard lock(mutex_);
  longest_gap_ = 0;
}

Nanos RouterLoad::longest_gap() const {
  std::lock_guard lock(mutex_);
  Nanos longest = longest_gap_;
  for (const Client& client : clients_) {
    if (client.last != 0) longest = std::max(longest, steady_now() - client.last);
  }
  return longest;
}

bool RouterLoad::all_moved(TimePoint since) const {
  std::lock_guard lock(mutex_);
  return std::all_of(clients_.begin(), clients_.end(),
                     [since](const Client& c) { return !c.busy || c.last > since; });
}

size_t RouterLoad::running() const {
  std::lock_guard lock(mutex_);
  return static_cast<size_t>(
      std::count_if(clients_.begin(), clients_.end(), [](const Client& c) { return c.last != 0; }));
}

LoadReport RouterLoad::report() const {
  std::lock_guard lock(mutex_);
  return report_;
}

void RouterLoad::stop() {
  std::lock_guard lock(mutex_);
  stopping_ = true;
}

bool RouterLoad::over() const {
  std::lock_guard lock(mutex_);
  return stopping_ &&
         std::none_of(clients_.begin(), clients_.end(), [](const Client& client) { return client.busy; });
}

uint64_t RouterLoad::resumed() const {
  std::lock_guard lock(mutex_);
  return resumed_;
}

}  // namespace conclave
