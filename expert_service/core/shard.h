// An expert shard: takes dispatches from its transport, groups the rows of all workers by expert, answers
// with one output row per (row, expert).
//
// Threading: everything on the executor, construction and destruction too (or after the executor stopped).
// Computation runs inside executor tasks, one group a task, so that events are seen between groups.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "expert_service/core/dispatch_queue.h"
#include "expert_service/core/expert_group.h"
#include "expert_service/core/expert_store.h"
#include "expert_service/core/options.h"
#include "libs/kernels/ops.h"
#include "libs/model/model_spec.h"
#include "libs/model/row_pool.h"
#include "libs/model/weights.h"
#include "libs/ports/executor.h"
#include "libs/ports/expert_transport.h"
#include "libs/ports/member_link.h"

namespace conclave {

class Shard final : public MemberHandler {
 public:
  // All references are borrowed and outlive the shard.
  Shard(Executor& executor, ExpertTransport& transport, const ModelSpec& spec, const ExpertTable& experts,
        kernels::Context kernels, ShardOptions options);
  ~Shard() override;

  // Before start(). The link is borrowed; null: no scheduler (tests).
  void set_link(MemberLink* link) { link_ = link; }
  // Called when the scheduler refuses this incarnation for good.
  void set_on_refused(std::function<void(const Refusal&)> f) { on_refused_ = std::move(f); }
  // Begins to take events from the transport.
  void start();

  Hello hello() override;
  void on_message(ToMember message) override;
  void on_down(const Status& cause) override;

  const ShardMetrics& metrics() const { return metrics_; }
  // Any thread; what heartbeats carry.
  Epoch epoch() const { return Epoch(epoch_.load(std::memory_order_relaxed)); }
  uint32_t loaded_permille() const { return loaded_permille_.load(std::memory_order_relaxed); }
  Heartbeat heartbeat() const {
    return {epoch(), loaded_permille(), held_experts_.load(std::memory_order_relaxed)};
  }
  // Whether there is anything to compute, and whom that waits for: a shard computes what it has.
  bool busy() const { return queue_.messages() > 0; }
  std::string waiting_for() const { return {}; }
  // Whether a scheduler has welcomed this shard and its assigned experts are warm.
  bool ready() const { return ready_.load(std::memory_order_relaxed); }

 private:
  struct WaitingReply {
    Incarnation worker;
    CombineBatch batch;
    TimePoint expires = kNever;
  };

  void wake();  // posts pump() unless it is posted already
  void pump();
  void read_transport();
  void handle(TransportEvent& event);
  void take_dispatch(Incarnation worker, DispatchBatch batch);
  void compute_group();
  void send_reply(Incarnation worker, CombineBatch& reply, TimePoint expires);
  void flush_replies(Incarnation worker);
  void drop_expired_replies();
  void on_placement(const PlacementUpdate& update);
  // Reads the next slice of weights, at the pace of warm_bytes_per_s; tells when the last one is read.
  void warm_some();
  void count_load(uint32_t layer, uint16_t expert, size_t rows);
  void report_load();

  Executor& executor_;
  ExpertTransport& transport_;
  const ModelSpec& spec_;
  const kernels::Context kernels_;
  const ShardOptions options_;
  MemberLink* link_ = nullptr;
  std::function<void(const Refusal&)> on_refused_;

  DispatchQueue queue_;
  ExpertStore store_;
  std::vector<WaitingDispatch> taken_;  // of the group that is computed
  ExpertGroup group_;
  RowPool pool_;
  std::vector<TransportEvent> events_;
  std::deque<WaitingReply> waiting_replies_;
  ShardMetrics metrics_;
  bool pump_posted_ = false;
  bool unread_events_ = false;  // the transport said ready while reading was paused
  bool welcomed_ = false;
  Epoch preparing_;  // newest epoch received; 0: none
  Epoch answered_;   // the last one answered with PlacementReady
  bool urgent_ = false;
  TimerId warm_timer_;
  // (layer, expert) pairs with rows since the last report, and how many.
  std::vector<uint32_t> loaded_;
  std::vector<uint64_t> load_;
  TimerId load_timer_;
  TimerId reply_timer_;
  TimePoint reply_timer_due_ = kNever;
  std::atomic<uint64_t> epoch_{0};
  std::atomic<uint32_t> held_experts_{0};
  std::atomic<uint32_t> loaded_permille_{0};
  std::atomic<bool> ready_{false};
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // posted tasks hold it weakly
};

}  // namespace conclave
