#include "libs/text/chat_template.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "libs/text/json_reader.h"
#include "libs/text/template_process.h"
#include "libs/text/utf8.h"

namespace conclave::text {
namespace {

namespace json = boost::json;

constexpr char kTextIsText = 1;
// Back-off between failed starts of a child.
constexpr std::chrono::milliseconds kFirstBackoff{50};
constexpr std::chrono::milliseconds kLongestBackoff{2000};

std::string config_frame(const TemplateSource& source, const ChatTemplateOptions& options) {
  const auto object_of = [](const std::map<std::string, std::string>& map) {
    json::object out;
    for (const auto& [key, value] : map) out[key] = value;
    return out;
  };
  const auto array_of = [](const std::vector<std::string>& list) {
    return json::array(list.begin(), list.end());
  };
  json::object config;
  config["templates"] = object_of(source.templates);
  config["variables"] = object_of(source.variables);
  config["special_tokens"] = array_of(source.special_tokens);
  config["other_tokens"] = array_of(source.other_tokens);
  config["cpu_seconds"] = options.cpu_seconds;
  config["max_output_bytes"] = options.max_output_bytes;
  return json::serialize(config);
}

uint32_t read_u32(std::string_view bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 4; i-- > 0;) value = (value << 8) | static_cast<uint8_t>(bytes[at + i]);
  return value;
}

// The body of an "o" answer. The child ran somebody's template, so it is checked like any peer's message.
StatusOr<RenderedPrompt> read_rendered(std::string_view body) {
  const Status rubbish = unavailable("the template process does not speak our protocol");
  if (body.size() < 4) return rubbish;
  const size_t count = read_u32(body, 0);
  if (count > (body.size() - 4) / 8) return rubbish;
  RenderedPrompt out;
  out.text = body.substr(4 + count * 8);
  if (!is_valid_utf8(out.text)) return rubbish;
  uint32_t last = 0;
  for (size_t i = 0; i < count; ++i) {
    const ByteRange range{read_u32(body, 4 + i * 8), read_u32(body, 8 + i * 8)};
    if (range.begin < last || range.end < range.begin || range.end > out.text.size()) return rubbish;
    last = range.end;
    out.literal.push_back(range);
  }
  return out;
}

class Pool final : public ChatTemplate {
 public:
  Pool(const TemplateSource& source, ChatTemplateOptions options)
      : options_(std::move(options)),
        config_(config_frame(source, options_)),
        cancel_fd_(eventfd(0, EFD_CLOEXEC)) {
    // Children are started by a thread of our own, because the kernel ends them with the thread that started
    // them.
    starter_ = std::thread([this] { keep_started(); });
  }

  ~Pool() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    const uint64_t one = 1;
    if (write(cancel_fd_, &one, sizeof(one)) < 0) {
      // The counter is at its maximum, so the descriptor is readable already.
    }
    changed_.notify_all();
    starter_.join();
    idle_.clear();
    close(cancel_fd_);
  }

