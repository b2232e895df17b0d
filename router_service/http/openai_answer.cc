#include "router_service/http/openai_answer.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "router_service/http/openai_response.h"
#include "router_service/http/openai_resume.h"
#include "router_service/http/openai_writer.h"

namespace conclave::router {
namespace {

using gateway::Gateway;
using gateway::Generation;
using gateway::Update;

constexpr size_t kPullBytes = 64 << 10;  // of a backlog, at once

// Adds what a client has not seen of some events: those behind the first `after` ones, each with its number.
class Numbering {
 public:
  explicit Numbering(uint64_t after) : after_(after) {}
  void add(std::string_view events, std::string& out) {
    while (!events.empty()) {
      const size_t end =
          std::min(events.find("\n\n"), events.size() - 2) + 2;  // JSON has no such line breaks
      if (++count_ > after_) {
        out += "id: ";
        out += std::to_string(count_);
        out += '\n';
        out += events.substr(0, end);
      }
      events.remove_prefix(end);
    }
  }
  uint64_t count() const { return count_; }
  uint64_t after() const { return after_; }

 private:
  uint64_t after_;
  uint64_t count_ = 0;
};

// Everything but notify() and reopen() runs on the connection, one call at a time.
class Answer : public http::StreamSource, public std::enable_shared_from_this<Answer> {
 public:
  Answer(std::shared_ptr<http::Exchange> exchange, AnswerStyle style, std::function<void(int)> done)
      : exchange_(std::move(exchange)), style_(style), done_(std::move(done)) {}

