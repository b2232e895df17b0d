// ExpertTransport over UCX: active messages between workers (UCP objects, one per transport) whose addresses
// are exchanged through the scheduler.
//
// A link is a UCP endpoint in peer error mode. Its failure arrives by UCX's error callback (a killed peer: a
// few ms), by our own keepalive (a stopped peer, a partition) or by the connect deadline. It is then closed
// by force, and whatever was still on its way keeps its memory until UCX has let go of it.
//
// Each message is one gather list of header and rows; the rows are sent from where they lie and received into
// a buffer of their own. UCX callbacks only queue; everything else happens after ucp_worker_progress has
// returned.
//
// The loop's thread only, construction and destruction included. Start it after any fork.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "libs/base/status.h"
#include "libs/runtime/loop_executor.h"
#include "libs/transport/session_transport.h"
#include "libs/transport/ucx_settings.h"

namespace conclave {

class UcxTransport final : public SessionTransport, private Poller {
 public:
  // What a data plane between processes wants on top of TransportOptions' own defaults: rows_crc and
  // keepalive on.
  static TransportOptions with_defaults(TransportOptions options);

  // UNAVAILABLE when UCX can't start with these settings (no such interface, for one); the message has UCX's
  // reason.
  static StatusOr<std::unique_ptr<UcxTransport>> create(LoopExecutor& loop, TransportOptions options,
                                                        UcxSettings settings = {});
  ~UcxTransport() override;

  std::string address() const override;
  // Endpoints being closed, and sends whose memory UCX still holds: both return to 0. For tests and metrics.
  size_t closing_links() const;
  size_t pending_sends() const;
  // What UCX selected, in its own words; for people.
  std::string describe() const;

 private:
  struct Impl;
  UcxTransport(LoopExecutor& loop, TransportOptions options, std::unique_ptr<Impl> impl);

  Status link_open(LinkId link, std::string_view address) override;
  SendResult link_send(LinkId link, OutMessage message) override;
  void link_close(LinkId link) override;
  bool link_ordered() const override { return true; }

  bool progress() override;
  int fd() override;
  bool arm() override;

  bool handle_arrivals();
  bool handle_failures();
  bool sweep_closing();
  void arm_sweep();

  LoopExecutor& loop_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave
