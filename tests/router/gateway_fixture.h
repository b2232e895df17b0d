// A gateway over a fake scheduler, and a client that collects what it is told.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "router_service/gateway/gateway.h"
#include "tests/router/fake_scheduler.h"
#include "tests/router/fake_text.h"

namespace conclave::gateway {

// Collects a generation's updates.
class Client {
 public:
  explicit Client(Gateway& gateway) : gateway_(gateway) {}

  Status start(GenerateRequest request) {
    auto made = gateway_.generate(std::move(request), [this] {
      std::lock_guard lock(mutex_);
      ++updates_;
      changed_.notify_all();
    });
    if (!made.ok()) return made.status();
    generation = *made;
    return OkStatus();
  }
  // Takes updates until `done` says so; false after 10 s.
  bool take_until(const std::function<bool()>& done) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!done()) {
      {
        std::unique_lock lock(mutex_);
        if (!changed_.wait_until(lock, until, [this] { return updates_ > 0; })) return false;
        updates_ = 0;
      }
      take();
    }
    return true;
  }
  bool finish() {
    return take_until([this] { return last.ended; });
  }
  void take() {
    last = generation->take();
    for (const ChoiceUpdate& choice : last.choices) {
      if (messages.size() <= choice.index) messages.resize(choice.index + 1), ends.resize(choice.index + 1);
      messages[choice.index].add(choice.events);
      if (choice.ended) ends[choice.index].push_back(choice);
      if (choice.index != 0) continue;
      for (const TokenOutput& token : choice.tokens) tokens.push_back(token.token);
      if (choice.ended) finish_reason = choice.finish;
    }
    text = messages.empty() ? "" : messages[0].content;
  }

  std::shared_ptr<Generation> generation;
  std::vector<text::AssistantMessage> messages;  // of each choice
  std::vector<std::vector<ChoiceUpdate>> ends;   // of each choice: one, once it has ended
  std::string text;                              // of choice 0, like the rest
  std::vector<TokenId> tokens;
  FinishReason finish_reason = FinishReason::kNone;
  Update last;

 private:
  Gateway& gateway_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int updates_ = 0;
};

inline GenerateRequest text_request(std::string text) {
  GenerateRequest request;
  request.prompt = TextPrompt{std::move(text)};
  return request;
}

inline ChatPrompt chat_prompt(std::string messages) {
  ChatPrompt chat;
  chat.request.messages_json = std::move(messages);
  return chat;
}

class GatewayTest : public ::testing::Test {
 protected:
  testing::FakeScheduler scheduler;
  testing::FakeText text;
  std::mutex mutex;
  std::vector<Summary> summaries;
  Gateway gateway{GatewayOptions{}, testing::fake_model(), scheduler, text, [this](const Summary& s) {
                    std::lock_guard lock(mutex);
                    summaries.push_back(s);
                  }};

  // Starts a request and gets it accepted.
  AcceptedRequest begin(Client& client, GenerateRequest request, size_t n = 0) {
    EXPECT_TRUE(client.start(std::move(request)).ok());
    AcceptedRequest accepted = scheduler.wait_submitted(n);
    EXPECT_EQ(accepted.id, client.generation->id());
    scheduler.accept(accepted.id);
    return accepted;
  }
};

}  // namespace conclave::gateway
