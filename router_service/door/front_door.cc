#include "router_service/door/front_door.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "libs/base/random.h"
#include "router_service/door/traceparent.h"

namespace conclave::door {
namespace {

constexpr char kKeysField[] = "router.api_keys_file";
constexpr size_t kMaxRequestIdBytes = 128;

bool is_bearer(std::string_view text) {
  constexpr std::string_view kScheme = "bearer ";
  if (text.size() < kScheme.size()) return false;
  for (size_t i = 0; i < kScheme.size(); ++i) {
    const char c = text[i];
    if ((c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c) != kScheme[i]) return false;
  }
  return true;
}

Status refused(std::string_view why) {
  return gateway::with_code(make_status(StatusCode::kUnauthenticated, why), "invalid_api_key");
}

}  // namespace

bool usable_request_id(std::string_view id) {
  return !id.empty() && id.size() <= kMaxRequestIdBytes &&
         std::all_of(id.begin(), id.end(), [](char c) { return c > ' ' && c < 0x7f; });
}

std::string make_request_id() {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%016llx%016llx", static_cast<unsigned long long>(system_random_u64()),
                static_cast<unsigned long long>(system_random_u64()));
  return buffer;
}

Visit::Visit(std::shared_ptr<DoorBook> book, std::string_view protocol, std::string_view route,
             std::string id, std::shared_ptr<Tenant> tenant, const TraceContext& trace)
    : book_(std::move(book)),
      protocol_(protocol),
      route_(route),
      id_(std::move(id)),
      tenant_(std::move(tenant)),
      arrived_(steady_now()),
      trace_(trace) {}

Visit::~Visit() {
  const TimePoint now = steady_now();
  if (charged_) tenant_->settle(estimated_, prompt_tokens_ + completion_tokens_, now);
  std::lock_guard lock(book_->mutex);
  if (!book_->on_end) return;
  AccessLine line;
  line.protocol = protocol_;
  line.request_id = id_;
  line.tenant = tenant_->name();
  line.route = route_;
  line.status = status_.load();
  // Nobody was told anything: the client had gone.
  if (line.status == 0 && protocol_ == "http") line.status = 499;
  line.outcome = outcome_;
  line.prompt_tokens = prompt_tokens_;
  line.completion_tokens = completion_tokens_;
  line.to_first_token = to_first_token_;
  line.total = now - arrived_;
  line.trace = trace_;
  book_->on_end(line);
}

Status Visit::charge(uint64_t estimated_tokens) {
  std::lock_guard lock(mutex_);
  Status charged = tenant_->charge(estimated_tokens, steady_now(), &retry_after_);
  if (charged.ok()) {
    charged_ = true;
    estimated_ = estimated_tokens;
  } else {
    book_->rate_limited.fetch_add(1);
  }
  return charged;
}

HeaderList Visit::headers() const {
  HeaderList out = tenant_->rate_headers(steady_now());
  std::lock_guard lock(mutex_);
  if (retry_after_ > 0) out.emplace_back("retry-after", retry_seconds(retry_after_));
  return out;
}

gateway::Origin Visit::origin(std::shared_ptr<Visit> self) const {
  gateway::Origin origin;
  origin.request_id = id_;
  origin.route = route_;
  origin.tenant = tenant_->name();
  origin.trusted = tenant_->trusted();
  origin.trace = trace_;
  origin.record = std::move(self);
  return origin;
}

void Visit::ended(const gateway::Summary& summary) {
  std::lock_guard lock(mutex_);
  outcome_ = summary.code != StatusCode::kOk           ? std::string(absl::StatusCodeToString(summary.code))
             : summary.finish == FinishReason::kLength ? "length"
                                                       : "stop";
  // A request may have several generations, one for each of its prompts.
  prompt_tokens_ += summary.usage.prompt_tokens;
  completion_tokens_ += summary.usage.completion_tokens;
  if (summary.to_first_token >= 0 && (to_first_token_ < 0 || summary.to_first_token < to_first_token_))
    to_first_token_ = summary.to_first_token;
}

FrontDoor::FrontDoor(FrontDoorOptions options)
    : options_(std::move(options)),
      anyone_(std::make_shared<Tenant>("", KeyGrant{0, 0, options_.trust_without_keys})),
      keys_(std::make_shared<const std::vector<Key>>()),
      file_(options_.keys_file, kKeysField, options_.max_keys_file_bytes) {
  book_->on_end = options_.on_end;
}

