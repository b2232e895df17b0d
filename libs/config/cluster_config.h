// One typed configuration for the whole cluster: every service reads the same file and takes its part. Keys,
// units, ranges and meanings are listed in schema.cc and printed in docs/config.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention_service/core/options.h"
#include "expert_service/core/options.h"
#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/model/numerics.h"
#include "libs/rpc/client_options.h"
#include "libs/tls/options.h"
#include "libs/transport/transport_options.h"
#include "libs/transport/ucx_settings.h"
#include "router_service/gateway/admission.h"
#include "scheduler/core/options.h"

namespace conclave {

struct ModelConfig {
  std::string path;  // directory of the checkpoint
  std::string name;  // what /v1/models shows; empty: the directory's name
  Precision precision = Precision::kBf16;
  bool fp8_wire = false;  // hidden rows travel as FP8
};

struct SchedulerConfig {
  std::string listen = "127.0.0.1:7070";
  std::string address;  // where members and routers find it; empty: `listen`
  std::string ops_listen = "127.0.0.1:7071";
  scheduler::SchedulerOptions options;
  uint32_t session_queue_messages = 65536;
  uint64_t session_queue_bytes = 64ull << 20;
  Nanos drain_time = 10 * kSecond;

  const std::string& connect_address() const { return address.empty() ? listen : address; }
};

struct RouterConfig {
  std::string http_listen = "127.0.0.1:8000";
  std::string grpc_listen = "127.0.0.1:8001";
  std::string ops_listen = "127.0.0.1:8002";
  std::string admin_listen = "127.0.0.1:8003";  // empty: none
  gateway::AdmissionLimits limits;
  uint32_t max_connections = 4096;    // HTTP
  uint32_t max_stream_events = 4096;  // waiting for one slow client before its request is cancelled
  uint32_t http_threads = 2;
  uint32_t template_processes = 2;
  Nanos template_deadline = 2 * kSecond;
  Nanos default_deadline = 600 * kSecond;
  Nanos idle_timeout = 75 * kSecond;
  Nanos write_timeout = 60 * kSecond;
  Nanos sse_ping_interval = 15 * kSecond;  // 0: none
  Nanos drain_time = 10 * kSecond;
  std::string api_keys_file;  // empty: nobody is asked for a key
  bool trust_without_keys = false;
  bool access_log = true;
  double trace_share = 0.01;  // of requests whose timeline is kept; always where the client's tracer asks
  uint32_t max_timelines = 256;
  Nanos stall_report = 30 * kSecond;  // not of the file's section: logging.stall_report_s
};

struct ProcessorConfig {
  std::string cpus;  // cpu_set.h; empty: all
  bool pin_threads = false;
};

struct AttentionConfig {
  ProcessorConfig processors;
  std::string ops_listen = "127.0.0.1:0";
  // name, numerics_id and model_fingerprint are filled in by the process; kv_blocks 0: as many as kv_bytes
  // hold; threads 0: the machine's cores.
  WorkerOptions options = [] {
    WorkerOptions o;
    o.name.clear();
    o.kv_blocks = 0;
    o.threads = 0;
    return o;
  }();
  uint64_t kv_bytes = 1ull << 30;
  Nanos drain_time = 30 * kSecond;
};

struct ExpertsConfig {
  ProcessorConfig processors;
  std::string ops_listen = "127.0.0.1:0";
  // As above.
  ShardOptions options = [] {
    ShardOptions o;
    o.name.clear();
    o.threads = 0;
    return o;
  }();
  Nanos drain_time = 10 * kSecond;
};

// Loopback works inside one process only.
enum class TransportKind : uint8_t { kUcx, kLoopback };

struct TransportConfig {
  TransportKind kind = TransportKind::kUcx;
  UcxSettings ucx;
  Nanos spin = 50 * kMicrosecond;  // of the loops that move rows
  // self, secret and fleet are filled in by the process.
  TransportOptions options = [] {
    TransportOptions o;
    o.rows_crc = true;
    o.keepalive_interval = 5 * kSecond;
    return o;
  }();
  std::string secret_file;  // empty: no secret
};

struct SupervisorConfig {
  uint32_t attention_workers = 1;
  uint32_t expert_shards = 2;
  Nanos restart_min = 100 * kMillisecond;
  Nanos restart_max = 10 * kSecond;
  Nanos healthy_after = 30 * kSecond;
  Nanos start_deadline = 120 * kSecond;
  Nanos stop_deadline = 15 * kSecond;
};

struct LoggingConfig {
  std::string level = "info";         // debug, info, warn or error
  std::string modules;                // "requests=debug,...": those with a level of their own
  bool texts = false;                 // debug lines may hold the text of prompts
  bool remote_changes = false;        // levels may be changed from other hosts
  Nanos stall_report = 30 * kSecond;  // without progress; 0: never
};

struct ClusterConfig {
  ModelConfig model;
  SchedulerConfig scheduler;
  RouterConfig router;
  AttentionConfig attention;
  ExpertsConfig experts;
  TransportConfig transport;
  rpc::ClientOptions
      control;  // `target` is not of the file: scheduler.connect_address(), unless a flag says otherwise; nor
                // is `tls`, which a process makes of the files that the section names
  tls::Options tls;
  SupervisorConfig supervisor;
  LoggingConfig logging;
};

// Checks that involve several keys; single keys are checked as they are read. INVALID_ARGUMENT names the
// keys.
Status validate_config(const ClusterConfig& config);

// The cluster's secrets out of the file's text: one a line, without white space around it, empty lines
// skipped. The first is the one to prove; a second one is accepted from peers too, while the secret is being
// changed. INVALID_ARGUMENT names transport.secret_file: none, more than two, one shorter than 16 bytes, or
// one twice.
StatusOr<std::vector<std::string>> parse_secrets(std::string_view text);
inline constexpr size_t kMinSecretBytes = 16;
inline constexpr size_t kMaxSecretFileBytes = 4096;

}  // namespace conclave
