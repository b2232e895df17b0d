// Settings shared by every gRPC channel and server of the project. Only .cc files include this.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "libs/base/status.h"
#include "libs/rpc/client_options.h"

namespace conclave::rpc {

// Sends gRPC's and protobuf's own log lines (severity ERROR) to `sink`, and drops the rest, so that a
// service's log stays JSON lines. Null: drops all. Once, before the first channel or server.
void route_grpc_logs(void (*sink)(const char* file, int line, const char* message));

// A channel of its own (no connection shared with another), with keepalive and message limits set; over
// mutual TLS where the options have an identity.
std::shared_ptr<grpc::Channel> make_channel(const ClientOptions& options);

// Adds a listener, over mutual TLS where there is an identity, keepalive rules that accept make_channel's,
// message limits, and refuses to share a port. `port` receives the port really taken when the server starts.
void configure_server(grpc::ServerBuilder& builder, const std::string& listen, uint64_t max_message_bytes,
                      int* port, std::shared_ptr<tls::Identity> identity = nullptr);

// Why `listen` (host:port) cannot be bound: asked of the kernel, for the error of a server that did not
// start. `key` names the config key or flag.
Status explain_listen_failure(const std::string& listen, const std::string& key);

Status from_grpc(const grpc::Status& status);
grpc::Status to_grpc(const Status& status);

}  // namespace conclave::rpc