FrontDoor::~FrontDoor() {
  std::lock_guard lock(book_->mutex);
  book_->on_end = nullptr;
}

StatusOr<std::unique_ptr<FrontDoor>> FrontDoor::open(FrontDoorOptions options) {
  std::unique_ptr<FrontDoor> door(new FrontDoor(std::move(options)));
  if (door->asks_for_keys()) RETURN_IF_ERROR(door->reload_keys().status());
  return door;
}

StatusOr<std::shared_ptr<Tenant>> FrontDoor::identify(std::string_view authorization) {
  if (!asks_for_keys()) return anyone_;
  const auto refuse = [this](std::string_view why) {
    unauthenticated_.fetch_add(1);
    return refused(why);
  };
  if (authorization.empty())
    return refuse("an API key is required: send the header \"Authorization: Bearer KEY\"");
  if (!is_bearer(authorization)) return refuse("the authorization must be \"Bearer KEY\"");
  authorization.remove_prefix(std::min(authorization.find_first_not_of(' ', 7), authorization.size()));
  while (!authorization.empty() && authorization.back() == ' ') authorization.remove_suffix(1);
  if (authorization.empty() || authorization.size() > kMaxKeyBytes)
    return refuse("the API key is not known here");
  const KeyHash hash = hash_key(authorization);
  std::shared_ptr<const std::vector<Key>> keys;
  {
    std::lock_guard lock(mutex_);
    keys = keys_;
  }
  const Key* found = nullptr;
  for (const Key& key : *keys)
    if (same_hash(key.hash, hash)) found = &key;  // and looks at the rest all the same
  if (found == nullptr) return refuse("the API key is not known here");
  return found->tenant;
}

std::shared_ptr<Visit> FrontDoor::enter(std::string_view protocol, std::string_view route, std::string id,
                                        std::shared_ptr<Tenant> tenant, std::string_view traceparent) {
  if (tenant == nullptr) tenant = anyone_;
  return std::shared_ptr<Visit>(new Visit(book_, protocol, route, std::move(id), std::move(tenant),
                                          begin_trace(traceparent, options_.trace_share)));
}

StatusOr<size_t> FrontDoor::reload_keys() {
  if (!asks_for_keys()) return failed_precondition("no keys are configured (router.api_keys_file)");
  std::lock_guard reload(reload_mutex_);
  auto text = file_.read();
  StatusOr<std::vector<KeyLine>> lines =
      text.ok() ? parse_key_file(*text, options_.max_keys) : StatusOr<std::vector<KeyLine>>(text.status());
  if (!lines.ok()) {
    failed_reloads_.fetch_add(1);
    return text.ok() ? with_field(annotate(lines.status(), options_.keys_file), kKeysField) : text.status();
  }
  const TimePoint now = steady_now();
  std::lock_guard lock(mutex_);
  auto keys = std::make_shared<std::vector<Key>>();
  std::map<std::string, std::shared_ptr<Tenant>> tenants;
  for (const KeyLine& line : *lines) {
    std::shared_ptr<Tenant>& tenant = tenants[line.name];
    if (tenant == nullptr) {
      const auto known = tenants_.find(line.name);
      if (known != tenants_.end()) {  // what it has used stays used
        tenant = known->second;
        tenant->set_grant(line.grant, now);
      } else {
        tenant = std::make_shared<Tenant>(line.name, line.grant);
      }
    }
    keys->push_back({line.hash, tenant});
  }
  keys_ = std::move(keys);
  tenants_ = std::move(tenants);
  reloads_.fetch_add(1);
  return lines->size();
}

StatusOr<bool> FrontDoor::reload_changed_keys() {
  if (!asks_for_keys()) return false;
  {
    std::lock_guard reload(reload_mutex_);
    if (!file_.changed()) return false;
  }
  RETURN_IF_ERROR(reload_keys().status());
  return true;
}

FrontDoorCounts FrontDoor::counts() const {
  FrontDoorCounts counts;
  counts.unauthenticated = unauthenticated_.load();
  counts.rate_limited = book_->rate_limited.load();
  counts.key_reloads = reloads_.load();
  counts.failed_key_reloads = failed_reloads_.load();
  std::lock_guard lock(mutex_);
  counts.keys = keys_->size();
  return counts;
}

}  // namespace conclave::door
