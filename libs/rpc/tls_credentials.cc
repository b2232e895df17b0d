#include "libs/rpc/tls_credentials.h"

#include <grpcpp/security/tls_credentials_options.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include "libs/base/address.h"

namespace conclave::rpc {
namespace {

namespace experimental = grpc::experimental;

std::string_view view(grpc::string_ref text) { return {text.data(), text.size()}; }

constexpr unsigned kLookSeconds = 1;  // tls.reload_interval_s is kept by Identity::refresh()

// Asked after each handshake, before anything of the connection is used. Lives as long as the credentials,
// and has the identity look at its files all that time: a peer that turns away at the sight of an old
// certificate gives it no other occasion.
class PeerJudge final : public experimental::ExternalCertificateVerifier {
 public:
  PeerJudge(std::shared_ptr<tls::Identity> identity, tls::Use peer_use, std::string name)
      : identity_(std::move(identity)),
        peer_use_(peer_use),
        name_(std::move(name)),
        refresher_([this](const std::stop_token& stop) { refresh_until(stop); }) {}

  bool Verify(experimental::TlsCustomVerificationCheckRequest* request, std::function<void(grpc::Status)>,
              grpc::Status* outcome) override {
    const tls::Identity::Verdict verdict =
        identity_->judge(peer_use_, view(request->peer_cert()), view(request->peer_cert_full_chain()), name_);
    *outcome =
        verdict.refused ? grpc::Status(grpc::StatusCode::UNAUTHENTICATED, verdict.detail) : grpc::Status::OK;
    return true;  // decided at once
  }
  void Cancel(experimental::TlsCustomVerificationCheckRequest*) override {}

 private:
  void refresh_until(const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any stopped;
    std::unique_lock lock(mutex);
    while (!stop.stop_requested()) {
      stopped.wait_for(lock, stop, std::chrono::seconds(kLookSeconds), [] { return false; });
      identity_->refresh();
    }
  }

  const std::shared_ptr<tls::Identity> identity_;
  const tls::Use peer_use_;
  const std::string name_;
  std::jthread refresher_;
};

// gRPC looks at the files by itself, on a thread of its own; they are the identity's copies, since gRPC ends
// the process where it finds an empty one.
std::shared_ptr<experimental::CertificateProviderInterface> files_of(const tls::Identity& identity) {
  const tls::ShownFiles& files = identity.shown();
  return std::make_shared<experimental::FileWatcherCertificateProvider>(
      files.key_path(), files.certificate_path(), files.ca_path(), kLookSeconds);
}

template <class Options>
void show_our_certificate(Options& options) {
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
}

}  // namespace

std::shared_ptr<grpc::ChannelCredentials> tls_channel_credentials(std::shared_ptr<tls::Identity> identity,
                                                                  const std::string& target) {
  std::string name = identity->options().server_name;
  if (name.empty()) {
    const auto address = parse_host_port(target);
    if (address.ok()) name = address->host;
  }
  experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(files_of(*identity));
  show_our_certificate(options);
  options.set_verify_server_certs(false);  // the judge does, and knows why
  options.set_check_call_host(false);      // likewise
  options.set_certificate_verifier(experimental::ExternalCertificateVerifier::Create<PeerJudge>(
      std::move(identity), tls::Use::kServer, std::move(name)));
  return experimental::TlsCredentials(options);
}

std::shared_ptr<grpc::ServerCredentials> tls_server_credentials(std::shared_ptr<tls::Identity> identity) {
  experimental::TlsServerCredentialsOptions options(files_of(*identity));
  show_our_certificate(options);
  // Whether it is a good one is the judge's to say.
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_BUT_DONT_VERIFY);
  options.set_certificate_verifier(experimental::ExternalCertificateVerifier::Create<PeerJudge>(
      std::move(identity), tls::Use::kClient, std::string()));
  return experimental::TlsServerCredentials(options);
}

std::optional<tls::Refusal> failed_handshake(std::string_view line) {
  if (line.find("Handshake failed with") == std::string_view::npos) return std::nullopt;
  // OpenSSL's names of what it met.
  for (const char* text :
       {"wrong version number", "http request", "https proxy request", "packet length too long",
        "unknown protocol", "bad record type", "record layer failure"}) {
    if (line.find(text) != std::string_view::npos) return tls::Refusal::kNotTls;
  }
  if (line.find("peer did not return a certificate") != std::string_view::npos)
    return tls::Refusal::kNoCertificate;
  return tls::Refusal::kOther;
}

}  // namespace conclave::rpc
