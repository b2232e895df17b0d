#include "libs/http/connection.h"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/write.hpp>
#include <cstdio>
#include <utility>

#include "libs/base/random.h"
#include "libs/http/exchange.h"

namespace conclave::http {
namespace {

constexpr Nanos kLingerTimeout = 2 * kSecond;
constexpr size_t kLingerBytes =
    4 << 20;  // of a refused request, read and dropped so that the client sees the answer
constexpr size_t kReadChunk = 4 << 10;
// Of the kernel, for one connection; left to itself it grows to megabytes for a client that does not read.
constexpr int kSendBufferBytes = 128 << 10;

std::string draw_request_id() {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%016llx%016llx", static_cast<unsigned long long>(system_random_u64()),
                static_cast<unsigned long long>(system_random_u64()));
  return buffer;
}

bool usable_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 &&
         std::all_of(id.begin(), id.end(), [](char c) { return c > ' ' && c < 0x7f; });
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

Request head_of_request(const beast::http::request<beast::http::string_body>& message) {
  Request request;
  const auto method = message.method_string();
  request.method.assign(method.data(), method.size());
  const std::string_view target(message.target().data(), message.target().size());
  const size_t question = target.find('?');
  request.path = target.substr(0, question);
  if (question != std::string_view::npos) request.query = target.substr(question + 1);
  for (const auto& field : message)
    request.headers.emplace_back(lower({field.name_string().data(), field.name_string().size()}),
                                 std::string(field.value().data(), field.value().size()));
  return request;
}

Request to_request(beast::http::request<beast::http::string_body>&& message) {
  Request request = head_of_request(message);
  request.body = std::move(message.body());
  return request;
}

}  // namespace

Connection::Connection(tcp::socket socket, std::shared_ptr<ServerState> state)
    : state_(std::move(state)),
      socket_(std::move(socket)),
      timer_(socket_.get_executor()),
      buffer_(state_->options.limits.max_header_bytes + state_->options.limits.pipelined_bytes) {
  state_->open.fetch_add(1);
  std::lock_guard lock(state_->mutex);
  state_->connections.insert(this);
}

Connection::~Connection() {
  {
    std::lock_guard lock(state_->mutex);
    state_->connections.erase(this);
  }
  state_->open.fetch_sub(1);
}

void Connection::start() {
  asio::dispatch(socket_.get_executor(), [self = shared_from_this()] {
    beast::error_code ignored;
    self->socket_.set_option(tcp::no_delay(true), ignored);
    self->socket_.set_option(asio::socket_base::send_buffer_size(kSendBufferBytes), ignored);
    self->socket_.non_blocking(true, ignored);
    self->read_header();
  });
}

void Connection::refuse() {
  asio::dispatch(socket_.get_executor(), [self = shared_from_this()] {
    beast::error_code ignored;
    self->socket_.non_blocking(true, ignored);
    self->phase_ = State::kHandling;
    self->request_id_ = draw_request_id();
    self->error_response(503, "too many connections; retry later");
  });
}

void Connection::drain() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    self->keep_alive_ = false;
    if (self->phase_ == State::kIdle) self->close();
  });
}

void Connection::abort() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] { self->close(); });
}

// --- timers ---

void Connection::arm(Nanos after, void (Connection::*expired)()) {
  due_ = steady_now() + after;
  expired_ = expired;
  if (timer_at_ > due_) wait_until(due_);
}

void Connection::disarm() {
  due_ = kNever;
  expired_ = nullptr;
}

void Connection::wait_until(TimePoint when) {
  timer_at_ = when;
  const uint64_t serial = ++timer_serial_;
  timer_.expires_at(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(when)));
  timer_.async_wait([self = shared_from_this(), serial](beast::error_code error) {
    if (!error && serial == self->timer_serial_) self->timer_due();
  });
}

void Connection::timer_due() {
  timer_at_ = kNever;
  if (expired_ == nullptr) return;
  if (steady_now() < due_) return wait_until(due_);
  (this->*std::exchange(expired_, nullptr))();
}

// The pending read ends with operation_aborted; only then may the socket be read again (linger).
void Connection::reading_too_slow() {
  const bool began = phase_ == State::kReading || (parser_ && parser_->got_some()) || buffer_.size() > 0;
  if (!began) return close();
  timed_out_ = true;
  socket_.cancel();
}

