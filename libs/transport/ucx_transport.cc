#include "libs/transport/ucx_transport.h"

#include <sched.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "libs/base/check.h"
#include "libs/transport/crc32c.h"

namespace conclave {
namespace {

constexpr unsigned kAmId = 1;
constexpr char kAddressMagic[4] = {'U', 'C', 'X', '1'};
constexpr size_t kAddressHead = 4 + 4 + 8;   // magic, CRC of what follows, incarnation
constexpr int kProgressBurst = 64;           // rounds of UCX progress in one turn of the loop
constexpr uint32_t kMaxPendingControl = 64;  // acks, pings and cancels waiting for a peer that does not read
constexpr size_t kMaxSpareOps = 256;
constexpr Nanos kLinger = 100 * kMillisecond;  // for the last sends of a link that is closed while healthy
constexpr Nanos kDestroyLimit = 2 * kSecond;   // for forced closes to complete at the end

Status ucx_error(std::string_view what, ucs_status_t status) {
  return unavailable(std::string(what) + ": " + ucs_status_string(status));
}

}  // namespace

struct UcxTransport::Impl {
  struct Link {
    LinkId id = 0;
    Impl* impl = nullptr;
    ucp_ep_h ep = nullptr;
    uint32_t pending_control = 0;
    uint32_t pending_sends = 0;
    bool open = true;  // false once given up: its errors concern nobody
    bool failed = false;
    bool forced = false;  // the forced close has begun
    TimePoint linger_until = 0;
    void* flush_request = nullptr;  // before the forced close of a healthy link
    void* close_request = nullptr;  // of the forced close, while it runs
  };
  // What one send needs until it completes. The link outlives its sends.
  struct SendOp {
    Impl* impl = nullptr;
    Link* link = nullptr;
    bool control = false;
    wire::Bytes header;
    RowBuffer rows;
    ucp_dt_iov_t iov[2];
  };
  struct Arrival {
    void* data = nullptr;  // eager: UCX's memory until released; rendezvous: null, see rows
    size_t length = 0;
    RowBuffer own;  // rendezvous: the message, received
  };
  // A rendezvous receive under way.
  struct Fetch {
    Impl* impl = nullptr;
    RowBuffer buffer;
  };

  ~Impl() {
    if (worker) ucp_worker_destroy(worker);
    if (context) ucp_cleanup(context);
  }

  Status start(const UcxSettings& settings);

  SendOp* take_op() {
    if (spare_ops.empty()) return new SendOp;
    SendOp* op = spare_ops.back().release();
    spare_ops.pop_back();
    return op;
  }
  void finish(SendOp* op, ucs_status_t status) {
    Link* link = op->link;
    --link->pending_sends;
    --pending_sends;
    if (op->control) --link->pending_control;
    if (status != UCS_OK && status != UCS_ERR_CANCELED) fail(link, status);
    if (owner) owner->recycle(std::move(op->header));
    op->header = {};
    op->rows.reset();
    if (spare_ops.size() < kMaxSpareOps) {
      spare_ops.emplace_back(op);
    } else {
      delete op;
    }
  }
  void fail(Link* link, ucs_status_t status) {
    link->failed = true;
    if (link->open) failures.emplace_back(link->id, status);
  }

