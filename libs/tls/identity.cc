#include "libs/tls/identity.h"

#include <openssl/x509_vfy.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include "libs/base/check.h"
#include "libs/tls/x509.h"

namespace conclave::tls {
namespace {

struct StackDeleter {
  void operator()(STACK_OF(X509) * stack) const { sk_X509_free(stack); }  // not what is in it
};

int64_t wall_clock() { return static_cast<int64_t>(std::time(nullptr)); }

Refusal refusal_of(int error) {
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return Refusal::kExpired;
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return Refusal::kNotYetValid;
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:  // an authority that bears our authority's name
    case X509_V_ERR_CERT_UNTRUSTED:
      return Refusal::kUnknownCa;
    default:
      return Refusal::kBadCertificate;
  }
}

// X509_V_OK, or why the certificate leads to no authority of the store.
int verify(X509_STORE* store, X509* certificate, const std::vector<Certificate>& chain, size_t first, Use use,
           int64_t now) {
  const std::unique_ptr<STACK_OF(X509), StackDeleter> others(sk_X509_new_null());
  for (size_t i = first; i < chain.size(); ++i) sk_X509_push(others.get(), chain[i].get());
  const StoreContext context(X509_STORE_CTX_new());
  if (context == nullptr || X509_STORE_CTX_init(context.get(), store, certificate, others.get()) != 1 ||
      X509_STORE_CTX_set_default(context.get(), use == Use::kServer ? "ssl_server" : "ssl_client") != 1) {
    return X509_V_ERR_UNSPECIFIED;
  }
  X509_VERIFY_PARAM* how = X509_STORE_CTX_get0_param(context.get());
  X509_VERIFY_PARAM_set_time(how, static_cast<time_t>(now));
  X509_VERIFY_PARAM_set_depth(how, kMaxChain);
  // Whatever stands in ca_file is believed, an intermediate authority alone too.
  X509_VERIFY_PARAM_set_flags(how, X509_V_FLAG_PARTIAL_CHAIN);
  if (X509_verify_cert(context.get()) == 1) return X509_V_OK;
  const int error = X509_STORE_CTX_get_error(context.get());
  return error == X509_V_OK ? X509_V_ERR_UNSPECIFIED : error;
}

std::string day(int64_t unix_s) {
  const time_t time = static_cast<time_t>(unix_s);
  std::tm parts{};
  gmtime_r(&time, &parts);
  char text[32];
  return std::string(text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts));
}

}  // namespace

struct Identity::Material {
  Store store;
  int64_t expires_s = 0;
};

StatusOr<std::vector<std::string>> parse_names(std::string_view text) {
  std::vector<std::string> out;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    std::string_view name = text.substr(0, comma);
    text.remove_prefix(std::min(comma + 1, text.size()));
    while (name.starts_with(' ')) name.remove_prefix(1);
    while (name.ends_with(' ')) name.remove_suffix(1);
    if (name.empty()) return invalid_field("tls.client_names", "tls.client_names has an empty name");
    if (out.size() == kMaxClientNames)
      return invalid_field("tls.client_names",
                           "tls.client_names has more than " + std::to_string(kMaxClientNames) + " names");
    out.emplace_back(name);
  }
  return out;
}

Identity::Identity(Options options, Use use, Clock clock)
    : options_(std::move(options)),
      use_(use),
      clock_(clock ? std::move(clock) : wall_clock),
      client_names_(parse_names(options_.client_names).value_or(std::vector<std::string>())),
      ca_(options_.ca_file, "tls.ca_file", kMaxFileBytes),
      cert_(options_.cert_file, "tls.cert_file", kMaxFileBytes),
      key_(options_.key_file, "tls.key_file", kMaxFileBytes) {}

Identity::~Identity() = default;

StatusOr<std::shared_ptr<Identity>> Identity::load(Options options, Use use, Clock clock) {
  RETURN_IF_ERROR(parse_names(options.client_names).status());
  std::shared_ptr<Identity> out(new Identity(std::move(options), use, std::move(clock)));
  std::lock_guard reload(out->reload_mutex_);
  ASSIGN_OR_RETURN(out->material_, out->read());
  out->figures_.expires_s = out->material_->expires_s;
  out->next_look_ = steady_now() + out->options_.reload_interval;
  return out;
}

