// What every ExpertTransport must do (libs/ports/expert_transport.h), as parameterised tests over rigs. A
// test program instantiates the suite for the rigs it links.
#pragma once

#include <memory>
#include <string>

#include "tests/transport/transport_rig.h"

namespace conclave::testing {

struct RigFactory {
  std::string name;
  std::function<std::unique_ptr<Rig>()> make;
};
inline void PrintTo(const RigFactory& f, std::ostream* out) { *out << f.name; }

class TransportConformance : public ::testing::TestWithParam<RigFactory> {
 protected:
  void SetUp() override { rig = GetParam().make(); }
  std::unique_ptr<Rig> rig;
};

}  // namespace conclave::testing