  // Waits for the first child, or for the reason why there is none.
  Status wait_started() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !idle_.empty() || !start_error_.ok(); });
    return idle_.empty() ? start_error_ : OkStatus();
  }

  StatusOr<RenderedPrompt> render(std::string_view document, TimePoint deadline,
                                  ControlTokens control) override {
    if (document.size() > options_.max_document_bytes) {
      return invalid_argument("the request has " + std::to_string(document.size()) +
                              " bytes; max_document_bytes is " + std::to_string(options_.max_document_bytes));
    }
    deadline = std::min(deadline, steady_now() + options_.call_timeout);
    ASSIGN_OR_RETURN(std::unique_ptr<TemplateProcess> child, take(deadline));
    const char flags = control == ControlTokens::kAsText ? kTextIsText : 0;
    auto answer = child->call(flags, document, deadline);
    if (!answer.ok()) {
      discard(std::move(child));
      return answer.status();
    }
    switch (answer->kind) {
      case 'o': {
        auto out = read_rendered(answer->body);
        if (out.ok()) {
          give_back(std::move(child));
        } else {
          discard(std::move(child));
        }
        return out;
      }
      case 'e':
      case 'i':
        give_back(std::move(child));
        return answer->kind == 'e'
                   ? invalid_field("messages", "chat template: " + replace_invalid_utf8(answer->body))
                   : invalid_argument(replace_invalid_utf8(answer->body));
      case 'm':
        discard(std::move(child));
        return resource_exhausted(replace_invalid_utf8(answer->body));
      default:
        discard(std::move(child));
        return unavailable("the template process does not speak our protocol");
    }
  }

  std::vector<int> idle_processes() const override {
    std::lock_guard lock(mutex_);
    std::vector<int> out;
    for (const auto& child : idle_) out.push_back(child->pid());
    return out;
  }

 private:
  StatusOr<std::unique_ptr<TemplateProcess>> take(TimePoint deadline) {
    std::unique_lock lock(mutex_);
    if (waiting_ >= options_.max_waiting) {
      return resource_exhausted("max_waiting (" + std::to_string(options_.max_waiting) +
                                ") renders wait for a template process");
    }
    ++waiting_;
    std::unique_ptr<TemplateProcess> out;
    for (;;) {
      while (!idle_.empty()) {
        out = std::move(idle_.back());
        idle_.pop_back();
        if (out->healthy()) {
          --waiting_;
          return out;
        }
        // It died while idle; nobody's request is at fault.
        out.reset();
        --alive_;
        changed_.notify_all();
      }
      const Nanos left = deadline - steady_now();
      if (left <= 0) break;
      changed_.wait_for(lock, std::chrono::nanoseconds(left), [&] { return !idle_.empty(); });
    }
    --waiting_;
    if (!start_error_.ok()) return unavailable("no template process: " + message_of(start_error_));
    return deadline_exceeded("no template process became free in time");
  }

  void give_back(std::unique_ptr<TemplateProcess> child) {
    {
      std::lock_guard lock(mutex_);
      idle_.push_back(std::move(child));
    }
    changed_.notify_all();
  }

  void discard(std::unique_ptr<TemplateProcess> child) {
    child.reset();
    {
      std::lock_guard lock(mutex_);
      --alive_;
    }
    changed_.notify_all();
  }

  void keep_started() {
    auto backoff = kFirstBackoff;
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || alive_ < options_.processes; });
      if (stopping_) return;
      ++alive_;
      lock.unlock();
      auto child = TemplateProcess::spawn(options_, config_, cancel_fd_);
      lock.lock();
      if (child.ok()) {
        idle_.push_back(std::move(*child));
        start_error_ = OkStatus();
        backoff = kFirstBackoff;
        changed_.notify_all();
        continue;
      }
      --alive_;
      start_error_ = child.status();
      changed_.notify_all();
      changed_.wait_for(lock, backoff, [&] { return stopping_; });
      backoff = std::min(backoff * 2, kLongestBackoff);
    }
  }

  const ChatTemplateOptions options_;
  const std::string config_;
  const int cancel_fd_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<TemplateProcess>> idle_;
  int alive_ = 0;  // idle, rendering or starting
  int waiting_ = 0;
  bool stopping_ = false;
  Status start_error_;
  std::thread starter_;
};

}  // namespace

StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::start(TemplateSource source,
                                                            ChatTemplateOptions options) {
  if (options.processes < 1) return invalid_field("processes", "processes is below 1");
  if (source.templates.count("default") == 0)
    return invalid_field("chat_template", "there is no default template");
  auto pool = std::make_unique<Pool>(source, std::move(options));
  RETURN_IF_ERROR(pool->wait_started());
  return std::unique_ptr<ChatTemplate>(std::move(pool));
}

}  // namespace conclave::text
