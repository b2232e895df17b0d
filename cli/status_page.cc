#include "cli/status_page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string_view>

namespace conclave::cli {
namespace {

using Kind = MemberView::Kind;

// Whatever bytes: one column for each character.
std::string printable(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if ((c & 0xc0) == 0x80 && !out.empty()) continue;  // the rest of a character that is already there
    out += c >= 0x20 && c < 0x7f ? text[i] : '?';
  }
  return out;
}

// The first `width` columns; what is cut off shows as '~'.
std::string fit(std::string_view text, size_t width) {
  std::string out = printable(text);
  if (out.size() > width) {
    out.resize(width);
    if (width > 0) out.back() = '~';
  }
  return out;
}

// A line of a fixed width: what does not fit is cut off.
class Row {
 public:
  explicit Row(size_t width) : width_(width) {}

  size_t left() const { return width_ - used_; }
  Row& add(std::string_view text, Tone tone = Tone::kPlain) {
    std::string part = fit(text, left());
    if (part.empty()) return *this;
    used_ += part.size();
    line_.push_back({std::move(part), tone});
    return *this;
  }
  // In a column of its own, `width` wide, with what follows it apart.
  Row& cell(std::string_view text, size_t width, Tone tone = Tone::kPlain) {
    std::string part = fit(text, std::min(width, left()));
    const size_t pad = std::min(width + 1, left()) - std::min(part.size(), left());
    add(part, tone);
    return add(std::string(pad, ' '));
  }
  Row& to_column(size_t column) {
    if (column > used_) add(std::string(column - used_, ' '));
    return *this;
  }
  // At the right border, when there is room for it and a space before it.
  Row& right(std::string_view text, Tone tone = Tone::kPlain) {
    if (text.size() + 1 > left()) return *this;
    to_column(width_ - text.size());
    return add(text, tone);
  }
  PageLine take() {
    while (!line_.empty()) {
      std::string& last = line_.back().text;
      last.erase(last.find_last_not_of(' ') + 1);
      if (!last.empty()) break;
      line_.pop_back();
    }
    return std::move(line_);
  }

 private:
  const size_t width_;
  size_t used_ = 0;
  PageLine line_;
};

double share(double part, double whole) {
  const double value = whole > 0 && std::isfinite(part) ? part / whole : 0;
  return std::isfinite(value) ? std::clamp(value, 0.0, 1.0) : 0;
}

// "[####------]", `width` columns with its brackets.
std::string bar(double filled, size_t width) {
  if (width < 3) return "";
  const size_t inside = width - 2;
  const auto full = std::min(inside, static_cast<size_t>(std::lround(filled * static_cast<double>(inside))));
  return "[" + std::string(full, '#') + std::string(inside - full, '-') + "]";
}

Tone usage_tone(double part) {
  return part >= 0.95 ? Tone::kBad : part >= 0.8 ? Tone::kWarning : Tone::kGood;
}

std::string percent(double part) {
  char text[16];
  std::snprintf(text, sizeof text, "%3.0f%%", 100 * part);
  return text;
}

Tone state_tone(const std::string& state) {
  if (state == "ready") return Tone::kGood;
  return state == "suspect" ? Tone::kBad : Tone::kWarning;
}

const char* kind_text(Kind kind) {
  constexpr const char* kNames[] = {"router", "attention", "expert", "unknown"};
  return kNames[static_cast<size_t>(kind)];
}

// Hexadecimal, as logs write it: all of it where there is room, else its end.
std::string incarnation_text(uint64_t incarnation, size_t width) {
  char text[24];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(incarnation));
  return width >= 16 ? text : std::string("~") + std::string(text).substr(16 - (width - 1));
}

// --- the parts of the page

PageLine head_line(const StatusView& v, size_t width) {
  Row row(width);
  row.add("conclave ", Tone::kBold).add(v.scheduler, Tone::kBold).add("  ");
  if (!v.reachable) {
    row.add(v.ever_reached ? "scheduler unreachable since " + v.since : "no scheduler answers", Tone::kBad);
  } else if (v.ready) {
    row.add("ready", Tone::kGood).add("  up " + short_age(v.age_s));
  } else {
    row.add("not ready", Tone::kBad);
  }
  return row.right(v.clock, Tone::kDim).take();
}

void add_problem(const StatusView& v, size_t width, std::vector<PageLine>& out) {
  if (!v.reachable) {
    Row row(width);
    row.add("  " + v.problem, Tone::kBad);
    out.push_back(row.take());
    if (v.ever_reached) {
      Row old(width);
      old.add("  what follows is " + short_age(v.unreachable_s) + " old; asking again", Tone::kDim);
      out.push_back(old.take());
    }
  } else if (!v.ready) {
    Row row(width);
    row.add("  " + v.not_ready, Tone::kBad);
    out.push_back(row.take());
  }
}

