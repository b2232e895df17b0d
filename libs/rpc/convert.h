// Domain types <-> protos, in this one place. from_proto validates what peers send: counts, ranges, sizes.
// Its error names the field and closes the session it came from. to_proto never fails: text is cut to its
// bound and made valid UTF-8 first, since protobuf would refuse to parse it at the other end.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "conclave/v1/cluster.pb.h"
#include "libs/base/status.h"
#include "libs/model/membership.h"
#include "libs/model/plan.h"
#include "libs/model/request.h"
#include "libs/model/timeline.h"
#include "libs/ports/scheduler_port.h"

namespace conclave::rpc {

namespace pb = ::conclave::v1;

// Bounds on what one message may claim.
inline constexpr size_t kMaxNameBytes = 256;
inline constexpr size_t kMaxTextBytes = 16 << 10;     // an error or a reason
inline constexpr size_t kMaxAddressBytes = 64 << 10;  // a transport address
inline constexpr uint32_t kMaxLayers = 4096;
inline constexpr uint32_t kMaxExperts = 65535;  // ids are 16 bits wide on the data plane
inline constexpr uint32_t kMaxShards = 4096;
inline constexpr uint32_t kMaxPositions = 1u << 26;  // of one sequence
inline constexpr uint32_t kMaxVocab = 1u << 26;
inline constexpr uint32_t kMaxPlanEntries = 1u << 20;  // slices, starts, ends, sampled tokens of one message
inline constexpr uint32_t kMaxPlanRows = 1u << 24;
inline constexpr uint32_t kMaxHomes = 1u << 26;          // entries of one placement
inline constexpr uint32_t kMaxLoadEntries = 1'000'000;   // of one load report
inline constexpr uint64_t kMaxLoadCount = 1ull << 48;    // pairs of one expert in one load report
inline constexpr uint32_t kMaxTimelineEntries = 65'536;  // marks, steps, members of one timeline
inline constexpr Nanos kMaxDuration = 366ll * 86400 * kSecond;

// Cut at `limit` bytes, with every byte that is not part of valid UTF-8 replaced by '?'.
std::string wire_text(std::string_view text, size_t limit = kMaxTextBytes);

void to_proto(RequestId from, pb::RequestId* to);
void to_proto(const SamplingParams& from, pb::SamplingParams* to);
void to_proto(const Hello& from, pb::Hello* to);
void to_proto(const Welcome& from, pb::Welcome* to);
void to_proto(const Refusal& from, pb::Refusal* to);
void to_proto(const BatchPlan& from, pb::BatchPlan* to);
void to_proto(const StepResult& from, pb::StepResult* to);
void to_proto(const StepTiming& from, pb::StepTiming* to);
void to_proto(const TraceContext& from, pb::TraceContext* to);
void to_proto(const SchedulerTimeline& from, pb::TimelineReply* to);
void to_proto(const PlacementTable& from, pb::Placement* to);
void to_proto(const ExpertLoad& from, pb::ExpertLoad* to);
void to_proto(const AcceptedRequest& from, pb::SubmitRequest* to);
void to_proto(const TokenEvent& from, pb::TokenEvent* to);
void to_proto(const FleetInfo& from, pb::FleetInfo* to);
void to_proto(const ToMember& from, pb::MemberDown* to);
void to_proto(const FromMember& from, pb::MemberUp* to);
void to_proto(RequestId id, const Status& status, pb::SubmitReply* to);
// `adopted` is null exactly when the status is not OK.
void to_proto(RequestId id, const Status& status, const AdoptedRequest* adopted, pb::AdoptReply* to);

StatusOr<RequestId> from_proto(const pb::RequestId& from);
StatusOr<SamplingParams> from_proto(const pb::SamplingParams& from);
StatusOr<Hello> from_proto(const pb::Hello& from);
StatusOr<Welcome> from_proto(const pb::Welcome& from);
StatusOr<Refusal> from_proto(const pb::Refusal& from);
StatusOr<BatchPlan> from_proto(const pb::BatchPlan& from);
StatusOr<StepResult> from_proto(const pb::StepResult& from);
StatusOr<StepTiming> from_proto(const pb::StepTiming& from);
TraceContext from_proto(const pb::TraceContext& from);
StatusOr<SchedulerTimeline> from_proto(const pb::TimelineReply& from);
StatusOr<PlacementTable> from_proto(const pb::Placement& from);
StatusOr<ExpertLoad> from_proto(const pb::ExpertLoad& from);
StatusOr<AcceptedRequest> from_proto(const pb::SubmitRequest& from);
StatusOr<TokenEvent> from_proto(const pb::TokenEvent& from);
StatusOr<std::vector<TokenEvent>> from_proto(const pb::TokenBatch& from);
StatusOr<FleetInfo> from_proto(const pb::FleetInfo& from);
StatusOr<ToMember> from_proto(const pb::MemberDown& from);
StatusOr<FromMember> from_proto(const pb::MemberUp& from);

struct SubmitAnswer {
  RequestId id;
  Status status;  // OK: accepted
  bool resumable = false;
};
StatusOr<SubmitAnswer> from_proto(const pb::SubmitReply& from);

struct AdoptAnswer {
  RequestId id;
  Status status;
  AdoptedRequest adopted;  // when OK
};
StatusOr<AdoptAnswer> from_proto(const pb::AdoptReply& from);

}  // namespace conclave::rpc
