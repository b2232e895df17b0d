// The fault programs: cluster_fault_test [--all | --stall | --scale | --soak SECONDS] [--seed N] [--only
// TEXT]
// [--kills N] [--checkpoint DIR] [--markdown FILE], and what GoogleTest takes. Without one of the first, what
// `check` runs.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iostream>

#include "tests/cluster/cluster.h"
#include "tests/cluster/fault_flags.h"

namespace conclave {
namespace {

constexpr uint32_t kKinds = 32, kTokens = 96;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

int run(int argc, char** argv) {
  ::testing::GTEST_FLAG(filter) = "-*.Long*";
  ::testing::InitGoogleTest(&argc, argv);
  FaultFlags& flags = fault_flags();
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&] {
      if (++i < argc) return std::string(argv[i]);
      std::cerr << flag << " takes a value\n";
      std::exit(2);
    };
    if (flag == "--all") {
      ::testing::GTEST_FLAG(filter) = "FaultMatrixTest.Long*";
    } else if (flag == "--stall") {
      ::testing::GTEST_FLAG(filter) = "StallTest.Long*";
    } else if (flag == "--scale") {
      ::testing::GTEST_FLAG(filter) = "ScaleTest.*:RollingTest.*";
    } else if (flag == "--soak") {
      ::testing::GTEST_FLAG(filter) = "SoakTest.Long*";
      flags.seconds = static_cast<uint32_t>(std::stoul(value()));
    } else if (flag == "--seed") {
      flags.seed = std::stoull(value());
    } else if (flag == "--only") {
      flags.only = value();
    } else if (flag == "--kills") {
      flags.kills = static_cast<uint32_t>(std::stoul(value()));
    } else if (flag == "--checkpoint") {
      flags.checkpoint = value();
    } else if (flag == "--markdown") {
      flags.markdown = value();
    } else {
      std::cerr << "unknown flag " << flag << "\n";
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}

}  // namespace

FaultFlags& fault_flags() {
  static FaultFlags flags;
  return flags;
}

void table_line(const std::string& line) {
  std::cout << line << std::endl;
  if (!fault_flags().markdown.empty()) std::ofstream(fault_flags().markdown, std::ios::app) << line << "\n";
}

const std::vector<std::vector<TokenId>>& fault_free_tokens() {
  static const auto tokens = undisturbed(kKinds, kTokens, demo_model());
  return tokens;
}

}  // namespace conclave

int main(int argc, char** argv) { return conclave::run(argc, argv); }
