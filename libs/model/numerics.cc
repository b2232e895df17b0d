#include "libs/model/numerics.h"

namespace conclave {

StatusOr<Precision> parse_precision(std::string_view text, std::string_view field) {
  if (text == "bf16") return Precision::kBf16;
  if (text == "f32") return Precision::kF32;
  return invalid_field(field, "must be bf16 or f32, not '" + std::string(text) + "'");
}

std::string numerics_id(Precision precision, std::string_view backend_class, bool fp8_wire) {
  const std::string d = precision == Precision::kBf16 ? "bf16" : "f32";
  const std::string wire = wire_dtype(precision, fp8_wire) == RowDtype::kFp8 ? "fp8" : d;
  return "k" + std::to_string(kKernelContractVersion) + "-" + std::string(backend_class) + "-act." + d +
         "-wire." + wire + "-out." + d + "-kv." + d;
}

}  // namespace conclave