  void start(Gateway& gateway, OpenAiRequest request) {
    in_pieces_ = !request.generate.resume_context.empty();
    if (request.resumable && !in_pieces_)
      exchange_->add_headers({{kNotResumableHeader, "only a stream that answers one prompt can be resumed"}});
    OpenAiWriter::Head head;
    head.created = request.created;
    head.model = gateway.model().name;
    head.fingerprint = in_pieces_ ? request.fingerprint : gateway.fleet().numerics_id;
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

  void resume(Gateway& gateway, std::string_view id, uint64_t after, gateway::Origin origin,
              gateway::AdmissionLimits limits) {
    in_pieces_ = true;
    numbering_ = Numbering(after);
    text_ = &gateway.text();
    auto generation = gateway.resume(
        id, std::move(origin),
        [self = shared_from_this(), limits = std::move(limits)](std::string_view context) {
          return self->reopen(context, limits);
        },
        [self = shared_from_this()] { self->notify(); });
    if (!generation.ok()) return fail(generation.status());
    parts_.push_back({*generation, {}, false, false});
    exchange_->on_client_gone([self = shared_from_this()] { self->cancel_all(); });
  }

  bool pull(std::string& out) override {
    if (in_pieces_) return pull_pieces(out);
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
    bool released = false;
  };

  // On a text thread.
  StatusOr<gateway::GenerateRequest> reopen(std::string_view context,
                                            const gateway::AdmissionLimits& limits) {
    ASSIGN_OR_RETURN(StreamContext read, read_stream_context(context, limits));
    gateway::GenerateRequest request = read.request.generate;
    std::lock_guard lock(mutex_);
    reopened_ = std::move(read);
    return request;
  }

  // The writer of a stream that is resumed, once its context was read: before it counts as accepted.
  void make_writer() {
    if (writer_ != nullptr) return;
    std::lock_guard lock(mutex_);
    if (!reopened_) return;
    const gateway::GenerateRequest& generate = reopened_->request.generate;
    OpenAiWriter::Head head;
    head.id = gateway::id_text(parts_[0].generation->id());
    head.model = reopened_->head.model;
    head.fingerprint = reopened_->head.fingerprint;
    head.created = reopened_->head.created;
    head.choices = static_cast<uint32_t>(generate.n.value_or(1));
    head.top_logprobs = static_cast<uint32_t>(generate.top_logprobs.value_or(0));
    head.prompt_logprobs = static_cast<uint32_t>(generate.prompt_logprobs.value_or(0));
    style_ = reopened_->request.style;
    writer_ = std::make_unique<OpenAiWriter>(style_, std::move(head), *text_);
  }

  bool pull_pieces(std::string& out) {
    Part& part = parts_[0];
    const size_t before = out.size();
    const auto add = [&](std::string_view events) {
      if (numbered_)
        numbering_.add(events, out);
      else
        out += events;
    };
    while (true) {
      if (pieces_.empty()) take_pieces();
      if (pieces_.empty()) break;
      for (Update& piece : std::exchange(pieces_, {})) {
        writer_->add(0, std::move(piece));
        add(writer_->events());
      }
      if (part.ended) break;
      if (out.size() - before < kPullBytes) continue;
      exchange_->wake();  // for the rest of a backlog
      return true;
    }
    if (!part.ended) return true;
    if (part.released) {  // only here: the client may go on elsewhere, behind the last event it has
      out += OpenAiWriter::error_events(part.error);
      return false;
    }
    add(part.error.ok() ? writer_->end_events() : OpenAiWriter::error_events(part.error));
    if (numbering_.count() < numbering_.after())
      out += OpenAiWriter::error_events(invalid_field(
          kLastEventIdHeader, "is " + std::to_string(numbering_.after()) + ", but the stream has " +
                                  std::to_string(numbering_.count()) + " events"));
    return false;
  }

  void take_pieces() {
    Part& part = parts_[0];
    if (part.ended) return;
    for (Update& piece : part.generation->take_pieces()) {
      if (piece.accepted && !part.accepted) {
        make_writer();
        part.accepted = true;
        if (writer_->wants_prompt())
          writer_->set_prompt(0, part.generation->prompt(), part.generation->prompt_text());
      }
      part.ended = piece.ended;
      part.error = piece.error;
      part.released = piece.released;
      pieces_.push_back(std::move(piece));
    }
  }

  void notify() {
    if (streaming_.load()) return exchange_->wake();
    exchange_->post([self = shared_from_this()] { self->advance(); });
  }

  void advance() {
    if (responded_) return;
    if (streaming_.load()) return exchange_->wake();
    if (in_pieces_)
      take_pieces();
    else
      take();
    // What a resumable stream has come to is part of it, even its failure.
    const bool begun = in_pieces_ && parts_[0].accepted;
    if (const Status error = first_error(); !error.ok() && !begun) return fail(error);
    if (style_.stream || in_pieces_) {
      for (const Part& part : parts_)
        if (!part.accepted && !part.ended) return;
      streaming_.store(true);
      done_(200);
      http::Response head;
      head.content_type = "text/event-stream; charset=utf-8";
      head.headers.emplace_back("cache-control", "no-cache");
      head.headers.emplace_back("x-accel-buffering", "no");
      if (in_pieces_) {
        Generation& generation = *parts_[0].generation;
        numbered_ = generation.resumable();
        if (numbered_) {
          generation.stream_began();
          head.headers.emplace_back(kStreamIdHeader, gateway::id_text(generation.id()));
        } else {
          head.headers.emplace_back(kNotResumableHeader, "there is no room for what that needs");
        }
      }
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
  AnswerStyle style_;
  const std::function<void(int)> done_;
  std::vector<Part> parts_;
  std::unique_ptr<OpenAiWriter> writer_;
  std::atomic<bool> streaming_{false};
  bool responded_ = false;
  // Of a resumable stream, which has one part.
  bool in_pieces_ = false;
  bool numbered_ = false;
  Numbering numbering_{0};
  std::vector<Update> pieces_;  // taken and not yet written
  const gateway::TextCodec* text_ = nullptr;
  std::mutex mutex_;
  std::optional<StreamContext> reopened_;  // guarded by mutex_
};

}  // namespace

void resume_openai(std::shared_ptr<http::Exchange> exchange, std::string_view id, uint64_t after,
                   gateway::Origin origin, const gateway::AdmissionLimits& limits, Gateway& gateway,
                   std::function<void(int status)> done) {
  AnswerStyle style;
  style.stream = true;
  std::make_shared<Answer>(std::move(exchange), style, std::move(done))
      ->resume(gateway, id, after, std::move(origin), limits);
}

void answer_openai(std::shared_ptr<http::Exchange> exchange, OpenAiRequest request, Gateway& gateway,
                   std::function<void(int status)> done) {
  std::make_shared<Answer>(std::move(exchange), request.style, std::move(done))
      ->start(gateway, std::move(request));
}

}  // namespace conclave::router
