#include "cli/cluster_control.h"

#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <utility>
#include <vector>

#include "libs/base/address.h"
#include "libs/rpc/grpc_setup.h"
#include "libs/tls/identity.h"

namespace conclave::cli {
namespace {

constexpr std::chrono::seconds kCallLimit(5);

}  // namespace

void add_scheduler_flag(CLI::App& command, SchedulerFlags& flags) {
  command.add_option("--scheduler", flags.address, "The scheduler's address")
      ->envname("CONCLAVE_SCHEDULER_ADDRESS")
      ->capture_default_str();
  command
      .add_option("--tls-ca", flags.tls.ca_file,
                  "Authorities of the cluster's certificates (PEM), where it has TLS")
      ->envname("CONCLAVE_TLS_CA_FILE");
  command.add_option("--tls-cert", flags.tls.cert_file, "Certificate to show to the scheduler (PEM)")
      ->envname("CONCLAVE_TLS_CERT_FILE");
  command.add_option("--tls-key", flags.tls.key_file, "Its private key (PEM)")
      ->envname("CONCLAVE_TLS_KEY_FILE");
  command
      .add_option("--tls-server-name", flags.tls.server_name,
                  "Name in the scheduler's certificate, if not the host of its address")
      ->envname("CONCLAVE_TLS_SERVER_NAME");
}

ClusterControl::ClusterControl(const SchedulerFlags& flags) : scheduler_(flags.address) {
  static std::once_flag quiet;  // gRPC's own lines are not for people
  std::call_once(quiet, [] { rpc::route_grpc_logs(nullptr); });
  if (const auto address = parse_host_port(scheduler_); !address.ok() || address->port == 0) {
    flags_ = invalid_field("--scheduler", address.ok() ? "'" + scheduler_ + "' names no port"
                                                       : message_of(address.status()));
    return;
  }
  rpc::ClientOptions options;
  options.target = scheduler_;
  tls_ = flags.tls.enabled();
  if (tls_) {
    for (const auto& [name, file] :
         {std::pair{"--tls-ca", &flags.tls.ca_file}, std::pair{"--tls-cert", &flags.tls.cert_file},
          std::pair{"--tls-key", &flags.tls.key_file}}) {
      if (!file->empty()) continue;
      flags_ = invalid_field(name, "is not given; --tls-ca, --tls-cert and --tls-key go together");
      return;
    }
    auto identity = tls::Identity::load(flags.tls, tls::Use::kClient);
    if (!identity.ok()) {
      flags_ = invalid_argument(message_of(identity.status()));  // which names the key
      return;
    }
    options.tls = *std::move(identity);
  }
  stub_ = v1::Cluster::NewStub(rpc::make_channel(options));
}

Status ClusterControl::explain(int code, const std::string& message) const {
  switch (code) {
    case grpc::StatusCode::NOT_FOUND:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::INVALID_ARGUMENT:
      return make_status(static_cast<StatusCode>(code), message);
    case grpc::StatusCode::UNIMPLEMENTED:
      return failed_precondition("the scheduler at " + scheduler_ + " is of a release without this command");
    default:
      break;
  }
  return unavailable("no scheduler answers at " + scheduler_ + " (" + message +
                     "); name its address with --scheduler, as `conclave up` printed it" +
                     (tls_ ? ", and see in its log whether it refused the certificate"
                           : ", and --tls-ca, --tls-cert and --tls-key where it asks for certificates"));
}

StatusOr<v1::StatusReply> ClusterControl::status(Nanos limit) {
  RETURN_IF_ERROR(flags_);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::nanoseconds(limit));
  v1::StatusReply reply;
  const grpc::Status status = stub_->Status(&context, {}, &reply);
  if (!status.ok()) return explain(status.error_code(), status.error_message());
  return reply;
}

Status ClusterControl::drain(uint64_t incarnation) {
  RETURN_IF_ERROR(flags_);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kCallLimit);
  v1::DrainRequest request;
  request.set_incarnation(incarnation);
  v1::DrainReply reply;
  const grpc::Status status = stub_->Drain(&context, request, &reply);
  return status.ok() ? OkStatus() : explain(status.error_code(), status.error_message());
}

StatusOr<v1::ExpertsReply> ClusterControl::experts(std::optional<uint32_t> layer) {
  RETURN_IF_ERROR(flags_);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kCallLimit);
  v1::ExpertsRequest request;
  if (layer) request.set_layer(*layer);
  v1::ExpertsReply reply;
  const grpc::Status status = stub_->Experts(&context, request, &reply);
  if (!status.ok()) return explain(status.error_code(), status.error_message());
  // Its columns are used as indices.
  const uint64_t rows = static_cast<uint64_t>(reply.load_size());
  bool sound = static_cast<uint64_t>(reply.home_begin_size()) == rows + 1 &&
               (reply.experts() == 0 ? rows == 0 : rows % reply.experts() == 0) && reply.home_begin(0) == 0 &&
               reply.home_begin(static_cast<int>(rows)) == static_cast<uint32_t>(reply.home_shards_size());
  for (uint64_t i = 0; sound && i < rows; ++i)
    sound = reply.home_begin(static_cast<int>(i)) <= reply.home_begin(static_cast<int>(i) + 1);
  for (const uint32_t home : reply.home_shards())
    sound = sound && home < static_cast<uint32_t>(reply.shards_size());
  if (!sound) return internal_error("the scheduler's answer about experts makes no sense");
  return reply;
}

StatusOr<v1::RebalanceReply> ClusterControl::rebalance(bool dry_run) {
  RETURN_IF_ERROR(flags_);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kCallLimit);
  v1::RebalanceRequest request;
  request.set_dry_run(dry_run);
  v1::RebalanceReply reply;
  const grpc::Status status = stub_->Rebalance(&context, request, &reply);
  if (!status.ok()) return explain(status.error_code(), status.error_message());
  return reply;
}

const char* role_name(v1::Role role) {
  switch (role) {
    case v1::ROLE_ROUTER:
      return "router";
    case v1::ROLE_ATTENTION:
      return "attention";
    case v1::ROLE_EXPERT:
      return "expert";
    default:
      return "unknown";
  }
}

StatusOr<v1::MemberStatus> find_member(const v1::StatusReply& cluster, const std::string& id) {
  // As `conclave status` writes it, and as logs and the live page do.
  const auto names_incarnation = [&id](uint64_t incarnation) {
    char hex[24];
    std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(incarnation));
    return id == std::to_string(incarnation) || id == hex || id == std::string("0x") + hex;
  };
  std::vector<const v1::MemberStatus*> named;
  std::string names;
  for (const v1::MemberStatus& member : cluster.members()) {
    if (names_incarnation(member.incarnation())) return member;
    if (member.name() == id) named.push_back(&member);
    names += (names.empty() ? "" : ", ") + member.name();
  }
  if (named.size() == 1) return *named.front();
  if (named.empty()) {
    return not_found("no member is called " + id + "; there are: " + (names.empty() ? "none" : names));
  }
  std::string incarnations;
  for (const auto* member : named) {
    incarnations += (incarnations.empty() ? "" : ", ") + std::to_string(member->incarnation());
  }
  return invalid_argument(std::to_string(named.size()) + " members are called " + id +
                          "; name one by its incarnation: " + incarnations);
}

}  // namespace conclave::cli
