// The keys of ClusterConfig: one list that the reader, the writer, the environment overrides and the
// documentation share, so that none of them can know a key that another does not.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"
#include "libs/config/cluster_config.h"

namespace conclave {

// How a value is written in YAML.
enum class FieldKind : uint8_t { kText, kBoolean, kNumber, kBytes };

// One key, bound to the member of one ClusterConfig, which must outlive it.
struct ConfigField {
  std::string section;
  std::string key;
  FieldKind kind = FieldKind::kText;
  std::string type;   // for people: "integer", "bytes", "host:port" ...
  std::string unit;   // empty when there is none
  std::string range;  // "1 .. 64", or the choices; empty when there is none
  std::string doc;
  // Takes the scalar's text; the error says what is wrong with it and names neither file nor key.
  std::function<Status(const std::string& text)> set;
  // The present value, as `set` takes it.
  std::function<std::string()> get;

  std::string name() const { return section + "." + key; }
  // CONCLAVE_SECTION_KEY.
  std::string environment_name() const;
};

struct ConfigSection {
  std::string name;
  std::string doc;
};

const std::vector<ConfigSection>& config_sections();
// Every key, in the order of the sections.
std::vector<ConfigField> config_fields(ClusterConfig& config);

// Takes the value's text for the key "section.key". INVALID_ARGUMENT names the key, and for one that is none
// the nearest one.
Status set_config_key(ClusterConfig& config, const std::string& key, const std::string& value);

// The candidate nearest to `word` by edit distance, or empty when none is near enough to be meant.
std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates);

// The whole config as YAML that parse_config reads back to an equal config.
std::string config_to_yaml(const ClusterConfig& config);
// docs/config.md: every key with its default, unit, range and meaning.
std::string config_markdown();

}  // namespace conclave
