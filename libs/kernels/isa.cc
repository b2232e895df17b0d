#include <array>
#include <cstdlib>

#include "libs/kernels/parallel.h"

namespace conclave::kernels {
namespace {

constexpr std::array kAllIsas = {Isa::kScalar};

bool cpu_has(Isa isa) { return isa == Isa::kScalar; }

}  // namespace

const Table& table_of(Isa) { return scalar_table(); }

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512bf16";
  }
  return "unknown";
}

Status self_check(Isa) { return OkStatus(); }

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : kAllIsas)
    if (cpu_has(isa) && self_check(isa).ok()) isas.push_back(isa);
  return isas;
}

StatusOr<Isa> choose_isa() {
  const std::vector<Isa> isas = available_isas();
  const char* wanted = std::getenv("CONCLAVE_ISA");
  if (wanted == nullptr || *wanted == '\0') return isas.back();
  for (const Isa isa : isas)
    if (isa_name(isa) == wanted) return isa;
  std::string names;
  for (const Isa isa : isas) names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  return invalid_field("CONCLAVE_ISA", "'" + std::string(wanted) + "' is not among this machine's: " + names);
}

}  // namespace conclave::kernels
