// The tools of one request: their names, and the types that their JSON schemas give to arguments.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"

namespace conclave::text {

class ParameterSchema;

// Immutable: every member is safe to call from many threads at once.
class ToolSet {
 public:
  static constexpr size_t kMaxTools = 4096;
  static constexpr size_t kMaxNameBytes = 256;

  // Reads the "tools" array of a request: OpenAI's {"type": "function", "function": {"name", "parameters"}}
  // or the bare {"name", "parameters"}. INVALID_ARGUMENT names the element at fault, as
  // "tools[1].function.name"; two tools of one name are such a fault.
  static StatusOr<std::shared_ptr<const ToolSet>> parse(std::string_view tools_json,
                                                        std::string_view field = "tools");
  ~ToolSet();

  size_t size() const;
  bool has(std::string_view name) const;
  // Whether some tool's name begins so.
  bool has_prefix(std::string_view beginning) const;
  // The schema of a tool's arguments; one that allows anything for a tool that is not there.
  ParameterSchema schema(std::string_view name) const;

 private:
  struct Tools;
  ToolSet();
  std::unique_ptr<Tools> tools_;
};

}  // namespace conclave::text
