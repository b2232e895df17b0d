#include "libs/transport/handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "libs/base/check.h"
#include "libs/transport/wire_bytes.h"

namespace conclave::wire {
namespace {

Proof hmac(std::string_view secret, const Bytes& message) {
  Proof proof;
  unsigned length = 0;
  const auto* result = HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                            reinterpret_cast<const unsigned char*>(message.data()), message.size(),
                            reinterpret_cast<unsigned char*>(proof.data()), &length);
  CONCLAVE_CHECK(result != nullptr && length == proof.size());
  return proof;
}

void put_text(Writer& w, std::string_view text) {  // with its length: no two field lists share their bytes
  w.put(static_cast<uint64_t>(text.size()));
  w.append(text.data(), text.size());
}

}  // namespace

Proof hello_proof(std::string_view secret, Incarnation sender, const HelloBody& hello) {
  Bytes m;
  Writer w(m);
  put_text(w, "conclave data plane hello 1");
  w.put(sender.value);
  w.put(hello.receiver.value);
  w.put(hello.session);
  w.put(hello.nonce);
  put_text(w, hello.address);
  put_text(w, hello.fleet);
  return hmac(secret, m);
}

Proof hello_ack_proof(std::string_view secret, Incarnation sender, const HelloAckBody& ack,
                      const Nonce& hello_nonce) {
  Bytes m;
  Writer w(m);
  put_text(w, "conclave data plane hello ack 1");
  w.put(sender.value);
  w.put(ack.receiver.value);
  w.put(ack.session);
  w.put(ack.nonce);
  w.put(hello_nonce);
  w.put(ack.code);
  return hmac(secret, m);
}

std::string secret_digest(std::string_view secret) {
  constexpr size_t kBytes = 16;
  Bytes m;
  Writer w(m);
  put_text(w, "conclave data plane secret digest 1");
  const Proof digest = hmac(secret, m);
  return std::string(reinterpret_cast<const char*>(digest.data()), kBytes);
}

bool same_proof(const Proof& a, const Proof& b) { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

}  // namespace conclave::wire