void Connection::writing_too_slow() {
  state_->slow.fetch_add(1);
  close();
}

// --- reading ---

void Connection::read_header() {
  if (phase_ == State::kClosed) return;
  if (state_->draining.load() && buffer_.size() == 0 && serial_ > 0) return close();
  phase_ = buffer_.size() > 0 ? State::kReading : State::kIdle;
  ++serial_;
  answered_ = complete_ = chunked_ = event_stream_ = head_request_ = http_1_0_ = timed_out_ = false;
  request_id_.clear();
  extra_headers_.clear();
  source_.reset();
  parser_.emplace();
  parser_->header_limit(state_->options.limits.max_header_bytes);
  parser_->body_limit(state_->options.limits.max_body_bytes);
  arm(state_->options.limits.header_timeout, &Connection::reading_too_slow);
  beast::http::async_read_header(
      socket_, buffer_, *parser_,
      [self = shared_from_this()](beast::error_code error, size_t) { self->on_header(error); });
}

void Connection::on_header(beast::error_code error) {
  if (phase_ == State::kClosed) return;
  if (error) return fail_request(error);
  phase_ = State::kReading;
  const auto& head = parser_->get();
  http_1_0_ = head.version() == 10;
  const std::string_view id(head["x-request-id"].data(), head["x-request-id"].size());
  request_id_ = usable_id(id) ? std::string(id) : draw_request_id();
  if (state_->options.head_check) {
    Request seen = head_of_request(head);
    seen.id = request_id_;
    head_request_ = seen.method == "HEAD";
    if (auto refusal = state_->options.head_check(seen)) {
      state_->requests.fetch_add(1);
      return refuse_request(*std::move(refusal));
    }
  }
  const auto expect = head[beast::http::field::expect];
  if (!expect.empty() && !parser_->is_done()) {
    if (!beast::iequals(expect, "100-continue")) {
      state_->malformed.fetch_add(1);
      return error_response(417, "unknown expectation");
    }
    send("HTTP/1.1 100 Continue\r\n\r\n");
  }
  if (parser_->is_done()) return dispatch();
  read_body();
}

void Connection::read_body() {
  arm(state_->options.limits.body_timeout, &Connection::reading_too_slow);
  beast::http::async_read(
      socket_, buffer_, *parser_,
      [self = shared_from_this()](beast::error_code error, size_t) { self->on_body(error); });
}

void Connection::on_body(beast::error_code error) {
  if (phase_ == State::kClosed) return;
  if (error) return fail_request(error);
  dispatch();
}

void Connection::fail_request(beast::error_code error) {
  namespace http = beast::http;
  if (timed_out_) {
    state_->malformed.fetch_add(1);
    return error_response(408, "the request did not arrive in time");
  }
  if (error == http::error::end_of_stream || error == asio::error::operation_aborted ||
      error.category() != http::make_error_code(http::error::end_of_stream).category())
    return close();  // the client went away between requests, or the socket failed
  state_->malformed.fetch_add(1);
  const bool large_header = error == http::error::header_limit || error == http::error::buffer_overflow;
  if (large_header) state_->large_headers.fetch_add(1);
  if (error == http::error::body_limit) state_->large_bodies.fetch_add(1);
  if (large_header)
    return error_response(431, "the request header is larger than " +
                                   std::to_string(state_->options.limits.max_header_bytes) + " bytes");
  if (error == http::error::body_limit)
    return error_response(413, "the request body is larger than " +
                                   std::to_string(state_->options.limits.max_body_bytes) + " bytes");
  if (error == http::error::partial_message) return error_response(400, "the request ended early");
  error_response(400, "malformed HTTP: " + error.message());
}

void Connection::dispatch() {
  disarm();
  phase_ = State::kHandling;
  state_->requests.fetch_add(1);
  keep_alive_ = parser_->get().keep_alive() && !state_->draining.load();
  Request request = to_request(parser_->release());
  head_request_ = request.method == "HEAD";
  request.id = request_id_;
  beast::error_code unknown;
  const tcp::endpoint from = socket_.remote_endpoint(unknown);
  request.from_loopback = !unknown && from.address().is_loopback();
  watch();
  auto exchange = std::make_shared<ExchangeImpl>(shared_from_this(), serial_);
  try {
    state_->handler(request, exchange);
  } catch (const std::exception&) {  // out of memory for one request is that request's failure
    exchange->respond(state_->options.error_body ? state_->options.error_body(500, "internal error")
                                                 : Response{500, "text/plain", {}, "internal error"});
  }
}

