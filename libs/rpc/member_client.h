// A member's line to a scheduler of another process: MemberLink over the gRPC stream Cluster.Join.
//
// It reconnects for ever, with back-off, asking the handler for a fresh Hello each time. Heartbeats leave
// from a thread of its own, so a member whose executor is busy computing does not look dead.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "libs/ports/executor.h"
#include "libs/ports/member_link.h"
#include "libs/rpc/client_options.h"

namespace conclave::rpc {

class MemberClient final : public MemberLink {
 public:
  // Nothing happens before start(). `handler` is called on `executor` only; both outlive the client.
  // `heartbeat` is asked on any thread for what heartbeats carry; without it they repeat the last Heartbeat
  // given to send().
  MemberClient(ClientOptions options, MemberHandler& handler, Executor& executor,
               std::function<Heartbeat()> heartbeat = nullptr);
  // Ends the connection and waits for gRPC to let go of it. On the executor, or once it runs no more tasks;
  // the handler is not called afterwards.
  ~MemberClient() override;
  MemberClient(const MemberClient&) = delete;
  MemberClient& operator=(const MemberClient&) = delete;

  void start();

  // From the executor.
  void send(FromMember message) override;

  // Whether any scheduler has welcomed it. Any thread.
  bool was_welcomed() const;
  // Why the member is not joined, for /readyz and logs; empty when it is. Any thread.
  std::string not_joined() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::rpc
