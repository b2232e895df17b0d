#include "tests/fuzz/wire_target.h"

#include <cstring>
#include <vector>

#include "libs/base/check.h"
#include "libs/transport/crc32c.h"
#include "libs/transport/wire.h"

namespace conclave::fuzz {

bool try_wire_message(std::span<const std::byte> input, bool mend_crc) {
  TransportLimits limits;
  limits.max_rows = 64;
  limits.max_items = 256;
  limits.max_hidden = 512;
  limits.max_message_bytes = 1 << 20;
  // A copy of the exact size: AddressSanitizer sees any read beyond it.
  std::vector<std::byte> message(input.begin(), input.end());
  if (mend_crc && message.size() >= wire::kFixedBytes) {
    uint32_t size;
    std::memcpy(&size, message.data() + 8, 4);
    if (size >= wire::kFixedBytes && size <= message.size()) {
      std::memset(message.data() + 12, 0, 4);
      const uint32_t crc = crc32c(wire::View(message).first(size));
      std::memcpy(message.data() + 12, &crc, 4);
    }
  }
  (void)wire::claimed_envelope(message);
  const auto h = wire::read_header(message, limits);
  if (!h.ok()) {
    CONCLAVE_CHECK(!message_of(h.status()).empty());
    return false;
  }
  const wire::View header = wire::View(message).first(h->header_bytes);
  const wire::View rows = wire::View(message).subspan(h->header_bytes);
  for (const wire::Section& s : wire::sections_of(*h, header)) CONCLAVE_CHECK(s.data.size() <= header.size());
  if (!wire::check_rows(*h, rows).ok()) return false;
  switch (h->kind) {
    case wire::Kind::kDispatch: {
      DispatchBatch b;
      if (!wire::decode(*h, header, limits, b).ok()) return false;
      b.rows = std::make_shared<std::vector<std::byte>>(rows.begin(), rows.end());
      // What was accepted is a batch that we would send ourselves.
      CONCLAVE_CHECK(wire::validate(b, limits).ok());
      CONCLAVE_CHECK(wire::message_bytes(b) + h->sections_bytes == message.size());
      return true;
    }
    case wire::Kind::kCombine: {
      CombineBatch b;
      if (!wire::decode(*h, header, limits, b).ok()) return false;
      b.outputs = std::make_shared<std::vector<std::byte>>(rows.begin(), rows.end());
      CONCLAVE_CHECK(wire::validate(b, limits).ok());
      CONCLAVE_CHECK(wire::message_bytes(b) + h->sections_bytes == message.size());
      return true;
    }
    case wire::Kind::kHello: {
      wire::HelloBody b;
      return wire::decode(*h, header, b).ok();
    }
    case wire::Kind::kHelloAck: {
      wire::HelloAckBody b;
      return wire::decode(*h, header, b).ok();
    }
    case wire::Kind::kPing: {
      wire::PingBody b;
      return wire::decode(*h, header, b).ok();
    }
    case wire::Kind::kCancel: {
      DispatchId id;
      return wire::decode_cancel(*h, header, id).ok();
    }
    case wire::Kind::kBye: {
      uint64_t session;
      return wire::decode_bye(*h, header, session).ok();
    }
    case wire::Kind::kAck:
      return true;
  }
  return false;
}

}  // namespace conclave::fuzz
