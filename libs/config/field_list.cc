#include "libs/config/field_list.h"

#include <charconv>
#include <cmath>

#include "libs/base/address.h"

namespace conclave {
namespace {

constexpr std::pair<std::string_view, uint64_t> kByteUnits[] = {
    {"TiB", 1ull << 40}, {"GiB", 1ull << 30}, {"MiB", 1ull << 20}, {"KiB", 1ull << 10}, {"B", 1}};

std::string shown(std::string_view text) { return "'" + std::string(text) + "'"; }

}  // namespace

StatusOr<uint64_t> parse_unsigned(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range) return invalid_argument(shown(text) + " is too large");
  if (error != std::errc() || end != text.data() + text.size()) {
    return invalid_argument(shown(text) + " is not a whole number of 0 or more");
  }
  return value;
}

StatusOr<double> parse_real(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    return invalid_argument(shown(text) + " is not a number");
  }
  return value;
}

std::string format_real(double value) {
  char buffer[64];
  // 600000, not 6e+05; what is far from people's numbers keeps its exponent, and fits.
  const double size = std::abs(value);
  const bool plain = size == 0 || (size >= 1e-6 && size < 1e15);
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value,
                                          plain ? std::chars_format::fixed : std::chars_format::general);
  return error == std::errc() ? std::string(buffer, end) : std::string("0");
}

StatusOr<uint64_t> parse_bytes(std::string_view text) {
  for (const auto& [unit, factor] : kByteUnits) {
    if (!text.ends_with(unit)) continue;
    std::string_view number = text.substr(0, text.size() - unit.size());
    while (number.ends_with(' ')) number.remove_suffix(1);
    ASSIGN_OR_RETURN(const double value, parse_real(number));
    const double bytes = value * static_cast<double>(factor);
    if (bytes < 0 || bytes >= 0x1p63) return invalid_argument(shown(text) + " is out of range");
    if (bytes != std::floor(bytes)) return invalid_argument(shown(text) + " is not a whole number of bytes");
    return static_cast<uint64_t>(bytes);
  }
  auto plain = parse_unsigned(text);
  if (!plain.ok())
    return invalid_argument(shown(text) + " is no size; write bytes, or a number with KiB, MiB, GiB or TiB");
  return *plain;
}

std::string format_bytes(uint64_t bytes) {
  for (const auto& [unit, factor] : kByteUnits) {
    if (factor > 1 && bytes != 0 && bytes % factor == 0)
      return std::to_string(bytes / factor) + std::string(unit);
  }
  return std::to_string(bytes);
}

ConfigField& FieldList::add(std::string key, FieldKind kind, std::string type, std::string unit,
                            std::string doc) {
  ConfigField& field = fields_.emplace_back();
  field.section = section_;
  field.key = std::move(key);
  field.kind = kind;
  field.type = std::move(type);
  field.unit = std::move(unit);
  field.doc = std::move(doc);
  return field;
}

Status FieldList::out_of_range(const std::string& text, const std::string& low, const std::string& high) {
  return invalid_argument(text + " is out of range; allowed are " + low + " to " + high);
}

void FieldList::text(std::string key, std::string& member, std::string doc) {
  ConfigField& field = add(std::move(key), FieldKind::kText, "text", "", std::move(doc));
  field.set = [&member](const std::string& value) -> Status {
    for (char c : value) {
      if (static_cast<unsigned char>(c) < 0x20) return invalid_argument("has a control character");
    }
    member = value;
    return OkStatus();
  };
  field.get = [&member] { return member; };
}

void FieldList::address(std::string key, std::string& member, bool optional, std::string doc) {
  ConfigField& field = add(std::move(key), FieldKind::kText, "host:port", "", std::move(doc));
  field.set = [&member, optional](const std::string& value) -> Status {
    if (optional && value.empty()) {
      member.clear();
      return OkStatus();
    }
    ASSIGN_OR_RETURN(const HostPort parsed, parse_host_port(value));
    member = parsed.text();  // ":80" in the form that every listener and client understands
    return OkStatus();
  };
  field.get = [&member] { return member; };
}

