// Routers for public clients, until standard input ends. One serves a checkpoint with a cluster in this
// process; the other, over the same tokenizer and template, a model whose words are written below, so that
// reasoning and tool calls can be tested without a model that has learned them.
//
// usage: client_server [CHECKPOINT]   (without one, a little random one is made)
//
// Prints one JSON line: {"http", "grpc", "scripted_http", "scripted_grpc", "model", "trained"}.
#include <unistd.h>

#include <cstdio>
#include <string>

#include "tests/router/fake_scheduler.h"
#include "tests/router/tiny_router.h"

namespace conclave::testing {
namespace {

bool has(const std::string& text, const std::string& what) { return text.find(what) != std::string::npos; }

// What the scripted model says after this prompt.
std::string scripted(const std::string& prompt) {
  const size_t user = prompt.rfind("]~b]user");
  if (user == std::string::npos) return "No conversation.";  // the router's warm-up token
  const std::string turn = prompt.substr(user);
  const size_t result = turn.rfind("<response>");
  if (result != std::string::npos) {
    const size_t begin = result + 10;
    return "The tool has answered.\n</think>\n\nThe answer is " +
           turn.substr(begin, turn.find("</response>", begin) - begin) + ".";
  }
  if (has(turn, "weather") && has(prompt, "# Tools"))
    return "Two calls are needed.\n</think>\n\nOne moment.\n<minimax:tool_call>\n"
           "<invoke name=\"get_weather\">\n<parameter name=\"city\">K\xc3\xb6ln</parameter>\n"
           "<parameter name=\"days\">3</parameter>\n<parameter name=\"detail\">{\"wind\": "
           "true}</parameter>\n</invoke>\n"
           "<invoke name=\"get_weather\">\n<parameter "
           "name=\"city\">42</parameter>\n</invoke>\n</minimax:tool_call>";
  return "It is a greeting.\n</think>\n\nHello from the script.";
}

int run(const std::string& checkpoint) {
  auto made = TinyRouter::start({}, checkpoint);
  if (!made.ok()) {
    std::fprintf(stderr, "client_server: %s\n", message_of(made.status()).c_str());
    return 1;
  }
  TinyRouter& real = **made;
  const gateway::TextCodec& text = *real.text;
  FakeScheduler model([&text](const AcceptedRequest& request) {
    auto tokens = text.encode(scripted(text.decode(request.prompt, /*skip_special=*/false)),
                              /*special_tokens=*/true);
    return tokens.ok() ? *tokens : std::vector<TokenId>{};
  });
  RouterConfig config;
  config.http_listen = config.grpc_listen = config.admin_listen = "127.0.0.1:0";
  ModelSpec spec = real.cluster->spec();
  spec.name = "scripted";
  spec.max_positions = 65536;
  auto other = router::RouterServer::start(config, spec, model, text, nullptr);
  if (!other.ok()) {
    std::fprintf(stderr, "client_server: %s\n", message_of(other.status()).c_str());
    return 1;
  }
  std::printf(
      R"({"http":"%s","grpc":"%s","scripted_http":"%s","scripted_grpc":"%s","model":"%s","trained":%s})"
      "\n",
      real.server->http_address().c_str(), real.server->grpc_address().c_str(),
      (*other)->http_address().c_str(), (*other)->grpc_address().c_str(), real.cluster->spec().name.c_str(),
      checkpoint.empty() ? "false" : "true");
  std::fflush(stdout);
  char ignored;
  while (read(STDIN_FILENO, &ignored, 1) > 0) {
  }
  (*other)->drain();
  real.server->drain();
  return 0;
}

}  // namespace
}  // namespace conclave::testing

int main(int argc, char** argv) { return conclave::testing::run(argc > 1 ? argv[1] : ""); }
