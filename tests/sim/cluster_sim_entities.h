// The processes of the simulated cluster. Internal to cluster_sim*.cc.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tests/sim/cluster_sim.h"

namespace conclave::scheduler {

inline void accumulate(ExchangeMetrics& sum, const ExchangeMetrics& more) {
  sum.retried_items += more.retried_items;
  sum.missing_items += more.missing_items;
  sum.duplicate_items += more.duplicate_items;
  sum.holds += more.holds;
  sum.deadlines += more.deadlines;
  sum.late_combines += more.late_combines;
  sum.credit_waits += more.credit_waits;
}

struct ClusterSim::Process {
  Role role = Role::kAttention;
  std::string name;
  SimExecutor* executor = nullptr;  // of the present life
  Incarnation incarnation;
  FaultTransport* faults = nullptr;  // owned by transport, where there is one
  std::unique_ptr<ExpertTransport> transport;
  std::unique_ptr<Worker> worker;
  std::unique_ptr<Shard> shard;
  std::unique_ptr<Tap> tap;
  std::unique_ptr<SimLink> link;
  bool leaving = false;
  bool gone = false;
  Nanos slow_by = 0;
  TimePoint slow_until = 0;
  // A worker's: dead shards that are missing in a placement it got, and what it took.
  std::set<Incarnation> told_dead;
  std::unordered_set<uint64_t> taken;

  bool running() const { return link != nullptr; }
};

struct ClusterSim::Router {
  SimExecutor* process = nullptr;
  std::unique_ptr<SimGateway> gateway;  // null while it is down
  Streams waiting;                      // its clients' while it is down
};

// Planted: connections to shards that are gone stay open, so what these still say arrives.
class UnclosingTransport final : public ExpertTransport {
 public:
  explicit UnclosingTransport(std::unique_ptr<ExpertTransport> inner) : inner_(std::move(inner)) {}
  std::string address() const override { return inner_->address(); }
  Incarnation self() const override { return inner_->self(); }
  void connect(Incarnation peer, std::string_view address) override { inner_->connect(peer, address); }
  void close(Incarnation) override {}
  bool is_up(Incarnation peer) const override { return inner_->is_up(peer); }
  Status submit(Incarnation peer, const DispatchBatch& batch) override { return inner_->submit(peer, batch); }
  Status reply(Incarnation peer, const CombineBatch& batch) override { return inner_->reply(peer, batch); }
  void cancel(Incarnation peer, DispatchId id) override { inner_->cancel(peer, id); }
  void poll(std::vector<TransportEvent>& out) override { inner_->poll(out); }
  void set_ready(std::function<void()> ready) override { inner_->set_ready(std::move(ready)); }

 private:
  const std::unique_ptr<ExpertTransport> inner_;
};

// Between a member and its line: sees what it is told.
class ClusterSim::Tap : public MemberHandler {
 public:
  Tap(ClusterSim& sim, Process& process, MemberHandler& inner)
      : sim_(sim), process_(process), inner_(inner) {}
  Hello hello() override { return inner_.hello(); }
  void on_message(ToMember message) override {
    const bool welcome = std::holds_alternative<Welcome>(message);
    const bool drained = std::holds_alternative<Drained>(message);
    if (welcome) process_.told_dead.clear();
    if (const auto* update = std::get_if<PlacementUpdate>(&message)) sim_.learn_dead(process_, update->table);
    inner_.on_message(std::move(message));
    if (welcome && process_.leaving) process_.link->send(Leaving{});
    if (drained) sim_.end(process_);
  }
  void on_down(const Status& cause) override { inner_.on_down(cause); }

 private:
  ClusterSim& sim_;
  Process& process_;
  MemberHandler& inner_;
};

}  // namespace conclave::scheduler