  static void on_sent(void* request, ucs_status_t status, void* user_data) {
    auto* op = static_cast<SendOp*>(user_data);
    ucp_request_free(request);
    op->impl->finish(op, status);
  }
  static void on_endpoint_error(void* arg, ucp_ep_h, ucs_status_t status) {
    auto* link = static_cast<Link*>(arg);
    link->impl->fail(link, status);
  }
  static ucs_status_t on_message(void* arg, const void*, size_t, void* data, size_t length,
                                 const ucp_am_recv_param_t* param) {
    auto* impl = static_cast<Impl*>(arg);
    if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) return impl->fetch(data, length);
    if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) {
      impl->arrivals.push_back({data, length, nullptr});
      return UCS_INPROGRESS;
    }
    auto copy = std::make_shared<std::vector<std::byte>>(length);
    if (length > 0) std::memcpy(copy->data(), data, length);
    impl->arrivals.push_back({nullptr, length, std::move(copy)});
    return UCS_OK;
  }
  // Only with settings other than ours (RNDV_THRESH): large messages then announce themselves first.
  ucs_status_t fetch(void* descriptor, size_t length) {
    if (length > max_message_bytes) return UCS_OK;  // UCX drops it; a short buffer would abort us
    auto* f = new Fetch{this, std::make_shared<std::vector<std::byte>>(length)};
    fetches.push_back({f, descriptor});
    return UCS_INPROGRESS;
  }
  struct Announced {
    Fetch* fetch;
    void* descriptor;
  };
  static void on_fetched(void* request, ucs_status_t status, size_t, void* user_data) {
    ucp_request_free(request);
    done(static_cast<Fetch*>(user_data), status);
  }
  static void done(Fetch* f, ucs_status_t status) {
    Impl* impl = f->impl;
    --impl->pending_fetches;
    if (status == UCS_OK) impl->arrivals.push_back({nullptr, f->buffer->size(), std::move(f->buffer)});
    delete f;
  }
  bool start_fetches() {
    if (fetches.empty()) return false;
    for (const Announced& a : std::exchange(fetches, {})) {
      ucp_request_param_t param{};
      param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
      param.cb.recv_am = on_fetched;
      param.user_data = a.fetch;
      ++pending_fetches;
      ucs_status_ptr_t request = ucp_am_recv_data_nbx(worker, a.descriptor, a.fetch->buffer->data(),
                                                      a.fetch->buffer->size(), &param);
      if (!UCS_PTR_IS_PTR(request)) done(a.fetch, UCS_PTR_STATUS(request));
    }
    return true;
  }

  UcxTransport* owner = nullptr;
  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;
  int event_fd = -1;
  uint64_t max_message_bytes = 0;
  std::string worker_address;
  std::unordered_map<LinkId, std::unique_ptr<Link>> links;
  std::vector<std::unique_ptr<Link>> closing;
  std::vector<std::unique_ptr<SendOp>> spare_ops;
  std::vector<Arrival> arrivals, receiving;
  std::vector<Announced> fetches;
  std::vector<std::pair<LinkId, ucs_status_t>> failures;
  size_t pending_sends = 0;
  size_t pending_fetches = 0;
  TimerId sweep_timer;
};

Status UcxTransport::Impl::start(const UcxSettings& settings) {
  settings.export_to_environment();
  ucp_config_t* config = nullptr;
  if (ucs_status_t s = ucp_config_read(nullptr, nullptr, &config); s != UCS_OK) {
    return ucx_error("reading UCX's configuration", s);
  }
  for (const auto& [name, value] : settings.general()) {
    if (std::getenv(("UCX_" + name).c_str()) != nullptr) continue;  // already in `config`
    if (ucs_status_t s = ucp_config_modify(config, name.c_str(), value.c_str()); s != UCS_OK) {
      ucp_config_release(config);
      return with_field(ucx_error("UCX does not take " + name + "=" + value, s), name);
    }
  }
  const std::string where = " (TLS=" + settings.tls + ", NET_DEVICES=" + settings.net_devices + ")";
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "conclave";
  ucs_status_t s = ucp_init(&params, config, &context);
  ucp_config_release(config);
  if (s != UCS_OK) return ucx_error("starting UCX" + where, s);
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  s = ucp_worker_create(context, &worker_params, &worker);
  if (s != UCS_OK) return ucx_error("creating a UCX worker" + where, s);
  if (s = ucp_worker_get_efd(worker, &event_fd); s != UCS_OK) return ucx_error("UCX's event descriptor", s);
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kAmId;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG | UCP_AM_FLAG_PERSISTENT_DATA;
  handler.cb = on_message;
  handler.arg = this;
  if (s = ucp_worker_set_am_recv_handler(worker, &handler); s != UCS_OK) {
    return ucx_error("UCX's message handler", s);
  }
  ucp_address_t* address = nullptr;
  size_t length = 0;
  if (s = ucp_worker_get_address(worker, &address, &length); s != UCS_OK) return ucx_error("the address", s);
  worker_address.assign(reinterpret_cast<const char*>(address), length);
  ucp_worker_release_address(worker, address);
  return OkStatus();
}

TransportOptions UcxTransport::with_defaults(TransportOptions options) {
  options.rows_crc = true;
  if (options.keepalive_interval == 0) options.keepalive_interval = kSecond;
  return options;
}

StatusOr<std::unique_ptr<UcxTransport>> UcxTransport::create(LoopExecutor& loop, TransportOptions options,
                                                             UcxSettings settings) {
  auto impl = std::make_unique<Impl>();
  RETURN_IF_ERROR(impl->start(settings));
  impl->max_message_bytes = options.limits.max_message_bytes;
  return std::unique_ptr<UcxTransport>(new UcxTransport(loop, std::move(options), std::move(impl)));
}