void FieldList::boolean(std::string key, bool& member, std::string doc) {
  ConfigField& field = add(std::move(key), FieldKind::kBoolean, "true or false", "", std::move(doc));
  field.set = [&member](const std::string& value) -> Status {
    if (value != "true" && value != "false")
      return invalid_argument(shown(value) + " is neither true nor false");
    member = value == "true";
    return OkStatus();
  };
  field.get = [&member] { return std::string(member ? "true" : "false"); };
}

void FieldList::weights(std::string key, std::map<std::string, uint32_t>& member, uint32_t low, uint32_t high,
                        std::string doc) {
  ConfigField& field = add(std::move(key), FieldKind::kText, "a list of NAME=NUMBER", "", std::move(doc));
  field.range = "NAME=" + std::to_string(low) + " .. " + std::to_string(high) + ", ...";
  field.set = [&member, low, high](const std::string& value) -> Status {
    std::map<std::string, uint32_t> parsed;
    std::string_view rest = value;
    const auto trim = [](std::string_view text) {
      while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
      while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
      return text;
    };
    while (!trim(rest).empty()) {
      const size_t comma = std::min(rest.find(','), rest.size());
      const std::string_view entry = trim(rest.substr(0, comma));
      rest.remove_prefix(std::min(comma + 1, rest.size()));
      const size_t equals = entry.rfind('=');
      const std::string name(trim(entry.substr(0, std::min(equals, entry.size()))));
      if (equals == std::string_view::npos || name.empty())
        return invalid_argument(shown(std::string(entry)) + " is not NAME=NUMBER");
      const std::string number(trim(entry.substr(equals + 1)));
      ASSIGN_OR_RETURN(const uint64_t weight, parse_unsigned(number));
      if (weight < low || weight > high)
        return out_of_range(number, std::to_string(low), std::to_string(high));
      if (!parsed.emplace(name, static_cast<uint32_t>(weight)).second)
        return invalid_argument(shown(name) + " comes twice");
    }
    member = std::move(parsed);
    return OkStatus();
  };
  field.get = [&member] {
    std::string out;
    for (const auto& [name, weight] : member) {
      out += (out.empty() ? "" : ",") + name + "=" + std::to_string(weight);
    }
    return out;
  };
}

void FieldList::real(std::string key, double& member, double low, double high, std::string unit,
                     std::string doc) {
  ConfigField& field = add(std::move(key), FieldKind::kNumber, "a number", std::move(unit), std::move(doc));
  field.range = format_real(low) + " .. " + format_real(high);
  field.set = [&member, low, high](const std::string& value) -> Status {
    ASSIGN_OR_RETURN(const double parsed, parse_real(value));
    if (parsed < low || parsed > high) return out_of_range(value, format_real(low), format_real(high));
    member = parsed;
    return OkStatus();
  };
  field.get = [&member] { return format_real(member); };
}

void FieldList::bytes(std::string key, uint64_t& member, uint64_t low, uint64_t high, std::string doc) {
  ConfigField& field = add(std::move(key), FieldKind::kBytes, "a size", "bytes", std::move(doc));
  field.range = format_bytes(low) + " .. " + format_bytes(high);
  field.set = [&member, low, high](const std::string& value) -> Status {
    ASSIGN_OR_RETURN(const uint64_t parsed, parse_bytes(value));
    if (parsed < low || parsed > high) return out_of_range(value, format_bytes(low), format_bytes(high));
    member = parsed;
    return OkStatus();
  };
  field.get = [&member] { return format_bytes(member); };
}

void FieldList::duration(std::string key, Nanos& member, Nanos unit_ns, std::string unit, double low,
                         double high, std::string doc) {
  ConfigField& field = add(std::move(key), FieldKind::kNumber, "a number", std::move(unit), std::move(doc));
  field.range = format_real(low) + " .. " + format_real(high);
  field.set = [&member, unit_ns, low, high](const std::string& value) -> Status {
    ASSIGN_OR_RETURN(const double parsed, parse_real(value));
    if (parsed < low || parsed > high) return out_of_range(value, format_real(low), format_real(high));
    member = static_cast<Nanos>(std::llround(parsed * static_cast<double>(unit_ns)));
    return OkStatus();
  };
  field.get = [&member, unit_ns] {
    return format_real(static_cast<double>(member) / static_cast<double>(unit_ns));
  };
}

}  // namespace conclave
