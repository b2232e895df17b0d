// The sub-commands of `conclave`. Each adds itself to the parser and stores what to run; a command's Status
// becomes one readable line on stderr and a non-zero exit.
#pragma once

#include <functional>

#include "libs/base/status.h"

namespace CLI {
class App;
}

namespace conclave::cli {

using Command = std::function<Status()>;

// Of a command that ended well; one that says something by it sets it.
inline int exit_code = 0;

// `chosen` receives the command the user named.
void add_model_commands(CLI::App& app, Command& chosen);      // model make | model inspect
void add_logits_command(CLI::App& app, Command& chosen);      // logits
void add_up_command(CLI::App& app, Command& chosen);          // up
void add_generate_command(CLI::App& app, Command& chosen);    // generate
void add_chat_command(CLI::App& app, Command& chosen);        // chat
void add_bench_command(CLI::App& app, Command& chosen);       // bench
void add_status_command(CLI::App& app, Command& chosen);      // status
void add_drain_command(CLI::App& app, Command& chosen);       // drain
void add_placement_commands(CLI::App& app, Command& chosen);  // shards | experts | rebalance
void add_key_command(CLI::App& app, Command& chosen);         // key
void add_log_level_command(CLI::App& app, Command& chosen);   // log-level
void add_diag_command(CLI::App& app, Command& chosen);        // diag
void add_timeline_command(CLI::App& app, Command& chosen);    // timeline

}  // namespace conclave::cli
