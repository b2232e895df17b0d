#include "tests/one_request/trace.h"

#include <utility>

#include "libs/base/check.h"

namespace conclave::one_request {
namespace {

std::string number(uint64_t n) { return std::to_string(n); }
std::string dtype_name(RowDtype dtype) {
  return dtype == RowDtype::kFp8 ? "FP8" : dtype == RowDtype::kBf16 ? "BF16" : "F32";
}

class TracingTransport final : public ExpertTransport {
 public:
  TracingTransport(std::unique_ptr<ExpertTransport> inner, Trace& trace)
      : inner_(std::move(inner)), trace_(trace) {}

  std::string address() const override { return inner_->address(); }
  Incarnation self() const override { return inner_->self(); }
  void connect(Incarnation peer, std::string_view address) override { inner_->connect(peer, address); }
  void close(Incarnation peer) override { inner_->close(peer); }
  bool is_up(Incarnation peer) const override { return inner_->is_up(peer); }
  Status submit(Incarnation peer, const DispatchBatch& batch) override {
    trace_.add("5-7", trace_.name_of(self()) + " -> " + trace_.name_of(peer),
               "layer " + number(batch.layer) + ", dispatch " + number(batch.id.seq) + ": " +
                   number(batch.row_count()) + " rows of " + number(batch.hidden) + " " +
                   dtype_name(batch.dtype) + ", for experts " + experts(batch));
    return inner_->submit(peer, batch);
  }
  Status reply(Incarnation peer, const CombineBatch& batch) override { return inner_->reply(peer, batch); }
  void cancel(Incarnation peer, DispatchId id) override { inner_->cancel(peer, id); }
  void poll(std::vector<TransportEvent>& out) override {
    const size_t before = out.size();
    inner_->poll(out);
    for (size_t i = before; i < out.size(); ++i) {
      const auto* combine = std::get_if<TransportEvent::Combine>(&out[i].what);
      if (combine == nullptr) continue;
      const CombineBatch& batch = combine->batch;
      trace_.add("8-9", trace_.name_of(out[i].peer) + " -> " + trace_.name_of(self()),
                 "layer " + number(batch.layer) + ", combine " + number(batch.id.seq) + ": " +
                     number(batch.items.size()) + " output rows" +
                     (batch.missing.empty() ? "" : ", " + number(batch.missing.size()) + " experts missing"));
    }
  }
  void set_ready(std::function<void()> ready) override { inner_->set_ready(std::move(ready)); }

 private:
  // "3 7 12; 3 9": per row, in slot order.
  static std::string experts(const DispatchBatch& batch) {
    std::string text;
    for (uint32_t row = 0; row < batch.row_count(); ++row) {
      if (row > 0) text += "; ";
      for (uint32_t i = batch.expert_begin[row]; i < batch.expert_begin[row + 1]; ++i) {
        if (i > batch.expert_begin[row]) text += " ";
        text += number(batch.expert_ids[i]);
      }
    }
    return text;
  }

  std::unique_ptr<ExpertTransport> inner_;
  Trace& trace_;
};

class TracingHandler final : public MemberHandler {
 public:
  TracingHandler(MemberHandler& inner, std::string member, Trace& trace)
      : inner_(inner), member_(std::move(member)), trace_(trace) {}
  Hello hello() override { return inner_.hello(); }
  void on_message(ToMember message) override {
    if (const auto* plan = std::get_if<BatchPlan>(&message))
      trace_.add("3", "scheduler -> " + member_, describe(*plan));
    inner_.on_message(std::move(message));
  }
  void on_down(const Status& cause) override { inner_.on_down(cause); }

 private:
  static std::string describe(const BatchPlan& plan) {
    std::string text = "plan " + number(plan.step.value);
    for (const auto& start : plan.starts) {
      text +=
          "; new sequence " + number(start.seq.value) + " with " + number(start.tokens.size()) + " tokens";
    }
    for (const auto& slice : plan.slices) {
      text += "; sequence " + number(slice.seq.value) + ": positions " + number(slice.start) + " to " +
              number(slice.start + slice.count - 1) + (slice.sample ? ", then sample" : "");
      if (!slice.new_blocks.empty()) text += ", " + number(slice.new_blocks.size()) + " new KV blocks";
    }
    for (const auto& seq : plan.ends) text += "; forget sequence " + number(seq.value);
    return text;
  }

  MemberHandler& inner_;
  const std::string member_;
  Trace& trace_;
};

class TracingLink final : public MemberLink {
 public:
  TracingLink(MemberLink& inner, std::string member, Trace& trace)
      : inner_(inner), member_(std::move(member)), trace_(trace) {}
  void send(FromMember message) override {
    if (const auto* result = std::get_if<StepResult>(&message)) {
      std::string text = "result of plan " + number(result->step.value);
      for (const auto& token : result->sampled) {
        text += "; sequence " + number(token.seq.value) + ", position " + number(token.position) +
                ": sampled id " + number(token.token);
        if (token.finish == FinishReason::kStop) text += " (a stop token)";
        if (token.finish == FinishReason::kLength) text += " (the last one allowed)";
      }
      trace_.add("9", member_ + " -> scheduler", text);
    }
    inner_.send(std::move(message));
  }

 private:
  MemberLink& inner_;
  const std::string member_;
  Trace& trace_;
};

}  // namespace

const std::string& Trace::name_of(Incarnation incarnation) const {
  const auto it = names_.find(incarnation);
  CONCLAVE_CHECK(it != names_.end());
  return it->second;
}

void Trace::add(std::string hop, std::string where, std::string what) {
  if (on_) lines_.push_back({std::move(hop), std::move(where), std::move(what)});
}

std::unique_ptr<ExpertTransport> trace_transport(std::unique_ptr<ExpertTransport> inner, Trace& trace) {
  return std::make_unique<TracingTransport>(std::move(inner), trace);
}
std::unique_ptr<MemberHandler> trace_handler(MemberHandler& inner, std::string member, Trace& trace) {
  return std::make_unique<TracingHandler>(inner, std::move(member), trace);
}
std::unique_ptr<MemberLink> trace_link(MemberLink& inner, std::string member, Trace& trace) {
  return std::make_unique<TracingLink>(inner, std::move(member), trace);
}

std::string ids_text(const std::vector<TokenId>& ids) {
  std::string text;
  for (size_t i = 0; i < ids.size() && i < 12; ++i) text += (i > 0 ? " " : "") + std::to_string(ids[i]);
  return ids.size() > 12 ? text + " ..." : text;
}

}  // namespace conclave::one_request
