#include "libs/transport/wire.h"

#include <algorithm>

#include "libs/transport/crc32c.h"
#include "libs/transport/wire_bytes.h"

namespace conclave::wire {
namespace {

constexpr size_t kAtHeaderBytes = 8;
constexpr size_t kAtHeaderCrc = 12;
constexpr size_t kAtSender = 16;
constexpr size_t kAtSession = 24;
constexpr size_t kAtRowsBytes = 48;
constexpr uint8_t kFlagRowsCrc = 1;
constexpr size_t kSectionHead = 8;

template <class T>
void store(Bytes& out, size_t at, T value) {
  std::memcpy(out.data() + at, &value, sizeof value);
}
template <class T>
T load(View data, size_t at) {
  T value;
  std::memcpy(&value, data.data() + at, sizeof value);
  return value;
}

uint32_t header_crc(View header) {
  // The CRC's own four bytes count as zero.
  constexpr std::array<std::byte, 4> kZero{};
  uint32_t c = crc32c(header.first(kAtHeaderCrc));
  c = crc32c(kZero, c);
  return crc32c(header.subspan(kAtHeaderCrc + 4), c);
}

// The longest header that any batch within the limits can have.
uint64_t max_header_bytes(const TransportLimits& limits) {
  const uint64_t arrays = uint64_t{limits.max_rows} * 2 + uint64_t{limits.max_items} * 4 + 65536ull * 2;
  return kFixedBytes + 256 + kMaxAddressBytes + kMaxFleetBytes + arrays + kMaxSectionsBytes;
}

Status check_sections(View sections) {
  size_t at = 0;
  while (at < sections.size()) {
    if (sections.size() - at < kSectionHead) return invalid_field("sections", "a section is cut off");
    const uint64_t length = load<uint32_t>(sections, at + 4);
    if (pad8(length) > sections.size() - at - kSectionHead) {
      return invalid_field("sections", "a section is longer than the header");
    }
    at += kSectionHead + pad8(length);
  }
  return OkStatus();
}

}  // namespace

void begin(Writer& w, Kind kind, const Envelope& envelope) {
  w.put(kMagic);
  w.put(kVersion);
  w.put(static_cast<uint8_t>(kind));
  w.put(uint8_t{0});   // flags
  w.put(uint32_t{0});  // header_bytes
  w.put(uint32_t{0});  // header_crc
  w.put(envelope.sender.value);
  w.put(envelope.session);
  w.put(envelope.acked_messages);
  w.put(envelope.acked_bytes);
  w.put(uint64_t{0});  // rows_bytes
  w.put(uint32_t{0});  // rows_crc
  w.put(uint32_t{0});  // sections_bytes
}

void finish(Bytes& out, uint64_t rows_bytes, bool has_rows_crc, uint32_t rows_crc, uint32_t sections_bytes) {
  store(out, 7, has_rows_crc ? kFlagRowsCrc : uint8_t{0});
  store(out, kAtHeaderBytes, static_cast<uint32_t>(out.size()));
  store(out, kAtRowsBytes, rows_bytes);
  store(out, kAtRowsBytes + 8, rows_crc);
  store(out, kAtRowsBytes + 12, sections_bytes);
  store(out, kAtHeaderCrc, header_crc(out));
}

uint32_t append_sections(Writer& w, std::span<const Section> sections) {
  uint32_t total = 0;
  for (const Section& s : sections) {
    w.put(s.type);
    w.put(s.version);
    w.put(static_cast<uint32_t>(s.data.size()));
    w.append(s.data.data(), s.data.size());
    w.pad8();
    total += static_cast<uint32_t>(kSectionHead + pad8(s.data.size()));
  }
  CONCLAVE_CHECK(total <= kMaxSectionsBytes);
  return total;
}

Status expect_body(const Header& h, uint64_t body) {
  const uint64_t want = kFixedBytes + pad8(body) + h.sections_bytes;
  if (h.header_bytes == want) return OkStatus();
  return invalid_field("header_bytes",
                       "is " + std::to_string(h.header_bytes) + ", the counts say " + std::to_string(want));
}

StatusOr<Header> read_header(View message, const TransportLimits& limits) {
  if (message.size() < kFixedBytes) return invalid_field("header_bytes", "shorter than a header");
  if (load<uint32_t>(message, 0) != kMagic) return invalid_field("magic", "not a data plane message");
  const auto version = load<uint16_t>(message, 4);
  if (version != kVersion) {
    return with_field(failed_precondition("wire version " + std::to_string(version) + ", this build speaks " +
                                          std::to_string(kVersion)),
                      "version");
  }
  Header h;
  h.header_bytes = load<uint32_t>(message, kAtHeaderBytes);
  if (h.header_bytes < kFixedBytes || h.header_bytes > message.size()) {
    return invalid_field("header_bytes", "does not fit the message");
  }
  if (h.header_bytes > max_header_bytes(limits)) return invalid_field("header_bytes", "above the limit");
  const View header = message.first(h.header_bytes);
  if (load<uint32_t>(message, kAtHeaderCrc) != header_crc(header)) {
    return with_field(data_loss("the header's CRC does not match"), "header_crc");
  }
  const auto kind = load<uint8_t>(message, 6);
  if (kind < static_cast<uint8_t>(Kind::kHello) || kind > static_cast<uint8_t>(Kind::kBye)) {
    return invalid_field("kind", "unknown message kind " + std::to_string(kind));
  }
  h.kind = static_cast<Kind>(kind);
  const auto flags = load<uint8_t>(message, 7);
  if (flags & ~kFlagRowsCrc) return invalid_field("flags", "unknown flags");
  h.has_rows_crc = flags & kFlagRowsCrc;
  Reader r(header, kAtSender);
  h.envelope.sender = Incarnation(r.get<uint64_t>());
  h.envelope.session = r.get<uint64_t>();
  h.envelope.acked_messages = r.get<uint64_t>();
  h.envelope.acked_bytes = r.get<uint64_t>();
  h.rows_bytes = r.get<uint64_t>();
  h.rows_crc = r.get<uint32_t>();
  h.sections_bytes = r.get<uint32_t>();
  if (h.rows_bytes > limits.max_message_bytes || h.rows_bytes + h.header_bytes > limits.max_message_bytes) {
    return invalid_field("rows_bytes", "the message is above max_message_bytes");
  }
  if (h.sections_bytes > kMaxSectionsBytes || h.sections_bytes > h.header_bytes - kFixedBytes) {
    return invalid_field("sections_bytes", "does not fit the header");
  }
  RETURN_IF_ERROR(check_sections(header.last(h.sections_bytes)));
  if (h.rows_bytes != 0 && h.kind != Kind::kDispatch && h.kind != Kind::kCombine) {
    return invalid_field("rows_bytes", "this kind has no rows");
  }
  return h;
}

Envelope claimed_envelope(View message) {
  Envelope e;
  if (message.size() < kFixedBytes || load<uint32_t>(message, 0) != kMagic) return e;
  e.sender = Incarnation(load<uint64_t>(message, kAtSender));
  e.session = load<uint64_t>(message, kAtSession);
  return e;
}

Status check_rows(const Header& h, View rows) {
  if (rows.size() != h.rows_bytes) {
    return invalid_field("rows_bytes",
                         std::to_string(rows.size()) + " bytes follow, not " + std::to_string(h.rows_bytes));
  }
  if (h.has_rows_crc && crc32c(rows) != h.rows_crc) {
    return with_field(data_loss("the rows' CRC does not match"), "rows_crc");
  }
  return OkStatus();
}

std::vector<Section> sections_of(const Header& h, View header) {
  std::vector<Section> out;
  View rest = header.last(h.sections_bytes);
  while (!rest.empty()) {
    const uint32_t length = load<uint32_t>(rest, 4);
    out.push_back({load<uint16_t>(rest, 0), load<uint16_t>(rest, 2), rest.subspan(kSectionHead, length)});
    rest = rest.subspan(kSectionHead + pad8(length));
  }
  return out;
}

// --- hello, ack, ping, cancel ---

namespace {
constexpr uint64_t kHelloFixed = 88;
constexpr uint64_t kHelloAckFixed = 80;
}  // namespace

void encode(const Envelope& envelope, const HelloBody& body, Bytes& out) {
  CONCLAVE_CHECK(body.address.size() <= kMaxAddressBytes && body.fleet.size() <= kMaxFleetBytes);
  Writer w(out);
  begin(w, Kind::kHello, envelope);
  w.put(body.receiver.value);
  w.put(body.session);
  w.put(body.nonce);
  w.put(body.window_bytes);
  w.put(body.window_messages);
  w.put(body.protocol_min);
  w.put(body.protocol_max);
  w.put(static_cast<uint16_t>(body.address.size()));
  w.put(static_cast<uint16_t>(body.fleet.size()));
  w.zeros(4);
  w.put(body.proof);
  w.append(body.address.data(), body.address.size());
  w.append(body.fleet.data(), body.fleet.size());
  w.pad8();
  finish(out, 0, false, 0, 0);
}

Status decode(const Header& h, View header, HelloBody& out) {
  if (header.size() < kFixedBytes + kHelloFixed)
    return invalid_field("header_bytes", "too short for a hello");
  Reader r(header, kFixedBytes);
  out.receiver = Incarnation(r.get<uint64_t>());
  out.session = r.get<uint64_t>();
  r.copy(out.nonce.data(), out.nonce.size());
  out.window_bytes = r.get<uint64_t>();
  out.window_messages = r.get<uint32_t>();
  out.protocol_min = r.get<uint16_t>();
  out.protocol_max = r.get<uint16_t>();
  const size_t address = r.get<uint16_t>();
  const size_t fleet = r.get<uint16_t>();
  r.skip(4);
  r.copy(out.proof.data(), out.proof.size());
  if (address > kMaxAddressBytes) return invalid_field("address", "too long");
  if (fleet > kMaxFleetBytes) return invalid_field("fleet", "too long");
  RETURN_IF_ERROR(expect_body(h, kHelloFixed + address + fleet));
  out.address = r.text(address);
  out.fleet = r.text(fleet);
  if (!h.envelope.sender) return invalid_field("sender", "is zero");
  if (out.session == 0) return invalid_field("session", "is zero");
  return OkStatus();
}

void encode(const Envelope& envelope, const HelloAckBody& body, Bytes& out) {
  const size_t length = std::min(body.message.size(), kMaxRefusalBytes);
  Writer w(out);
  begin(w, Kind::kHelloAck, envelope);
  w.put(body.receiver.value);
  w.put(body.session);
  w.put(body.nonce);
  w.put(body.window_bytes);
  w.put(body.window_messages);
  w.put(body.code);
  w.put(static_cast<uint16_t>(length));
  w.put(body.proof);
  w.append(body.message.data(), length);
  w.pad8();
  finish(out, 0, false, 0, 0);
}

Status decode(const Header& h, View header, HelloAckBody& out) {
  if (header.size() < kFixedBytes + kHelloAckFixed) {
    return invalid_field("header_bytes", "too short for a hello ack");
  }
  Reader r(header, kFixedBytes);
  out.receiver = Incarnation(r.get<uint64_t>());
  out.session = r.get<uint64_t>();
  r.copy(out.nonce.data(), out.nonce.size());
  out.window_bytes = r.get<uint64_t>();
  out.window_messages = r.get<uint32_t>();
  out.code = r.get<uint16_t>();
  const size_t length = r.get<uint16_t>();
  r.copy(out.proof.data(), out.proof.size());
  if (length > kMaxRefusalBytes) return invalid_field("message", "too long");
  RETURN_IF_ERROR(expect_body(h, kHelloAckFixed + length));
  out.message = r.text(length);
  if (out.code == 0 && out.session == 0) return invalid_field("session", "is zero");
  return OkStatus();
}

void encode(const Envelope& envelope, const PingBody& body, Bytes& out) {
  Writer w(out);
  begin(w, Kind::kPing, envelope);
  w.put(body.sent_messages);
  w.put(body.sent_bytes);
  finish(out, 0, false, 0, 0);
}

Status decode(const Header& h, View header, PingBody& out) {
  RETURN_IF_ERROR(expect_body(h, 16));
  Reader r(header, kFixedBytes);
  out.sent_messages = r.get<uint64_t>();
  out.sent_bytes = r.get<uint64_t>();
  return OkStatus();
}

void encode_cancel(const Envelope& envelope, DispatchId id, Bytes& out) {
  Writer w(out);
  begin(w, Kind::kCancel, envelope);
  w.put(id.worker.value);
  w.put(id.seq);
  finish(out, 0, false, 0, 0);
}

Status decode_cancel(const Header& h, View header, DispatchId& out) {
  RETURN_IF_ERROR(expect_body(h, 16));
  Reader r(header, kFixedBytes);
  out.worker = Incarnation(r.get<uint64_t>());
  out.seq = r.get<uint64_t>();
  return OkStatus();
}

void encode_ack(const Envelope& envelope, Bytes& out) {
  Writer w(out);
  begin(w, Kind::kAck, envelope);
  finish(out, 0, false, 0, 0);
}

void encode_bye(const Envelope& envelope, uint64_t session, Bytes& out) {
  Writer w(out);
  begin(w, Kind::kBye, envelope);
  w.put(session);
  finish(out, 0, false, 0, 0);
}

Status decode_bye(const Header& h, View header, uint64_t& session) {
  RETURN_IF_ERROR(expect_body(h, 8));
  session = Reader(header, kFixedBytes).get<uint64_t>();
  return OkStatus();
}

}  // namespace conclave::wire
