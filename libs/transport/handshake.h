// Proofs of the cluster's secret, exchanged in the first messages of a connection. The secret never travels;
// each proof is an HMAC-SHA256 over what the two ends are called and numbers drawn for this connection.
#pragma once

#include <string>
#include <string_view>

#include "libs/base/ids.h"
#include "libs/transport/wire.h"

namespace conclave::wire {

Proof hello_proof(std::string_view secret, Incarnation sender, const HelloBody& hello);
// `hello_nonce` binds the answer to the hello it answers.
Proof hello_ack_proof(std::string_view secret, Incarnation sender, const HelloAckBody& ack,
                      const Nonce& hello_nonce);
// Tells two secrets apart and is no proof: 16 bytes of an HMAC-SHA256 with its own label. Whoever sees it can try guesses,
// as whoever sees a handshake can: secrets are drawn at random.
std::string secret_digest(std::string_view secret);
// In constant time.
bool same_proof(const Proof& a, const Proof& b);

}  // namespace conclave::wire