constexpr size_t kLabel = 11;

PageLine tokens_line(const StatusView& v, size_t width) {
  Row row(width);
  row.cell("tokens/s", kLabel, Tone::kDim);
  row.add(short_number(v.rates.generated), Tone::kBold).add(" generated  ");
  row.add(short_number(v.rates.prompt), Tone::kBold).add(" prompt  ");
  row.add(short_number(v.rates.cached)).add(" cached  ");
  return row.add(short_number(v.rates.steps)).add(" steps/s").take();
}

PageLine requests_line(const StatusView& v, size_t width) {
  Row row(width);
  row.cell("requests", kLabel, Tone::kDim);
  row.add(std::to_string(v.running), Tone::kBold).add(" running  ");
  row.add(std::to_string(v.waiting), v.waiting > 0 ? Tone::kBold : Tone::kPlain).add(" waiting  ");
  row.add(std::to_string(v.stalled), v.stalled > 0 ? Tone::kBad : Tone::kPlain).add(" stalled  ");
  row.add(short_number(v.rates.ended)).add(" ended/s  ");
  const bool refused = v.rates.refused > 0;  // false for what is unknown
  return row.add(short_number(v.rates.refused), refused ? Tone::kWarning : Tone::kPlain)
      .add(" refused/s")
      .take();
}

PageLine latency_line(const char* label, const Percentiles& p, const StatusView& v, size_t width) {
  Row row(width);
  row.cell(label, kLabel, Tone::kDim);
  if (p.count <= 0 || !std::isfinite(p.count)) {
    return row
        .add(v.latency_problem.empty() ? "nothing seen in the last " + short_age(v.latency_window_s)
                                       : v.latency_problem,
             Tone::kDim)
        .take();
  }
  row.add("p50 ").add(short_time(p.p50), Tone::kBold).add("  p90 ").add(short_time(p.p90), Tone::kBold);
  row.add("  p99 ").add(short_time(p.p99), Tone::kBold);
  return row.add("  (" + short_number(p.count) + " in " + short_age(v.latency_window_s) + ")", Tone::kDim)
      .take();
}

PageLine kv_line(const StatusView& v, size_t width) {
  double total = 0, used = 0, cached = 0;
  for (const MemberView& m : v.members) total += m.kv_total, used += m.kv_used, cached += m.kv_cached;
  const double part = share(used, total);
  Row row(width);
  row.cell("KV cache", kLabel, Tone::kDim);
  row.add(bar(part, std::min<size_t>(30, width / 3)), usage_tone(part)).add(" " + percent(part));
  row.add(" of " + short_number(total) + " pages  ");
  return row.add(short_number(cached) + " kept for reuse", Tone::kDim).take();
}

PageLine placement_line(const StatusView& v, size_t width) {
  Row row(width);
  row.cell("placement", kLabel, Tone::kDim);
  row.add("epoch " + std::to_string(v.epoch), Tone::kBold);
  if (v.preparing_epoch > 0)
    row.add(" (" + std::to_string(v.preparing_epoch) + " being prepared)", Tone::kWarning);
  row.add("  " + std::to_string(v.layers) + "x" + std::to_string(v.experts) + " experts");
  char busiest[48] = "";
  if (std::isfinite(v.busiest) && v.busiest > 0)
    std::snprintf(busiest, sizeof busiest, "%.2f", std::min(v.busiest, 1e6));
  if (busiest[0] != '\0')
    row.add("  busiest shard ").add(busiest, v.busiest >= 1.5 ? Tone::kWarning : Tone::kPlain).add("x mean");
  return row
      .add("  moves +" + short_number(static_cast<double>(v.totals.homes_added)) + " -" +
               short_number(static_cast<double>(v.totals.homes_removed)),
           Tone::kDim)
      .take();
}

struct Columns {
  size_t role = 9, name = 14, state = 8, incarnation = 7, age = 7;
};

Columns columns_for(size_t width) {
  Columns c;
  if (width < 60) {
    c.role = 6;
    c.name = 10;
    c.incarnation = 0;
    c.age = 0;
  } else if (width >= 110) {
    c.incarnation = 16;
    c.name = 14 + std::min<size_t>(26, width - 110);
  }
  return c;
}

