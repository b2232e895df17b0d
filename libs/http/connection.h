// One client's connection: reads a request, hands it to the handler, writes what comes back, and again.
// Internal to the server; everything runs on the connection's strand.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "libs/http/http_server.h"

namespace conclave::http {

namespace asio = boost::asio;
namespace beast = boost::beast;
using tcp = asio::ip::tcp;

class Connection;

// What connections share with their server. Connections (and exchanges that outlive the server) keep it
// alive.
struct ServerState {
  asio::io_context context;
  std::atomic<bool> stopped{false};  // nothing is posted any more
  std::atomic<uint32_t> posting{0};  // exchanges that found it not stopped and post right now
  HttpServerOptions options;
  Handler handler;
  std::atomic<bool> draining{false};
  std::atomic<uint64_t> opened{0}, refused{0}, open{0}, requests{0}, malformed{0}, gone{0}, slow{0},
      large_bodies{0}, large_headers{0}, pings{0};
  std::mutex mutex;
  std::set<Connection*> connections;  // guarded by mutex; to reach them at drain and stop
};

// Held while an exchange posts. A task left in a context that nobody runs would keep its connection, and so
// the context and itself, for ever: the server's end waits for the gates and runs what they let in.
class PostGate {
 public:
  explicit PostGate(ServerState& state) : state_(state) {
    state_.posting.fetch_add(1);
    open_ = !state_.stopped.load();
  }
  ~PostGate() {
    if (state_.posting.fetch_sub(1) == 1 && state_.stopped.load()) state_.posting.notify_all();
  }
  PostGate(const PostGate&) = delete;
  PostGate& operator=(const PostGate&) = delete;

  // False: the server has stopped; post nothing.
  bool open() const { return open_; }

 private:
  ServerState& state_;
  bool open_;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // The socket's executor is this connection's strand.
  Connection(tcp::socket socket, std::shared_ptr<ServerState> state);
  ~Connection();

  void start();
  // Answers 503 and closes, without reading.
  void refuse();
  // Any thread: closes when idle, or after the response in progress.
  void drain();
  // Any thread: closes at once.
  void abort();

 private:
  friend class ExchangeImpl;
  enum class State { kIdle, kReading, kHandling, kClosing, kClosed };

  void read_header();
  void on_header(beast::error_code error);
  void read_body();
  void on_body(beast::error_code error);
  void fail_request(beast::error_code error);
  void dispatch();
  void watch();
  void on_watched(beast::error_code error, size_t bytes);

  // From the exchange, on the strand; `serial` tells a late call from the current request's.
  void respond(uint64_t serial, Response response);
  void begin_stream(uint64_t serial, Response head, std::shared_ptr<StreamSource> source);
  void pull(uint64_t serial);
  void set_gone(uint64_t serial, std::function<void()> gone);
  void add_headers(uint64_t serial, Headers headers);

  std::string head_of(const Response& response, std::optional<size_t> length);
  void error_response(int status, std::string_view message);
  // Answers and closes, whatever of the request was not read.
  void refuse_request(Response response);
  void send(std::string bytes);
  // Writes what the socket takes at once; the rest when it can take more.
  void write_some();
  void on_writable(beast::error_code error);
  void all_written();
  void ping();
  void response_complete();
  void next_request();
  void linger();
  void discard();
  void close();
  void client_gone();
  // One thing at a time is waited for. The wait itself is left alone where it ends early enough: on a busy
  // stream the time moves on with every token, and a timer for each would cost more than the write.
  void arm(Nanos after, void (Connection::*expired)());
  void disarm();
  void wait_until(TimePoint when);
  void timer_due();
  void reading_too_slow();
  void writing_too_slow();

  const std::shared_ptr<ServerState> state_;  // first: its context outlives the socket and the timer
  tcp::socket socket_;
  asio::steady_timer timer_;
  uint64_t timer_serial_ = 0;
  TimePoint timer_at_ = kNever;  // when the wait in progress ends
  TimePoint due_ = kNever;
  void (Connection::*expired_)() = nullptr;  // to call at due_
  beast::flat_buffer buffer_;
  std::optional<beast::http::request_parser<beast::http::string_body>> parser_;
  State phase_ = State::kIdle;
  uint64_t serial_ = 0;  // of the request in progress
  std::string request_id_;
  Headers extra_headers_;  // of the response
  bool keep_alive_ = true;
  bool head_request_ = false;
  bool http_1_0_ = false;
  bool watching_ = false;
  bool timed_out_ = false;  // the read in progress was cancelled for being too slow
  bool answered_ = false;   // the response has begun
  bool complete_ = false;   // ... and all of it is queued
  bool chunked_ = false;
  bool event_stream_ = false;
  std::shared_ptr<StreamSource> source_;
  std::function<void()> gone_;
  std::deque<std::string> out_;
  size_t out_bytes_ = 0;
  size_t out_offset_ = 0;  // of out_.front()
  bool writing_ = false;
  size_t discarded_ = 0;
};

}  // namespace conclave::http