// While a request is handled the socket is read on: an end of file tells that the client is gone, and other
// bytes are the next request.
void Connection::watch() {
  if (watching_ || buffer_.size() >= state_->options.limits.pipelined_bytes) return;
  watching_ = true;
  socket_.async_read_some(
      buffer_.prepare(std::min<size_t>(kReadChunk, buffer_.max_size() - buffer_.size())),
      [self = shared_from_this()](beast::error_code error, size_t bytes) { self->on_watched(error, bytes); });
}

void Connection::on_watched(beast::error_code error, size_t bytes) {
  watching_ = false;
  if (phase_ == State::kClosed) return;
  buffer_.commit(bytes);
  if (phase_ == State::kClosing) return error ? close() : discard();
  if (phase_ == State::kIdle && (!error || error == asio::error::operation_aborted)) return read_header();
  if (error) return close();
  watch();
}

// --- the response ---

std::string Connection::head_of(const Response& response, std::optional<size_t> length) {
  std::string head = "HTTP/1.1 " + std::to_string(response.status) + " ";
  head += reason_phrase(response.status);
  head += "\r\n";
  const auto add = [&head](std::string_view name, std::string_view value) {
    head += name;
    head += ": ";
    head += value;
    head += "\r\n";
  };
  if (response.status != 204) add("content-type", response.content_type);
  if (length && response.status != 204) add("content-length", std::to_string(*length));
  if (!length && chunked_) add("transfer-encoding", "chunked");
  for (const auto& [name, value] : response.headers) add(name, value);
  for (const auto& [name, value] : extra_headers_) add(name, value);
  add("x-request-id", request_id_);
  if (!keep_alive_)
    add("connection", "close");
  else if (http_1_0_)
    add("connection", "keep-alive");
  head += "\r\n";
  return head;
}

void Connection::error_response(int status, std::string_view message) {
  refuse_request(state_->options.error_body
                     ? state_->options.error_body(status, message)
                     : Response{status, "text/plain", {}, std::string(message) + "\n"});
}

void Connection::refuse_request(Response response) {
  disarm();
  keep_alive_ = false;
  if (request_id_.empty()) request_id_ = draw_request_id();
  phase_ = State::kHandling;
  respond(serial_, std::move(response));
}

void Connection::add_headers(uint64_t serial, Headers headers) {
  if (serial != serial_ || phase_ != State::kHandling || answered_) return;
  for (auto& header : headers) extra_headers_.push_back(std::move(header));
}

void Connection::respond(uint64_t serial, Response response) {
  if (serial != serial_ || phase_ != State::kHandling || answered_) return;
  answered_ = complete_ = true;
  std::string bytes = head_of(response, response.body.size());
  if (!head_request_ && response.status != 204) bytes += response.body;
  send(std::move(bytes));
}

void Connection::begin_stream(uint64_t serial, Response head, std::shared_ptr<StreamSource> source) {
  if (serial != serial_ || phase_ != State::kHandling || answered_) return;
  answered_ = true;
  chunked_ = !http_1_0_;
  event_stream_ = head.content_type.starts_with("text/event-stream");
  if (!chunked_) keep_alive_ = false;  // the end of the body is the end of the connection
  source_ = std::move(source);
  send(head_of(head, std::nullopt));
  pull(serial);
}

void Connection::pull(uint64_t serial) {
  if (serial != serial_ || phase_ != State::kHandling || !source_ || complete_) return;
  if (out_bytes_ >= state_->options.limits.write_buffer_bytes) return;  // all_written pulls again
  // The chunk's size goes before it, once it is known: eight digits are kept free for it.
  constexpr size_t kSizeLine = 10;
  std::string bytes(chunked_ ? kSizeLine : 0, '0');
  const bool more = source_->pull(bytes);
  if (chunked_) {
    const size_t size = bytes.size() - kSizeLine;
    if (size == 0) {
      bytes.clear();
    } else {
      constexpr char kDigits[] = "0123456789abcdef";
      size_t rest = size;
      for (size_t i = kSizeLine - 2; i-- > 0; rest >>= 4) bytes[i] = kDigits[rest & 15];
      bytes[kSizeLine - 2] = '\r';
      bytes[kSizeLine - 1] = '\n';
      bytes += "\r\n";
    }
  }
  if (!more) {
    complete_ = true;
    if (chunked_) bytes += "0\r\n\r\n";
  }
  if (!bytes.empty()) return send(std::move(bytes));
  if (complete_ && !writing_) response_complete();
}

