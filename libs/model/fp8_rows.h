// Hidden rows as FP8: `hidden` E4M3 codes, then one F32 scale for each 128 of them (the last block may be
// shorter). scale = largest magnitude / 448 in F32, code = nearest E4M3 of value / scale, ties to even; a
// block of zeros has scale 0. Pure F32 operations, the same bits on every machine. A block that holds a NaN
// or an infinity becomes NaN as a whole or in part: never a number.
#pragma once

#include <cstddef>
#include <cstdint>

#include "libs/base/float_bits.h"

namespace conclave {

// `out` has row_bytes(RowDtype::kFp8, hidden) bytes.
void encode_fp8_row(const float* row, uint32_t hidden, std::byte* out);
// code * scale in F32, rounded to BF16. `row` needs no alignment.
void decode_fp8_row(const std::byte* row, uint32_t hidden, Bf16* out);

}  // namespace conclave