StatusOr<std::shared_ptr<const Identity::Material>> Identity::read() {
  const auto fault = [](const WatchedFile& file, const std::string& what) {
    return invalid_field(file.field(), file.field() + ": " + file.path() + " " + what);
  };
  // All three, so that the next look compares with what is there now even where one is at fault.
  const auto ca_text = ca_.read(), cert_text = cert_.read(), key_text = key_.read();
  for (const auto* text : {&ca_text, &cert_text, &key_text}) RETURN_IF_ERROR(text->status());
  auto authorities = parse_certificates(*ca_text);
  if (!authorities.ok()) return fault(ca_, message_of(authorities.status()));
  auto chain = parse_certificates(*cert_text);
  if (!chain.ok()) return fault(cert_, message_of(chain.status()));
  auto key = parse_private_key(*key_text);
  if (!key.ok()) return fault(key_, message_of(key.status()));

  X509* own = chain->front().get();
  if (X509_check_private_key(own, key->get()) != 1)
    return fault(key_, "is not the key of the certificate in " + cert_.path());
  const int64_t now = clock_();
  auto material = std::make_shared<Material>();
  material->expires_s = not_after(own);
  for (const Certificate& one : *chain) {
    material->expires_s = std::min(material->expires_s, not_after(one.get()));
    if (not_after(one.get()) <= now)
      return fault(cert_, "has expired at " + day(not_after(one.get())) + ": " + describe(one.get()));
    if (not_before(one.get()) > now)
      return fault(cert_, "is not valid before " + day(not_before(one.get())) + ": " + describe(one.get()));
  }
  material->store.reset(X509_STORE_new());
  CONCLAVE_CHECK(material->store != nullptr);
  for (const Certificate& authority : *authorities) {
    if (X509_STORE_add_cert(material->store.get(), authority.get()) != 1)
      return fault(ca_, "cannot be taken: " + describe(authority.get()));
  }
  if (const int error = verify(material->store.get(), own, *chain, 1, use_, now); error != X509_V_OK) {
    return fault(cert_, "is of no use here: " + describe(own) + ", " + X509_verify_cert_error_string(error) +
                            " (tls.ca_file is " + ca_.path() + ")");
  }
  RETURN_IF_ERROR(shown_.show(*ca_text, *cert_text, *key_text));
  return material;
}

std::shared_ptr<const Identity::Material> Identity::material() const {
  std::lock_guard lock(mutex_);
  return material_;
}

void Identity::refresh() {
  Status outcome;
  {
    std::lock_guard reload(reload_mutex_);
    if (steady_now() < next_look_) return;
    next_look_ = steady_now() + options_.reload_interval;
    if (!ca_.changed() && !cert_.changed() && !key_.changed()) return;
    auto taken = read();
    outcome = taken.status();
    std::lock_guard lock(mutex_);
    if (taken.ok()) {
      material_ = *std::move(taken);
      figures_.expires_s = material_->expires_s;
      ++figures_.reloads;
    } else {
      ++figures_.failed_reloads;
    }
  }
  if (observer_.reloaded) observer_.reloaded(outcome);
}

Identity::Verdict Identity::judge(Use peer_use, std::string_view certificate, std::string_view chain,
                                  const std::string& name) {
  refresh();
  Verdict verdict;
  const auto refuse = [&](Refusal refusal, std::string detail) {
    verdict.refused = refusal;
    verdict.detail = std::move(detail);
    count(refusal, verdict.detail);
    return verdict;
  };
  if (certificate.empty()) return refuse(Refusal::kNoCertificate, "the peer shows no certificate");
  if (certificate.size() + chain.size() > kMaxFileBytes)
    return refuse(Refusal::kBadCertificate, "the peer's certificates are too long");
  auto leaf = parse_certificates(certificate);
  auto others = chain.empty() ? StatusOr<std::vector<Certificate>>(std::vector<Certificate>())
                              : parse_certificates(chain);
  if (!leaf.ok() || !others.ok())
    return refuse(Refusal::kBadCertificate, "the peer's certificates cannot be read");
  X509* peer = leaf->front().get();
  verdict.detail = describe(peer);
  const int error = verify(material()->store.get(), peer, *others, 0, peer_use, clock_());
  if (error != X509_V_OK) {
    std::string detail = verdict.detail + ": " + X509_verify_cert_error_string(error);
    if (error == X509_V_ERR_CERT_HAS_EXPIRED) detail += ", it ended at " + day(not_after(peer));
    return refuse(refusal_of(error), std::move(detail));
  }
  if (peer_use == Use::kServer) {
    if (!holds_host(peer, name)) return refuse(Refusal::kWrongName, verdict.detail + ": is not of " + name);
  } else if (!client_names_.empty() &&
             std::none_of(client_names_.begin(), client_names_.end(),
                          [peer](const std::string& one) { return holds_name(peer, one); })) {
    return refuse(Refusal::kWrongName, verdict.detail + ": holds none of tls.client_names");
  }
  return verdict;
}

void Identity::count(Refusal refusal, const std::string& detail) {
  {
    std::lock_guard lock(mutex_);
    ++figures_.refused[static_cast<size_t>(refusal)];
  }
  if (observer_.refused) observer_.refused(refusal, detail);
}

Identity::Figures Identity::figures() {
  refresh();
  std::lock_guard lock(mutex_);
  return figures_;
}

}  // namespace conclave::tls
