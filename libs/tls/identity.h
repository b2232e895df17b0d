// Who this process is to the others of its cluster, and whom it believes: its certificate and key, the
// authorities, and the judgement of a peer's certificate. Files are read again when they change; a set that
// does not hold together is not taken, and the one before it stays in force for judging. Any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"
#include "libs/base/watched_file.h"
#include "libs/tls/options.h"
#include "libs/tls/refusal.h"
#include "libs/tls/shown_files.h"

namespace conclave::tls {

// What our own certificate is for.
enum class Use : uint8_t { kServer, kClient };

inline constexpr uint64_t kMaxFileBytes = 256 << 10;  // of each file
inline constexpr int kMaxChain = 8;                   // certificates between a peer's and an authority's
inline constexpr size_t kMaxClientNames = 64;         // of tls.client_names

class Identity {
 public:
  struct Verdict {
    std::optional<Refusal> refused;  // nothing: the peer is welcome
    std::string detail;              // whose certificate it is, and what is wrong with it
  };
  struct Figures {
    int64_t expires_s = 0;  // when the first certificate of our own chain ends, seconds since 1970
    uint64_t reloads = 0;   // the first reading not included
    uint64_t failed_reloads = 0;
    uint64_t refused[kRefusals] = {};
  };
  // Told of what happens; called on whichever thread meets it, and must not block or come back here.
  struct Observer {
    std::function<void(Refusal, const std::string& detail)> refused;
    std::function<void(const Status& outcome)> reloaded;
  };
  using Clock = std::function<int64_t()>;  // seconds since 1970

  // Reads and checks the files: INVALID_ARGUMENT names the key (tls.ca_file, tls.cert_file, tls.key_file)
  // that is unreadable, expired, not yet valid, of another key or authority, or not fit for `use`.
  static StatusOr<std::shared_ptr<Identity>> load(Options options, Use use, Clock clock = nullptr);
  ~Identity();
  Identity(const Identity&) = delete;
  Identity& operator=(const Identity&) = delete;

  const Options& options() const { return options_; }
  // Copies of the last set that was taken; their paths never change.
  const ShownFiles& shown() const { return shown_; }
  // Once, before others use it.
  void observe(Observer observer) { observer_ = std::move(observer); }

  // Judges a peer by its certificate and what it sent along (PEM, both). When `peer_use` is kServer it must
  // hold `name`, a host name or an address; when kClient, one of options().client_names. Counts what it
  // refuses.
  Verdict judge(Use peer_use, std::string_view certificate, std::string_view chain, const std::string& name);
  // Counts a refusal that was found elsewhere, and tells the observer.
  void count(Refusal refusal, const std::string& detail);
  // Looks at the files, at most once in reload_interval, and takes what is new. judge() and figures() do it
  // too.
  void refresh();
  Figures figures();

 private:
  struct Material;  // what one reading of the files gave

  Identity(Options options, Use use, Clock clock);
  StatusOr<std::shared_ptr<const Material>> read();  // under reload_mutex_
  std::shared_ptr<const Material> material() const;

  const Options options_;
  const Use use_;
  const Clock clock_;
  const std::vector<std::string> client_names_;
  Observer observer_;

  std::mutex reload_mutex_;  // one reading at a time
  WatchedFile ca_, cert_, key_;
  ShownFiles shown_;
  TimePoint next_look_ = 0;

  mutable std::mutex mutex_;
  std::shared_ptr<const Material> material_;  // guarded by mutex_
  Figures figures_;                           // guarded by mutex_
};

// "a, b" as {"a", "b"}. INVALID_ARGUMENT names tls.client_names: an empty name, or too many.
StatusOr<std::vector<std::string>> parse_names(std::string_view text);

}  // namespace conclave::tls
