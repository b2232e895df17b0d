// What the mains of workers and shards do alike between joining the cluster and their end.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "libs/service/member_settings.h"

namespace conclave {

struct ServedMember {
  Nanos drain_time = 0;  // from SIGTERM, for what runs here to be moved elsewhere
  std::string phase;     // of /startupz, until it is ready for the first time
  std::function<StartupStep()> step;
  std::string work;  // "the running step", for health checks
};

// Serves until SIGTERM, then until the scheduler has moved everything elsewhere, the drain time is over or a
// second SIGTERM comes. What is cut off so is computed again by others: nothing is lost.
// `done` grows with all that is computed.
template <class Core, class Metrics>
Status serve_member(Service& service, MemberProcess<Core, Metrics>& member, ServedMember how,
                    std::function<void(const Metrics&, MetricSink&)> exporter,
                    std::function<uint64_t(const Metrics&)> done) {
  RETURN_IF_ERROR(member.start());
  const auto collector = service.metrics().add_collector([&](MetricSink& sink) {
    exporter(member.metrics(), sink);
    export_transport(member.transport_stats(), member.incarnations(), sink);
  });
  const auto loop_watch = service.progress().executor(
      "the loop", [&member](std::function<void()> task) { member.post(std::move(task)); });
  const auto work_watch = service.progress().work(how.work, [&member, done = std::move(done)] {
    ProgressWatch::Work work;
    work.done = done(member.metrics());
    work.busy = member.busy();
    work.detail = member.waiting_for();
    return work;
  });
  const auto data_plane = service.describe("data_plane", [&member] { return member.data_plane(); });
  const auto compute = service.describe("compute", [&member] { return member.compute(); });
  const auto ready = service.ready_unless([&member] { return member.reasons(); });
  const auto hangup = service.on_hangup([&member] { member.reload_secret(); });
  service.started({}, std::move(how.phase), std::move(how.step));
  service.wait_for_stop();
  Service::limit_end(how.drain_time + 5 * kSecond);
  member.drain([&service] { service.end_wait(); });
  switch (service.wait_for_end(how.drain_time)) {
    case Service::Ending::kDone:
      break;
    case Service::Ending::kSignal:
      log_warn(LogModule::kMembers, "leaving at once: a second signal");
      break;
    case Service::Ending::kTimeout:
      log_warn(LogModule::kMembers, "leaving before everything was moved elsewhere",
               {{"drain_time_ms", static_cast<int64_t>(how.drain_time / kMillisecond)}});
      break;
  }
  return OkStatus();
}

}  // namespace conclave
