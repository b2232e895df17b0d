#include "tests/tls/certificates.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <atomic>
#include <filesystem>
#include <fstream>

#include "libs/base/check.h"
#include "libs/tls/x509.h"

namespace conclave::tls {
namespace {

PrivateKey make_private_key() {
  PrivateKey key(EVP_PKEY_Q_keygen(nullptr, nullptr, "EC", "P-256"));
  CONCLAVE_CHECK(key != nullptr);
  return key;
}

void add_extension(X509* certificate, X509* issuer, int id, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, id, value.c_str());
  CONCLAVE_CHECK(extension != nullptr);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

// `issuer` null: signed by itself.
Certificate make(const Wish& wish, EVP_PKEY* key, X509* issuer, EVP_PKEY* issuer_key) {
  Certificate certificate(X509_new());
  X509* const c = certificate.get();
  X509_set_version(c, 2);
  uint64_t serial = 0;
  CONCLAVE_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof serial) == 1);
  ASN1_INTEGER_set_uint64(X509_get_serialNumber(c), serial >> 1);
  X509_gmtime_adj(X509_getm_notBefore(c), static_cast<long>(wish.begins_s));
  X509_gmtime_adj(X509_getm_notAfter(c), static_cast<long>(wish.ends_s));
  X509_set_pubkey(c, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(c), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(wish.name.c_str()), -1, -1, 0);
  X509_set_issuer_name(c, X509_get_subject_name(issuer == nullptr ? c : issuer));
  X509* const signer = issuer == nullptr ? c : issuer;
  add_extension(c, signer, NID_subject_key_identifier, "hash");
  if (wish.authority) {
    add_extension(c, signer, NID_basic_constraints, "critical,CA:TRUE");
    add_extension(c, signer, NID_key_usage, "critical,keyCertSign,cRLSign");
  } else {
    add_extension(c, signer, NID_basic_constraints, "critical,CA:FALSE");
    add_extension(c, signer, NID_key_usage, "critical,digitalSignature");
    add_extension(c, signer, NID_ext_key_usage, wish.usage);
    std::string names;
    for (const auto& name : wish.dns) names += (names.empty() ? "DNS:" : ",DNS:") + name;
    for (const auto& address : wish.addresses) names += (names.empty() ? "IP:" : ",IP:") + address;
    for (const auto& uri : wish.uris) names += (names.empty() ? "URI:" : ",URI:") + uri;
    if (!names.empty()) add_extension(c, signer, NID_subject_alt_name, names);
  }
  if (issuer != nullptr) add_extension(c, signer, NID_authority_key_identifier, "keyid:always");
  CONCLAVE_CHECK(X509_sign(c, issuer_key == nullptr ? key : issuer_key, EVP_sha256()) > 0);
  return certificate;
}

std::string text_of(const Bio& bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(size));
}

std::string pem_of(X509* certificate) {
  const Bio bio(BIO_new(BIO_s_mem()));
  CONCLAVE_CHECK(PEM_write_bio_X509(bio.get(), certificate) == 1);
  return text_of(bio);
}

std::string pem_of(EVP_PKEY* key) {
  const Bio bio(BIO_new(BIO_s_mem()));
  CONCLAVE_CHECK(PEM_write_bio_PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr) == 1);
  return text_of(bio);
}

Wish authority_wish(const std::string& name) {
  Wish wish;
  wish.name = name;
  wish.authority = true;
  wish.ends_s = 10 * 24 * 3600;
  return wish;
}

void write(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::trunc | std::ios::binary);
  out << text;
  CONCLAVE_CHECK(static_cast<bool>(out.flush()));
}

}  // namespace

struct Authority::Parts {
  PrivateKey key;
  Certificate certificate;
};

Authority::Authority(const std::string& name) : parts_(std::make_unique<Parts>()) {
  parts_->key = make_private_key();
  parts_->certificate = make(authority_wish(name), parts_->key.get(), nullptr, nullptr);
  pem_ = pem_of(parts_->certificate.get());
}
Authority::Authority(std::unique_ptr<Parts> parts, std::string pem)
    : parts_(std::move(parts)), pem_(std::move(pem)) {}
Authority::Authority(Authority&&) noexcept = default;
Authority& Authority::operator=(Authority&&) noexcept = default;
Authority::~Authority() = default;

Leaf Authority::issue(const Wish& wish) const {
  const PrivateKey key = make_private_key();
  const Certificate certificate = make(wish, key.get(), parts_->certificate.get(), parts_->key.get());
  return {pem_of(certificate.get()), pem_of(key.get())};
}

Authority Authority::intermediate(const std::string& name) const {
  auto parts = std::make_unique<Parts>();
  parts->key = make_private_key();
  parts->certificate =
      make(authority_wish(name), parts->key.get(), parts_->certificate.get(), parts_->key.get());
  std::string pem = pem_of(parts->certificate.get());
  return Authority(std::move(parts), std::move(pem));
}

Options write_files(const std::string& directory, const std::string& authorities, const Leaf& leaf) {
  namespace fs = std::filesystem;
  static std::atomic<int> count{0};
  const std::string fresh = directory + "." + std::to_string(++count);
  fs::create_directories(fresh);
  write(fresh + "/ca.crt", authorities);
  write(fresh + "/tls.crt", leaf.certificate);
  write(fresh + "/tls.key", leaf.key);
  const std::string link = directory + ".new";
  fs::remove(link);
  fs::create_directory_symlink(fresh, link);
  fs::rename(link, directory);
  Options options;
  options.ca_file = directory + "/ca.crt";
  options.cert_file = directory + "/tls.crt";
  options.key_file = directory + "/tls.key";
  return options;
}

}  // namespace conclave::tls
