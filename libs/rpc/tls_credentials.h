// gRPC's credentials for mutual TLS, out of an identity of ours. Only .cc files include this.
//
// gRPC makes the handshake and proves that each side has its key; whose certificate is believed is judged by
// tls::Identity alone, so that every refusal has a reason, a log line and a count.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "libs/tls/identity.h"

namespace conclave::rpc {

// `target`: host:port; its host is the name that the server's certificate must hold unless the options name
// one.
std::shared_ptr<grpc::ChannelCredentials> tls_channel_credentials(std::shared_ptr<tls::Identity> identity,
                                                                  const std::string& target);
std::shared_ptr<grpc::ServerCredentials> tls_server_credentials(std::shared_ptr<tls::Identity> identity);

// What a log line of gRPC says about a handshake that failed before there was a certificate to judge;
// nothing: it is about something else. gRPC tells of these in no other way.
std::optional<tls::Refusal> failed_handshake(std::string_view grpc_log_line);

}  // namespace conclave::rpc
