// CRC-32C (Castagnoli, RFC 3720 appendix B.4), the checksum of wire headers and rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave {

// Continues from `crc` (0 to start): crc32c(b, crc32c(a)) is the checksum of a followed by b. Uses SSE4.2
// where the CPU has it. Pure, any thread.
uint32_t crc32c(std::span<const std::byte> data, uint32_t crc = 0);

// The table form, for tests and other CPUs.
uint32_t crc32c_portable(std::span<const std::byte> data, uint32_t crc = 0);

}  // namespace conclave
