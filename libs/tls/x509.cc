#include "libs/tls/x509.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <ctime>

namespace conclave::tls {
namespace {

constexpr size_t kMaxNameShown = 200;

Bio bio_of(std::string_view text) { return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size()))); }

// Instead of asking on the terminal.
int no_password(char*, int, int, void*) { return -1; }

std::string name_text(const X509_NAME* name) {
  Bio out(BIO_new(BIO_s_mem()));
  X509_NAME_print_ex(out.get(), name, 0, XN_FLAG_RFC2253 & ~ASN1_STRFLGS_ESC_MSB);
  char* data = nullptr;
  const long size = BIO_get_mem_data(out.get(), &data);
  std::string text(data, static_cast<size_t>(std::max(0L, size)));
  if (text.size() > kMaxNameShown) text = text.substr(0, kMaxNameShown) + "...";
  return text.empty() ? "no name" : text;
}

int64_t seconds(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return 0;
  return static_cast<int64_t>(timegm(&parts));
}

}  // namespace

StatusOr<std::vector<Certificate>> parse_certificates(std::string_view pem) {
  std::vector<Certificate> out;
  const Bio bio = bio_of(pem);
  ERR_clear_error();
  while (X509* certificate = PEM_read_bio_X509(bio.get(), nullptr, no_password, nullptr)) {
    out.emplace_back(certificate);
  }
  // The end shows as a line that does not begin anything.
  const unsigned long error = ERR_peek_last_error();
  const bool end = ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (!end) return invalid_argument("certificate " + std::to_string(out.size() + 1) + " cannot be read");
  if (out.empty()) return invalid_argument("holds no certificate (PEM)");
  return out;
}

StatusOr<PrivateKey> parse_private_key(std::string_view pem) {
  const Bio bio = bio_of(pem);
  ERR_clear_error();
  PrivateKey key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr));
  ERR_clear_error();
  if (key == nullptr) return invalid_argument("holds no private key (PEM, without a password)");
  return key;
}

std::string describe(X509* certificate) {
  return name_text(X509_get_subject_name(certificate)) + " (issued by " +
         name_text(X509_get_issuer_name(certificate)) + ")";
}

int64_t not_after(X509* certificate) { return seconds(X509_get0_notAfter(certificate)); }
int64_t not_before(X509* certificate) { return seconds(X509_get0_notBefore(certificate)); }

bool holds_host(X509* certificate, const std::string& name) {
  if (name.empty()) return false;
  // An address is one only where it parses; else 1 and 0 and errors alike mean that it does not match.
  if (X509_check_ip_asc(certificate, name.c_str(), 0) == 1) return true;
  return X509_check_host(certificate, name.data(), name.size(), X509_CHECK_FLAG_NEVER_CHECK_SUBJECT,
                         nullptr) == 1;
}

bool holds_name(X509* certificate, const std::string& name) {
  auto* names =
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr));
  if (names == nullptr) return false;
  bool found = false;
  for (int i = 0; i < sk_GENERAL_NAME_num(names); ++i) {
    const GENERAL_NAME* one = sk_GENERAL_NAME_value(names, i);
    if (one->type != GEN_DNS && one->type != GEN_URI) continue;
    const ASN1_IA5STRING* text = one->type == GEN_DNS ? one->d.dNSName : one->d.uniformResourceIdentifier;
    const std::string_view held(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                                static_cast<size_t>(ASN1_STRING_length(text)));
    found = found || held == name;
  }
  GENERAL_NAMES_free(names);
  return found;
}

}  // namespace conclave::tls
