// The router over a real little cluster in this process: a made checkpoint with its tokenizer and template,
// loopback transport, HTTP and gRPC on ports of the kernel's choosing.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "libs/base/random.h"
#include "libs/base/status.h"
#include "libs/checkpoint/make.h"
#include "libs/local_cluster/local_cluster.h"
#include "libs/telemetry/metrics.h"
#include "router_service/router_server.h"

namespace conclave::testing {

class TinyRouter {
 public:
  // `checkpoint`: a directory; empty: one is made.
  static StatusOr<std::unique_ptr<TinyRouter>> start(RouterConfig config = {}, std::string checkpoint = "",
                                                     LocalClusterOptions cluster = {}) {
    auto made = std::unique_ptr<TinyRouter>(new TinyRouter);
    if (checkpoint.empty()) {
      made->dir_ =
          std::filesystem::temp_directory_path() / ("conclave-tiny-" + std::to_string(system_random_u64()));
      MakeOptions make;
      make.out = checkpoint = made->dir_ / "tiny-m2";
      make.geometry = "tiny-m2";
      make.layers = 2;
      make.seed = 11;
      auto report = make_checkpoint(make);
      if (!report.ok()) return report.status();
    }
    ASSIGN_OR_RETURN(made->cluster, LocalCluster::load(checkpoint, std::move(cluster)));
    RETURN_IF_ERROR(made->cluster->wait_ready());
    config.http_listen = config.grpc_listen = config.admin_listen = "127.0.0.1:0";
    ASSIGN_OR_RETURN(made->text, router::load_model_text(checkpoint, config));
    ASSIGN_OR_RETURN(made->server,
                     router::RouterServer::start(config, made->cluster->spec(), made->cluster->port(),
                                                 *made->text, &made->metrics));
    RETURN_IF_ERROR(made->server->wait_ready(30 * kSecond));
    return made;
  }
  ~TinyRouter() {
    server.reset();
    text.reset();
    cluster.reset();
    std::error_code ignored;
    if (!dir_.empty()) std::filesystem::remove_all(dir_, ignored);
  }
  std::string model_dir() const { return dir_ / "tiny-m2"; }

  MetricsRegistry metrics;
  std::unique_ptr<LocalCluster> cluster;
  std::unique_ptr<gateway::TextCodec> text;
  std::unique_ptr<router::RouterServer> server;

 private:
  TinyRouter() = default;
  std::filesystem::path dir_;
};

}  // namespace conclave::testing
