// Which processors a process or a thread may run on. Linux.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"

namespace conclave {

// Processors by number, ascending, each once: "0-3,8" as the kernel writes them, or "numa:1" for all of one
// memory node. `field` names the key for the error: text that is neither, no such node, nothing in the list.
StatusOr<std::vector<uint32_t>> parse_cpus(std::string_view text, std::string_view field);

// The calling thread, and those it starts from now on, run on these only. Memory that a thread touches first
// lies on its own node, so a process bound before it allocates keeps its memory near. INVALID_ARGUMENT
// (naming `field`) when none of them is there or allowed. `cpus` must not be empty.
Status bind_to_cpus(std::span<const uint32_t> cpus, std::string_view field);

// Those the calling thread may run on.
std::vector<uint32_t> allowed_cpus();

}  // namespace conclave
