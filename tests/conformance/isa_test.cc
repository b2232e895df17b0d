#include <cstdlib>

#include "tests/conformance/support.h"

namespace conclave::kernels::testing {
namespace {

bool cpu_supports(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case Isa::kAvx512Bf16:
      return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("gfni");
  }
  return false;
}

// An instruction set this CPU has but whose kernels differ from the contract would drop out silently
// elsewhere.
TEST(Isa, WhatTheCpuHasPassesItsSelfCheck) {
  const std::vector<Isa> isas = available_isas();
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
    const bool available = std::find(isas.begin(), isas.end(), isa) != isas.end();
    EXPECT_EQ(available, cpu_supports(isa)) << isa_name(isa) << ": " << self_check(isa);
    if (!cpu_supports(isa)) {
      EXPECT_FALSE(self_check(isa).ok());
    }
  }
}

TEST(Isa, TheEnvironmentChooses) {
  ASSERT_EQ(unsetenv("CONCLAVE_ISA"), 0);
  EXPECT_EQ(best_isa(), available_isas().back());
  EXPECT_EQ(choose_isa().value(), best_isa());
  for (const Isa isa : available_isas()) {
    ASSERT_EQ(setenv("CONCLAVE_ISA", std::string(isa_name(isa)).c_str(), 1), 0);
    EXPECT_EQ(choose_isa().value(), isa);
  }
  ASSERT_EQ(setenv("CONCLAVE_ISA", "sse9", 1), 0);
  EXPECT_EQ(choose_isa().status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(field_of(choose_isa().status()), "CONCLAVE_ISA");
  ASSERT_EQ(unsetenv("CONCLAVE_ISA"), 0);
}

}  // namespace
}  // namespace conclave::kernels::testing