UcxTransport::UcxTransport(LoopExecutor& loop, TransportOptions options, std::unique_ptr<Impl> impl)
    : SessionTransport(loop, std::move(options)), loop_(loop), impl_(std::move(impl)) {
  impl_->owner = this;
  loop_.add_poller(this);
}

UcxTransport::~UcxTransport() {
  loop_.remove_poller(this);
  shut_down();
  executor_.cancel(impl_->sweep_timer);
  impl_->owner = nullptr;
  const TimePoint limit = steady_now() + kDestroyLimit;
  while ((!impl_->closing.empty() || impl_->pending_sends > 0 || impl_->pending_fetches > 0) &&
         steady_now() < limit) {
    if (ucp_worker_progress(impl_->worker) == 0) sched_yield();
    sweep_closing();
  }
  for (auto& f : impl_->fetches) {
    ucp_am_data_release(impl_->worker, f.descriptor);
    delete f.fetch;
  }
  for (auto& a : impl_->arrivals) {
    if (a.data) ucp_am_data_release(impl_->worker, a.data);
  }
  if (impl_->pending_sends > 0 || !impl_->closing.empty()) {
    // UCX still refers to memory of ours: better leaked at the end of a process than freed under it.
    for (auto& link : impl_->closing) link.release();
  }
}

// --- addresses: magic, CRC, incarnation, UCX's worker address. UCX asserts on garbage, so it never gets to
// see any ---

std::string UcxTransport::address() const {
  std::string body(8, '\0');
  const uint64_t id = self().value;
  std::memcpy(body.data(), &id, 8);
  body += impl_->worker_address;
  const uint32_t crc = crc32c(std::as_bytes(std::span(body)));
  std::string out(kAddressMagic, 4);
  out.append(reinterpret_cast<const char*>(&crc), 4);
  return out + body;
}

