#include "cli/cluster_watch.h"

#include <algorithm>
#include <ctime>
#include <future>
#include <iterator>
#include <utility>
#include <vector>

#include "cli/http_client.h"
#include "libs/base/address.h"

namespace conclave::cli {
namespace {

// The histograms that are read, and what they are in the view.
struct LatencySource {
  const char* metric;
  bool scheduler;  // of it, else of routers
  Percentiles StatusView::*shown;
};
constexpr LatencySource kSources[] = {
    {"conclave_router_time_to_first_token_seconds", false, &StatusView::first_token},
    {"conclave_router_time_per_output_token_seconds", false, &StatusView::per_token},
    {"conclave_router_inter_token_seconds", false, &StatusView::token_gap},
    {"conclave_router_request_duration_seconds", false, &StatusView::whole},
    {"conclave_scheduler_queue_seconds", true, &StatusView::queue},
};

std::string clock_text(int64_t wall_ns) {
  const auto seconds = static_cast<time_t>(wall_ns / kSecond);
  tm local{};
  localtime_r(&seconds, &local);
  char text[16];
  return std::string(text, std::strftime(text, sizeof text, "%H:%M:%S", &local));
}

MemberView::Kind kind_of(v1::Role role) {
  switch (role) {
    case v1::ROLE_ROUTER:
      return MemberView::Kind::kRouter;
    case v1::ROLE_ATTENTION:
      return MemberView::Kind::kAttention;
    case v1::ROLE_EXPERT:
      return MemberView::Kind::kExpert;
    default:
      return MemberView::Kind::kOther;
  }
}

double seconds(int64_t ns) { return static_cast<double>(ns) / kSecond; }

MemberView member_view(const v1::MemberStatus& m) {
  MemberView out;
  out.kind = kind_of(m.role());
  out.name = m.name();
  out.incarnation = m.incarnation();
  out.state = m.state();
  out.age_s = seconds(m.age_ns());
  out.threads = m.threads();
  out.ops_address = m.ops_address();
  out.version = m.version();
  out.numerics_id = m.numerics_id();
  out.kv_total = m.kv_blocks_total();
  out.kv_used = m.kv_blocks_used();
  out.kv_cached = m.kv_blocks_cached();
  out.sequences = m.sequences();
  out.homes = m.shard().homes();
  out.sole_homes = m.shard().sole_homes();
  out.held = m.shard().held();
  out.load = m.shard().load();
  out.assigned_load = m.shard().assigned_load();
  return out;
}

Totals totals_of(const v1::ClusterTotals& t) {
  Totals out;
  out.generated = t.tokens_generated();
  out.prompt = t.prompt_tokens();
  out.cached = t.cached_tokens();
  out.steps = t.steps();
  out.accepted = t.requests_accepted();
  out.refused = t.requests_refused();
  out.ended = t.requests_ended();
  out.failed = t.requests_failed();
  out.replayed = t.sequences_replayed();
  out.preempted = t.sequences_preempted();
  out.lost = t.members_lost();
  out.stalls = t.stalls();
  out.placement_changes = t.placement_changes();
  out.homes_added = t.homes_added();
  out.homes_removed = t.homes_removed();
  return out;
}

}  // namespace

std::string ops_address_at(const std::string& announced, const std::string& host) {
  auto address = parse_host_port(announced);
  if (!address.ok()) return "";
  if (address->host == "0.0.0.0" || address->host == "::") {
    const auto from = parse_host_port(host);
    if (!from.ok()) return "";
    address->host = from->host;
  }
  return address->text();
}

StatusView view_of(const v1::StatusReply& reply, const std::string& address) {
  StatusView out;
  out.scheduler = address;
  out.reachable = out.ever_reached = true;
  out.incarnation = reply.scheduler_incarnation();
  out.age_s = seconds(reply.age_ns());
  out.version = reply.version();
  out.ops_address = ops_address_at(reply.ops_address(), address);
  out.numerics_id = reply.fleet().numerics_id();
  out.ready = reply.fleet().ready();
  out.not_ready = reply.fleet().not_ready();
  out.epoch = reply.epoch();
  out.preparing_epoch = reply.preparing_epoch();
  out.layers = reply.layers();
  out.experts = reply.experts();
  out.busiest = reply.busiest();
  out.running = reply.requests_running();
  out.waiting = reply.requests_waiting();
  out.stalled = reply.requests_stalled();
  for (const auto& member : reply.members()) out.members.push_back(member_view(member));
  for (const auto& event : reply.events()) {
    out.events.push_back(
        {event.number(), event.kind(), event.who(), event.detail(), seconds(event.age_ns()), event.times()});
  }
  out.totals = totals_of(reply.totals());
  return out;
}

Rates rates_between(const v1::StatusReply& before, const v1::StatusReply& now) {
  Rates out;
  const double time = seconds(now.age_ns() - before.age_ns());
  if (before.scheduler_incarnation() != now.scheduler_incarnation() || time <= 0) return out;
  const Totals a = totals_of(before.totals()), b = totals_of(now.totals());
  const auto rate = [time](uint64_t from, uint64_t to) {
    return to >= from ? static_cast<double>(to - from) / time : kUnknown;
  };
  out.generated = rate(a.generated, b.generated);
  out.prompt = rate(a.prompt, b.prompt);
  out.cached = rate(a.cached, b.cached);
  out.steps = rate(a.steps, b.steps);
  out.accepted = rate(a.accepted, b.accepted);
  out.refused = rate(a.refused, b.refused);
  out.ended = rate(a.ended, b.ended);
  out.failed = rate(a.failed, b.failed);
  return out;
}

ClusterWatch::ClusterWatch(std::string address, std::unique_ptr<ClusterControl> control, bool latencies)
    : address_(std::move(address)),
      control_(std::move(control)),
      latencies_(latencies),
      windows_(std::size(kSources), LatencyWindow(kWindow)) {}

StatusView ClusterWatch::look() {
  StatusOr<v1::StatusReply> reply = control_->status(kLookLimit);
  const int64_t wall = wall_now_ns();
  if (!reply.ok()) {
    if (!lost_at_) {
      lost_at_ = steady_now();
      lost_clock_ = clock_text(wall);
    }
    StatusView out = last_.value_or(StatusView{});
    out.scheduler = address_;
    out.reachable = false;
    out.ever_reached = last_.has_value();
    out.problem = message_of(reply.status());
    out.since = lost_clock_;
    out.unreachable_s = seconds(steady_now() - *lost_at_);
    out.clock = clock_text(wall);
    out.wall_ns = wall;
    out.rates = {};
    return out;
  }
  lost_at_.reset();
  StatusView out = view_of(*reply, address_);
  out.clock = clock_text(wall);
  out.wall_ns = wall;
  if (before_) out.rates = rates_between(*before_, *reply);
  before_ = *std::move(reply);
  if (latencies_) add_latencies(out);
  last_ = out;
  return out;
}

void ClusterWatch::add_latencies(StatusView& view) {
  struct Scrape {
    std::string address;
    bool scheduler;
    std::future<StatusOr<HttpResponse>> page;
  };
  std::vector<Scrape> scrapes;
  const auto scrape_one = [&scrapes](const std::string& address, bool scheduler) {
    const auto url = parse_url(address);
    if (address.empty() || !url.ok() || scrapes.size() > kMaxRouters) return;
    scrapes.push_back({address, scheduler, std::async(std::launch::async, [url = *url] {
                         return http_request(url, "GET", "/metrics", "", kScrapeLimit);
                       })});
  };
  scrape_one(view.ops_address, true);
  size_t routers = 0;
  for (const MemberView& member : view.members) {
    if (member.kind != MemberView::Kind::kRouter) continue;
    ++routers;
    scrape_one(member.ops_address, false);
  }
  const TimePoint now = steady_now();
  std::string problem =
      routers == 0 ? "no router is connected" : "routers do not say where their metrics are";
  size_t read = 0;
  for (Scrape& scrape : scrapes) {
    const StatusOr<HttpResponse> page = scrape.page.get();
    if (!page.ok() || page->status != 200) {
      if (scrape.scheduler) continue;  // what it alone has stays unknown
      problem = "no metrics of " + scrape.address +
                (page.ok() ? ": HTTP " + std::to_string(page->status) : ": it cannot be reached from here");
      continue;
    }
    read += !scrape.scheduler;
    for (size_t i = 0; i < windows_.size(); ++i) {
      if (kSources[i].scheduler != scrape.scheduler) continue;
      windows_[i].look(scrape.address, read_histogram(page->body, kSources[i].metric), now);
    }
  }
  view.latency_window_s = seconds(windows_.front().reaches(now));
  for (size_t i = 0; i < windows_.size(); ++i) {
    view.*kSources[i].shown = percentiles_of(windows_[i].observed());
  }
  if (read == 0) view.latency_problem = problem;
}

}  // namespace conclave::cli
