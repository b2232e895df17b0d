// Going on with a request that another connection had, here or at another router.
#include <new>
#include <string>
#include <utility>

#include "libs/model/no_such_stream.h"
#include "router_service/gateway/gateway.h"
#include "router_service/gateway/router_context.h"

namespace conclave::gateway {

StatusOr<std::shared_ptr<Generation>> Gateway::resume(std::string_view text, Origin origin, Reopen reopen,
                                                      std::function<void()> on_update) {
  const auto id = parse_id(text);
  if (!id) return no_such_stream();
  const uint64_t number = next_place_.fetch_add(1);
  auto generation = std::make_shared<Generation>(*id, scheduler_, options_.stream, std::move(on_update),
                                                 on_generation_end(number, origin.record));
  std::string tenant = origin.tenant;
  std::shared_ptr<Generation> reader;            // of this router, until now
  std::lock_guard one_at_a_time(resume_mutex_);  // who comes later takes over from who came first
  {
    std::lock_guard lock(mutex_);
    if (draining_) return unavailable("the router is shutting down");
    const auto at = open_.find(*id);
    if (at != open_.end()) {
      if (at->second.origin.tenant != tenant || !at->second.generation->resumable()) return no_such_stream();
      reader = at->second.generation;
    } else if (open_.size() >= options_.limits.max_requests) {
      return limit_reached(Limit::kRequests, "requests are open", options_.limits.max_requests);
    }
    if (origin.trace.followed) generation->follow(timelines_.open(*id, origin, true, generation->arrived()));
    open_.insert_or_assign(*id, Open{generation, "", std::move(origin), number});
  }
  if (reader) reader->hand_over(cancelled("another connection has taken the stream over"));
  generation->adopt(
      std::move(tenant), [this, generation, reopen = std::move(reopen)](const AdoptedRequest& adopted) {
        const bool taken = pool_.try_submit([this, generation, reopen, adopted] {
          Status begun;
          try {
            begun = begin_adopted(*generation, adopted, reopen);
          } catch (const std::bad_alloc&) {
            begun = resource_exhausted("there is not enough memory for this request");
          }
          if (!begun.ok()) generation->hand_over(begun);
        });
        if (!taken) {
          generation->hand_over(limit_reached(Limit::kWaitingTexts, "requests are waiting to be tokenized",
                                              options_.limits.max_waiting_texts));
        }
      });
  return generation;
}

Status Gateway::begin_adopted(Generation& generation, const AdoptedRequest& adopted,
                              const Reopen& reopen) const {
  const AcceptedRequest& request = adopted.request;
  const auto context = read_router_context(request.router_context);
  if (!context) return failed_precondition("this stream was begun by a router of another version");
  ASSIGN_OR_RETURN(const GenerateRequest reopened, reopen(context->adapter));
  ASSIGN_OR_RETURN(auto choices, make_choices(reopened, request.sampling, context->starts_in_reasoning,
                                              request.choices, request.id));
  generation.begin_adopted(request.prompt, std::move(choices), std::string(context->echoed));
  return OkStatus();
}

}  // namespace conclave::gateway
