#include "libs/http/http_server.h"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <future>
#include <new>
#include <thread>

#include "libs/base/address.h"
#include "libs/http/connection.h"

namespace conclave::http {
namespace {

constexpr Nanos kAcceptRetry = 100 * kMillisecond;

class HttpServerImpl : public HttpServer {
 public:
  HttpServerImpl(HttpServerOptions options, Handler handler) : state_(std::make_shared<ServerState>()) {
    state_->options = std::move(options);
    state_->handler = std::move(handler);
  }

  // Every operation is cancelled and every completion runs, so that no connection is left in the context.
  ~HttpServerImpl() override {
    if (!threads_.empty()) {
      std::promise<void> closed;
      asio::post(strand_, [&] {
        stop_accepting();
        closed.set_value();
      });
      closed.get_future().wait();
      state_->draining.store(true);
      for (const auto& connection : connections()) connection->abort();
    }
    work_.reset();
    for (std::thread& thread : threads_) thread.join();
    state_->stopped.store(true);
    while (const uint32_t posting = state_->posting.load()) state_->posting.wait(posting);
    state_->context.restart();
    serve();  // what was posted after the last thread had left
    state_->handler = nullptr;
  }

  Status listen() {
    const auto host_port = parse_host_port(state_->options.listen);
    if (!host_port.ok()) return with_field(host_port.status(), "listen");
    const std::string where = "cannot listen on " + state_->options.listen;
    beast::error_code error;
    tcp::resolver resolver(state_->context);
    const auto found = resolver.resolve(host_port->host, std::to_string(host_port->port),
                                        tcp::resolver::passive | tcp::resolver::numeric_service, error);
    if (error || found.empty()) return unavailable(where + ": unknown host (" + error.message() + ")");
    const tcp::endpoint endpoint = found.begin()->endpoint();
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error == asio::error::address_in_use)
      return unavailable(where + ": the port is in use; stop its owner or choose another port");
    if (error) return unavailable(where + ": " + error.message());
    bound_ = acceptor_.local_endpoint(error);
    return OkStatus();
  }

  void run() {
    asio::post(strand_, [this] { accept(); });
    for (unsigned i = 0; i < std::max(1u, state_->options.threads); ++i)
      threads_.emplace_back([this] { serve(); });
  }

  // A handler that runs out of memory loses its connection, not the server.
  void serve() {
    for (;;) {
      try {
        state_->context.run();
        return;
      } catch (const std::bad_alloc&) {
      }
    }
  }

  std::string address() const override {
    return HostPort{bound_.address().to_string(), bound_.port()}.text();
  }
  uint16_t port() const override { return bound_.port(); }

  HttpCounts counts() const override {
    HttpCounts counts;
    counts.connections_opened = state_->opened.load();
    counts.connections_refused = state_->refused.load();
    counts.connections_open = state_->open.load();
    counts.requests = state_->requests.load();
    counts.malformed = state_->malformed.load();
    counts.clients_gone = state_->gone.load();
    counts.slow_clients = state_->slow.load();
    counts.sse_pings = state_->pings.load();
    counts.bodies_too_large = state_->large_bodies.load();
    counts.headers_too_large = state_->large_headers.load();
    return counts;
  }

  void post(std::function<void()> task) override { asio::post(state_->context, std::move(task)); }

  void drain() override {
    state_->draining.store(true);
    asio::post(strand_, [this] { stop_accepting(); });
    for (const auto& connection : connections()) connection->drain();
  }

 private:
  void stop_accepting() {
    beast::error_code ignored;
    acceptor_.close(ignored);
    retry_.cancel();
  }

  std::vector<std::shared_ptr<Connection>> connections() {
    std::vector<std::shared_ptr<Connection>> all;
    std::lock_guard lock(state_->mutex);
    for (Connection* connection : state_->connections)
      if (auto alive = connection->weak_from_this().lock()) all.push_back(std::move(alive));
    return all;
  }

  void accept() {
    acceptor_.async_accept(asio::make_strand(state_->context),
                           [this](beast::error_code error, tcp::socket socket) {
                             if (!acceptor_.is_open()) return;
                             if (error) {  // out of descriptors, most likely: wait for some to come back
                               retry_.expires_after(std::chrono::nanoseconds(kAcceptRetry));
                               retry_.async_wait([this](beast::error_code stopped) {
                                 if (!stopped && acceptor_.is_open()) accept();
                               });
                               return;
                             }
                             const uint64_t open = state_->open.load();
                             const uint64_t limit = state_->options.limits.max_connections;
                             const bool full = open >= limit;
                             if (open >= 2 * limit) {  // not even the refusals are taken any more
                               state_->refused.fetch_add(1);
                               socket.close(error);
                               return accept();
                             }
                             const auto connection = std::make_shared<Connection>(std::move(socket), state_);
                             if (full) {
                               state_->refused.fetch_add(1);
                               connection->refuse();
                             } else {
                               state_->opened.fetch_add(1);
                               connection->start();
                             }
                             accept();
                           });
  }

  std::shared_ptr<ServerState> state_;
  asio::executor_work_guard<asio::io_context::executor_type> work_ = asio::make_work_guard(state_->context);
  asio::strand<asio::io_context::executor_type> strand_ = asio::make_strand(state_->context);
  tcp::acceptor acceptor_{strand_};  // used on its strand alone
  asio::steady_timer retry_{strand_};
  tcp::endpoint bound_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::string_view Request::header(std::string_view name) const {
  for (const auto& [key, value] : headers)
    if (key == name) return value;
  return {};
}

StatusOr<std::unique_ptr<HttpServer>> HttpServer::start(HttpServerOptions options, Handler handler) {
  auto server = std::make_unique<HttpServerImpl>(std::move(options), std::move(handler));
  RETURN_IF_ERROR(server->listen());
  server->run();
  return std::unique_ptr<HttpServer>(std::move(server));
}

StatusOr<std::unique_ptr<HttpServer>> HttpServer::start_small(
    HttpServerOptions options, std::function<Response(const Request&)> answer) {
  options.limits.max_body_bytes = 1024;
  options.limits.max_header_bytes = 8 << 10;
  return start(std::move(options),
               [answer = std::move(answer)](Request& request, std::shared_ptr<Exchange> exchange) {
                 exchange->respond(answer(request));
               });
}

std::string_view reason_phrase(int status) {
  const auto phrase = beast::http::obsolete_reason(static_cast<beast::http::status>(status));
  return {phrase.data(), phrase.size()};
}

}  // namespace conclave::http
