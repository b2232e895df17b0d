#include "expert_service/core/shard.h"

#include <algorithm>
#include <utility>

#include "libs/base/check.h"

namespace conclave {

Shard::Shard(Executor& executor, ExpertTransport& transport, const ModelSpec& spec,
             const ExpertTable& experts, kernels::Context kernels, ShardOptions options)
    : executor_(executor),
      transport_(transport),
      spec_(spec),
      kernels_(kernels),
      options_(std::move(options)),
      queue_(spec.num_layers, options_.max_queued_items),
      store_(experts, spec.num_experts, {options_.capacity_bytes, options_.weights_are_mapped}),
      group_(spec.num_experts, options_.precision, options_.fp8_wire) {
  CONCLAVE_CHECK(experts.size() == spec.num_layers);
  metrics_.experts = spec.num_experts;
  metrics_.tokens.assign(static_cast<size_t>(spec.num_layers) * spec.num_experts, 0);
  load_.assign(metrics_.tokens.size(), 0);
}

Shard::~Shard() {
  transport_.set_ready(nullptr);
  for (const TimerId timer : {reply_timer_, warm_timer_, load_timer_}) {
    if (timer) executor_.cancel(timer);
  }
}

void Shard::start() {
  transport_.set_ready([this, alive = std::weak_ptr<bool>(alive_)] {
    if (alive.expired()) return;
    unread_events_ = true;
    wake();
  });
  unread_events_ = true;
  wake();
}

Hello Shard::hello() {
  Hello h;
  h.role = Role::kExpert;
  h.name = options_.name;
  h.incarnation = transport_.self();
  h.numerics_id = options_.numerics_id;
  h.model_fingerprint = options_.model_fingerprint;
  h.threads = options_.threads;
  h.capacity_bytes = options_.capacity_bytes;
  h.expert_bytes = store_.largest_bytes();
  h.transport_address = transport_.address();
  h.num_layers = spec_.num_layers;
  h.num_experts = spec_.num_experts;
  h.max_positions = spec_.max_positions;
  h.vocab_size = spec_.vocab_size;
  return h;
}

void Shard::on_message(ToMember message) {
  if (std::holds_alternative<Welcome>(message)) {
    // Epochs count from 1 for each scheduler incarnation. Held experts stay: they are right under any
    // placement.
    welcomed_ = true;
    preparing_ = answered_ = Epoch();
    epoch_.store(0, std::memory_order_relaxed);
  } else if (auto* refusal = std::get_if<Refusal>(&message)) {
    if (on_refused_) on_refused_(*refusal);
  } else if (auto* update = std::get_if<PlacementUpdate>(&message)) {
    on_placement(*update);
  }
  // Drained concerns the process; plans are not for it.
}

void Shard::on_down(const Status&) {
  // Workers may still reach it: dispatches go on without the scheduler.
  welcomed_ = false;
  ready_.store(false, std::memory_order_relaxed);
}

void Shard::on_placement(const PlacementUpdate& update) {
  const PlacementTable& table = update.table;
  if (!table.validate().ok() || table.epoch() < preparing_) return;
  if (table.epoch() == preparing_ && !update.release) return;
  preparing_ = table.epoch();
  urgent_ = update.urgent;
  store_.assign(table, transport_.self());
  if (update.release) metrics_.released_experts += store_.release();
  metrics_.held_experts = store_.held();
  metrics_.held_bytes = store_.held_bytes();
  held_experts_.store(static_cast<uint32_t>(store_.held()), std::memory_order_relaxed);
  // A pause of the old pace ends here.
  if (warm_timer_) executor_.cancel(std::exchange(warm_timer_, TimerId()));
  warm_some();
}

void Shard::warm_some() {
  const TimePoint begin = executor_.now();
  const uint64_t read = store_.warm(options_.warm_slice_bytes);
  metrics_.weight_bytes_warmed += read;
  metrics_.cold_experts = store_.cold();
  const uint64_t held = std::max<uint64_t>(store_.held(), 1);
  loaded_permille_.store(static_cast<uint32_t>(1000 * (held - std::min(store_.cold(), held)) / held),
                         std::memory_order_relaxed);
  if (!store_.warming()) {
    if (answered_ == preparing_) return;
    answered_ = preparing_;
    epoch_.store(preparing_.value, std::memory_order_relaxed);
    ready_.store(welcomed_, std::memory_order_relaxed);
    if (link_ != nullptr) link_->send(PlacementReady{preparing_});
    return;
  }
  // Nobody waits for what is warmed beside a placement that serves.
  const bool paced = options_.warm_bytes_per_s > 0 && !urgent_ && ready();
  const Nanos pause = paced ? static_cast<Nanos>(static_cast<double>(read) * static_cast<double>(kSecond) /
                                                 static_cast<double>(options_.warm_bytes_per_s))
                            : 0;
  warm_timer_ = executor_.post_at(begin + pause, [this, alive = std::weak_ptr<bool>(alive_)] {
    if (alive.expired()) return;
    warm_timer_ = TimerId();
    warm_some();
  });
}

void Shard::count_load(uint32_t layer, uint16_t expert, size_t rows) {
  const size_t index = static_cast<size_t>(layer) * spec_.num_experts + expert;
  metrics_.tokens[index] += rows;
  if (load_[index] == 0) loaded_.push_back(static_cast<uint32_t>(index));
  load_[index] += rows;
  if (load_timer_ || link_ == nullptr) return;
  load_timer_ =
      executor_.post_at(executor_.now() + options_.load_report, [this, alive = std::weak_ptr<bool>(alive_)] {
        if (alive.expired()) return;
        load_timer_ = TimerId();
        report_load();
      });
}

// Without a scheduler the counts stay for the next one.
void Shard::report_load() {
  if (!welcomed_ || link_ == nullptr) return;
  std::sort(loaded_.begin(), loaded_.end());
  ExpertLoad report;
  report.entries.reserve(loaded_.size());
  for (const uint32_t index : loaded_) report.entries.push_back({index, std::exchange(load_[index], 0)});
  loaded_.clear();
  ++metrics_.load_reports;
  link_->send(std::move(report));
}

void Shard::wake() {
  if (pump_posted_) return;
  pump_posted_ = true;
  executor_.post([this, alive = std::weak_ptr<bool>(alive_)] {
    if (alive.expired()) return;
    pump_posted_ = false;
    pump();
  });
}

void Shard::pump() {
  if (unread_events_ && !queue_.full()) read_transport();
  if (!queue_.empty()) compute_group();
  metrics_.queued_items = queue_.items();
  if (!queue_.empty() || unread_events_) wake();
}

void Shard::read_transport() {
  unread_events_ = false;
  events_.clear();
  transport_.poll(events_);
  for (TransportEvent& event : events_) handle(event);
  if (queue_.full()) {
    // Events that come now stay with the transport until a group is done (options: max_queued_items).
    ++metrics_.reads_paused;
    unread_events_ = true;
  }
}

void Shard::handle(TransportEvent& event) {
  if (auto* dispatch = std::get_if<TransportEvent::Dispatch>(&event.what)) {
    take_dispatch(event.peer, std::move(dispatch->batch));
  } else if (auto* cancel = std::get_if<TransportEvent::Cancel>(&event.what)) {
    // Only its own worker may cancel a dispatch.
    if (cancel->id.worker == event.peer && queue_.cancel(cancel->id)) ++metrics_.cancelled_dispatches;
  } else if (std::holds_alternative<TransportEvent::Writable>(event.what)) {
    flush_replies(event.peer);
  } else if (std::holds_alternative<TransportEvent::PeerDown>(event.what)) {
    metrics_.cancelled_dispatches += queue_.drop_worker(event.peer);
    metrics_.dropped_replies +=
        std::erase_if(waiting_replies_, [&](const WaitingReply& r) { return r.worker == event.peer; });
  } else if (std::holds_alternative<TransportEvent::Rejected>(event.what)) {
    ++metrics_.rejected_dispatches;
  }
}

void Shard::take_dispatch(Incarnation worker, DispatchBatch batch) {
  ++metrics_.dispatches;
  const Status checked = check_dispatch(batch, spec_.num_layers, spec_.num_experts, spec_.hidden_size,
                                        wire_dtype(options_.precision, options_.fp8_wire));
  if (!checked.ok() || batch.id.worker != worker) {
    ++metrics_.rejected_dispatches;
    return;
  }
  const TimePoint expires = batch.time_left > 0 ? executor_.now() + batch.time_left : kNever;
  queue_.push({worker, std::move(batch), expires, 0});
}

void Shard::compute_group() {
  const TimePoint begin = executor_.now();
  queue_.take(begin, options_.max_group_items, metrics_.expired_dispatches, taken_);
  if (taken_.empty()) return;
  const uint32_t layer = taken_.front().batch.layer;
  group_.build(taken_, store_, transport_.self(), pool_);
  kernels::run_experts(kernels_, options_.precision, group_.jobs());
  const Nanos busy = executor_.now() - begin;
  ++metrics_.groups;
  metrics_.items += group_.items();
  metrics_.expert_runs += group_.jobs().size();
  metrics_.missing_items += group_.missing_items();
  metrics_.compute_ns += busy;
  group_.each_expert([&](uint16_t expert, size_t rows) { count_load(layer, expert, rows); });
  const std::span<CombineBatch> replies = group_.replies();
  for (size_t i = 0; i < replies.size(); ++i) {
    replies[i].compute_ns = busy;
    TimePoint expires = taken_[i].expires;
    if (expires == kNever) expires = begin + options_.reply_deadline;
    send_reply(taken_[i].worker, replies[i], expires);
    replies[i].outputs.reset();
    transport_.recycle(std::move(taken_[i].batch));
  }
  taken_.clear();
}

// Moves the reply only where it has to wait.
void Shard::send_reply(Incarnation worker, CombineBatch& reply, TimePoint expires) {
  const Status sent = transport_.reply(worker, reply);
  if (sent.ok()) {
    ++metrics_.replies;
    return;
  }
  if (sent.code() != StatusCode::kResourceExhausted) {
    ++metrics_.dropped_replies;
    return;
  }
  if (waiting_replies_.size() >= options_.max_waiting_replies) {
    waiting_replies_.pop_front();
    ++metrics_.dropped_replies;
  }
  waiting_replies_.push_back({worker, std::move(reply), expires});
  drop_expired_replies();
}

void Shard::flush_replies(Incarnation worker) {
  const TimePoint now = executor_.now();
  for (auto it = waiting_replies_.begin(); it != waiting_replies_.end();) {
    if (it->worker != worker) {
      ++it;
      continue;
    }
    if (it->expires > now) {
      const Status sent = transport_.reply(worker, it->batch);
      if (sent.code() == StatusCode::kResourceExhausted) return;  // the next Writable goes on here
      ++(sent.ok() ? metrics_.replies : metrics_.dropped_replies);
    } else {
      ++metrics_.dropped_replies;
    }
    it = waiting_replies_.erase(it);
  }
}

// Frees the rows of replies that nobody waits for any more, also when their peer never becomes writable.
void Shard::drop_expired_replies() {
  const TimePoint now = executor_.now();
  metrics_.dropped_replies +=
      std::erase_if(waiting_replies_, [&](const WaitingReply& r) { return r.expires <= now; });
  TimePoint first = kNever;
  for (const WaitingReply& r : waiting_replies_) first = std::min(first, r.expires);
  if (first == reply_timer_due_) return;
  if (reply_timer_) executor_.cancel(reply_timer_);
  reply_timer_ = TimerId();
  reply_timer_due_ = first;
  if (first == kNever) return;
  reply_timer_ = executor_.post_at(first, [this, alive = std::weak_ptr<bool>(alive_)] {
    if (alive.expired()) return;
    reply_timer_ = TimerId();
    reply_timer_due_ = kNever;
    drop_expired_replies();
  });
}

}  // namespace conclave
