// What is done with bytes that claim to be a data plane message; shared by the seeded loop and libFuzzer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::fuzz {

// Decodes with small limits whatever it can; aborts when an accepted message breaks what decoding promises.
// Returns whether the message was accepted. `mend_crc` makes the header's CRC right first, so that the checks
// behind it are reached.
bool try_wire_message(std::span<const std::byte> bytes, bool mend_crc);

}  // namespace conclave::fuzz
