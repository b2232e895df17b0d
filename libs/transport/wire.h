// The wire form of the data plane (docs/wire_format.md): a little-endian header with a CRC, then rows. The
// header holds everything but the rows and is encoded into a buffer of its own, so that rows are never copied
// to be sent.
//
// Decoding trusts nothing: every count is checked against TransportLimits, by arithmetic that can't overflow,
// before memory is reserved or read by it. Errors are INVALID_ARGUMENT naming the field (with_field),
// DATA_LOSS for a wrong CRC, FAILED_PRECONDITION for another version. All functions are pure; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "libs/base/status.h"
#include "libs/model/dispatch.h"
#include "libs/ports/expert_transport.h"

namespace conclave::wire {

using Bytes = std::vector<std::byte>;
using View = std::span<const std::byte>;

inline constexpr uint32_t kMagic = 0x4c434e43;  // the bytes "CNCL"
inline constexpr uint16_t kVersion = 1;
inline constexpr size_t kFixedBytes = 64;             // of every header, before the body
inline constexpr uint32_t kMaxSectionsBytes = 65536;  // of all optional sections of one message
inline constexpr size_t kMaxAddressBytes = 8192;
inline constexpr size_t kMaxFleetBytes = 512;
inline constexpr size_t kMaxRefusalBytes = 512;

enum class Kind : uint8_t {
  kHello = 1,
  kHelloAck = 2,
  kDispatch = 3,
  kCombine = 4,
  kCancel = 5,
  kAck = 6,   // nothing but the envelope's acknowledgements
  kPing = 7,  // asks for an Ack
  kBye = 8,   // the sender has closed the connection
};

// Who sends, on which connection, and what the sender has consumed of what it received on it.
struct Envelope {
  Incarnation sender;
  uint64_t session = 0;  // the number the receiver chose for this connection; 0 in a Hello
  uint64_t acked_messages = 0;
  uint64_t acked_bytes = 0;
};

struct Header {
  Kind kind = Kind::kAck;
  Envelope envelope;
  uint32_t header_bytes = 0;  // the whole header: fixed part, body, sections
  uint64_t rows_bytes = 0;    // what follows it
  bool has_rows_crc = false;
  uint32_t rows_crc = 0;
  uint32_t sections_bytes = 0;
};

using Nonce = std::array<std::byte, 16>;
using Proof = std::array<std::byte, 32>;

struct HelloBody {
  Incarnation receiver;
  uint64_t session = 0;  // the sender's number for this connection: what it wants to see in the envelope
  Nonce nonce{};
  uint64_t window_bytes = 0;  // what the receiver of this hello may have unacknowledged at the sender
  uint32_t window_messages = 0;
  uint16_t protocol_min = 0;
  uint16_t protocol_max = 0;
  Proof proof{};
  std::string address;  // where to answer
  std::string fleet;    // must be equal at both ends
};

struct HelloAckBody {
  Incarnation receiver;
  uint64_t session = 0;
  Nonce nonce{};
  uint64_t window_bytes = 0;
  uint32_t window_messages = 0;
  uint16_t code = 0;  // a StatusCode; 0: welcome
  Proof proof{};
  std::string message;  // why not
};

struct PingBody {
  uint64_t sent_messages =
      0;  // by the sender on this connection so far; on an ordered link the receiver learns of
  uint64_t sent_bytes = 0;  // messages that were lost to damage
};

// Optional data at the end of a header. Readers skip types and versions they don't know.
struct Section {
  uint16_t type = 0;
  uint16_t version = 0;
  View data;
};

// --- encoding: replaces `out` with the header; the rows, if any, are sent behind it as they lie ---

// What decode would refuse, checked before anything is sent.
Status validate(const DispatchBatch& batch, const TransportLimits& limits);
Status validate(const CombineBatch& batch, const TransportLimits& limits);
// Header and rows; only for valid batches.
uint64_t message_bytes(const DispatchBatch& batch);
uint64_t message_bytes(const CombineBatch& batch);
// Only for valid batches.
void encode(const Envelope& envelope, const DispatchBatch& batch, bool rows_crc, Bytes& out,
            std::span<const Section> sections = {});
void encode(const Envelope& envelope, const CombineBatch& batch, bool rows_crc, Bytes& out,
            std::span<const Section> sections = {});
void encode(const Envelope& envelope, const HelloBody& body, Bytes& out);
void encode(const Envelope& envelope, const HelloAckBody& body, Bytes& out);
void encode(const Envelope& envelope, const PingBody& body, Bytes& out);
void encode_cancel(const Envelope& envelope, DispatchId id, Bytes& out);
void encode_ack(const Envelope& envelope, Bytes& out);
// `session` is the sender's own number for the connection, which the receiver put in its messages: it is
// known to both from the hello on, even when the answer to the hello never arrived.
void encode_bye(const Envelope& envelope, uint64_t session, Bytes& out);

// --- decoding ---

// Checks the start of `message`: magic, version, kind, sizes, CRC, sections. `message` may hold rows after
// the header.
StatusOr<Header> read_header(View message, const TransportLimits& limits);
// The sender and session that damaged bytes claim, for attributing a rejection; zeros when too short or no
// magic.
Envelope claimed_envelope(View message);
// `header` is the header alone (header_bytes long). Fill everything but rows/outputs.
Status decode(const Header& h, View header, const TransportLimits& limits, DispatchBatch& out);
Status decode(const Header& h, View header, const TransportLimits& limits, CombineBatch& out);
Status decode(const Header& h, View header, HelloBody& out);
Status decode(const Header& h, View header, HelloAckBody& out);
Status decode(const Header& h, View header, PingBody& out);
Status decode_cancel(const Header& h, View header, DispatchId& out);
Status decode_bye(const Header& h, View header, uint64_t& session);
// Length and, where the sender made one, CRC.
Status check_rows(const Header& h, View rows);
// The sections of a header that read_header accepted; views into `header`.
std::vector<Section> sections_of(const Header& h, View header);

}  // namespace conclave::wire
