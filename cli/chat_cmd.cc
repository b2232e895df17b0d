// conclave chat: a conversation at the terminal; with --message one question and its answer.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <memory>

#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/sampling_flags.h"

namespace conclave::cli {
namespace {

namespace json = boost::json;

std::atomic<bool> interrupted{false};

struct ChatFlags {
  SamplingFlags sampling;
  std::string system;
  std::string message;
};

// Asks with the conversation so far and appends the answer. Ctrl-C ends the answer, not the conversation.
Status ask(const ChatFlags& flags, json::array& messages) {
  interrupted = false;
  const bool color = isatty(STDOUT_FILENO) == 1;
  bool dim = false;
  auto set_dim = [&](bool on) {
    if (dim != on) std::fputs(on ? (color ? "\033[2m" : "") : (color ? "\033[0m\n" : "\n"), stdout);
    dim = on;
  };
  auto result = run_stream(flags.sampling, "/v1/chat/completions", {{"messages", messages}},
                           [&](const std::string& text, bool reasoning) {
                             set_dim(reasoning);
                             std::fwrite(text.data(), 1, text.size(), stdout);
                             std::fflush(stdout);
                             return !interrupted.load() && std::ferror(stdout) == 0;
                           });
  set_dim(false);
  std::printf("\n");
  RETURN_IF_ERROR(result.status());
  print_summary(*result);
  json::object answer{{"role", "assistant"}, {"content", result->text}};
  if (!result->reasoning.empty()) answer["reasoning_content"] = result->reasoning;
  messages.push_back(std::move(answer));
  return OkStatus();
}

Status run_chat(const ChatFlags& flags) {
  json::array messages;
  auto begin = [&] {
    messages.clear();
    if (!flags.system.empty()) messages.push_back({{"role", "system"}, {"content", flags.system}});
  };
  begin();
  if (!flags.message.empty()) {
    messages.push_back({{"role", "user"}, {"content", flags.message}});
    return ask(flags, messages);
  }
  std::signal(SIGINT, [](int) { interrupted = true; });
  const bool terminal = isatty(STDIN_FILENO) == 1;
  if (terminal) std::fprintf(stderr, "/reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer\n");
  std::string line;
  for (;;) {
    if (terminal) std::fprintf(stderr, "> ");
    if (!std::getline(std::cin, line)) {
      if (interrupted.exchange(false) && !std::cin.eof()) {
        std::cin.clear();
        continue;
      }
      return OkStatus();
    }
    if (line.empty()) continue;
    if (line == "/exit") return OkStatus();
    if (line == "/reset") {
      begin();
      continue;
    }
    messages.push_back({{"role", "user"}, {"content", line}});
    if (const Status status = ask(flags, messages); !status.ok()) {
      messages.pop_back();  // so that the next question does not carry one without an answer
      if (!terminal) return status;
      std::fprintf(stderr, "conclave: %s\n", message_of(status).c_str());
    }
  }
}

}  // namespace

void add_chat_command(CLI::App& app, Command& chosen) {
  auto* command = app.add_subcommand("chat", "Talk with the model; thinking is shown dimmed");
  auto flags = std::make_shared<ChatFlags>();
  command->add_option("--system", flags->system, "A system message");
  command->add_option("--message,-m", flags->message, "Ask this once and end");
  flags->sampling.add_to(*command);
  command->callback([&chosen, flags] { chosen = [flags] { return run_chat(*flags); }; });
}

}  // namespace conclave::cli