void Connection::set_gone(uint64_t serial, std::function<void()> gone) {
  if (phase_ == State::kClosed && serial == serial_ && !complete_) return gone();
  if (serial == serial_ && phase_ == State::kHandling && !complete_) gone_ = std::move(gone);
}

void Connection::send(std::string bytes) {
  out_bytes_ += bytes.size();
  out_.push_back(std::move(bytes));
  if (!writing_) write_some();
}

void Connection::write_some() {
  writing_ = true;
  beast::error_code error;
  while (!out_.empty()) {
    const std::string& front = out_.front();
    const size_t bytes =
        socket_.write_some(asio::buffer(front.data() + out_offset_, front.size() - out_offset_), error);
    if (error == asio::error::would_block || error == asio::error::try_again) {
      if (phase_ == State::kHandling)
        arm(state_->options.limits.write_timeout, &Connection::writing_too_slow);
      return socket_.async_wait(tcp::socket::wait_write,
                                [self = shared_from_this()](beast::error_code e) { self->on_writable(e); });
    }
    if (error) {
      writing_ = false;
      return close();
    }
    out_offset_ += bytes;
    out_bytes_ -= bytes;
    if (out_offset_ == front.size()) {
      out_.pop_front();
      out_offset_ = 0;
    }
  }
  writing_ = false;
  all_written();
}

void Connection::on_writable(beast::error_code error) {
  if (phase_ == State::kClosed) return;
  if (error) {
    writing_ = false;
    return close();
  }
  const uint64_t serial = serial_;
  write_some();
  if (!writing_) pull(serial);  // it may have been held back by what was waiting
}

void Connection::all_written() {
  if (phase_ != State::kHandling) return;  // only "100 Continue" so far
  disarm();
  if (complete_) return response_complete();
  const Nanos ping_after = state_->options.limits.sse_ping_interval;
  if (event_stream_ && ping_after > 0) arm(ping_after, &Connection::ping);
}

void Connection::ping() {
  if (phase_ != State::kHandling || !source_ || complete_ || writing_) return;
  state_->pings.fetch_add(1);
  constexpr std::string_view kComment = ": keep-alive\n\n";
  send(chunked_ ? "e\r\n" + std::string(kComment) + "\r\n" : std::string(kComment));
}

void Connection::response_complete() {
  gone_ = nullptr;
  source_.reset();
  if (!keep_alive_) return linger();
  next_request();
}

void Connection::next_request() {
  if (!watching_) return read_header();
  // A read is pending: its end starts the next request, at once when there are bytes already.
  phase_ = State::kIdle;
  parser_.reset();  // of the last request: nothing of the next has come
  if (state_->draining.load() && buffer_.size() == 0) return close();
  arm(state_->options.limits.header_timeout, &Connection::reading_too_slow);
  if (buffer_.size() > 0) socket_.cancel();
}

// Closing a socket with unread bytes resets the connection, and the client might lose the answer; so say
// "done", and read and drop what still comes, within bounds.
void Connection::linger() {
  phase_ = State::kClosing;
  beast::error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  arm(kLingerTimeout, &Connection::close);
  discard();
}

void Connection::discard() {
  discarded_ += buffer_.size();
  buffer_.consume(buffer_.size());
  if (discarded_ > kLingerBytes) return close();
  watch();
}

void Connection::close() {
  if (phase_ == State::kClosed) return;
  const bool unfinished = phase_ == State::kHandling;
  phase_ = State::kClosed;
  disarm();
  timer_.cancel();  // its handler keeps this alive
  beast::error_code ignored;
  socket_.close(ignored);
  source_.reset();
  if (unfinished) client_gone();
}

void Connection::client_gone() {
  state_->gone.fetch_add(1);
  if (auto gone = std::exchange(gone_, nullptr)) gone();
}

}  // namespace conclave::http
