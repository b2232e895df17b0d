// What the mains of workers and shards derive from the configuration alike.
#pragma once

#include "libs/checkpoint/binding.h"
#include "libs/service/member_process.h"
#include "libs/service/service.h"

namespace conclave {

struct LoadedMember {
  std::unique_ptr<BoundModel> model;
  MemberSettings settings;
};

// Checks the configuration, maps and binds the checkpoint, chooses the kernels. Errors name the key and say
// what to do.
StatusOr<LoadedMember> load_member(Service& service, const ProcessorConfig& processors, uint32_t threads);

// Keeps this thread and all that it starts to the processors that the configuration names. Before there are
// others, and before memory is allocated.
Status bind_process(const ProcessorConfig& processors, std::string_view section);

// The counters that both kinds of member have.
void export_transport(const TransportStats& stats, uint64_t incarnations, MetricSink& sink);

}  // namespace conclave
