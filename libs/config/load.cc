#include "libs/config/load.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "libs/config/schema.h"

extern char** environ;

namespace conclave {
namespace {

constexpr std::string_view kPrefix = "CONCLAVE_";
// Read by other parts of the project, so no overrides of a key.
constexpr std::string_view kOtherVariables[] = {"CONCLAVE_ISA", "CONCLAVE_URL", "CONCLAVE_TESTDATA_DIR",
                                                "CONCLAVE_BIN_DIR", "CONCLAVE_TEST_FAULTS"};

// Collects faults, so that all are reported at once.
class Faults {
 public:
  explicit Faults(std::string_view file) : file_(file) {}

  void add(const YAML::Mark& mark, const std::string& what) {
    add_line(file_ + (mark.line >= 0 ? ":" + std::to_string(mark.line + 1) : "") + ": " + what);
  }
  void add_line(const std::string& line) {
    if (count_++ < kMaxConfigFaults) lines_ += (lines_.empty() ? "" : "\n") + line;
  }
  Status status() const {
    if (count_ == 0) return OkStatus();
    if (count_ <= kMaxConfigFaults) return invalid_argument(lines_);
    return invalid_argument(lines_ + "\n... and " + std::to_string(count_ - kMaxConfigFaults) +
                            " more faults");
  }

 private:
  const std::string file_;
  std::string lines_;
  size_t count_ = 0;
};

std::string suggestion(const std::string& word, const std::vector<std::string>& known) {
  const std::string near = nearest_name(word, known);
  return near.empty() ? "" : "; did you mean '" + near + "'?";
}

const char* kind_of(const YAML::Node& node) {
  if (node.IsMap()) return "a mapping";
  if (node.IsSequence()) return "a list";
  if (node.IsNull()) return "nothing";
  return "a single value";
}

// A value in quotes is text to YAML: right for text keys, a mistake for numbers.
bool quoted(const YAML::Node& node) { return node.Tag() == "!"; }

void read_value(const ConfigField& field, const YAML::Node& node, Faults& faults) {
  if (!node.IsScalar()) {
    faults.add(node.Mark(), field.name() + ": takes " + field.type + ", found " + kind_of(node));
    return;
  }
  if (quoted(node) && (field.kind == FieldKind::kNumber || field.kind == FieldKind::kBoolean)) {
    faults.add(node.Mark(), field.name() + ": takes " + field.type + "; write it without quotes");
    return;
  }
  if (Status set = field.set(node.Scalar()); !set.ok()) {
    faults.add(node.Mark(), field.name() + ": " + message_of(set));
  }
}

void read_section(const std::string& section, const YAML::Node& node, const std::vector<ConfigField>& fields,
                  Faults& faults) {
  if (node.IsNull()) return;  // "section:" with every key commented out
  if (!node.IsMap()) {
    faults.add(node.Mark(), section + ": takes a mapping of keys, found " + kind_of(node));
    return;
  }
  std::vector<std::string> known;
  for (const ConfigField& field : fields) {
    if (field.section == section) known.push_back(field.key);
  }
  std::set<std::string> seen;
  for (const auto& entry : node) {
    if (!entry.first.IsScalar()) {
      faults.add(entry.first.Mark(), section + ": a key must be a word");
      continue;
    }
    const std::string key = entry.first.Scalar();
    if (!seen.insert(key).second) {
      faults.add(entry.first.Mark(), section + "." + key + ": given twice");
      continue;
    }
    const ConfigField* found = nullptr;
    for (const ConfigField& field : fields) {
      if (field.section == section && field.key == key) found = &field;
    }
    if (found == nullptr) {
      faults.add(entry.first.Mark(), "unknown key '" + section + "." + key + "'" + suggestion(key, known));
    } else {
      read_value(*found, entry.second, faults);
    }
  }
}

void read_document(const YAML::Node& root, const std::vector<ConfigField>& fields, Faults& faults) {
  if (root.IsNull()) return;
  if (!root.IsMap()) {
    faults.add(root.Mark(), std::string("the file must be a mapping of sections, found ") + kind_of(root));
    return;
  }
  std::vector<std::string> sections;
  for (const ConfigSection& section : config_sections()) sections.push_back(section.name);
  std::set<std::string> seen;
  for (const auto& entry : root) {
    if (!entry.first.IsScalar()) {
      faults.add(entry.first.Mark(), "a section name must be a word");
      continue;
    }
    const std::string name = entry.first.Scalar();
    if (!seen.insert(name).second) {
      faults.add(entry.first.Mark(), "section '" + name + "' is given twice");
    } else if (std::find(sections.begin(), sections.end(), name) == sections.end()) {
      faults.add(entry.first.Mark(), "unknown section '" + name + "'" + suggestion(name, sections));
    } else {
      read_section(name, entry.second, fields, faults);
    }
  }
}

// What Kubernetes sets for a service of our name; said nothing about, since nobody meant a key by it.
bool orchestrator_variable(const std::string& name) {
  return name.find("_SERVICE_HOST") != std::string::npos || name.find("_SERVICE_PORT") != std::string::npos ||
         name.ends_with("_PORT") || name.find("_PORT_") != std::string::npos;
}

void apply_environment(const Environment& environment, const std::vector<ConfigField>& fields, Faults& faults,
                       std::vector<std::string>& warnings) {
  std::map<std::string, const ConfigField*> by_name;
  std::vector<std::string> known;
  for (const ConfigField& field : fields) {
    by_name[field.environment_name()] = &field;
    known.push_back(field.environment_name());
  }
  for (const auto& [name, value] : environment) {
    if (!name.starts_with(kPrefix)) continue;
    if (std::find(std::begin(kOtherVariables), std::end(kOtherVariables), name) != std::end(kOtherVariables))
      continue;
    if (auto found = by_name.find(name); found != by_name.end()) {
      if (Status set = found->second->set(value); !set.ok()) {
        faults.add_line("environment " + name + ": " + message_of(set));
      }
    } else if (!orchestrator_variable(name)) {
      warnings.push_back("environment variable " + name + " is no config key and has no effect" +
                         suggestion(name, known));
    }
  }
}

}  // namespace

Environment process_environment() {
  Environment out;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos || !text.starts_with(kPrefix)) continue;
    out.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return out;
}