Status UcxTransport::link_open(LinkId id, std::string_view address) {
  if (address.size() <= kAddressHead || std::memcmp(address.data(), kAddressMagic, 4) != 0) {
    return invalid_field("address", "is not a UCX address of ours");
  }
  uint32_t crc;
  std::memcpy(&crc, address.data() + 4, 4);
  if (crc != crc32c(std::as_bytes(std::span(address.substr(8))))) {
    return with_field(data_loss("the address is damaged"), "address");
  }
  // UCX wants it aligned.
  std::vector<uint64_t> aligned((address.size() - kAddressHead + 7) / 8);
  std::memcpy(aligned.data(), address.data() + kAddressHead, address.size() - kAddressHead);
  auto link = std::make_unique<Impl::Link>();
  link->id = id;
  link->impl = impl_.get();
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(aligned.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = Impl::on_endpoint_error;
  params.err_handler.arg = link.get();
  if (ucs_status_t s = ucp_ep_create(impl_->worker, &params, &link->ep); s != UCS_OK) {
    return ucx_error("creating an endpoint", s);
  }
  impl_->links[id] = std::move(link);
  return OkStatus();
}

SessionTransport::SendResult UcxTransport::link_send(LinkId id, OutMessage message) {
  auto it = impl_->links.find(id);
  CONCLAVE_CHECK(it != impl_->links.end());
  Impl::Link& link = *it->second;
  if (message.control && link.pending_control >= kMaxPendingControl) {
    recycle(std::move(message.header));
    return SendResult::kTaken;  // control messages are cumulative or best effort
  }
  Impl::SendOp* op = impl_->take_op();
  op->impl = impl_.get();
  op->link = &link;
  op->control = message.control;
  op->header = std::move(message.header);
  op->rows = std::move(message.rows);
  ++link.pending_sends;
  ++impl_->pending_sends;
  if (op->control) ++link.pending_control;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE;
  param.cb.send = Impl::on_sent;
  param.user_data = op;
  const void* buffer = op->header.data();
  size_t count = op->header.size();
  param.datatype = ucp_dt_make_contig(1);
  if (op->rows && !op->rows->empty()) {
    op->iov[0] = {op->header.data(), op->header.size()};
    op->iov[1] = {op->rows->data(), op->rows->size()};
    buffer = op->iov;
    count = 2;
    param.datatype = UCP_DATATYPE_IOV;
  }
  ucs_status_ptr_t request = ucp_am_send_nbx(link.ep, kAmId, nullptr, 0, buffer, count, &param);
  if (!UCS_PTR_IS_PTR(request)) impl_->finish(op, UCS_PTR_STATUS(request));
  return SendResult::kTaken;
}

void UcxTransport::link_close(LinkId id) {
  auto node = impl_->links.extract(id);
  if (node.empty()) return;
  std::unique_ptr<Impl::Link> link = std::move(node.mapped());
  link->open = false;
  if (!link->failed) {
    // A forced close throws away what the socket has not taken yet; a healthy peer takes it in no time.
    ucp_request_param_t param{};
    ucs_status_ptr_t request = ucp_ep_flush_nbx(link->ep, &param);
    if (UCS_PTR_IS_PTR(request)) {
      link->flush_request = request;
      link->linger_until = steady_now() + kLinger;
    }
  }
  impl_->closing.push_back(std::move(link));
  sweep_closing();
  arm_sweep();
}

// Moves closing links on: flush, forced close, gone. The forced close completes by itself; sends complete
// with it.
bool UcxTransport::sweep_closing() {
  const auto done = [](void*& request) {
    if (request && ucp_request_check_status(request) != UCS_INPROGRESS) {
      ucp_request_free(request);
      request = nullptr;
    }
    return request == nullptr;
  };
  const TimePoint now = steady_now();
  for (auto& link : impl_->closing) {
    const bool flushed = done(link->flush_request);
    if (link->forced || (!flushed && !link->failed && now < link->linger_until)) continue;
    link->forced = true;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    ucs_status_ptr_t request = ucp_ep_close_nbx(link->ep, &param);
    if (UCS_PTR_IS_PTR(request)) link->close_request = request;
  }
  const size_t before = impl_->closing.size();
  std::erase_if(impl_->closing, [&](const std::unique_ptr<Impl::Link>& link) {
    return link->forced && done(link->flush_request) && done(link->close_request) && link->pending_sends == 0;
  });
  return impl_->closing.size() != before;
}

// The loop may sleep while a link lingers for a peer that does not read.
void UcxTransport::arm_sweep() {
  if (impl_->sweep_timer || impl_->closing.empty() || alive_ == nullptr) return;
  impl_->sweep_timer = executor_.post_at(steady_now() + kLinger, [this, alive = std::weak_ptr<int>(alive_)] {
    if (alive.expired()) return;
    impl_->sweep_timer = {};
    sweep_closing();
    arm_sweep();
  });
}

// --- the loop ---

bool UcxTransport::progress() {
  bool worked = false;
  for (int i = 0; i < kProgressBurst && ucp_worker_progress(impl_->worker) != 0; ++i) worked = true;
  worked |= impl_->start_fetches();
  worked |= handle_arrivals();
  worked |= handle_failures();
  if (!impl_->closing.empty()) worked |= sweep_closing();
  return worked;
}

bool UcxTransport::handle_arrivals() {
  if (impl_->arrivals.empty()) return false;
  // What a receiver sends may bring more.
  impl_->receiving.swap(impl_->arrivals);
  for (Impl::Arrival& a : impl_->receiving) {
    if (a.data) {
      receive({static_cast<const std::byte*>(a.data), a.length}, nullptr);
      ucp_am_data_release(impl_->worker, a.data);
    } else {
      receive(*a.own, nullptr);
    }
  }
  impl_->receiving.clear();
  return true;
}

bool UcxTransport::handle_failures() {
  if (impl_->failures.empty()) return false;
  for (const auto& [id, status] : std::exchange(impl_->failures, {})) {
    if (impl_->links.contains(id)) link_failed(id, ucx_error("the connection failed", status));
  }
  return true;
}

int UcxTransport::fd() { return impl_->event_fd; }

bool UcxTransport::arm() { return ucp_worker_arm(impl_->worker) != UCS_ERR_BUSY; }

size_t UcxTransport::closing_links() const { return impl_->closing.size(); }
size_t UcxTransport::pending_sends() const { return impl_->pending_sends; }

std::string UcxTransport::describe() const {
  char* text = nullptr;
  size_t length = 0;
  FILE* out = open_memstream(&text, &length);
  if (out == nullptr) return {};
  ucp_context_print_info(impl_->context, out);
  ucp_worker_print_info(impl_->worker, out);
  for (const auto& [id, link] : impl_->links) ucp_ep_print_info(link->ep, out);
  std::fclose(out);
  std::string result(text, length);
  std::free(text);
  return result;
}

}  // namespace conclave
