// The protocol-neutral front: validates a request, tokenizes it off the I/O threads, submits it, and follows
// it until it ends. HTTP and gRPC are thin adapters over this.
//
// Bounds: AdmissionLimits (those of the queue: RESOURCE_EXHAUSTED, before any work), the prompt's length, and
// the tokens waiting for a slow client (Generation::Limits).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/model/model_spec.h"
#include "libs/ports/scheduler_port.h"
#include "router_service/gateway/admission.h"
#include "router_service/gateway/generation.h"
#include "router_service/gateway/request.h"
#include "router_service/gateway/sampling.h"
#include "router_service/gateway/text_codec.h"
#include "router_service/gateway/timeline.h"
#include "router_service/gateway/work_pool.h"

namespace conclave::gateway {

struct GatewayOptions {
  AdmissionLimits limits;
  unsigned text_threads = 2;  // tokenizing and templates
  Nanos default_deadline = 600 * kSecond;
  // A fleet that stops being ready (a process died) is usually back within a second: for so long requests are
  // still taken, and wait in the scheduler's queue. After that they are refused with the reason.
  Nanos unready_grace = 10 * kSecond;
  uint32_t max_timelines = 256;  // of followed requests, open or ended
  Generation::Limits stream;
  // Hears of each request on its way to the scheduler, for logs; on a thread for texts. May be null.
  std::function<void(const Origin&, const AcceptedRequest&)> on_submit;
};

struct GatewayCounts {
  uint64_t open = 0;
  uint64_t waiting_texts = 0;
  uint64_t done_texts = 0;       // since the start
  uint64_t queued_requests = 0;  // without their first token
  uint64_t queued_tokens = 0;    // of their prompts
};

// An open request without progress, as far as that is this router's to say: what its scheduler does not do
// the scheduler reports.
struct StalledRequest {
  RequestId id;
  std::string request_id;
  StallHop hop = StallHop::kText;
  Nanos time = 0;
};

// One open request, for people; never its text.
struct OpenRequest {
  RequestId id;
  std::string request_id;
  std::string tenant;
  std::string route;
  Nanos age = 0;
  bool accepted = false;  // the scheduler has it
  Usage usage;            // so far
};

class Gateway {
 public:
  // `scheduler` and `codec` outlive the gateway. `on_end` is told about every request that got past the first
  // checks.
  Gateway(GatewayOptions options, ModelSpec model, SchedulerPort& scheduler, const TextCodec& codec,
          std::function<void(const Summary&)> on_end = nullptr);
  // Ends what is open (UNAVAILABLE) and waits for the text threads and for ends that others report.
  ~Gateway();

  // Any thread, never blocks. An error here was found before any work; later ones come through the
  // generation.
  StatusOr<std::shared_ptr<Generation>> generate(GenerateRequest request, std::function<void()> on_update);

  // Reads what the adapter put into GenerateRequest::resume_context; its fields that say how the answer is
  // read are used. On a text thread; an error ends the generation with it.
  using Reopen = std::function<StatusOr<GenerateRequest>(std::string_view context)>;
  // Goes on with a resumable request that this router or another had, from its first token on: whoever reads
  // it now is told that it was taken over. Errors that come at once: UNAVAILABLE while draining,
  // RESOURCE_EXHAUSTED, and NOT_FOUND for what is no id. Later ones, NOT_FOUND too, come through the
  // generation, which is then not accepted.
  StatusOr<std::shared_ptr<Generation>> resume(std::string_view id, Origin origin, Reopen reopen,
                                               std::function<void()> on_update);

  // The same checks alone, for requests that stand or fall together.
  Status acceptable(const GenerateRequest& request) const { return check(request).status(); }

  // Runs work that may take milliseconds (parsing a large body) on a text thread; false at their bound.
  bool run_on_text_thread(std::function<void()> work) { return pool_.try_submit(std::move(work)); }

  // Ends the open requests that are called so: by the id that answers carry ("chatcmpl-" or "cmpl-" before it
  // or not), or by the client's own name. Of this tenant alone. How many there were.
  size_t abort(std::string_view id, std::string_view tenant = "",
               const Status& cause = cancelled("the request was aborted"));

  // Why the fleet could not serve a request now; OK when it could.
  Status ready() const;
  const ModelSpec& model() const { return model_; }
  const TextCodec& text() const { return codec_; }
  FleetInfo fleet() const { return scheduler_.fleet(); }
  // The longest prompt plus answer, in tokens.
  uint32_t context_length() const;
  GatewayCounts counts() const;
  const LimitCounters& limits() const { return limit_counters_; }
  const TimelineBook& timelines() const { return timelines_; }
  // What the scheduler knows of a request; SchedulerPort::timeline.
  void ask_timeline(RequestId id, std::function<void(StatusOr<SchedulerTimeline>)> done) const {
    scheduler_.timeline(id, std::move(done));
  }
  // Counts a refusal by a limit that a protocol adapter found (limit_of).
  void note_limit(const Status& refusal) const;
  // The oldest first, at most `max` of them.
  std::vector<OpenRequest> open_requests(size_t max) const;

  // Those without progress for `limit`, the longest first.
  std::vector<StalledRequest> stalled(TimePoint now, Nanos limit) const;

  // No new requests (UNAVAILABLE). Any thread.
  void begin_drain();
  // True when nothing is open any more; false after `wait`.
  bool wait_idle(Nanos wait);
  // Ends everything that is open with this cause; resumable requests go on for others to take over.
  void abort_all(const Status& cause);

 private:
  // As ready(), but forgives a fleet that was ready within unready_grace.
  Status accepting() const;
  // What is known of a request before its prompt is tokenized.
  StatusOr<SamplingParams> check(const GenerateRequest& request) const;
  Status limit_reached(Limit limit, std::string_view what, uint64_t bound) const;
  Status check_prompt_length(const GenerateRequest& request, size_t tokens) const;
  struct Work {
    GenerateRequest request;
    SamplingParams sampling;
    std::shared_ptr<Generation> generation;
    std::shared_ptr<QueueMeter::Place> place;
  };
  struct Encoded {
    std::vector<TokenId> tokens;
    bool starts_in_reasoning = false;
  };
  StatusOr<Encoded> encode(const GenerateRequest& request, TimePoint deadline) const;
  Status prepare(Work& work) const;
  StatusOr<std::vector<Choice>> make_choices(const GenerateRequest& request, const SamplingParams& sampling,
                                             bool starts_in_reasoning, uint32_t count, RequestId id) const;
  // Told to the generation whose place in open_ has this number.
  std::function<void(const Summary&)> on_generation_end(uint64_t place,
                                                        std::shared_ptr<RequestRecord> record);
  void ended(const Summary& summary, uint64_t place);
  Status begin_adopted(Generation& generation, const AdoptedRequest& adopted, const Reopen& reopen) const;

  const GatewayOptions options_;
  const ModelSpec model_;
  SchedulerPort& scheduler_;
  const TextCodec& codec_;
  const std::function<void(const Summary&)> on_end_;
  mutable LimitCounters limit_counters_;
  QueueMeter queue_;
  TimelineBook timelines_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  bool draining_ = false;
  struct Open {
    std::shared_ptr<Generation> generation;
    std::string name;
    Origin origin;
    uint64_t place = 0;  // a resumed one may take an older one's entry
  };
  std::unordered_map<RequestId, Open> open_;
  std::atomic<uint64_t> next_place_{1};
  std::mutex resume_mutex_;
  WorkPool pool_;  // last: its threads use the rest
};

}  // namespace conclave::gateway
