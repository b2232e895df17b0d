#include "router_service/http/openai_answer.h"

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "router_service/http/openai_response.h"
#include "router_service/http/openai_writer.h"

namespace conclave::router {
namespace {

using gateway::Gateway;
using gateway::Generation;
using gateway::Update;

// Everything but notify() runs on the connection, one call at a time.
class Answer : public http::StreamSource, public std::enable_shared_from_this<Answer> {
 public:
  Answer(std::shared_ptr<http::Exchange> exchange, AnswerStyle style, std::function<void(int)> done)
      : exchange_(std::move(exchange)), style_(style), done_(std::move(done)) {}

  void start(Gateway& gateway, OpenAiRequest request) {
    OpenAiWriter::Head head;
    head.model = gateway.model().name;
    head.fingerprint = gateway.fleet().numerics_id;
    head.prompts = static_cast<uint32_t>(1 + request.more_prompts.size());
    head.choices = static_cast<uint32_t>(request.generate.n.value_or(1));
    head.top_logprobs = static_cast<uint32_t>(request.generate.top_logprobs.value_or(0));
    head.prompt_logprobs = static_cast<uint32_t>(request.generate.prompt_logprobs.value_or(0));
    std::vector<gateway::GenerateRequest> all(head.prompts, request.generate);
    for (size_t i = 1; i < all.size(); ++i)
      std::visit([&](auto& prompt) { all[i].prompt = std::move(prompt); }, request.more_prompts[i - 1]);
    for (size_t i = 1; i < all.size(); ++i)
      if (const Status refused = gateway.acceptable(all[i]); !refused.ok()) return fail(refused);
    for (gateway::GenerateRequest& one : all) {
      auto generation = gateway.generate(std::move(one), [self = shared_from_this()] { self->notify(); });
      if (!generation.ok()) return fail(generation.status());
      parts_.push_back({*generation, {}, false, false});
    }
    head.id = gateway::id_text(parts_[0].generation->id());
    writer_ = std::make_unique<OpenAiWriter>(style_, std::move(head), gateway.text());
    exchange_->on_client_gone([self = shared_from_this()] { self->cancel_all(); });
  }

  bool pull(std::string& out) override {
    take();
    const Status error = first_error();
    out += writer_->events();  // the text before a failure too
    if (!error.ok()) {
      cancel_all();
      out += OpenAiWriter::error_events(error);
      return false;
    }
    if (!all_ended()) return true;
    out += writer_->end_events();
    return false;
  }

 private:
  struct Part {
    std::shared_ptr<Generation> generation;
    Status error;
    bool accepted = false;
    bool ended = false;
  };

  void notify() {
    if (streaming_.load()) return exchange_->wake();
    exchange_->post([self = shared_from_this()] { self->advance(); });
  }

  void advance() {
    if (responded_) return;
    if (streaming_.load()) return exchange_->wake();
    take();
    if (const Status error = first_error(); !error.ok()) return fail(error);
    if (style_.stream) {
      for (const Part& part : parts_)
        if (!part.accepted && !part.ended) return;
      streaming_.store(true);
      done_(200);
      http::Response head;
      head.content_type = "text/event-stream; charset=utf-8";
      head.headers.emplace_back("cache-control", "no-cache");
      head.headers.emplace_back("x-accel-buffering", "no");
      exchange_->stream(std::move(head), shared_from_this());
      return;
    }
    if (!all_ended()) return;
    http::Response response;
    response.body = writer_->whole();
    respond(std::move(response));
  }

  void take() {
    for (uint32_t i = 0; i < parts_.size(); ++i) {
      Part& part = parts_[i];
      if (part.ended) continue;
      Update update = part.generation->take();
      if (update.accepted && !part.accepted) {
        part.accepted = true;
        if (writer_->wants_prompt())
          writer_->set_prompt(i, part.generation->prompt(), part.generation->prompt_text());
      }
      part.ended = update.ended;
      part.error = update.error;
      writer_->add(i, std::move(update));
    }
  }

  Status first_error() const {
    for (const Part& part : parts_)
      if (part.ended && !part.error.ok()) return part.error;
    return OkStatus();
  }
  bool all_ended() const {
    for (const Part& part : parts_)
      if (!part.ended) return false;
    return true;
  }
  void cancel_all() {
    for (const Part& part : parts_) part.generation->cancel();
  }

  void fail(const Status& error) {
    if (responded_) return;
    cancel_all();
    respond(error_response(error));
  }
  void respond(http::Response response) {
    responded_ = true;
    done_(response.status);
    exchange_->respond(std::move(response));
  }

  const std::shared_ptr<http::Exchange> exchange_;
  const AnswerStyle style_;
  const std::function<void(int)> done_;
  std::vector<Part> parts_;
  std::unique_ptr<OpenAiWriter> writer_;
  std::atomic<bool> streaming_{false};
  bool responded_ = false;
};

}  // namespace

void answer_openai(std::shared_ptr<http::Exchange> exchange, OpenAiRequest request, Gateway& gateway,
                   std::function<void(int status)> done) {
  std::make_shared<Answer>(std::move(exchange), request.style, std::move(done))
      ->start(gateway, std::move(request));
}

}  // namespace conclave::router
