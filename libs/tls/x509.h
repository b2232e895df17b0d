// OpenSSL's certificates with C++ lifetimes. Internal to libs/tls.
#pragma once

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"

namespace conclave::tls {

template <auto Free>
struct FreeWith {
  template <class T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Certificate = std::unique_ptr<X509, FreeWith<X509_free>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, FreeWith<EVP_PKEY_free>>;
using Store = std::unique_ptr<X509_STORE, FreeWith<X509_STORE_free>>;
using StoreContext = std::unique_ptr<X509_STORE_CTX, FreeWith<X509_STORE_CTX_free>>;
using Bio = std::unique_ptr<BIO, FreeWith<BIO_free_all>>;

// Every certificate of a PEM text, in order. INVALID_ARGUMENT where one cannot be read.
StatusOr<std::vector<Certificate>> parse_certificates(std::string_view pem);
// INVALID_ARGUMENT when there is none, or it asks for a password.
StatusOr<PrivateKey> parse_private_key(std::string_view pem);
// "CN=worker (issued by CN=authority)", bounded.
std::string describe(X509* certificate);
// Seconds since 1970.
int64_t not_after(X509* certificate);
int64_t not_before(X509* certificate);
// Whether its DNS names or addresses cover `name`, as a client asks of a server.
bool holds_host(X509* certificate, const std::string& name);
// Whether `name` is one of its DNS or URI names, letter by letter.
bool holds_name(X509* certificate, const std::string& name);

}  // namespace conclave::tls
