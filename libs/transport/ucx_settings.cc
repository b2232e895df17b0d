#include "libs/transport/ucx_settings.h"

#include <cstdlib>

namespace conclave {

std::vector<std::pair<std::string, std::string>> UcxSettings::general() const {
  return {{"TLS", tls},
          {"NET_DEVICES", net_devices},
          {"ZCOPY_THRESH", zcopy_thresh},
          {"RNDV_THRESH", rndv_thresh}};
}

std::vector<std::pair<std::string, std::string>> UcxSettings::environment() const {
  return {{"TCP_MAX_POLL", tcp_max_poll},
          {"TCP_CONN_NB", tcp_conn_nb},
          {"TCP_TX_SEG_SIZE", tcp_tx_seg_size},
          {"TCP_RX_SEG_SIZE", tcp_rx_seg_size}};
}

void UcxSettings::export_to_environment() const {
  for (const auto& [name, value] : environment())
    ::setenv(("UCX_" + name).c_str(), value.c_str(), /*overwrite=*/0);
}

}  // namespace conclave
