#include "libs/rpc/grpc_setup.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>

#include "libs/base/address.h"
#include "libs/rpc/convert.h"
#include "libs/rpc/tls_credentials.h"

namespace conclave::rpc {
namespace {

using LogSink = void (*)(const char* file, int line, const char* message);
std::atomic<LogSink> g_log_sink{nullptr};

constexpr Nanos kHandshakeLimit = 10 * kSecond;  // from a connection to its first HTTP/2 settings

int to_ms(Nanos duration) {
  return static_cast<int>(std::clamp<Nanos>(duration / kMillisecond, 1, std::numeric_limits<int>::max()));
}

int message_limit(uint64_t bytes) {
  return static_cast<int>(std::min<uint64_t>(bytes, std::numeric_limits<int>::max()));
}

}  // namespace

void route_grpc_logs(void (*sink)(const char* file, int line, const char* message)) {
  g_log_sink.store(sink);
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
  gpr_set_log_function([](gpr_log_func_args* args) {
    if (LogSink to = g_log_sink.load(); to != nullptr) to(args->file, args->line, args->message);
  });
  google::protobuf::SetLogHandler(
      [](google::protobuf::LogLevel level, const char* file, int line, const std::string& message) {
        LogSink to = g_log_sink.load();
        if (to != nullptr && level >= google::protobuf::LOGLEVEL_ERROR) to(file, line, message.c_str());
      });
}

std::shared_ptr<grpc::Channel> make_channel(const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // The pauses are ours (backoff.h); gRPC's own stay at their shortest, 100 ms.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS,
                   to_ms(options.connect_deadline));  // of one attempt to connect
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS,
                   1000);  // a restarted scheduler may have moved
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, to_ms(options.keepalive_time));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, to_ms(options.keepalive_timeout));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // as many as keepalive wants
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);                // we resubmit ourselves
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // a proxy set for the web is not meant for the cluster
  arguments.SetMaxReceiveMessageSize(message_limit(options.max_message_bytes));
  arguments.SetMaxSendMessageSize(message_limit(options.max_message_bytes));
  return grpc::CreateCustomChannel(options.target,
                                   options.tls == nullptr
                                       ? grpc::InsecureChannelCredentials()
                                       : tls_channel_credentials(options.tls, options.target),
                                   arguments);
}

void configure_server(grpc::ServerBuilder& builder, const std::string& listen, uint64_t max_message_bytes,
                      int* port, std::shared_ptr<tls::Identity> identity) {
  builder.AddListeningPort(
      listen,
      identity == nullptr ? grpc::InsecureServerCredentials() : tls_server_credentials(std::move(identity)),
      port);
  // For whoever connects and says nothing, or not enough.
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, to_ms(kHandshakeLimit));
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.SetMaxReceiveMessageSize(message_limit(max_message_bytes));
  builder.SetMaxSendMessageSize(message_limit(max_message_bytes));
}

Status explain_listen_failure(const std::string& listen, const std::string& key) {
  const std::string prefix = "cannot listen on " + listen + ": ";
  auto parsed = parse_host_port(listen);
  if (!parsed.ok()) return invalid_field(key, prefix + message_of(parsed.status()) + "; correct " + key);
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error =
          getaddrinfo(parsed->host.c_str(), std::to_string(parsed->port).c_str(), &hints, &found);
      error != 0) {
    return invalid_field(key, prefix + gai_strerror(error) + "; correct " + key);
  }
  std::string reason = "the gRPC server did not start";
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    const int fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    const int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, at->ai_addr, at->ai_addrlen) != 0 || ::listen(fd, 1) != 0) reason = std::strerror(errno);
    close(fd);
  }
  freeaddrinfo(found);
  return with_field(unavailable(prefix + reason + "; choose another address with " + key +
                                " or stop the program that has it"),
                    key);
}

Status from_grpc(const grpc::Status& status) {
  if (status.ok()) return OkStatus();
  return make_status(static_cast<StatusCode>(status.error_code()), status.error_message());
}

grpc::Status to_grpc(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), wire_text(message_of(status), 2048));
}

}  // namespace conclave::rpc
