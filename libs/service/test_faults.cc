#include "libs/service/test_faults.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string>

namespace conclave {
namespace {

constexpr char kVariable[] = "CONCLAVE_TEST_FAULTS";

#ifdef CONCLAVE_FAULT_INJECTION
constexpr bool kBuiltIn = true;
#else
constexpr bool kBuiltIn = false;
#endif

template <class Number>
bool parse_number(std::string_view text, Number& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

double* probability(FaultPlan& plan, std::string_view name) {
  if (name == "drop_out") return &plan.drop_out;
  if (name == "drop_in") return &plan.drop_in;
  if (name == "duplicate_out") return &plan.duplicate_out;
  if (name == "duplicate_in") return &plan.duplicate_in;
  if (name == "delay_out") return &plan.delay_out;
  if (name == "delay_in") return &plan.delay_in;
  if (name == "reorder_in") return &plan.reorder_in;
  if (name == "corrupt_in") return &plan.corrupt_in;
  if (name == "peer_down") return &plan.peer_down;
  if (name == "stall") return &plan.stall;
  return nullptr;
}

}  // namespace

StatusOr<TestFaults> parse_test_faults(std::string_view text) {
  TestFaults out;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    const size_t equals = word.find('=');
    const std::string_view name = word.substr(0, equals);
    const std::string_view value = equals == std::string_view::npos ? "" : word.substr(equals + 1);
    double* chance = probability(out.plan, name);
    const bool good = name == "seed"      ? parse_number(value, out.seed)
                      : chance != nullptr ? parse_number(value, *chance) && *chance >= 0 && *chance <= 1
                                          : false;
    if (!good) {
      return invalid_argument(std::string(kVariable) + ": '" + std::string(word) +
                              "' is no fault; write for example seed=7,corrupt_in=0.01");
    }
  }
  return out;
}

StatusOr<std::optional<TestFaults>> test_faults_of_environment() {
  const char* text = std::getenv(kVariable);
  if (text == nullptr) return std::optional<TestFaults>();
  if (!kBuiltIn) {
    return failed_precondition(std::string(kVariable) +
                               " is set, and this build has no faults to inject; unset it");
  }
  ASSIGN_OR_RETURN(const TestFaults faults, parse_test_faults(text));
  return std::optional<TestFaults>(faults);
}

}  // namespace conclave