PageLine member_head(const Columns& c, size_t width) {
  Row row(width);
  row.cell("ROLE", c.role, Tone::kDim).cell("NAME", c.name, Tone::kDim).cell("STATE", c.state, Tone::kDim);
  if (c.incarnation > 0) row.cell(c.incarnation >= 16 ? "INCARNATION" : "INC.", c.incarnation, Tone::kDim);
  if (c.age > 0) row.cell("UP", c.age, Tone::kDim);
  return row.add("LOAD", Tone::kDim).take();
}

PageLine member_line(const MemberView& m, const Columns& c, double most, double all, size_t width) {
  Row row(width);
  row.cell(kind_text(m.kind), c.role).cell(m.name, c.name, Tone::kBold);
  row.cell(m.state, c.state, state_tone(m.state));
  if (c.incarnation > 0) row.cell(incarnation_text(m.incarnation, c.incarnation), c.incarnation, Tone::kDim);
  if (c.age > 0) row.cell(short_age(m.age_s), c.age);
  const size_t bar_width = row.left() > 20 ? std::min<size_t>(20, row.left() - 17) : row.left() / 2;
  if (m.kind == Kind::kAttention) {
    const double part = share(m.kv_used, m.kv_total);
    row.add(bar(part, bar_width), usage_tone(part)).add(" KV" + percent(part));
    row.add("  " + std::to_string(m.sequences) + " seq");
  } else if (m.kind == Kind::kExpert) {
    row.add(bar(share(m.load, most), bar_width), Tone::kGood).add(" " + short_number(m.load) + " rows/s");
    row.add(percent(share(m.load, all)));
  } else {
    row.add(m.ops_address, Tone::kDim);
  }
  return row.take();
}

PageLine event_line(const EventView& e, size_t width) {
  Row row(width);
  char age[24];
  std::snprintf(age, sizeof age, "%7s ago ", short_age(e.age_s).c_str());
  const Tone tone = e.kind == "lost" || e.kind == "stall" ? Tone::kBad
                    : e.fault() || e.kind == "draining"   ? Tone::kWarning
                                                          : Tone::kPlain;
  row.add(age, Tone::kDim).cell(e.kind, 9, tone);
  if (!e.who.empty())
    row.add(fit(e.who, std::max<size_t>(10, width / 4)), Tone::kBold).add(e.detail.empty() ? "" : ": ");
  row.add(e.detail);
  if (e.times > 1) row.add(" (" + std::to_string(e.times) + " times)");
  return row.take();
}

// Those that need attention first, then by role and how busy they are.
std::vector<const MemberView*> ordered(const StatusView& v, bool all_fit) {
  std::vector<const MemberView*> out;
  for (const MemberView& m : v.members) out.push_back(&m);
  const auto busy = [](const MemberView& m) {
    const double load = m.kind == Kind::kAttention ? static_cast<double>(m.kv_used) : m.load;
    return std::isfinite(load) ? load : 0.0;
  };
  std::stable_sort(out.begin(), out.end(), [&](const MemberView* a, const MemberView* b) {
    if (!all_fit) {
      const bool a_ready = a->state == "ready", b_ready = b->state == "ready";
      if (a_ready != b_ready) return !a_ready;
    }
    if (a->kind != b->kind) return a->kind < b->kind;
    if (!all_fit && busy(*a) != busy(*b)) return busy(*a) > busy(*b);
    return a->name < b->name;
  });
  return out;
}

}  // namespace

std::string short_number(double value) {
  if (!std::isfinite(value)) return "-";
  const double size = std::fabs(value);
  char text[32];
  constexpr std::array<const char*, 6> kUnits = {"", "k", "M", "G", "T", "P"};
  size_t unit = 0;
  double shown = value;
  while (std::fabs(shown) >= 999.5 && unit + 1 < kUnits.size()) shown /= 1000, ++unit;
  if (std::fabs(shown) >= 1e6) return value > 0 ? ">1000P" : "<-1000P";
  const bool whole = size >= 100 || size == std::floor(size);
  std::snprintf(text, sizeof text,
                unit > 0 && std::fabs(shown) < 9.95 ? "%.1f%s"
                : unit > 0 || whole                 ? "%.0f%s"
                                                    : "%.1f%s",
                shown, kUnits[unit]);
  return text;
}

std::string short_time(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "-";
  char text[32];
  if (seconds < 0.0095) {
    std::snprintf(text, sizeof text, "%.1f ms", seconds * 1000);
  } else if (seconds < 0.9995) {
    std::snprintf(text, sizeof text, "%.0f ms", seconds * 1000);
  } else if (seconds < 1000) {
    std::snprintf(text, sizeof text, seconds < 99.5 ? "%.1f s" : "%.0f s", seconds);
  } else {
    return short_age(seconds);
  }
  return text;
}