StatusOr<LoadedConfig> parse_config(std::string_view yaml, std::string_view file,
                                    const Environment& environment) {
  if (yaml.size() > kMaxConfigBytes) {
    return invalid_argument(std::string(file) + ": is " + std::to_string(yaml.size()) +
                            " bytes long; a config has at most " + std::to_string(kMaxConfigBytes));
  }
  LoadedConfig out;
  Faults faults(file);
  const std::vector<ConfigField> fields = config_fields(out.config);
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(std::string(yaml));
    if (documents.size() > 1) {
      return invalid_argument(std::string(file) + ": has several YAML documents; a config is one");
    }
    if (!documents.empty()) read_document(documents[0], fields, faults);
  } catch (const YAML::Exception& e) {
    faults.add(e.mark, "is not valid YAML: " + e.msg);
  }
  apply_environment(environment, fields, faults, out.warnings);
  RETURN_IF_ERROR(faults.status());
  if (Status checked = validate_config(out.config); !checked.ok()) {
    return invalid_argument(std::string(file) + ": " + message_of(checked));
  }
  return out;
}

StatusOr<LoadedConfig> load_config_file(const std::string& path, const Environment& environment) {
  if (path.empty()) return parse_config("", "defaults", environment);
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return invalid_argument("config file '" + path + "' is a directory");
  }
  std::ifstream in(path, std::ios::binary);
  if (!in) return not_found("config file '" + path + "' cannot be read");
  std::ostringstream text;
  text << in.rdbuf();  // sets a fail bit for an empty file, which is a valid config
  if (in.bad()) return not_found("config file '" + path + "' cannot be read");
  return parse_config(text.str(), path, environment);
}

}  // namespace conclave
