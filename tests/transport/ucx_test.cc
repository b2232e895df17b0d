#include <gtest/gtest.h>

#include "libs/transport/ucx_transport.h"
#include "tests/transport/conformance_tests.h"

namespace conclave::testing {
namespace {

std::unique_ptr<Rig> ucx_rig(const UcxSettings& settings) {
  return std::make_unique<ThreadRig>([settings](Node& node, LoopExecutor& loop, TransportOptions options) {
    auto transport = UcxTransport::create(loop, UcxTransport::with_defaults(std::move(options)), settings);
    ASSERT_TRUE(transport.ok()) << transport.status();
    node.session = transport->get();
    node.transport = std::move(*transport);
  });
}

UcxSettings rendezvous() {
  UcxSettings s;
  s.rndv_thresh = "16k";
  return s;
}

INSTANTIATE_TEST_SUITE_P(Ucx, TransportConformance,
                         ::testing::Values(RigFactory{"eager", [] { return ucx_rig({}); }},
                                           RigFactory{"rendezvous", [] { return ucx_rig(rendezvous()); }}),
                         [](const auto& p) { return p.param.name; });

}  // namespace
}  // namespace conclave::testing