std::string short_age(double seconds) {
  if (!std::isfinite(seconds)) return "-";
  const double whole = std::floor(std::clamp(seconds, 0.0, 1e11));
  const auto s = static_cast<unsigned long long>(whole);
  char text[48];
  if (s < 60) {
    std::snprintf(text, sizeof text, "%llu s", s);
  } else if (s < 3600) {
    std::snprintf(text, sizeof text, "%llu m", s / 60);
  } else if (s < 86400) {
    std::snprintf(text, sizeof text, "%lluh %llum", s / 3600, s / 60 % 60);
  } else if (s < 100ull * 86400) {
    std::snprintf(text, sizeof text, "%llud %lluh", s / 86400, s / 3600 % 24);
  } else {
    return s < 1000ull * 86400 ? std::to_string(s / 86400) + " d" : ">999 d";
  }
  return text;
}

std::string line_text(const PageLine& line, bool colour) {
  constexpr std::array<std::string_view, 6> kCodes = {"", "1", "2", "32", "33", "1;31"};
  std::string out;
  for (const PageSpan& span : line) {
    const std::string_view code = colour ? kCodes[static_cast<size_t>(span.tone)] : "";
    if (code.empty()) {
      out += span.text;
    } else {
      out += "\x1b[" + std::string(code) + "m" + span.text + "\x1b[0m";
    }
  }
  return out;
}

std::vector<PageLine> render_status(const StatusView& v, PageSize size) {
  const size_t width = std::max(size.width, kMinWidth);
  const size_t height = size.height == 0 ? SIZE_MAX : std::max(size.height, kMinHeight);
  std::vector<PageLine> out;
  out.push_back(head_line(v, width));
  add_problem(v, width, out);
  if (!v.reachable && !v.ever_reached) return out;
  out.push_back(tokens_line(v, width));
  out.push_back(requests_line(v, width));
  const bool roomy = height >= kRoomyHeight;
  if (roomy) out.push_back(latency_line("queue", v.queue, v, width));
  out.push_back(latency_line("first token", v.first_token, v, width));
  out.push_back(latency_line("per token", v.per_token, v, width));
  if (roomy) out.push_back(latency_line("token gaps", v.token_gap, v, width));
  if (roomy) out.push_back(latency_line("whole", v.whole, v, width));
  out.push_back(kv_line(v, width));
  out.push_back(placement_line(v, width));

  std::vector<const EventView*> events;  // the newest first
  for (auto it = v.events.rbegin(); it != v.events.rend(); ++it)
    if (it->age_s <= kEventMinutes * 60) events.push_back(&*it);
  // What is left is shared: the head of the members, one of them, the head of the events and one of those
  // come before more of either.
  const size_t left = height > out.size() ? height - out.size() : 0;
  const size_t event_rows = events.empty() ? 0 : events.size() + 1;
  const size_t event_share = std::min(event_rows, std::max<size_t>(left / 3, left > 3 ? 2 : 0));
  size_t member_space = left - event_share;
  const size_t member_rows = v.members.size() + 1;
  const bool all_fit = member_rows <= member_space;
  if (all_fit) member_space = member_rows;
  if (member_space >= 2) {
    const Columns columns = columns_for(width);
    double most = 0, all = 0;
    for (const MemberView& m : v.members) {
      if (m.kind != Kind::kExpert || !std::isfinite(m.load)) continue;
      most = std::max(most, m.load);
      all += m.load;
    }
    out.push_back(member_head(columns, width));
    const std::vector<const MemberView*> members = ordered(v, all_fit);
    const size_t shown = all_fit ? members.size() : member_space - 2;
    for (size_t i = 0; i < shown; ++i) out.push_back(member_line(*members[i], columns, most, all, width));
    if (!all_fit) {
      Row row(width);
      row.add("  and " + std::to_string(members.size() - shown) + " more", Tone::kDim);
      out.push_back(row.take());
    }
  }
  const size_t rest = height > out.size() ? height - out.size() : 0;
  if (!events.empty() && rest >= 2) {
    Row row(width);
    row.add("EVENTS of the last " + short_age(kEventMinutes * 60), Tone::kDim);
    out.push_back(row.take());
    for (size_t i = 0; i < std::min(events.size(), rest - 1); ++i)
      out.push_back(event_line(*events[i], width));
  }
  if (out.size() > height) out.resize(height);
  return out;
}

}  // namespace conclave::cli
