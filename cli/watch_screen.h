// Shows something again and again: a full screen at a terminal, pages or JSON lines elsewhere.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cli/status_page.h"
#include "cli/status_view.h"
#include "libs/base/clock.h"
#include "libs/base/status.h"

namespace conclave::cli {

struct WatchOptions {
  Nanos interval = kSecond;
  bool json = false;
  uint64_t count = 0;  // looks; 0: until SIGINT, SIGTERM, SIGHUP, 'q', or nobody reads any more
};

// Blocks the signals that run_watch waits for; before the first thread of the process starts.
void block_watch_signals();

// Calls `look` on a thread of its own, one call at a time, and shows what it returns. At a terminal the page
// fills the screen, follows its size, and is gone at the end, as is all that was set; Ctrl-Z stops it and
// `fg` brings it back. What is no terminal (or a dumb one) gets one page after the other, 80 columns wide
// where COLUMNS does not say otherwise. NO_COLOR turns colours off.
Status run_watch(const WatchOptions& options, const std::function<StatusView()>& look);

}  // namespace conclave::cli
