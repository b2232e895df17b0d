// A router over a little cluster for public clients: prints its addresses on one line and serves until its
// standard input ends.
#include <unistd.h>

#include <cstdio>

#include "tests/router/tiny_router.h"

int main() {
  auto router = conclave::testing::TinyRouter::start();
  if (!router.ok()) {
    std::fprintf(stderr, "client_server: %s\n", conclave::message_of(router.status()).c_str());
    return 1;
  }
  std::printf("%s %s\n", (*router)->server->http_address().c_str(),
              (*router)->server->grpc_address().c_str());
  std::fflush(stdout);
  char ignored;
  while (read(STDIN_FILENO, &ignored, 1) > 0) {
  }
  (*router)->server->drain();
  return 0;
}
