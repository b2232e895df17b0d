// What decides the bits of an answer (design rule 1). Two processes work together only when their ids are
// equal.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "libs/base/status.h"

namespace conclave {

// What matmul inputs, hidden rows on the wire, expert outputs and the KV cache are rounded to.
enum class Precision : uint8_t {
  kBf16,  // the default: residual stream F32, everything named above BF16, accumulation F32
  kF32,   // parity mode: everything F32
};

// Row formats on the wire. kFp8: E4M3 with one F32 scale for each 128 values (fp8_rows.h).
enum class RowDtype : uint8_t { kBf16 = 1, kF32 = 2, kFp8 = 3 };

// Of expert outputs.
inline RowDtype row_dtype(Precision p) { return p == Precision::kBf16 ? RowDtype::kBf16 : RowDtype::kF32; }
// Of hidden rows on their way to shards. kF32 has no FP8 wire.
inline RowDtype wire_dtype(Precision p, bool fp8_wire) {
  return fp8_wire && p == Precision::kBf16 ? RowDtype::kFp8 : row_dtype(p);
}
inline bool known_row_dtype(uint8_t d) { return d >= 1 && d <= 3; }
// Bytes of a row of `hidden` values.
inline size_t row_bytes(RowDtype d, uint32_t hidden) {
  const size_t n = hidden;
  return d == RowDtype::kFp8 ? n + (n + 127) / 128 * sizeof(float) : n * (d == RowDtype::kBf16 ? 2 : 4);
}

// "bf16" or "f32"; field names the flag or key for the error.
StatusOr<Precision> parse_precision(std::string_view text, std::string_view field);

// E.g. "k2-cpu-act.bf16-wire.bf16-out.bf16-kv.bf16". `backend_class` names the backend and instruction class
// whose results are bitwise the contract's ("cpu" for every CPU kernel that passed its self check).
std::string numerics_id(Precision precision, std::string_view backend_class, bool fp8_wire = false);

// Raised whenever a kernel's result changes in any bit.
inline constexpr int kKernelContractVersion = 2;

}  // namespace conclave
